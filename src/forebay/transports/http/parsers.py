# SPDX-License-Identifier: Apache-2.0
"""The parsers of requests: how they are made, what is kept from them, and what their errors mean.

The library reads as Node.js does. It knows the methods that have a name, stops before the body of a message that asks
for another protocol, and calls a message that came after the last one an error; a server of HTTP has to go on.
"""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn, Protocol

import httptools

from forebay.errors import ForebayError
from forebay.transports.http.http_errors import NotHttp

_METHOD: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64} ")
_NO_PATH: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/?]*(?=\?|\Z)")
_TOLD_METHODS: Final = b"POST ", b"GET ", b"HEAD ", b"CONNECT "


class TakesBody(Protocol):
    """What is told of a body."""

    def on_body(self, body: bytes) -> None:
        """Take a piece."""
        ...

    def on_message_complete(self) -> None:
        """Called at the end of a message."""
        ...


class _Enough(Exception):
    """Makes a parser stop: nobody wants what it would read."""


def stop_parsing() -> NoReturn:
    """Make the parser stop in whose callback this is."""
    raise _Enough


def new_parser(connection: object) -> Any:
    """Return a parser as uvicorn makes it, which is between two messages."""
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def parser_of_rest(connection: TakesBody, frame: bytes) -> Any:
    """Return a parser that reads the rest of a message whose head another one has read, and nothing after it.

    Args:
        frame: The headers that say where it ends.
    """
    parser = httptools.HttpRequestParser(_Rest(connection))
    parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % frame)
    return parser


class _Rest:
    def __init__(self, connection: TakesBody) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete
        self._has_begun = False

    def on_message_begin(self) -> None:
        if self._has_begun:
            stop_parsing()
        self._has_begun = True


def with_known_method(data: bytes) -> bytes:
    """Replace the method that begins a message by one that the parser knows, unless it matters to the parser."""
    if data.startswith(_TOLD_METHODS):
        return data
    method = _METHOD.match(data)
    return b"POST " + data[method.end() :] if method is not None else data


def with_path(target: bytes) -> bytes:
    """Give an absolute target the path that it may lack."""
    host = _NO_PATH.match(target)
    return target if host is None else host[0] + b"/" + target[host.end() :]


_PROXIED: Final = "this port does not read the PROXY protocol; have the proxy pass connections on without it"
_OTHER_PROTOCOLS: Final = {
    b"PRI * HTTP/2": "this port speaks HTTP/1.1, and HTTP/2 came; gRPC has a port of its own, --grpc-port",
    b"PROXY ": _PROXIED,
    b"\r\n\r\n\0\r\nQUIT\n": _PROXIED,
    b"\x16\x03": "this port speaks plain HTTP, and TLS came; ask for it with http://, or give the server a --certfile",
}
"""What is told of a beginning that is another protocol's."""


def refusal_of(error: httptools.HttpParserError, data: bytes) -> ForebayError | None:
    """Tell bad requests and refusals apart from a defect of ours in one of the parser's callbacks, which is None.

    Args:
        data: What could not be read.
    """
    cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
    if isinstance(cause, ForebayError):
        return cause
    if isinstance(cause, httptools.HttpParserError | UnicodeError):
        other = next((told for beginning, told in _OTHER_PROTOCOLS.items() if data.startswith(beginning)), None)
        return NotHttp(other or f"this is not a request this server can read: {str(cause)[:200]}")
    return None
