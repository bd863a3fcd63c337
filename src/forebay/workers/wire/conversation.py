# SPDX-License-Identifier: Apache-2.0
"""The server's side of a conversation with one worker, as docs/reference/worker-protocol.md has it. Sans-I/O.

Theory of operation. Bytes go in and events come out; calls return the bytes to send. There is no loop here, no socket
and no clock; `worker_slot.py` drives it. `TABLE` (`conversation_state.py`), and nothing else, defines what a worker may
say in which state, and where that leads. Messages that may not come, or only once, are barred one by one.

A batch that was sent sits in the worker until it has ended, alone or beside others: `seating.py` knows which, and what
their clients have taken.

A worker is only half trusted, because somebody else may have started it. A message that does not fit the state or the
types of the protocol becomes a `Violation` before any part of it is acted on, and nothing is read after it. Whatever
arrives, nothing is raised. Events own what they carry: contents of shared memory have been copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from forebay.errors import InternalError, InvalidRequest, TooLarge, revive
from forebay.types.call import Failure, media_of
from forebay.types.failures import MAX_MESSAGE, clean
from forebay.types.first_use import known
from forebay.types.log_line import LogLine
from forebay.workers.pools.seating import Seating, Sitting, names
from forebay.workers.wire import frames
from forebay.workers.wire.conversation_state import BEGIN, CLOSE, TABLE, UNREADY, Act, State
from forebay.workers.wire.worker_events import (
    Counted,
    Event,
    Failed,
    Heard,
    Hello,
    Kept,
    Leaving,
    Logged,
    Ready,
    Result,
    Violation,
)

if TYPE_CHECKING:
    from forebay.types.batch import Done, EntryBatch, Phase
    from forebay.workers.memory.shm import Arenas

T = TypeVar("T")

MAX_BYTES: Final = 1 << 20
"""Longest message about metrics."""

_LINE: Final = known(LogLine)


class Conversation:
    """What was said, and what may be said next.

    Attributes:
        state: Where it is in `TABLE`.
        seating: The batches that run in the worker. Its `seats` are 0 where it runs one at a time.
        owes_since: Since when the worker owes the next sign of life; None while it is idle or waits for slow clients.
        worker: How the timeline calls the worker.
        pid: Its process, as it says.
    """

    def __init__(
        self,
        max_frame_bytes: int = frames.MAX_FRAME_BYTES,
        check: Callable[[EntryBatch, Sequence[Any]], None] | None = None,
        seats: int = 0,
        speak: Callable[[int | None], object] = lambda _left: None,
        ahead: int = 0,
        max_elements: int | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Wait for the worker to speak.

        Args:
            max_frame_bytes: Longest frame that is read, and the most that it may refer to in shared memory.
            check: Given a batch and its outcomes, or the parts of one step, raises `InvalidRequest` if they are not of
                the types that belong there; None where the worker is forebay's own.
            seats: Rows that may stream in it at a time; 0 gives it one batch after the other.
            speak: Called when there is something to say about the batches that run, with the name of the one that is
                called off, if it is that: send what `go` returns, soon.
            ahead: Rows that may wait in the worker for a seat.
            max_elements: The most values in a frame; None where the worker is forebay's own.
            clock: Gives the time, for what batches are billed.
        """
        self.state: State = "greeting"
        self.seating = Seating(0, self._allow, self._leave_seat, clock)
        self.owes_since: float | None = None
        self.worker = ""
        self.pid = 0
        self._seats = seats
        self._ahead = ahead
        self._speak = speak
        self._round = 0
        self._joins: list[Any] = []
        self._leaves: list[int] = []
        self._allows: list[tuple[int, int]] = []
        self._groups: dict[Any, int] = {}
        self._max_frame_bytes = max_frame_bytes
        self._check = check
        self._reader = frames.FrameReader(self._copy, max_frame_bytes, max_elements=max_elements)
        self._shared: Arenas | None = None
        self._copied = 0
        self._abilities: frozenset[str] = frozenset()
        self._barred = {"log"}
        self._sent = 0.0

    @property
    def is_leaving(self) -> bool:
        """Whether the worker wants no more."""
        return "leaving" in self._barred

    def feed(self, data: bytes | bytearray | memoryview, now: float) -> Iterator[Event]:
        """Read bytes and yield what happens; the consumer may change the state between two events."""
        if self.state == "gone":
            return
        try:
            for message in self._reader.feed(data):
                self._copied = 0
                yield self._event(message, now)
                if self.state == "gone":  # pyright: ignore[reportUnnecessaryComparison] # it has changed since
                    return
            if self._reader.is_inside:  # over a slow line an answer is on its way for long
                self._note_life(now)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a message, its sender is at fault
            self._on(CLOSE)
            yield Violation(f"it does not speak the protocol: {error}")

    def open(self, options: Mapping[str, Any], shared: Arenas | None) -> bytes:
        """Answer a hello.

        Args:
            options: What the worker has to know.
            shared: Memory for large bodies and results, if there is any; belongs to the conversation from then on.
        """
        assert self.state == "opening"
        if shared is not None and ("shares" not in self._abilities or self.seating.seats):
            shared.close()  # it is written from its beginning for each batch, and those that sit overlap
            shared = None
        if self.seating.seats:
            options = {**options, "seats": self._seats, **({"ahead": self._ahead} if self._ahead else {})}
        self._shared = shared
        if "log" in options:
            self._barred.discard("log")
        told = {"arena": None} if shared is None else {"arena": shared.handle, "may_keep": True}
        return frames.encode(["open", {**options, **told, "max_frame": self._max_frame_bytes}])

    def begin(
        self, batch: EntryBatch, done: Done, bodies: list[Any], params: Any, sizes: list[int] | None, now: float
    ) -> bytes:
        """Give the worker a batch, which runs alone.

        Args:
            batch: What is to run. If it notes where its time goes, the worker is asked for its phases, if it can tell.
            done: Whom to tell of its end.
            bodies: One for each entry.
            params: One map for all of them, or a list of maps.
            sizes: Samples in each; None if it is one.

        Raises:
            InternalError: The bodies are not plain data; the worker is still idle.
            TooLarge: They are too large to be sent; as above.
        """
        name = next(names)
        asked = [] if batch.noted is None or "phases" not in self._abilities else [True]
        if self._shared is not None:
            bodies = _sendable(self._shared.place, bodies)
        frame = _sendable(frames.encode, ["batch", name, bodies, params, sizes, *asked])
        if len(frame) - frames.HEADER > frames.MAX_FRAME_BYTES:
            raise TooLarge(
                f"the batch cannot be sent to a worker: it has {len(frame)} bytes, at most {frames.MAX_FRAME_BYTES} "
                "are allowed; send smaller requests, or let fewer of them share a batch"
            )
        self._on(BEGIN)  # once the frame is there: a batch that cannot be sent leaves the worker idle
        self.seating.join(batch, done, name)
        self._round = 0
        self.owes_since = self._sent = now
        return frame

    def seat(self, batch: EntryBatch, done: Done, bodies: list[Any], params: Any, sizes: list[int] | None) -> None:
        """Seat a batch beside others; the worker hears of it with the next `go`. As `begin` otherwise."""
        seating = self.seating
        if len(self._groups) > 2 * len(seating.open) + 64:
            keys = {sitting.batch.key for sitting in seating.open.values()}
            self._groups = {key: number for key, number in self._groups.items() if key in keys}
        group = self._groups.get(batch.key)
        if group is None:
            group = self._groups[batch.key] = next(names)
        join = _sendable(frames.encode_part, [bodies, params, sizes, group])
        if len(join) > frames.MAX_FRAME_BYTES // 2:
            raise TooLarge(
                f"the batch cannot be sent to a worker: it has {len(join)} bytes, at most "
                f"{frames.MAX_FRAME_BYTES // 2} are allowed; send smaller requests"
            )
        self._joins.append([seating.join(batch, done).name, msgspec.Raw(join)])
        self._speak(None)

    def go(self, now: float) -> bytes | None:
        """Return what the worker is to hear of its batches by now; None if there is nothing.

        One with seats hears after each round that it may go on.
        """
        if self.state == "gone":
            return None
        seating = self.seating
        if not any(sitting.room > 0 for sitting in seating.open.values()):
            self.owes_since = None
        elif self.owes_since is None:
            self.owes_since = now
        if not (seating.seats or self._leaves or self._allows):
            return None
        frame = frames.encode(["go", self._round, self._joins, self._leaves, self._allows])
        self._joins, self._leaves, self._allows = [], [], []
        return frame

    def written(self) -> bytes:
        """Tell the worker that its answers were written."""
        return frames.encode(["written"])

    def stop(self) -> bytes:
        """Tell the worker to end once it has answered."""
        return frames.encode(["stop"])

    def close(self) -> None:
        """Read nothing more, and give the shared memory back."""
        self._on(CLOSE)
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _on(self, what: str | Act) -> None:
        """Go where this leads."""
        self.state = TABLE[self.state][what]

    def _note_life(self, now: float) -> None:
        if self.owes_since is not None:
            self.owes_since = now

    def _event(self, message: Any, now: float) -> Event:
        kind = message[0]
        if kind not in TABLE[self.state] or kind in self._barred:
            raise InvalidRequest(f"{str(kind)[:40]!r} is not a message of the protocol while it is {self.state}")
        if kind == "result":
            return self._finish(message, now)
        event = self._hear(message, now) if kind == "round" else _EVENTS[kind](self, message)
        self._on(kind)  # last: `_ask` asks in which state it was said
        return event

    def _greet(self, message: list[Any]) -> Hello:
        about = frames.told_in_hello(message)
        self._abilities = frozenset(name for name in _ABILITIES if about.get(name) is True)
        if self._seats and "seats" in self._abilities:
            had, seats = self.seating, self._seats + self._ahead
            self.seating = Seating(seats, self._allow, self._leave_seat, had.clock, had.accounts)
        self._barred.add("ready" if self.seating.seats else "sit")
        self.worker = str(about.get("worker"))[:8]
        self.pid = msgspec.convert(about.get("pid", 0), int)
        return Hello(about)

    def _ask(self, message: list[Any]) -> Ready:
        if self.state == "opening" and len(message) > 1 and self._shared is not None:
            self._shared.close()
            self._shared = None
        return Ready()

    def _fail(self, message: list[Any]) -> Failed:
        _, kind, text, detail, trace = message
        return Failed(str(kind), _shortened(str(text)), detail, _shortened(str(trace), 8))

    def _leave(self, _message: list[Any]) -> Leaving:
        self._barred.add("leaving")
        return Leaving()

    def _keep(self, _message: list[Any]) -> Kept:
        self._barred.add("keeps")
        return Kept()

    def _log(self, message: list[Any]) -> Logged:
        _, batch_id, line = message
        return Logged(msgspec.convert(batch_id, int), msgspec.convert(line, _LINE))

    def _count_metrics(self, message: list[Any]) -> Counted:
        _, data = message
        if type(data) is not bytes or len(data) > MAX_BYTES:
            raise InvalidRequest(f"its metrics are not at most {MAX_BYTES} bytes")
        return Counted(data)

    def _hear(self, message: list[Any], now: float) -> Heard:
        _, number, parts, ended = message
        seating = self.seating
        if number != self._round + 1:
            raise InvalidRequest(f"it sends round {str(number)[:40]} after round {self._round}")
        if not seating.seats and (ended or any(one.batch.on_steps is None for one in seating.open.values())):
            raise InvalidRequest("it sends a round of an answer that is not streamed, or that ends by a result")
        found: list[tuple[int | list[int], list[Any]]] = []
        sitters = seating.open
        for name, given, failures, *media in parts:  # a name is an int by type: True and 1.0 would find batch 1
            part = _with_media(given, *media) if media else given
            if type(name) is list:
                self._check_step(cast("list[Any]", name), part, failures)
                found.append((cast("list[int]", name), part))
                continue
            is_plain = failures is None and self._check is None and type(name) is int and type(part) is list
            if is_plain and name in sitters and len(cast("list[Any]", part)) == len(sitters[name].batch.entries):
                found.append((name, cast("list[Any]", part)))  # as nearly always
                continue
            sitting = seating.check(name)
            found.append((name, self._checked(part, failures, sitting.batch)))
        left: dict[int, tuple[int, list[Any], float]] = {}
        for name, given, failures, seconds, media in ended:
            sitting = seating.check(name)
            if name in left or type(seconds) not in _NUMBERS or not 0.0 <= seconds < math.inf:
                raise InvalidRequest(f"it does not say right how stream {name} has ended")
            outcomes = _with_media(given, media)
            left[name] = name, self._checked(outcomes, failures, sitting.batch), seconds
        self._round = number  # all of it was checked: nothing of a round that is a violation is acted on
        self._note_life(now)
        return Heard(found, list(left.values()))

    def _check_step(self, names: list[Any], parts: Any, failures: Any) -> None:
        """Look at what several batches of one entry each have made together."""
        if type(parts) is not list or len(cast("list[Any]", parts)) != len(names) or failures is not None:
            raise InvalidRequest("it does not say right what several streams have made together")
        sitters = self.seating.open
        for name, part in zip(names, cast("list[Any]", parts), strict=True):
            is_plain = self._check is None and type(name) is int
            if is_plain and name in sitters and len(sitters[name].batch.entries) == 1:
                continue  # as nearly always
            batch = self.seating.check(name).batch
            self._checked([part], None, batch)

    def _allow(self, sitting: Sitting, steps: int) -> None:
        self._allows.append((sitting.name, steps))
        self._speak(None)

    def _leave_seat(self, sitting: Sitting) -> None:
        self._leaves.append(sitting.name)
        self._speak(sitting.name)

    def _finish(self, message: list[Any], now: float) -> Result:
        _, name, outcomes, failures, seconds, is_ready, *more = message
        sitting = self.seating.check(name)
        if type(seconds) not in _NUMBERS or not 0.0 <= seconds < math.inf:
            raise InvalidRequest(f"it says that a batch took {str(seconds)[:40]} seconds")
        ran = None
        if more:
            outcomes = _with_media(outcomes, *more[1:2])
            ran = None if more[0] is None else self._read_phases(more[0], seconds, now)
        found = self._checked(outcomes, failures, sitting.batch)
        sitting.batch.own_s = _own_seconds(*more[2:], most=seconds, count=len(found))
        # From here on nothing raises: before, a violation leaves the batch in its seat, and it is handed on.
        self._on("result" if is_ready else UNREADY)
        self.seating.end(name, seconds)
        self.owes_since = None
        return Result(sitting, found, ran, bool(is_ready))

    def _checked(self, outcomes: Any, failures: Any, batch: EntryBatch) -> list[Any]:
        """Return the outcomes as they are handed on, or raise before anything has changed."""
        count = len(batch.entries)
        if type(outcomes) is not list or len(cast("list[Any]", outcomes)) != count:
            number = len(cast("list[Any]", outcomes)) if isinstance(outcomes, list) else type(outcomes).__name__
            raise InvalidRequest(f"it answered {number} of {count} items")
        found = cast("list[Any]", outcomes)
        if failures:
            for index, failure in cast("dict[int, Sequence[Any]]", failures).items():
                if type(index) is not int or index < 0:
                    raise InvalidRequest(f"expected the position of an item, got {str(index)[:40]}")
                found[index] = _failure(*failure)
        if self._check is not None:
            self._check(batch, found)
        return found

    def _read_phases(self, told: Any, seconds: float, now: float) -> tuple[float, list[Phase]]:
        started, phases = msgspec.convert(told, tuple[float, list[tuple[str, str, float, float, int]]])
        late = 0.0
        if not self._sent <= started <= now - seconds:
            # Its clock is another machine's: assume that both ways took equally long.
            late = (self._sent + now - seconds) / 2 - started
        if not all(map(math.isfinite, [late, *(moment for phase in phases for moment in phase[2:4])])):
            raise InvalidRequest("it says that a phase had no beginning or no end")
        return started + late, [
            (name, what, since + late, until + late, row) for name, what, since, until, row in phases
        ]

    def _copy(self, offset: int, length: int) -> bytes:
        """Copy out of the shared memory what a message refers to: the worker may write there again at any time."""
        if self._shared is None or self.state in _BEFORE_BATCHES:
            raise InvalidRequest("it placed bytes in shared memory that was never agreed on")
        self._copied += length
        if self._copied > self._max_frame_bytes:
            msg = f"a message refers to {self._copied} shared bytes, at most {self._max_frame_bytes} are read"
            raise InvalidRequest(msg)
        return bytes(self._shared.view(offset, length))


_ABILITIES: Final = ("shares", "phases", "seats")
_BEFORE_BATCHES: Final = frozenset({"greeting", "opening"})
_NUMBERS: Final = frozenset({int, float})
_EVENTS: Final[Mapping[str, Callable[[Conversation, list[Any]], Event]]] = {
    "hello": Conversation._greet,  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
    "ready": Conversation._ask,  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
    "sit": Conversation._ask,  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
    "failed": Conversation._fail,  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
    "keeps": Conversation._keep,  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
    "leaving": Conversation._leave,  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
    "metrics": Conversation._count_metrics,  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
    "log": Conversation._log,  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
}


def _sendable(make: Callable[[list[Any]], T], found: list[Any]) -> T:
    """Return what is made of bodies that may be no plain data; raises an `InternalError` if they are none."""
    try:
        return make(found)
    except Exception as error:
        raise InternalError(f"the batch cannot be sent to a worker: {error}") from error


def _own_seconds(own: Any = None, *, most: float, count: int) -> list[float]:
    """Return the seconds that each item needed by itself; none if the worker does not say so."""
    found = [] if own is None else msgspec.convert(own, list[float])
    if found and (len(found) != count or not all(0.0 <= one < math.inf for one in found)):
        raise InvalidRequest("it does not say right what each item needed")
    total = sum(found)
    return [one * most / total for one in found] if total > most else found


def _with_media(outcomes: Any, types: Any = None) -> Any:
    """Return the outcomes, made into `Media` where they have a media type, or a status and headers, of their own."""
    for index, kind in cast("dict[int, Any]", types or {}).items():
        if type(index) is not int or index < 0 or type(outcomes[index]) is not bytes:
            raise InvalidRequest(f"expected the position of bytes with a media type, got {str(index)[:40]}")
        outcomes[index] = media_of(outcomes[index], kind)
    return outcomes


def _failure(kind: Any, message: Any, detail: Any, trace: Any) -> Failure:
    if not isinstance(kind, str) or not isinstance(message, str) or not isinstance(trace, str):
        raise InvalidRequest("a failure is not described in words")
    if detail is not None:
        msgspec.json.encode(detail, enc_hook=str)  # it will stand in an answer: raises now if it cannot
    return Failure(revive(kind, _shortened(message), detail, _shortened(trace, 8)))


def _shortened(text: str, times: int = 1) -> str:
    """Return a text of an error; one that its worker has shortened is not too long here."""
    return clean(text, 2 * times * MAX_MESSAGE)
