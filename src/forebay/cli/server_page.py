# SPDX-License-Identifier: Apache-2.0
"""Ask a running server for one of its pages, for the commands that print what it tells."""

from __future__ import annotations

from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final
from urllib import error, request

import msgspec

from forebay.cli.call_model import reason_of
from forebay.cli.request_head import key_header, url_of
from forebay.cli.trace import fault_of
from forebay.errors import ConfigError
from forebay.types.first_use import known

TIMEOUT_S: Final = 60.0
MAX_BYTES: Final = 64 << 20
"""Longest answer that is read."""
_FAULT_BYTES: Final = 2000


class PageMissing(ConfigError):
    """The server has no such page."""


def page_of(server: str, path: str, api_key: str | None, kind: Any) -> Any:
    """Return what a server answers at a path, read as a type.

    Raises:
        PageMissing: If it has none there.
        ConfigError: If it does not answer, or with an error, or with something else.
    """
    url = f"{url_of(server).geturl().rstrip('/')}/{path}"
    message = request.Request(url, headers=key_header(api_key))  # noqa: S310 - `url_of` has seen to the scheme
    try:
        with request.urlopen(message, timeout=TIMEOUT_S) as answer:  # noqa: S310 - as above
            body = answer.read(MAX_BYTES + 1)
    except error.HTTPError as failure:
        kind = PageMissing if failure.code == HTTPStatus.NOT_FOUND else ConfigError
        raise kind(f"{server} answers {failure.code}: {fault_of(failure.read(_FAULT_BYTES))}") from failure
    except HTTPException as failure:
        raise ConfigError(f"{server} answers, but not in HTTP") from failure
    except (error.URLError, TimeoutError, ConnectionError) as failure:
        raise ConfigError(f"{server} does not answer: {reason_of(failure)}") from failure
    if len(body) > MAX_BYTES:
        raise ConfigError(f"{server} answers with more than {MAX_BYTES >> 20} MiB; is it a forebay server?")
    try:
        return msgspec.json.decode(body, type=known(kind))
    except (msgspec.DecodeError, UnicodeDecodeError) as failure:
        raise ConfigError(f"{server} answers, but is not a forebay server: {failure}") from failure
