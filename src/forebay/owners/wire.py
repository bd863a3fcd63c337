# SPDX-License-Identifier: Apache-2.0
"""What a front and an owner say to each other, as docs/reference/worker-protocol.md has it. Sans-I/O.

Each message is one frame of the worker protocol. Bodies and results stand at the end of theirs; what is long of them
is elsewhere, as `detached_bodies.py` has it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

import msgspec

from forebay.observe.traces.trace_context import MAX_CHARACTERS
from forebay.types.call import Media, MediaHead
from forebay.types.tenant import LEAST_URGENT, MAX_CHILD, MAX_NAME
from forebay.workers.wire.heartbeat import BEAT

_Number = Annotated[int, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Child = Annotated[str, msgspec.Meta(max_length=MAX_CHILD)]
_Class = Annotated[int, msgspec.Meta(ge=0, le=LEAST_URGENT)]
_Samples = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
_Trace = Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]
_OwnId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f-]{0,64}\Z")]
"""An id that an owner has made; it is told to clients in a header."""
MAX_CHARGED: Final = 1024
"""Tenants that a bundle charges with tokens; to do so takes about a millisecond."""
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class LinkBeat(msgspec.Struct, frozen=True, array_like=True, tag=BEAT):
    """Either side can still be reached."""


class SeesMemory(msgspec.Struct, frozen=True, array_like=True, tag="sees"):
    """The front sees the owner's files in memory, as the owner sees its: results may lie there."""


class HandedOn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request on its way to its owner; its body follows.

    What stands after these is not read; the last three are left out where a front has not told tenants apart and no
    deadline is stated.

    Attributes:
        seat: What both sides call it, until it has ended.
        params: What the protocol says about the body, as msgpack: most requests have the same.
        size: Samples in it.
        left_s: What is left of its time; clocks differ, so it is a duration.
        id: What the client and the logs call it; empty if nobody has named it yet.
        trace: The `traceparent` of the span that it is for the front; empty if it belongs to no trace.
        client: Stands for the connection that it came by; 0 if that is not known.
        tenant: The name of the tenant; empty for a request without one.
        tier: The class of the request.
        is_due: Whether what is left of its time is a deadline that its client has stated, or that its tenant has.
        child: Of which child of the tenant the request is; empty if of none.
    """

    seat: _Count
    params: bytes
    size: _Samples
    left_s: float
    id: str
    trace: _Trace = ""
    client: _Number = 0
    tenant: _Name = ""
    tier: _Class = 0
    is_due: bool = False
    child: _Child = ""


class ModelRequests(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is new about the requests to one model.

    Attributes:
        model: Its number, as the owner has told it.
        seats: Requests that are handed on.
        leaves: Seats that nobody waits for any more.
        allows: Seats of streamed answers, and for how many more parts there is room.
        tokens: Tenants, each with the tokens of prompts and of answers that its requests had.
    """

    model: _Number
    seats: list[HandedOn]
    leaves: list[int]
    allows: list[tuple[int, _Count]]
    tokens: Annotated[list[tuple[_Name, _Number, _Number]], msgspec.Meta(max_length=MAX_CHARGED)] = []


class HandedRequests(msgspec.Struct, frozen=True, array_like=True, tag="requests", gc=False):
    """All that came in one turn of the front's loop.

    Attributes:
        bundles: One for each model.
        taken: How many more results in memory the front has read, so that others may lie there.
        bodies: Those of all seats, in order.
    """

    bundles: list[ModelRequests]
    taken: _Number
    bodies: list[Any]


class MemberServings(msgspec.Struct, frozen=True, array_like=True, tag="servings"):
    """All that a member runs from now on.

    Attributes:
        address: Where it takes calls.
        protocol: The major version of what members say to each other.
        servings: Their names, each with its weight x partitions.
    """

    address: str
    protocol: int
    servings: list[tuple[str, int]]


class CallerHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a front; the door has read it already."""

    version: int
    about: dict[str, Any]


class EndedSeat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that has ended otherwise than most; its result follows, nil if it failed.

    Attributes:
        seat: Which.
        media: The media type of a result that has one of its own, or its type, status and headers.
        failure: Kind, message and detail of an error.
        id: What the owner has called a request that failed, and that came without a name.
        cost_s: Seconds that workers were busy for it, where the owner's answers say what they cost.
        retry_s: Seconds after which its client should try again, if it was refused and that is known.
    """

    seat: int
    media: MediaHead | None = None
    failure: tuple[str, str, Any] | None = None
    id: _OwnId = ""
    cost_s: _Seconds = 0.0
    retry_s: _Seconds = 0.0


class ModelAnswers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is new about the requests to one model.

    Attributes:
        model: Its number.
        heard: Samples of this link that the owner has read so far, so that the front knows what `room` counts.
        room: Samples for which the owner's queue has room.
        parts: Seats of streamed answers, and how many parts of each follow.
        ended: Requests that have ended; of most the seat alone, and their results follow.
        returned: Seats of requests that the owner has not taken.
        row_s: Seconds in which a sample of this front is answered where the queue is full; 0 while there is room.
    """

    model: _Number
    heard: _Number
    room: int
    parts: list[tuple[int, _Count]]
    ended: list[int | EndedSeat]
    returned: list[int]
    row_s: _Seconds = 0.0


class OwnerAnswers(msgspec.Struct, frozen=True, array_like=True, tag="answers", gc=False):
    """All that became known in one turn of the owner's loop.

    Attributes:
        models: What is new, for each model.
        results: Of each model first the parts of its streams, then the results of what has ended. A part with the head
            of its answer is `{"body", "told"}`, the latter as the `media` of an `EndedSeat`.
    """

    models: list[ModelAnswers]
    results: list[Any]


class OwnerOpening(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The owner lets the front in.

    Attributes:
        options: `max_body` is the longest body that the owner reads, `shares` a file of its own if it sees those of
            the front.
    """

    options: dict[str, Any]


class OwnedModels(msgspec.Struct, frozen=True, array_like=True, tag="models"):
    """All that the owner serves from now on.

    Attributes:
        models: Numbers and descriptions, see `model_description.py`.
        elsewhere: Names of models that it hands on itself, each with the address of the owner.
    """

    models: list[Any]
    elsewhere: dict[str, str] = {}


class OwnerDirectory(msgspec.Struct, frozen=True, array_like=True, tag="directory"):
    """What runs where from now on, see `cluster/directory.py`."""

    directory: bytes


class OwnerLeaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """The owner takes no further requests, and answers those that it has."""


class OwnerChallenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """The owner's nonce."""

    nonce: bytes


class OwnerWelcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The owner's proof that it knows the secret."""

    proof: bytes


class OwnerRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Why the front is not let in."""

    reason: str


FromCaller = CallerHello | SeesMemory | HandedRequests | MemberServings | LinkBeat
FromOwner = (
    OwnerChallenge
    | OwnerWelcome
    | OwnerRefusal
    | OwnerOpening
    | OwnedModels
    | OwnerDirectory
    | OwnerAnswers
    | OwnerLeaving
    | LinkBeat
)


def bodies_of(message: Any) -> list[Any] | None:
    """Return the bodies of a message; None if it is of a kind that has none."""
    match message:
        case HandedRequests():
            return message.bodies
        case OwnerAnswers():
            return message.results
        case OwnedModels():
            return message.models
        case _:
            return None


def bytes_of(body: Any) -> int:
    """Return how long the bytes are that a body is made of."""
    if type(body) is Media:
        body = body.body
    if isinstance(body, list | tuple):
        return sum(map(bytes_of, cast("list[Any]", body)))
    return memoryview(cast("bytes", body)).nbytes if isinstance(body, bytes | bytearray | memoryview) else 0
