# SPDX-License-Identifier: Apache-2.0
"""How a worker and a server show each other that both know a secret, without ever sending it.

Each side makes up a nonce; what is sent is an HMAC over both nonces and the name of the side that sends it, so that a
proof is good for one connection and in one direction only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from forebay.errors import ConfigError

NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
VARIABLE = "FOREBAY_SECRET"
"""Environment variable that holds the secret if no option does."""


def nonce() -> bytes:
    """Return bytes nobody can foresee."""
    return os.urandom(NONCE_BYTES)


def proof(secret: bytes, side: str, server_nonce: bytes, worker_nonce: bytes) -> bytes:
    """Return what `side` ("server" or "worker") sends."""
    return hmac.digest(secret, side.encode() + b"\0" + server_nonce + worker_nonce, hashlib.sha256)


def is_proof(given: object, secret: bytes, side: str, server_nonce: bytes, worker_nonce: bytes) -> bool:
    """Check what the other side sent, in a time that tells nothing about the secret."""
    expected = proof(secret, side, server_nonce, worker_nonce)
    return isinstance(given, bytes) and hmac.compare_digest(given, expected)


def read_secret(given: str | None, option: str) -> bytes | None:
    """Return the secret an option names: its value, the first line of @FILE, or that of the environment.

    Raises:
        ConfigError: If the file cannot be read or the secret is too short to be one.
    """
    where = option
    if given is None:
        given, where = os.environ.get(VARIABLE), VARIABLE
        if given is None:
            return None
    if given.startswith("@"):
        given = next(iter(lines_of(given[1:], "the secret")), "")
    secret = given.encode()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{where}: expected a secret of at least {MIN_SECRET_BYTES} bytes, got {len(secret)}; "
            "make one with: openssl rand -hex 16"
        )
    return secret


def lines_of(path: str, what: str) -> list[str]:
    """Return the lines of a file of keys, without blank lines and without comments, which begin with `#`.

    Args:
        what: What it holds, for the message.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # editors may put a mark before the text
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{what} in {path} cannot be read: {why}") from error
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
