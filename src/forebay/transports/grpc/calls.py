# SPDX-License-Identifier: Apache-2.0
"""One call, from its head to its status.

`states.CALLS` says where it may be. Its stream is over when both of its ends are closed, or when one side gives up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import CapacityError, ForebayError, QueueFull, TooLate
from forebay.observe.logs.access_log import COST, Answering, EndedCall
from forebay.observe.logs.request_ids import next_id
from forebay.transports.grpc import frames, refusals, statuses
from forebay.transports.grpc.messages import STEP_BYTES, BadMessage, MessageBuffer, Unpacking
from forebay.transports.grpc.service import Piece, named_in, parent_in
from forebay.transports.grpc.states import CALLS, DECIDE, END_STREAM, HALF_CLOSED, RECEIVING, CallState
from forebay.transports.grpc.statuses import Status
from forebay.transports.rate_limit_fields import rate_limit_fields

if TYPE_CHECKING:
    from forebay.transports.grpc.connection import GrpcConnection
    from forebay.transports.grpc.heads import CallHead, Metadata
    from forebay.transports.grpc.refusals import CallRefusal
    from forebay.transports.grpc.sending import Outgoing
    from forebay.types.call import Request
    from forebay.types.tenant import Tenant

log = logging.getLogger("forebay.requests")

NEVER: Final = float("inf")
MAX_UNSENT_BYTES: Final = 64 * 1024
"""A stream that has more than this to send waits until all of it was taken."""
MESSAGE_OVERHEAD_BYTES: Final = 512
"""What a message counts beside its length, so that a stream of empty ones waits as well."""
MAX_STREAK: Final = 64
"""Messages that a method takes in one turn of the loop; others want to be served as well."""
STREAK_BYTES: Final = 4 * 1024
"""A message counts once more for each of these."""
SMALL_BYTES: Final = 16 * 1024
"""Packed messages are unpacked on the loop as far as this, and beside it from there on."""


class OpenCall:
    """A call that is not over.

    Attributes:
        stream: Its number on the connection.
        head: What its header block means.
        state: Which of its ends are closed.
        window: How much of its answer the client takes now.
        outgoing: What it has to send; None until the head of its answer is written.
        started: When it began, if that is to be told.
        status: How it ended; None if its client called it off.
        refusal: Why it is refused, if it came to a full queue.
        retry_at: When its client should try again then; 0 if that is not known.
        sent_bytes: Of its messages, if they are counted.
        cost: The field of its trailers that says what it has cost; empty if none does.
        request_id: What its request is called; empty until somebody needs it.
        on_leave: Called once when the server is about to stop; a stream that may rest sets it.
    """

    # What most calls never change stands here and not in __init__, which is on the hot path.
    deadline = NEVER
    on_cancel: Callable[[], object] | None = None
    on_leave: Callable[[], object] | None = None
    state: CallState = RECEIVING
    started = 0.0
    status: Status | None = None
    sent_bytes = 0
    outgoing: Outgoing | None = None
    cost = b""
    request_id = ""
    refusal: CallRefusal | None = None
    retry_at = 0.0
    _answered: EndedCall | None = None
    _inbox: MessageBuffer | None = None
    _task: asyncio.Task[None] | None = None
    _arrival: asyncio.Future[None] | None = None
    _room: asyncio.Future[None] | None = None
    _streak = 0
    _received = 0
    _arriving = 0
    _held = 0
    _kept = 0
    _queued = 0
    _allowed = frames.STREAM_WINDOW

    def __init__(self, connection: GrpcConnection, stream: int, head: CallHead, window: int, epoch: int) -> None:
        self.stream = stream
        self.window = window
        self.head = head
        self._connection = connection
        self._seen = epoch
        if connection.port.tells:
            self.started = time.monotonic()

    @property
    def is_stream(self) -> bool:
        """Whether its method takes any number of messages."""
        return self.head.is_stream

    # What a method sees

    @property
    def peer(self) -> str:
        """The address of the caller, as `ADDRESS:PORT`."""
        return self._connection.peer

    @property
    def tenant(self) -> Tenant | None:
        """Whose key it shows, where keys have names."""
        return self.head.tenant

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """What the client says beside its message."""
        return self.head.metadata

    def answered_by(self, endpoint: Answering, request: Request) -> None:
        """Note which endpoint answers, while it replies, as far as a log wants it."""
        self.request_id = request.id
        if self._connection.port.tells:
            says_cost = self._connection.port.config.answer_cost
            self._answered = self._answered or EndedCall("gRPC", "", says_cost=says_cost)
            self._answered.answered_by(endpoint, request)
            if cost := self._answered.cost:
                self.cost = statuses.literal(COST, cost)

    def more_trailers(self) -> bytes:
        """Return what its trailers say beside its status: its id if it failed, its cost, what is left of limits."""
        fields = rate_limit_fields(self.head.tenant)
        if self.request_id and self.status is not Status.OK:
            fields.append((b"x-request-id", self.request_id.encode()))
        return self.cost + b"".join([statuses.literal(name, value) for name, value in fields])

    def reply(self, message: bytes) -> None:
        """Answer the call with its only message; does nothing if it has ended."""
        if not self.state.is_done:
            self._connection.answer(self, message)

    def reply_in_pieces(self, pieces: Sequence[Piece]) -> None:
        """Reply with a message that lies in several places."""
        if not self.state.is_done:
            self._connection.answer_at_length(self, pieces)

    def fail(self, error: ForebayError, own: Mapping[type[ForebayError], Status] = statuses.NONE) -> None:
        """Answer the call with the status of an error; does nothing if it has ended."""
        if self.state.is_done:
            return
        self.request_id = named_in(self.metadata) or self.request_id or next_id()
        if isinstance(error, CapacityError):
            self._connection.port.refused_requests.note(error, self.request_id)
        if isinstance(error, QueueFull | TooLate):
            self.refuse(refusals.same(*statuses.of_error(error, own)), error.retry_at)
        else:
            self.end(*statuses.of_error(error, own))

    def refuse(self, refusal: CallRefusal, retry_at: float = 0.0) -> None:
        """Tell the client, in turn, that it came to a full queue; `RefusalLine` decides when.

        Args:
            retry_at: When it should try again; 0 if that is not known.
        """
        self.on_cancel = None
        self.refusal = refusal
        self.retry_at = retry_at
        self._connection.port.refusals.refuse(self)

    def tell_refused(self) -> None:
        """End a call that was refused and has not ended."""
        refusal = self.refusal
        assert refusal is not None
        self.decide(refusal.status)
        when = refusals.pushback(self.retry_at, self.deadline, time.monotonic()) if self.retry_at else b""
        self._connection.end(self, refusal.trailers + when)

    # How it ends

    def begin_answer(self, metadata: Metadata) -> None:
        """Say something before the first message; does nothing once a message was sent, or the call has ended."""
        if not self.state.is_done:
            self._connection.begin_answer(self, statuses.metadata(metadata))

    def end(self, status: Status, text: str = "", message: bytes | None = None, metadata: Metadata = ()) -> None:
        """Give the call its status, after what it has sent and a last message; does nothing if it has one."""
        if self.state.is_done:
            return
        if message is not None:
            self._connection.send_message(self, (message,), len(message))
        self.decide(status)
        self._connection.end(self, statuses.trailers(status, text, statuses.metadata(metadata)))

    def decide(self, status: Status) -> None:
        """Note the status, before it is sent."""
        self.state = CALLS[self.state][DECIDE]
        self.on_cancel = None
        self.status = status

    def fail_by(self, error: Exception, method: str, own: Mapping[type[ForebayError], Status]) -> None:
        """Give the call the status of whatever its method raised."""
        if isinstance(error, ForebayError):
            self.fail(error, own)
            return
        log.error("%s failed", method, exc_info=error)
        self.end(Status.INTERNAL, "the server failed; its log says why")

    def abandon(self, status: Status, text: str) -> None:
        """Give the call its status although its method is still at work, and send nothing else."""
        if not self.state.is_done:
            self.cancel()
            self.status = status
            self._connection.end(self, statuses.trailers(status, text), at_once=True)

    def cancel(self) -> None:
        """Stop all work for this call: its client no longer waits."""
        if self.state.is_done:
            return
        self.state = CALLS[self.state][DECIDE]
        # After the state, and once: what is called may reply, which must do nothing, or cancel again.
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            try:
                on_cancel()
            except Exception:
                log.exception("failed to cancel a call")
        task, self._task = self._task, None  # what cancels it refers to the call by its traceback
        if task is not None:
            task.cancel()

    def told(self) -> EndedCall:
        """Return the record of this call, which is over."""
        status = Status.CANCELLED if self.status is None else self.status
        call = ended(self.head, self._connection.peer, status)
        call.started, call.body_bytes = self.started, self.sent_bytes
        call.request_id = call.request_id or self.request_id
        answer = self._answered
        if answer is not None:
            call.model, call.run_id, call.batch_size = answer.model, answer.run_id, answer.batch_size
            call.queue_s, call.cost_s = answer.queue_s, answer.cost_s
        return call

    def forget(self) -> None:
        """Free what the call holds; it is over."""
        if self._inbox is not None:
            account = self._connection.account
            account.forget_arriving(self._arriving)
            account.release(self._held + self._kept)
            self._inbox = None
            self._arriving = self._held = self._kept = 0
        if self._queued:
            self._connection.queue(-self._queued)
            self._queued = 0

    # What it holds

    @property
    def arriving_bytes(self) -> int:
        """What has come of messages that were not taken yet."""
        return self._arriving

    @property
    def unsent_bytes(self) -> int:
        """What its client has not taken of its answers."""
        return self._queued + (0 if self.outgoing is None else self.outgoing.unsent_bytes)

    def queue(self, size: int) -> None:
        """Count bytes of answers that wait in the method until they are yielded; a negative size as they are."""
        if not self.state.is_done:
            self._queued += size
            self._connection.queue(size)

    def keep_message(self) -> int:
        """Count the message that was taken last until `release_message`, not until the next one; returns its size."""
        size, self._held = self._held, 0
        self._kept += size
        return size

    @property
    def holds_much(self) -> bool:
        """Whether what it holds by these two is half of what its connection may hold: no more is to be taken now."""
        return 2 * (self._kept + self._queued) > self._connection.port.max_connection_bytes

    def release_message(self, size: int) -> None:
        """Count such a message no longer: its request was answered."""
        if self._inbox is not None:
            self._kept -= size
            self._connection.account.release(size)

    def worked(self) -> None:
        """Count its only message no longer: it is answered."""
        if self._held and not self.head.is_stream:
            self._hold(0)

    def refuse_message(self, text: str) -> None:
        """End the call: a message has too many elements, or the server holds too much."""
        self._refuse(BadMessage(Status.RESOURCE_EXHAUSTED, text))

    # What the client sends

    def take_whole(self, size: int) -> bool:
        """Take the only message of a call that came in one piece; returns False if it is not that simple."""
        head = self.head
        if self._inbox is None and not head.is_stream and (head.length < 0 or head.length == size):
            self.state = HALF_CLOSED  # END_STREAM
            return True
        return False

    def begin(self, message: bytes) -> None:
        """Begin the method."""
        self.head.begin(self, message)

    def room(self, longest: int) -> memoryview | None:
        """Return where so much of what comes next may be put, or less; None if it has to be received.

        It may be one byte longer than what is missing of a message if more is asked for; see `byte_after`.
        """
        return None if self._inbox is None or self.state.is_done else self._inbox.room(longest)

    def byte_after(self) -> bytes:
        """Return what was put there after the message."""
        assert self._inbox is not None
        return self._inbox.byte_after()

    @property
    def missing_bytes(self) -> int:
        """What has not come of a long message that lands."""
        return 0 if self._inbox is None else self._inbox.missing_bytes

    def advance(self, size: int, *, is_last: bool) -> None:
        """Take what was put there.

        Args:
            is_last: Whether the client has said everything with it.

        Raises:
            StreamFault: If it is more than the client was allowed to send.
        """
        inbox = self._inbox
        assert inbox is not None
        self._count(size, size, is_last=is_last)
        inbox.advance(size)
        self._received_more(inbox, size)

    def receive(self, payload: bytes | memoryview, flow_bytes: int, *, is_last: bool) -> None:
        """Take the payload of a DATA frame.

        Args:
            payload: Without padding.
            flow_bytes: How long it was with its padding.
            is_last: Whether the client has said everything with it.

        Raises:
            StreamFault: If it is more than the client was allowed to send.
        """
        self._count(len(payload), flow_bytes, is_last=is_last)
        if self.state.is_done:
            return
        inbox = self._inbox
        if inbox is None:
            limit = self._connection.port.config.max_message_bytes
            inbox = self._inbox = MessageBuffer(self.head.encoding, limit, self.head.lands)
        inbox.add(payload)
        self._received_more(inbox, len(payload))

    def _count(self, size: int, flow_bytes: int, *, is_last: bool) -> None:
        """Count what has come; raises StreamFault if it is more than the client was allowed to send."""
        port = self._connection.port
        self._allowed -= flow_bytes
        if self._allowed < 0:
            msg = f"stream {self.stream} sent more than its window"
            raise frames.StreamFault(self.stream, frames.Reason.FLOW_CONTROL_ERROR, msg)
        self._seen = port.epoch
        self._received += size
        length = self.head.length
        if length >= 0 and (self._received > length or (is_last and self._received < length)):
            msg = f"stream {self.stream} has another length than its content-length"
            raise frames.StreamFault(self.stream, frames.Reason.PROTOCOL_ERROR, msg)
        if is_last:
            self.state = CALLS[self.state][END_STREAM]

    def _received_more(self, inbox: MessageBuffer, size: int) -> None:
        """Act on what has come."""
        self._arriving += size
        self._connection.account.arrive(size)
        if self.state.is_done:  # it was refused
            return
        if self.head.is_stream:
            self._wake(self._arrival)
        else:
            self._receive_only(inbox)
        self._allow_more()

    def _receive_only(self, inbox: MessageBuffer) -> None:
        """Begin the method once its only message has come."""
        if inbox.missing_bytes and not self.state.is_half_closed:
            return  # of what lands, all else is known
        if inbox.has_landed and self.state.is_half_closed:
            self._connection.port.begin_later(self)
        else:
            self._begin_only(inbox)

    def begin_landed(self) -> None:
        """Begin the method, whose only message has landed; does nothing if the call has ended."""
        if self._inbox is not None:
            self._begin_only(self._inbox)

    def _begin_only(self, inbox: MessageBuffer) -> None:
        try:
            inbox.check()
            if inbox.is_overfull():
                self.end(Status.UNIMPLEMENTED, "the method takes one message, more were sent")
            elif self.state.is_half_closed:
                message = self._take(inbox)
                if message is None and not len(inbox):
                    self.end(Status.UNIMPLEMENTED, "the method takes one message, none was sent")
                elif message is None:
                    self.end(Status.INTERNAL, "the call ended within a message")
                elif isinstance(message, Unpacking):
                    self.run(self._begin_unpacked(message))
                else:
                    self.head.begin(self, message)
        except BadMessage as error:
            self._refuse(error)

    async def _begin_unpacked(self, unpacking: Unpacking) -> None:
        """Begin the method once its only message is unpacked."""
        try:
            message = await self._unpack(unpacking)
        except BadMessage as error:
            self._refuse(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the status of this call
            self.fail_by(error, self.head.path.decode("latin-1"), statuses.NONE)
        else:
            self.head.begin(self, message)

    async def _unpack(self, unpacking: Unpacking) -> bytes:
        """Unpack the rest of a message beside the loop, each step within the bytes that may be held.

        Raises:
            BadMessage: If it cannot be unpacked, or is too long.
        """
        port = self._connection.port
        while True:
            async with port.unpacking:
                self._hold(unpacking.size + STEP_BYTES)
                port.byte_budget.make_room()
                if port.byte_budget.is_exceeded():
                    raise BadMessage(Status.RESOURCE_EXHAUSTED, port.byte_budget.exceeded().message)
                message = await port.loop.run_in_executor(port.unpackers, unpacking.step, STEP_BYTES)
                self._hold(unpacking.size)
            if message is not None:
                return message

    def _hold(self, size: int) -> None:
        """Count what the message takes that is being unpacked or answered."""
        if self._inbox is not None:  # else the call is over
            self._connection.account.work(size - self._held)
            self._held = size

    def _refuse(self, error: BadMessage) -> None:
        """End the call by what its client has sent."""
        port, connection = self._connection.port, self._connection
        if self._task is not None and self.head.is_stream:
            self.abandon(error.status, error.message)
        else:
            self.end(error.status, error.message)
        port.refused(connection.peer, error.message)
        connection.wasted()

    def close_early(self) -> None:
        """End the call's input: the client ended it outside of a DATA frame.

        Raises:
            StreamFault: If it announced more than it has sent.
        """
        if self.head.length > self._received:
            msg = f"stream {self.stream} has another length than its content-length"
            raise frames.StreamFault(self.stream, frames.Reason.PROTOCOL_ERROR, msg)
        self.state = CALLS[self.state][END_STREAM]
        if self.state.is_done:
            return
        if self.head.is_stream:
            self._wake(self._arrival)
        elif self._inbox is None or not len(self._inbox):
            self.end(Status.UNIMPLEMENTED, "the method takes one message, none was sent")
        else:
            self._receive_only(self._inbox)

    def _take(self, inbox: MessageBuffer) -> bytes | memoryview | Unpacking | None:
        """Take the next message, unpacked if it is small."""
        before = len(inbox)
        # To ask for the next message is to be done with the one before.
        if self._held:
            self._hold(0)
        try:
            message = inbox.take()
        finally:
            taken = before - len(inbox)
            self._arriving -= taken
            self._connection.account.forget_arriving(taken)
        if message is not None and not isinstance(message, Unpacking) and len(message) > SMALL_BYTES:
            self._hold(len(message))
        if isinstance(message, Unpacking) and message.packed_bytes <= SMALL_BYTES:
            unpacking = message
            whole = unpacking.step(SMALL_BYTES)
            self._hold(unpacking.size)
            return unpacking if whole is None else whole
        return message

    def _allow_more(self) -> None:
        """Give the client room for what was taken, and for the rest of a message that is waited for."""
        if self.state.is_half_closed or self.state.is_done:
            return
        held = len(self._inbox) if self._inbox is not None and self.head.is_stream and self._arrival is None else 0
        more = frames.STREAM_WINDOW - held - self._allowed
        if more >= frames.STREAM_WINDOW // 2:
            self._allowed += more
            self._connection.send(frames.window_update(self.stream, more))

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # Methods that take their time

    def run(self, method: Coroutine[Any, Any, None]) -> None:
        """Run the method in a task of its own."""
        port = self._connection.port
        task = self._task = port.loop.create_task(method)
        port.tasks.add(task)
        task.add_done_callback(port.tasks.discard)

    async def next_message(self) -> bytes | memoryview | None:
        """Wait for the next message; None after the last."""
        while not self.state.is_done:
            inbox = self._inbox
            try:
                message = None if inbox is None else self._take(inbox)
                if message is None and self.state.is_half_closed:
                    if inbox is None or not len(inbox):
                        return None
                    raise BadMessage(Status.INTERNAL, "the call ended within a message")
                if isinstance(message, Unpacking):
                    message = await self._unpack(message)
            except BadMessage as error:
                self._refuse(error)
                break
            if message is not None:
                self._allow_more()
                self._streak += 1 + len(message) // STREAK_BYTES
                if self._streak >= MAX_STREAK:
                    self._streak = 0
                    await asyncio.sleep(0)
                return message
            self._streak = 0
            self._seen = self._connection.port.epoch
            # Before `_allow_more`, which counts what lies in the inbox against the client unless it is waited for: else
            # a message longer than the window would wait for room, and the room for the message.
            self._arrival = asyncio.get_running_loop().create_future()
            self._allow_more()
            try:
                await self._arrival
            finally:
                self._arrival = None
        await asyncio.sleep(0)  # the task was cancelled: it ends here
        return None

    async def send(self, message: bytes | list[Piece]) -> None:
        """Send a message of a stream; waits while the client does not take what was sent before."""
        if self.state.is_done:  # by itself: whoever else ends it cancels the task
            raise asyncio.CancelledError
        limit = self._connection.port.config.max_message_bytes
        pieces = (message,) if isinstance(message, bytes) else message
        size = sum(map(len, pieces))
        if size > limit:
            self.abandon(*too_long(size, limit))
            await asyncio.sleep(0)  # the task was cancelled: it ends here
        outgoing = self._connection.send_message(self, pieces, size)
        if outgoing.unsent_bytes + len(outgoing.pieces) * MESSAGE_OVERHEAD_BYTES > MAX_UNSENT_BYTES:
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._room
            finally:
                self._room = None

    def drained(self) -> None:
        """Send the trailers, or wake who waits for room: everything was sent."""
        if self.outgoing is not None and self.outgoing.trailers is not None:
            self._connection.end(self, self.outgoing.trailers)
        self._wake(self._room)

    # Limits

    def is_young(self, epoch: int) -> bool:
        """Whether the call began, or got something from its client, within the last second or two."""
        return epoch - self._seen <= 1

    def is_slow(self, epoch: int, max_quiet: float) -> bool:
        """Whether the client is in the middle of a message and has been quiet for more sweeps than this."""
        if self.state.is_half_closed or self.state.is_done or epoch - self._seen <= max_quiet:
            return False
        return not self.head.is_stream or (
            self._arrival is not None and self._inbox is not None and len(self._inbox) > 0
        )


def ended(head: CallHead, peer: str, status: Status) -> EndedCall:
    """Return the record of a call with this head."""
    call = EndedCall("gRPC", head.path.decode("latin-1"), client=peer, status=int(status), code=status.name.lower())
    call.request_id = named_in(head.metadata)
    call.parent = parent_in(head.metadata)
    return call


def too_long(size: int, limit: int) -> tuple[Status, str]:
    """Return the status of a call whose answer may not be sent."""
    msg = f"answer: expected at most {limit} bytes (--max-body-bytes; of a pipeline max_message_bytes), got {size}"
    return Status.RESOURCE_EXHAUSTED, msg
