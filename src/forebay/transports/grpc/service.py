# SPDX-License-Identifier: Apache-2.0
"""What a gRPC port serves: services by their full name, with methods that take bytes and return bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from forebay.errors import ForebayError
from forebay.observe.logs.request_ids import request_id_of
from forebay.transports.grpc.statuses import NONE, Status

if TYPE_CHECKING:
    from forebay.observe.logs.access_log import Answering
    from forebay.serving.endpoint import Endpoint
    from forebay.transports.grpc.heads import Metadata
    from forebay.transports.grpc.messages import PlacesOf
    from forebay.types.call import Request
    from forebay.types.tenant import Tenant


Piece = bytes | bytearray | memoryview


def parent_in(metadata: Sequence[tuple[str, str | bytes]]) -> str:
    """Return the caller's `traceparent`; empty if there is none."""
    return next((str(value) for name, value in metadata if name == "traceparent"), "")


def named_in(metadata: Sequence[tuple[str, str | bytes]]) -> str:
    """Return what the caller calls its request; empty if it does not say, or says what cannot stand in a log."""
    return next((request_id_of(str(value).encode()) for name, value in metadata if name == "x-request-id"), "")


def peer_of(call: Call) -> str:
    """Return who calls in the words of gRPC."""
    return f"ipv6:{call.peer}" if call.peer.startswith("[") else f"ipv4:{call.peer}"


def described(files: Iterable[Any], known: dict[str, bytes] | None = None) -> list[bytes]:
    """Return the serialized descriptors of files and of all they import, each after those it imports."""
    found = {} if known is None else known
    for file in files:
        if file.name not in found:
            described(file.dependencies, found)
            found[file.name] = file.serialized_pb
    return list(found.values())


class Call(Protocol):
    """One call, as its method sees it.

    Attributes:
        deadline: Monotonic seconds at which the client stops waiting; infinity if it never does.
        on_cancel: Called once if the client goes away, calls it off or its deadline passes before it is answered; a
            method that answers later sets it.
        on_leave: Called once when the server is about to stop: a stream that rests need not wait for its client.
    """

    deadline: float
    on_cancel: Callable[[], object] | None
    on_leave: Callable[[], object] | None

    @property
    def peer(self) -> str:
        """The address of the caller, as `ADDRESS:PORT`."""
        ...

    @property
    def tenant(self) -> Tenant | None:
        """Whose key it shows, where keys have names."""
        ...

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """What the client says beside its message: names in lower case, bytes where the name ends in `-bin`."""
        ...

    def answered_by(self, endpoint: Answering, request: Request) -> None:
        """Note who answers, for the access log and traces; called while the endpoint replies."""
        ...

    def begin_answer(self, metadata: Metadata) -> None:
        """Say something before the first message; does nothing once a message was sent, or the call has ended."""
        ...

    def reply(self, message: bytes) -> None:
        """Answer the call with its only message; does nothing if it has ended."""
        ...

    def reply_in_pieces(self, pieces: Sequence[Piece]) -> None:
        """Reply with a message that lies in several places, from which it is sent; they must not change any more."""
        ...

    def queue(self, size: int) -> None:
        """Count bytes of answers that wait in the method until they are yielded; a negative size as they are."""
        ...

    def keep_message(self) -> int:
        """Count the message that was taken last until `release_message`, not until the next one; returns its size."""
        ...

    @property
    def holds_much(self) -> bool:
        """Whether what it holds by these two is half of what its connection may hold: no more is to be taken now."""
        ...

    def release_message(self, size: int) -> None:
        """Count such a message no longer: its request was answered."""
        ...

    def fail(self, error: ForebayError, own: Mapping[type[ForebayError], Status] = NONE) -> None:
        """Answer the call with the status of an error, its service's own if it has one; nothing if it has ended."""
        ...

    def end(self, status: Status, text: str = "", message: bytes | None = None, metadata: Metadata = ()) -> None:
        """Give the call its status, after what it has sent and a last message; does nothing if it has one."""
        ...


Direct = Callable[[Any, Call], None]
"""Answers a call now or later by `reply` or `fail`, without a task; what it raises becomes the status."""

Unary = Callable[[bytes, Call], Awaitable[bytes]]
"""Answers a call with what it returns; it is cancelled with the call."""

Stream = Callable[[AsyncIterator[Any], Call], AsyncIterator[bytes | list[Piece]]]
"""Answers a call with the messages it yields, whole or in pieces; it is closed with the call.

A client that takes nothing holds it up.
"""


class GrpcService(msgspec.Struct, frozen=True, kw_only=True):
    """A service. What a method raises becomes the status of the call, a `ForebayError` that of its code.

    Attributes:
        full_name: With its package.
        direct: Methods that answer without a task, by name.
        unary: Methods that are coroutines, by name.
        streams: Methods that take and give any number of messages, by name.
        public: Names of methods that need no API key, as probes have none.
        queues: Methods all of whose calls wait in one queue, and whose it is: while it is full, they are refused before
            anything is read.
        lands: Methods that take a long message as a view of where it has landed, and not as bytes; and what says, of
            the message's beginning, where that is to be.
        statuses: What it says differently of errors that a method raises.
        files: Serialized descriptors of the files it is described in, each after those it imports; without them it
            cannot be looked up by reflection.
    """

    full_name: str
    direct: Mapping[str, Direct] = {}
    unary: Mapping[str, Unary] = {}
    streams: Mapping[str, Stream] = {}
    public: Collection[str] = ()
    queues: Mapping[str, Endpoint] = {}
    lands: Mapping[str, PlacesOf] = {}
    statuses: Mapping[type[ForebayError], Status] = NONE
    files: Sequence[bytes] = ()
