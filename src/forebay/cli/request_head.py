# SPDX-License-Identifier: Apache-2.0
"""URL and headers of a request, as people write them for the commands that ask a server. Nothing is sent here."""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, quote, urlsplit

from forebay.errors import ConfigError
from forebay.workers.wire.shared_secret import lines_of

if TYPE_CHECKING:
    import argparse

_TOKEN: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
"""What HTTP allows as the name of a header."""
_BARE: Final = re.compile(r"(localhost|[\w.-]+:\d+|[\w-]+(\.[\w-]+)+)(/[^\s\x00-\x1f\x7f]*)?", re.ASCII)
"""A host, with a port or a dot in it unless it is this machine, and perhaps a path."""
_URL: Final = re.compile(r"https?://[^\s\x00-\x1f\x7f]+", re.IGNORECASE)


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    """Let a command take an API key."""
    parser.add_argument("--api-key", metavar="KEY", help="sent as X-API-Key; @FILE takes the first line")


def add_header_flags(parser: argparse.ArgumentParser) -> None:
    """Let a command take headers, and among them an API key."""
    parser.add_argument("--content-type", metavar="TYPE", help="media type of DATA, if the guess is wrong")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="may be repeated")
    add_key_flag(parser)


def url_of(text: str) -> SplitResult:
    """Read a URL, by HTTP if it does not say; what is not ASCII in it is encoded, as browsers do.

    Raises:
        ConfigError: If it is none.
    """
    whole = f"http://{text}" if _BARE.fullmatch(text) else text
    if _URL.fullmatch(whole) is None:
        model = text if _TOKEN.fullmatch(text) else "iris"
        why = "; a URL has no space" if re.search(r"\s", text) else ""
        raise ConfigError(f"{text!r} is not a URL, such as http://127.0.0.1:8080/models/{model}{why}")
    try:
        parts = urlsplit(whole)
        port = parts.port
        netloc = parts.netloc.encode("idna").decode()
    except UnicodeError as failure:
        raise ConfigError(f"{text!r} is not a URL: its host is not valid") from failure
    except ValueError as failure:
        raise ConfigError(f"{text!r} is not a URL: {failure}") from failure
    if not parts.hostname or port == 0:
        raise ConfigError(f"{text!r} is not a URL: expected a host, and a port > 0 if it has one")
    if "@" in netloc:
        msg = "expected a URL without a user name before @; send a key with --api-key"
        raise ConfigError(msg)
    path, query = (quote(part, string.punctuation, errors="surrogateescape") for part in (parts.path, parts.query))
    return SplitResult(parts.scheme, netloc, path, query, "")


def key_header(key: str | None) -> dict[str, str]:
    """Return what `--api-key` says, as `headers_of` does.

    Raises:
        ConfigError: If it cannot be a header, or is a file that cannot be read.
    """
    if key is None:
        return {}
    if key.startswith("@"):
        key = next(iter(lines_of(key[1:], "the API key")), "")
    if not key.strip():
        raise ConfigError("--api-key: expected a key, got ''; check that the variable it comes from is set")
    return {"x-api-key": _value(key, "--api-key: expected a key of one line")}


def headers_of(parsed: argparse.Namespace, media_type: str | None) -> dict[str, str]:
    """Return what the flags of a command say; values have a character for each byte of their UTF-8.

    Args:
        media_type: What the body is, if nobody says otherwise; None where there is no body.

    Raises:
        ConfigError: If one of them cannot be a header.
    """
    headers: dict[str, str] = {}
    if media_type is not None:
        told = parsed.content_type
        headers["content-type"] = _value(told or media_type, f"--content-type: expected a media type, got {told!r}")
    for header in parsed.header:
        name, _, value = (part.strip() for part in header.partition(":"))
        impossible = f"--header: expected NAME:VALUE, got {header!r}"
        if ":" not in header or _TOKEN.fullmatch(name) is None:
            raise ConfigError(impossible)
        headers[name.lower()] = _value(value, impossible)
    return headers | key_header(parsed.api_key)


def _value(text: str, otherwise: str) -> str:
    if not text.isprintable():
        raise ConfigError(otherwise)
    return text.encode().decode("latin-1")
