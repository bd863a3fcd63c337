# SPDX-License-Identifier: Apache-2.0
"""What TLS needs, of the files that a person names, or why it cannot be had."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from forebay.errors import ConfigError

_OTHER_KEY: Final = "KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"
"""What is said of a key that is not the certificate's: of one of its kind, and of one of another."""


def server_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """Return how connections are encrypted; None if they are not.

    Args:
        certfile: The certificate chain, in PEM.
        keyfile: Its private key; None if it is in the same file.

    Raises:
        ConfigError: If the files cannot be used, with the reason and the cure.
    """
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--keyfile was given without --certfile; TLS needs the certificate as well")
        return None

    def no_password() -> str:  # the library would ask at the terminal, and wait
        file = keyfile or certfile
        msg = f"the private key in {file} is encrypted; `openssl pkey -in {file}` writes it without its pass phrase"
        raise ConfigError(msg)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, no_password)
    except OSError as error:
        raise ConfigError(_why_not(certfile, keyfile, error)) from error
    return context


def _why_not(certfile: str, keyfile: str | None, error: OSError) -> str:
    held: dict[str, bytes] = {}
    for file in (certfile, keyfile or certfile):
        try:
            held[file] = Path(file).read_bytes()
        except OSError as unread:
            return f"the TLS file {file}: {unread.strerror}"
    if b"BEGIN CERTIFICATE" not in held[certfile]:
        return f"{certfile} holds no certificate in PEM"
    if b"PRIVATE KEY" not in held[keyfile or certfile]:
        cure = "" if keyfile else "; name the file that does with --keyfile"
        return f"{keyfile or certfile} holds no private key{cure}"
    if any(said in str(error) for said in _OTHER_KEY):
        return f"{keyfile or certfile} is the key of another certificate than that in {certfile}"
    files = certfile if keyfile is None else f"{certfile} and {keyfile}"
    return f"the TLS files {files} cannot be used: {error.strerror or error}"
