# SPDX-License-Identifier: Apache-2.0
"""TLS of the files that a person names, for every port and for what dials, or why that cannot be.

Certificates are renewed while a server runs. So each new connection looks whether a file has changed, which costs a few
microseconds beside the handshake. Open connections keep the certificate that they began with.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from forebay.errors import ConfigError

log = logging.getLogger("forebay")

_RETRY_S: Final = 60.0
"""Pause before files are read again that could not be used and have not changed since."""
_OTHER_KEY: Final = "KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"
"""What is said of a key that is not the certificate's: of one of its kind, and of one of another."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
"""What the library says of a server that answers without TLS."""


class TlsFiles:
    """How connections are encrypted, by files that are read again once one of them has changed."""

    def __init__(self, make: Callable[[], ssl.SSLContext], *files: str | None) -> None:
        """Read the files.

        Args:
            make: Reads them.
            files: Which they are.

        Raises:
            ConfigError: If they cannot be used, with the reason and the cure.
        """
        self._make = make
        self._files = [Path(file) for file in files if file is not None]
        self._stamps = self._look()  # before they are read, or a change meanwhile would be missed
        self._retry_at = float("inf")
        self._context = make()

    @property
    def context(self) -> ssl.SSLContext:
        """How the next connection is encrypted; while changed files cannot be used, as before."""
        stamps, now = self._look(), time.monotonic()
        if stamps != self._stamps or now >= self._retry_at:
            self._stamps, self._retry_at = stamps, float("inf")
            try:
                self._context = self._make()
            except ConfigError as error:
                self._retry_at = now + _RETRY_S
                log.warning("cannot use a changed TLS file; new connections use its former content: %s", error.message)
            else:
                log.info("new connections use the changed TLS files %s", ", ".join(map(str, self._files)))
        return self._context

    def _look(self) -> Sequence[tuple[int, int, int] | None]:
        return [_stamp(file) for file in self._files]


def server_tls(
    certfile: str | None = None,
    keyfile: str | None = None,
    cafile: str | None = None,
    *,
    flag: str = "--",
    protocols: Sequence[str] = (),
) -> TlsFiles | None:
    """Return how a port encrypts its connections; None if it does not.

    Args:
        certfile: The certificate chain, in PEM; None if the port does not speak TLS.
        keyfile: Its private key; None if it is in the same file.
        cafile: Authorities in PEM, of which clients must have a certificate; None asks them for none.
        flag: How the flags begin that name the files, for messages.
        protocols: What is spoken on the port, as ALPN names it; none leaves that open.

    Raises:
        ConfigError: If the files cannot be used, with the reason and the cure.
    """
    if certfile is None:
        for named, file in (("keyfile", keyfile), ("cafile", cafile)):
            if file is not None:
                msg = f"{flag}{named} was given without {flag}certfile; TLS needs the certificate as well"
                raise ConfigError(msg)
        return None
    return TlsFiles(partial(_server_context, certfile, keyfile, cafile, flag, protocols), certfile, keyfile, cafile)


def _server_context(
    certfile: str, keyfile: str | None, cafile: str | None, flag: str, protocols: Sequence[str]
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_chain(context, certfile, keyfile, flag)
    if cafile is not None:
        _load_authorities(context, cafile)
        context.verify_mode = ssl.CERT_REQUIRED
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def client_tls(cafile: str | None, certfile: str | None, keyfile: str | None, *, flag: str = "--") -> TlsFiles | None:
    """Return how connections are encrypted that are dialled; None if they are not.

    The certificate of the server must be signed by one of the authorities and name the host that was dialled.

    Args:
        cafile: The authorities, in PEM.
        certfile: The certificate chain that the server is shown, in PEM; None shows none.
        keyfile: Its private key; None if it is in the same file.
        flag: How the flags begin that name the files, for messages.

    Raises:
        ConfigError: If the files cannot be used, with the reason and the cure.
    """
    if cafile is None:
        for named, file in (("certfile", certfile), ("keyfile", keyfile)):
            if file is not None:
                msg = f"{flag}{named} was given without {flag}cafile; TLS needs the authority of the server as well"
                raise ConfigError(msg)
        return None
    if certfile is None and keyfile is not None:
        raise ConfigError(f"{flag}keyfile was given without {flag}certfile; a key needs its certificate as well")
    return TlsFiles(partial(_client_context, cafile, certfile, keyfile, flag), cafile, certfile, keyfile)


def _client_context(cafile: str, certfile: str | None, keyfile: str | None, flag: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_authorities(context, cafile)
    if certfile is not None:
        _load_chain(context, certfile, keyfile, flag)
    return context


def why_no_tls(error: ssl.SSLError, flag: str = "--") -> str:
    """Return why TLS was not agreed on with a server that was dialled, as the end of a sentence about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"shows a certificate that is not believed ({error.verify_message}); it must be signed by an authority in "
            f"{flag}cafile and name the host that was dialled"
        )
    reason = str(error.reason or error)
    if reason in _NO_TLS:
        return f"does not speak TLS; start it with --attach-certfile, or leave out {flag}cafile"
    if "ALERT" in reason:
        return (
            f"does not believe the certificate that it was shown ({_spelled(reason)}); it must be signed by an "
            f"authority in the server's --attach-cafile: {flag}certfile, {flag}keyfile"
        )
    return f"does not agree on TLS: {_spelled(reason)}"


def why_closed(flag: str = "--") -> str:
    """Return why a server may hang up after TLS was agreed on, and before it has answered."""
    return (
        "the connection was closed before it answered; if it asks for certificates, what it is shown must be signed by "
        f"an authority in its --attach-cafile ({flag}certfile, {flag}keyfile)"
    )


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what differs once a file has changed; None if it cannot be found."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _spelled(reason: str) -> str:
    return reason.replace("_", " ").lower()


def _load_chain(context: ssl.SSLContext, certfile: str, keyfile: str | None, flag: str) -> None:
    def no_password() -> str:  # the library would ask at the terminal, and wait
        file = keyfile or certfile
        msg = f"the private key in {file} is encrypted; `openssl pkey -in {file}` writes it without its pass phrase"
        raise ConfigError(msg)

    try:
        context.load_cert_chain(certfile, keyfile, no_password)
    except OSError as error:
        raise ConfigError(_why_not(certfile, keyfile, error, flag)) from error


def _load_authorities(context: ssl.SSLContext, cafile: str) -> None:
    try:
        context.load_verify_locations(cafile)
    except ssl.SSLError as error:
        raise ConfigError(f"{cafile} holds no certificate in PEM") from error
    except OSError as error:
        raise ConfigError(f"the TLS file {cafile}: {error.strerror}") from error


def _why_not(certfile: str, keyfile: str | None, error: OSError, flag: str) -> str:
    held: dict[str, bytes] = {}
    for file in (certfile, keyfile or certfile):
        try:
            held[file] = Path(file).read_bytes()
        except OSError as unread:
            return f"the TLS file {file}: {unread.strerror}"
    if b"BEGIN CERTIFICATE" not in held[certfile]:
        return f"{certfile} holds no certificate in PEM"
    if b"PRIVATE KEY" not in held[keyfile or certfile]:
        cure = "" if keyfile else f"; name the file that does with {flag}keyfile"
        return f"{keyfile or certfile} holds no private key{cure}"
    if any(said in str(error) for said in _OTHER_KEY):
        return f"{keyfile or certfile} is the key of another certificate than that in {certfile}"
    files = certfile if keyfile is None else f"{certfile} and {keyfile}"
    return f"the TLS files {files} cannot be used: {error.strerror or error}"
