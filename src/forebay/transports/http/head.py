# SPDX-License-Identifier: Apache-2.0
"""The line and headers of a request to a model, and what is remembered of them for the next request that has the same.

`Route.read_head` makes a `Head`. A usual one is remembered by its bytes (`HeadMemory`), and its `Mailbox`
(`same_turn.py`) has the requests that came with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.protocols import native

if TYPE_CHECKING:
    from forebay.errors import ForebayError
    from forebay.transports.http.route import Route
    from forebay.transports.http.same_turn import Mailbox
    from forebay.types.tenant import Tenant

NEVER: Final = float("inf")


class Head(msgspec.Struct, eq=False):
    """The line and headers of a request to a model, read. Only the last five attributes change after that.

    Attributes:
        route: Whom it is for; None for a request that could not be read that far.
        method: Of the request, as far as it could be read.
        target: Its target without the query, as far as it could be read.
        parent: The span that it belongs to, as the client has written it.
        params: Formats of body and answer.
        id: The request's id if the client named one.
        timeout_s: Time the client gives it; infinity leaves it to the endpoint.
        keep_alive: Whether the connection stays open afterwards.
        chunked: Whether a streamed answer may be sent in chunks (HTTP/1.1).
        problem: Why the request is refused, if that is known before its body was read.
        length: Content-Length, -1 if not given.
        is_forwarded: Whether a proxy says that it asks for somebody else.
        texts: The headers as texts, for models that ask.
        tenant: Whose key it shows, where keys have names.
        packing: What the body is packed with, if it has to be unpacked.
        form: The Content-Type of a form, with its boundary.
        answer_packing: What the answer is to be packed with; such requests take the slow lane.
        expects_continue: Whether the client waits for "100 Continue" before it sends the body.
        is_usual: Whether the same bytes may be taken for the same head again, without parsing them.
        is_simple: Whether a request is its body and nothing else: no time limit, no id, one sample, one answer.
        is_full: The endpoint's: whether it would refuse a request now.
        mailbox: Where its requests wait to be submitted together; None if each is submitted by itself.
        prefix: The answer's head up to the variable part of the request id, as of the second `stamp`.
        stamp: The sweep in which `prefix` was written.
        refusal: The answer of a full queue as a format, with what differs among those who get it.
        refusal_stamp: The sweep in which `refusal` was written.
    """

    route: Route | None = None
    method: bytes = b"POST"
    target: bytes = b""
    parent: bytes = b""
    params: Mapping[str, str] = msgspec.field(default_factory=lambda: native.PARAMS["json", "json"])
    id: str = ""
    timeout_s: float = NEVER
    keep_alive: bool = True
    chunked: bool = True
    problem: ForebayError | None = None
    length: int = -1
    is_forwarded: bool = False
    texts: Mapping[str, str] | None = None
    tenant: Tenant | None = None
    packing: bytes = b""
    form: bytes = b""
    answer_packing: bytes = b""
    expects_continue: bool = False
    is_usual: bool = True
    is_simple: bool = False
    is_full: Callable[[], bool] = bool
    mailbox: Mailbox | None = None
    prefix: bytes = b""
    stamp: int = -1
    refusal: bytes = b""
    refusal_stamp: int = -1

    @property
    def is_staged(self) -> bool:
        """Whether its body is read in steps, beside the loop."""
        return bool(self.packing or self.form)


class HeadMemory:
    """A head that is remembered by its bytes.

    Attributes:
        head: What they mean.
        raw: They: the same object for all clients, so that it stays in the core's cache.
        beyond: What follows them in order, of the same length.
        raw_bytes: Their length.
        whole_bytes: The length of the message that they begin.
        headers: What the head was read from, names in lower case.
        url: The target it was read from, with the query.
        mailbox: Its own.
    """

    __slots__ = ("beyond", "head", "headers", "mailbox", "raw", "raw_bytes", "url", "whole_bytes")

    def __init__(self, head: Head, raw: bytes, headers: list[tuple[bytes, bytes]], url: bytes) -> None:
        self.head = head
        self.raw = raw
        self.beyond = raw[:-1] + b"\x0b"  # the last byte is a line feed
        self.raw_bytes = len(raw)
        self.whole_bytes = len(raw) + head.length
        self.headers = headers
        self.url = url
        self.mailbox = head.mailbox


UNREAD: Final = HeadMemory(Head(), b"", [], b"")
"""What a client sent last that has sent nothing yet; no message is so short."""
