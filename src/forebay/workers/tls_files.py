# SPDX-License-Identifier: Apache-2.0
"""TLS of the files that a person names, for every port and for what dials, or why that cannot be."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from forebay.errors import ConfigError

_OTHER_KEY: Final = "KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"
"""What is said of a key that is not the certificate's: of one of its kind, and of one of another."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
"""What the library says of a server that answers without TLS."""


def server_context(
    certfile: str | None, keyfile: str | None, cafile: str | None = None, *, flag: str = "--"
) -> ssl.SSLContext | None:
    """Return how a port encrypts its connections; None if it does not.

    Args:
        certfile: The certificate chain, in PEM.
        keyfile: Its private key; None if it is in the same file.
        cafile: Authorities in PEM, of which clients must have a certificate; None asks them for none.
        flag: How the flags begin that name the files, for messages.

    Raises:
        ConfigError: If the files cannot be used, with the reason and the cure.
    """
    if certfile is None:
        for named, file in (("keyfile", keyfile), ("cafile", cafile)):
            if file is not None:
                msg = f"{flag}{named} was given without {flag}certfile; TLS needs the certificate as well"
                raise ConfigError(msg)
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_chain(context, certfile, keyfile, flag)
    if cafile is not None:
        _load_authorities(context, cafile)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    cafile: str | None, certfile: str | None, keyfile: str | None, *, flag: str = "--"
) -> ssl.SSLContext | None:
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
