# SPDX-License-Identifier: Apache-2.0
"""The front's end of a connection to an owner: what came in a turn of the loop leaves at its end."""

from __future__ import annotations

import asyncio
import functools
import itertools
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, cast

import msgspec

from forebay.errors import CapacityError, ForebayError, InvalidRequest, TooLarge, Unavailable, UserCodeError, revive
from forebay.observe.logs.request_ids import id_of
from forebay.observe.traces.trace_context import TraceContexts
from forebay.owners.caller_conversation import MAX_PARAM_BYTES
from forebay.owners.detached_bodies import (
    FOLLOWING_BYTES,
    FRAME_BYTES,
    HEAD_BYTES,
    LYING_BYTES,
    Apart,
    refused,
    set_apart,
    weight,
)
from forebay.owners.model_description import read_description
from forebay.owners.owner_conversation import OwnerConversation
from forebay.owners.owner_pool import LinkPool, OwnerSlot
from forebay.owners.parts_ahead import PartsAhead
from forebay.owners.shared_files import SharedFiles
from forebay.owners.stepwise_reader import InSteps, send
from forebay.owners.wire import (
    EndedSeat,
    ModelRequests,
    OwnedModels,
    OwnerAnswers,
    OwnerDirectory,
    OwnerLeaving,
    OwnerOpening,
    bytes_of,
)
from forebay.types.call import Failure, Origin, Request, media_of
from forebay.types.failures import without_frames
from forebay.types.server_state import here
from forebay.workers.memory.landing import Joining, landed_in, placed
from forebay.workers.wire import frames
from forebay.workers.wire.address import CONNECT_S, Address, UnixAddress, peer_of, stranger_at, tune
from forebay.workers.wire.loop_heartbeat import BEAT_FRAME, SILENCE, LoopHeartbeat
from forebay.workers.wire.tls_files import TlsFiles, why_closed, why_no_tls

FLAG: Final = "--owner-"
"""How the flags begin that name the TLS files of a front."""
MAX_MODELS: Final = 4096
"""Versions of models that an owner may have."""
MAX_DESCRIBED_BYTES: Final = 1 << 26
"""What it may say of them together."""
DESCRIPTION_COST: Final = 64
"""What it costs to read the description of a model, as requests: a good half of a millisecond."""
GREET_S: Final = 5.0
"""Time in which an owner must have let this server in; what it serves it may say later, when that is loaded."""


class OwnerLink(asyncio.Protocol):
    """One connection to an owner.

    Attributes:
        greeted: Done once the owner has described its models, or does not.
        ended: Done once the owner takes no further requests, with the reason.
        slots: The models that are asked by it, by their numbers.
        place: Which of several shards its owner is, as the end of the owner's name.
        elsewhere: Names of models that the owner hands on itself, each with the address of their owner.
        is_leaving: Whether it ends once all that was handed on is answered.
        told_as: What this side is where it is told what runs where.
    """

    told_as: ClassVar[str] = frames.MEMBER

    def __init__(
        self,
        name: str,
        secret: bytes | None,
        on_models: Callable[[OwnerLink, Sequence[tuple[int, Any]]], object],
        on_end: Callable[[OwnerLink], object],
        on_lost: Callable[[OwnerLink], object],
        on_directory: Callable[[OwnerLink, bytes], object] | None = None,
        read: Callable[[Any], Any] = read_description,
    ) -> None:
        """Make the front's end.

        Args:
            on_models: Called with what the owner serves, whenever that changes.
            on_end: Called once when it takes no further requests.
            on_lost: Called once when the connection is closed.
            on_directory: Called with what runs where, whenever that changes; None for a front that is not a member.
            read: Reads what the owner tells of one model; raises a `ForebayError`.
        """
        loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.slots: dict[int, OwnerSlot] = {}
        self._conversation = OwnerConversation(
            name, secret, self._write, self, frames.CALLER if on_directory is None else self.told_as
        )
        self._has_secret = secret is not None
        self._on_models = on_models
        self._on_end = on_end
        self._on_lost = on_lost
        self._on_directory = on_directory
        self._read_model = read
        self.is_leaving = False
        self.place = ""
        self.elsewhere: dict[str, str] = {}
        self._transport: asyncio.Transport | None = None
        self._is_encrypted = False
        self._new: dict[OwnerSlot, None] = {}
        self._new_bytes = self._following_bytes = self._lying_bytes = 0
        self._taken = 0
        self._lying: list[Apart] = []
        self._ahead = PartsAhead()
        self._traces = here(TraceContexts)
        self._known_head: tuple[Mapping[str, Any] | None, bytes] = None, b""
        self._files: SharedFiles | None = None
        self._reading: InSteps | None = None
        self._is_speaking = False
        self._waiting: asyncio.TimerHandle | None = None
        self._heartbeat: LoopHeartbeat | None = None

    @property
    def peer(self) -> tuple[str, int] | None:
        """The address that it is connected with; None for a unix socket."""
        return peer_of(self._transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self._transport = cast("asyncio.Transport", transport)
        self._is_encrypted = transport.get_extra_info("ssl_object") is not None  # then the owner has proven who it is
        is_sure = self._has_secret or self._is_encrypted
        if not is_sure and (stranger := stranger_at(transport.get_extra_info("socket"))):
            self.give_up(
                f"it belongs to {stranger}, and a server without a secret cannot know it; "
                "give both the same one: --attach-secret @FILE"
            )
            return
        self._waiting = asyncio.get_running_loop().call_later(
            GREET_S, self.give_up, f"it has not let this server in within {GREET_S:g} s"
        )
        self._files = SharedFiles(transport)
        self._reading = InSteps(self._transport, self._read)
        self._conversation.greet(self._files.shown)

    def data_received(self, data: bytes) -> None:
        """Act on what the owner says."""
        if self._heartbeat is not None:
            self._heartbeat.heard()
        if self._reading is not None:
            self._reading.take(data)

    def expect(self, message: Any, apart: list[Apart]) -> None:
        """Have results that follow their frame joined as they come; those that lie in memory are copied later.

        Raises:
            InvalidRequest: An owner describes more than is read.
        """
        if isinstance(message, OwnedModels):
            _require_short(apart)
        for one in apart:
            if one.place is None:
                one.sink = Joining()
        self._lying = [one for one in apart if one.place is not None]

    def arrived(self, body: Apart, size: int) -> None:
        """Do nothing: one frame at a time is read, and what follows it is bounded."""

    def _read(self, data: bytes) -> Iterator[int]:
        """Act on what has come, in steps."""
        conversation = self._conversation
        for message in conversation.feed(data):
            try:
                match message:
                    case OwnerAnswers():
                        if self._lying:
                            yield from self._copy(message)
                        yield from self._hear(message)
                    case OwnedModels(models, elsewhere):
                        self.elsewhere = elsewhere
                        yield from self._describe(msgspec.convert(models, list[tuple[int, Any]]))
                    case OwnerDirectory(directory) if self._on_directory is not None:
                        self._on_directory(self, directory)
                    case OwnerDirectory():
                        raise InvalidRequest("it sent the directory to a front that is not a member")
                    case OwnerLeaving():
                        self._end("it is being stopped")
                    case OwnerOpening(options):  # this server is let in
                        self._wait_no_longer()
                        self._begin_to_beat()
                        self._share(options.get("shares"))
            except (ForebayError, ValueError, TypeError) as error:
                self.give_up(f"it does not speak the protocol: {error}")
        if conversation.problem:
            self.give_up(conversation.problem)

    def _describe(self, models: list[tuple[int, Any]]) -> Iterator[int]:
        """Read what the owner serves, a model in a step, and serve it."""
        if len(models) > MAX_MODELS:
            raise InvalidRequest(f"it has {len(models)} models, at most {MAX_MODELS} are served")
        told: list[tuple[int, Any]] = []
        for number, one in models:
            told.append((number, self._read_model(one)))
            yield DESCRIPTION_COST
        self._on_models(self, told)
        _settle(self.greeted, "")

    def _share(self, shown: Any) -> None:
        """Have bodies lie in memory if the owner sees that, and tell it if this server sees its own."""
        if shown is not None and self._files is not None:
            self._files.is_seen = True
            if self._files.sees(shown):
                self._write(frames.encode(["sees"]))

    def _copy(self, message: OwnerAnswers) -> Iterator[int]:
        """Copy the results that lie in memory of the owner, in steps, and let it go."""
        lying, self._lying = self._lying, []
        for one in lying:
            assert one.place is not None
            assert self._files is not None
            try:
                one.put((yield from self._files.copy(one.place, None)))
            except OSError as error:
                problem = f"its answer lies in memory that cannot be read: {error.strerror}"
                refused(one, message.results, Unavailable(problem))
        self._taken += len(lying)
        self._speak_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        """Have what was handed on sent once more."""
        self._transport = None
        if self._heartbeat is not None:
            self._heartbeat.end()
        if self._reading is not None:
            self._reading.end()
        if self._files is not None:
            self._files.close()
        self._conversation.lose()
        self._end(self._conversation.problem or self._why_lost(exc))
        for slot in [*self.slots.values()]:
            slot.pool.gone(slot)
        self.slots.clear()
        self._on_lost(self)

    def give_up(self, reason: str) -> None:
        """Hang up."""
        self._conversation.problem = self._conversation.problem or reason
        self._conversation.lose()
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Hang up once what was said has been sent."""
        self._say()
        self._conversation.lose()
        if self._transport is not None:
            self._transport.close()

    def leave(self) -> None:
        """Hang up as soon as no pool hands requests on by it, and all that were handed on are answered."""
        self.is_leaving = True
        self.close_if_done()

    def close_if_done(self) -> None:
        """Hang up if that is wanted and nothing is left to be answered."""
        if self.is_leaving and not any(slot.is_in_use for slot in self.slots.values()):
            self.close()

    def slot(self, number: int, pool: LinkPool, room: int) -> OwnerSlot:
        """Return the slot by which a pool asks for the model of this number."""
        slot = self.slots.get(number)
        if slot is None or slot.pool is not pool:
            if slot is not None and slot.is_in_use:  # answers are told apart by the number alone
                self.give_up("another pool still waits for answers of the same model")
            slot = OwnerSlot(self, number, pool, room)
            if not self.ended.done():
                self.slots[number] = slot
        return slot

    @property
    def problem(self) -> str:
        """Why it is of no use, beyond that the connection has ended; empty if nothing is known."""
        return self._conversation.problem

    @property
    def is_connected(self) -> bool:
        """Whether the connection is there, be it that it is being closed."""
        return self._transport is not None

    @property
    def local_host(self) -> str:
        """The address of this machine from which the owner is reached; empty over a Unix socket."""
        name = None if self._transport is None else self._transport.get_extra_info("sockname")
        return str(cast("tuple[Any, ...]", name)[0]) if isinstance(name, tuple) else ""

    def say(self, frame: bytes) -> None:
        """Send a frame that is not a request."""
        self._write(frame)

    def forget(self, slot: OwnerSlot) -> None:
        """Ask for a model no more."""
        if self.slots.get(slot.number) is slot:
            del self.slots[slot.number]
            self.close_if_done()

    def hand_on(self, slot: OwnerSlot, first: int, requests: Sequence[Request]) -> None:
        """Send requests under names in a row from the first one, and fail those that cannot be sent."""
        now, short = time.monotonic(), min(frames.LONG_BYTES - 1, self._conversation.max_body_bytes)
        params, packed = self._known_head
        traces, has_spans = self._traces, self._traces.begin is not None
        for name, request in enumerate(requests, first):
            try:
                if request.params is not params:  # most come with a head that came before
                    packed = _packed(request.params)
                    params, _ = self._known_head = request.params, packed
                body = request.body
                is_short = type(body) is bytes and len(body) <= short
                body, pieces, size = (body, (), len(body)) if is_short else self._laid(slot, name, body)
            except (ForebayError, TypeError) as error:
                failed = error if isinstance(error, ForebayError) else InvalidRequest(f"expected plain data: {error}")
                failure = Failure(without_frames(failed))
                asyncio.get_running_loop().call_soon(self._fail, slot, name, failure)
                continue
            size += len(packed) + HEAD_BYTES
            if self._new_bytes + size > FRAME_BYTES:
                self._say()
            root, tenant = request.root(), request.tenant
            trace = traces.outgoing(root) if has_spans or root.trace else ""
            # Clients of a stream are told its id before its end, which is when an owner says how it called a request.
            called = root.id if request.on_part is None else id_of(root)
            told = name, packed, request.size, request.deadline - now, called, trace, client_of(request.origin)
            if tenant is None and request.due == NEVER:
                slot.joins.append(told)  # as `HandedOn`
            else:
                whose, tier = ("", 0) if tenant is None else (tenant.name, tenant.tier)
                child = () if tenant is None or not tenant.child else (tenant.child,)
                slot.joins.append((*told, whose, tier, request.due != NEVER, *child))
            slot.bodies.append(body)
            self._new[slot] = None
            self._new_bytes += size
            if is_short:
                continue
            slot.following += pieces
            if self._following_bytes >= FOLLOWING_BYTES or self._lying_bytes >= LYING_BYTES:
                self._say()
        self._say()  # a bundle is what came in a turn

    def _laid(self, slot: OwnerSlot, name: int, body: Any) -> tuple[Any, Sequence[Any], int]:
        """Return what stands in a frame for a body, the pieces that follow it, and how long the first is at most.

        Raises:
            TooLarge: The owner does not read it.
            TypeError: It is not plain data.
        """
        most, size = self._conversation.max_body_bytes, bytes_of(body)
        if size > most:
            raise TooLarge(f"the request cannot be sent to its owner: it has {size} bytes, at most {most} are read")
        kept: list[memoryview] = []
        body, pieces = set_apart(body, functools.partial(self._place, slot, kept))
        if kept:
            slot.kept[name] = kept
        self._following_bytes += sum(map(len, pieces))
        self._lying_bytes += sum(map(len, kept))
        return body, pieces, weight(body)

    def speak(self, slot: OwnerSlot) -> None:
        """Have what is new of a model sent at the end of this turn, or now if that is much."""
        self._new[slot] = None
        self._new_bytes += HEAD_BYTES
        if self._new_bytes >= FRAME_BYTES:
            self._say()
        else:
            self._speak_soon()

    def _speak_soon(self) -> None:
        if not self._is_speaking:
            self._is_speaking = True
            asyncio.get_running_loop().call_soon(self._say)

    def _place(self, slot: OwnerSlot, kept: list[memoryview], data: Any) -> Any:
        """Return what stands in a frame for bytes in memory that the owner sees; None if it sees none."""
        if self._files is None or not self._files.is_seen:
            return None
        places = slot.pool.bodies
        lying = data if type(data) is memoryview and places.has(data) else None
        if lying is None:
            try:
                lying = placed(data, places)
            except OSError:
                return None
        found = landed_in(lying)
        if found is None:
            return None
        kept.append(lying)
        return frames.landed(*found)

    @staticmethod
    def _fail(slot: OwnerSlot, name: int, failure: Failure) -> None:
        if name in slot.seating.open:
            slot.end([name], [failure])

    def _say(self) -> None:
        self._is_speaking = False
        new, self._new = self._new, {}
        self._new_bytes = self._following_bytes = self._lying_bytes = 0
        taken, self._taken = self._taken, 0
        bundles: list[ModelRequests] = []
        bodies: list[Any] = []
        following: list[Any] = []
        for slot in new:
            for seat, count in slot.allows:
                self._ahead.allow(seat, count)
            tokens = [(tenant, *counts) for tenant, counts in slot.tokens.items()]
            bundles.append(ModelRequests(slot.number, slot.joins, slot.leaves, slot.allows, tokens))
            bodies += slot.bodies
            following += slot.following
            slot.joins, slot.bodies, slot.following, slot.leaves, slot.allows = [], [], [], [], []
            slot.tokens = {}
        if bundles or taken:
            self._write(frames.encode(("requests", bundles, taken, bodies)), *following)

    def _hear(self, message: OwnerAnswers) -> Iterator[int]:
        results = iter(message.results)
        for told in message.models:
            parts = [[_part(next(results)) for _ in range(count)] for _, count in told.parts] if told.parts else []
            outcomes = [*itertools.islice(results, len(told.ended))]
            if EndedSeat in {*map(type, told.ended)}:
                outcomes = [*map(_outcome, told.ended, outcomes)]
            for (seat, _), some in zip(told.parts, parts, strict=True):
                self._ahead.come(seat, some)
            for one in told.ended if self._ahead.is_any else ():
                self._ahead.end(one.seat if isinstance(one, EndedSeat) else one)
            slot = self.slots.get(told.model)
            if slot is not None:
                slot.hear(told, parts, outcomes)
            yield len(told.ended) + len(told.parts) + 1
        if self.is_leaving:
            self.close_if_done()

    def _begin_to_beat(self) -> None:
        if peer_of(self._transport) is not None:  # there is a network between
            self._heartbeat = LoopHeartbeat(lambda: self.give_up(SILENCE), lambda: self._write(BEAT_FRAME))

    def _wait_no_longer(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _end(self, reason: str) -> None:
        """Hand nothing more on."""
        self._wait_no_longer()
        _settle(self.greeted, reason)
        if not self.ended.done():
            self.ended.set_result(reason)
            for slot in self.slots.values():
                slot.pool.retire(slot)
            self._on_end(self)

    def _why_lost(self, error: Exception | None) -> str:
        if isinstance(error, ssl.SSLError):
            return f"it {why_no_tls(error, FLAG)}"
        is_let_in = self._waiting is None
        return why_closed(FLAG) if self._is_encrypted and not is_let_in else "the connection was closed"

    def _write(self, *pieces: Any) -> None:
        send(self._transport, pieces)


async def dialled(
    address: Address, tls: TlsFiles | None, make: Callable[[], OwnerLink], host: str | None = None
) -> OwnerLink:
    """Connect to an owner.

    Args:
        tls: How the connection is encrypted, if there is a network between; None if it is not.
        host: Which address of its name is dialled; None for whichever answers.

    Raises:
        OSError: Nobody is there.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_S):
        if isinstance(address, UnixAddress):
            _, link = await loop.create_unix_connection(make, address.path)
        else:
            context, name = (None, None) if tls is None else (tls.context, address.host)
            transport, link = await loop.create_connection(
                make, host or address.host, address.port, ssl=context, server_hostname=name
            )
            tune(transport.get_extra_info("socket"))
    return link


def client_of(origin: Origin | None) -> int:
    """Return what stands for a connection on the way to an owner, whose queue waits for clients that come back.

    The queue here waits for nobody, so the number is kept where a queue would note that it has answered.
    """
    if origin is None:
        return 0
    if not origin.release:
        origin.release = next(_clients)
    return origin.release


NEVER: Final = float("inf")

_clients: Final = itertools.count(1)


def _packed(params: Mapping[str, Any]) -> bytes:
    """Return params as they are sent.

    Raises:
        TooLarge: The owner does not read them.
        TypeError: They are not plain data.
    """
    packed = frames.encode_part(params)
    if len(packed) > MAX_PARAM_BYTES:
        found = f"params of {len(packed)} bytes, at most {MAX_PARAM_BYTES}"
        raise TooLarge(f"the request cannot be sent to its owner: it has {found} are read")
    return packed


def _settle(future: asyncio.Future[str], result: str) -> None:
    if not future.done():
        future.set_result(result)


def _require_short(apart: list[Apart]) -> None:
    size = sum(one.length for one in apart)
    if size > MAX_DESCRIBED_BYTES:
        raise InvalidRequest(f"what it says of its models has {size} bytes, at most {MAX_DESCRIBED_BYTES} are read")


def _part(result: Any) -> Any:
    """Return a part of a streamed answer; raises the error of one that could not be read."""
    if type(result) is Failure:
        raise result.error
    return media_of(**msgspec.convert(result, dict[str, Any])) if type(result) is dict else result


def _outcome(told: EndedSeat | int, result: Any) -> Any:
    """Return what came of a request."""
    if not isinstance(told, EndedSeat):
        return result
    if told.failure is not None:
        kind, message, detail = told.failure
        error = revive(kind, message, detail)
        if told.retry_s and isinstance(error, CapacityError):
            error.retry_at = time.monotonic() + told.retry_s
        if isinstance(error, UserCodeError):
            error.is_logged = True  # by the owner, with its traceback
        return Failure(error)
    if type(result) is Failure:  # it could not be read
        return result
    return result if told.media is None else media_of(result, told.media)
