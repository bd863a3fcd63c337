# SPDX-License-Identifier: Apache-2.0
"""A worker process: dials the server, says hello, opens its runner and asks for batches until it is told to stop.

Each thread has a connection of its own, and a connection is a slot: nothing is shared between them but the runner.
A thread blocks in `recv` while it is idle, so an idle worker costs nothing and a batch costs one wake-up. Slots of a
runner that awaits are coroutines of one thread instead.

Run as `python -P -m forebay.workers.processes.child --connect unix:PATH --worker N`; the process pool does that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from forebay.errors import BadOutcome, ForebayError, Unavailable
from forebay.observe.logs.model_log import capture, origin, release
from forebay.observe.metrics.author_metrics import MetricReporter
from forebay.types.call import Failure, Media, MediaHead, told_of
from forebay.workers.memory.freed_memory import keep_freed_memory
from forebay.workers.pool import CREDIT
from forebay.workers.pools.seats import Round, Seats, follow
from forebay.workers.processes import sigterm
from forebay.workers.processes.device_binding import device_in, run_on
from forebay.workers.processes.parent_death import end_with
from forebay.workers.runner import Runner, RunnerSpec, WorkerContext
from forebay.workers.user_calls.cancel import probe
from forebay.workers.user_calls.phases import Laps, lap, needed, phases_of
from forebay.workers.user_calls.user_code import (
    answered,
    attempt,
    attempt_async,
    caught,
    close_runner,
    do_after,
    settled,
    user_code,
)
from forebay.workers.wire.address import Address, parse_address
from forebay.workers.wire.worker_connection import WorkerConnection, calls_off


class ReceivedItem(msgspec.Struct, gc=False):
    """What arrived of one request."""

    body: Any
    params: Mapping[str, Any]
    size: int


def serve(connection: WorkerConnection, runner: Runner, metrics: MetricReporter | None = None) -> None:
    """Ask for batches and run them until the server says stop or is gone; look whether the model has metrics."""
    if "log" in connection.options:
        origin.set(connection)
    connection.lends = runner.borrows_input
    connection.ask()
    if connection.options.get("seats"):
        try:
            follow(*_seated(connection, runner, metrics))
        except (EOFError, ConnectionError):
            pass  # the server is gone
        return
    while True:
        try:
            message = connection.receive()
        except (EOFError, ConnectionError):
            return
        if message[0] == "batch":
            _run(connection, runner, message)
            if metrics is not None:
                metrics.look()
        elif message[0] == "stop":
            return


def _seated(connection: WorkerConnection, runner: Runner, metrics: MetricReporter | None) -> tuple[Seats, _ServerLink]:
    link = _ServerLink(connection, metrics)
    options = connection.options
    seats, ahead = options["seats"], options.get("ahead", 0)
    return Seats(runner.run, time.monotonic, link.enter, connection.watch, seats=seats, ahead=ahead), link


class _ServerLink:
    """The way of a worker with seats to its server; see `Link`."""

    def __init__(self, connection: WorkerConnection, metrics: MetricReporter | None) -> None:
        self._connection = connection
        self._metrics = metrics
        self._unsent: list[tuple[int, Failure]] = []

    def enter(self, name: Any) -> None:
        """User code runs for this batch, or for several."""
        probe.set(None if name is None else self._connection.begin(name))
        if name is None:
            self._connection.end()

    def receive(self, *, wait: bool) -> Iterator[Sequence[Any]]:
        """Return what the server has said."""
        while self._unsent:
            wait = False
            yield "leave", *self._unsent.pop()
        for message in self._connection.receive_all(wait=wait):
            if message[0] == "stop":
                yield ("stop",)
            elif message[0] == "go":
                _, number, joins, leaves, allows = message
                yield "heard", number
                for name, (bodies, params, sizes, key) in joins:
                    yield "join", name, _items(bodies, params, sizes), key
                for name in leaves:
                    yield "leave", name
                for name, steps in allows:
                    yield "allow", name, steps

    def tell(self, number: int, told: Round) -> None:
        """Send what a round has made; what cannot be sent fails its own batch."""
        connection = self._connection
        connection.end()
        parts: list[list[Any]] = [
            [name, part, None] if type(name) is list or _is_plain(part) else _part(name, part)
            for name, part in told.parts
        ]
        ended = [[name, *_wired(outcomes), seconds, _media(outcomes)] for name, outcomes, seconds in told.ended]
        frame, error = caught(connection.framed, ["round", number, parts, ended])
        if error is not None:  # the user's parts hold something that msgpack does not, or too much
            frame = connection.framed(["round", number, *self._sendable(parts, ended)])
        connection.send_frame(frame)
        if told.ended and self._metrics is not None:
            self._metrics.look()

    def _sendable(self, parts: list[Any], ended: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return what of a round fits into a frame, with failures in place of the rest."""
        left = {name for name, *_ in ended}
        sent: list[Any] = []
        failures: dict[int, Failure] = {}
        for part in _apart(parts):
            error = caught(self._connection.framed, ["round", 0, [*sent, part], []])[1]
            if error is None:
                sent.append(part)
            else:
                failures[part[0]] = Failure(BadOutcome(f"a part cannot be sent to the server: {error}"))
        self._unsent = [(name, failure) for name, failure in failures.items() if name not in left]
        for place, (name, outcomes, _, seconds, _) in enumerate(ended):
            failure = failures.get(name)
            if failure is None:
                error = caught(self._connection.framed, ["round", 0, [], ended[place : place + 1]])[1]
                failure = Failure(BadOutcome(f"the results cannot be sent to the server: {error}")) if error else None
            if failure is not None:
                ended[place] = [name, *_wired([failure] * len(outcomes)), seconds, None]
        return sent, ended


def _apart(parts: Sequence[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Take apart what several batches have made together."""
    for names, made, *rest in parts:
        if type(names) is list:
            yield from ([name, [part], None] for name, part in zip(cast("list[Any]", names), made, strict=True))
        else:
            yield names, made, *rest


def _part(name: Any, part: Sequence[Any]) -> list[Any]:
    return [name, *_wired(part), *([media] if (media := _media(part)) else [])]


def _is_plain(part: Sequence[Any]) -> bool:
    return len(part) == 1 and type(part[0]) is bytes


def _wired(outcomes: Sequence[Any]) -> tuple[Sequence[Any], dict[int, list[Any]] | None]:
    """Return outcomes, or parts, with the failures taken out, and the failures by themselves."""
    failures = {place: wire_error(one.error) for place, one in enumerate(outcomes) if type(one) is Failure}
    plain = [None if type(one) is Failure else one.body if type(one) is Media else one for one in outcomes]
    return plain, failures or None


_TOLD_APART: Final = frozenset({Failure, Media})


def _media(outcomes: Sequence[Any]) -> dict[int, MediaHead] | None:
    return {place: told_of(one) for place, one in enumerate(outcomes) if type(one) is Media} or None


def _items(bodies: list[Any], params: Any, sizes: list[int] | None) -> list[ReceivedItem]:
    differ = isinstance(params, list)
    if sizes is None and not differ:
        return [ReceivedItem(body, params, 1) for body in bodies]
    count = len(bodies)
    each = cast("list[Any]", params) if differ else [params] * count
    return [ReceivedItem(*fields) for fields in zip(bodies, each, sizes or [1] * count, strict=True)]


class _Batch:
    """A batch that runs, its outcomes until they are sent, and what is noted of it."""

    def __init__(self, connection: WorkerConnection, message: list[Any]) -> None:
        _, self.id, bodies, params, sizes, *rest = message
        message.clear()  # nobody but the runner refers to the bodies
        self.items = _items(bodies, params, sizes)
        self.count = len(bodies)
        self.outcomes: Sequence[Any] = ()
        self._connection = connection
        probe.set(connection.begin(self.id))
        self._started = started = time.monotonic()
        self._laps = Laps(started) if rest[:1] == [True] else None
        lap.set(self._laps)
        self._own_s: list[float] | None = [] if connection.options.get("costs") is True else None
        needed.set(self._own_s)

    def answer(self, runner: Runner, *, is_ready: bool) -> None:
        """Send the outcomes."""
        connection, outcomes, self.outcomes = self._connection, self.outcomes, ()
        seconds = time.monotonic() - self._started
        told = None if self._laps is None else [self._started, phases_of(runner, self._laps)]
        about = (told, self._own_s)
        connection.end()
        try:
            frame = _result(connection, self.id, outcomes, seconds, about, is_ready=is_ready)
        except Exception as error:  # noqa: BLE001 - the user's results hold something that msgpack does not, or too much
            failure = Failure(BadOutcome(f"the results cannot be sent to the server: {error}"))
            frame = _result(connection, self.id, [failure] * self.count, seconds, about, is_ready=is_ready)
        self.items = []
        del outcomes
        if connection.is_lent_still():
            connection.send(["keeps"])
        connection.send_frame(frame)


def _run(connection: WorkerConnection, runner: Runner, message: list[Any]) -> None:
    batch = _Batch(connection, message)
    name, count = batch.id, batch.count
    batch.outcomes, work = answered(runner.run, batch.items, lambda steps: _stream(connection, name, count, steps))
    batch.answer(runner, is_ready=not work)
    if work:
        while (message := connection.receive())[0] != "written":
            if message[0] == "stop":
                return
        do_after(work)
        connection.send(["ready"])


async def _serve_on_loop(connection: WorkerConnection, runner: Runner, metrics: MetricReporter) -> None:
    """Be one of several slots whose batches run side by side on this loop; see `serve`."""
    heard = asyncio.Event()
    forget = connection.watch(heard.set)
    batch: _Batch | None = None
    task: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(0))
    is_stopping = False
    if "log" in connection.options:
        origin.set(connection)
    connection.lends = runner.borrows_input
    connection.ask()
    try:
        while not is_stopping:
            await heard.wait()
            heard.clear()
            for message in connection.receive_all(wait=False):
                if message[0] == "batch":
                    batch = _Batch(connection, message)
                    task = asyncio.create_task(attempt_async(runner.run_async, batch.items))
                    task.add_done_callback(functools.partial(_ended, batch, runner, metrics))
                elif message[0] == "stop":
                    is_stopping = True
                elif batch is not None and calls_off(message, batch.id):
                    task.cancel()
        await asyncio.wait([task])
    except (EOFError, ConnectionError):
        task.cancel()
    finally:
        forget()


def _ended(batch: _Batch, runner: Runner, metrics: MetricReporter, task: asyncio.Task[Any]) -> None:
    """Answer a batch of a task that is over; it may have been cancelled before it began."""
    found: Any = Failure(Unavailable("the request was cancelled")) if task.cancelled() else task.result()
    found = found if type(found) is Failure else attempt(settled, found, batch.count)
    batch.outcomes = [found] * batch.count if type(found) is Failure else found[0]
    with contextlib.suppress(ConnectionError):  # the server is gone
        batch.answer(runner, is_ready=True)
        metrics.look()


def _result(
    connection: WorkerConnection, batch_id: int, outcomes: Sequence[Any], seconds: float, about: Any, *, is_ready: bool
) -> bytes:
    told, own_s = about
    failures = media = None
    if not _TOLD_APART.isdisjoint(map(type, outcomes)):
        media = _media(outcomes)
        outcomes, failures = _wired(outcomes)
    message: list[Any] = ["result", batch_id, connection.place(outcomes), failures, seconds, is_ready]
    if told is not None or media is not None or own_s:
        message.append(told)
    if media is not None or own_s:
        message.append(media)
    if own_s:
        message.append(own_s)
    return connection.framed(message)


def _stream(connection: WorkerConnection, batch_id: int, count: int, steps: Iterator[Sequence[Any]]) -> None:
    room = int(CREDIT)
    for number, step in enumerate(steps, 1):
        while room == 0:
            message = connection.receive()
            if message[0] == "stop" or calls_off(message, batch_id):
                return
            if message[0] == "go":
                room += sum(steps for name, steps in message[4] if name == batch_id)
        parts, _ = settled(step, count)
        connection.send_frame(connection.framed(["round", number, [_part(batch_id, parts)], []]))
        room -= 1
        if connection.is_cancelled():
            break


class _BesideBatches(logging.Handler):
    """Sends what is logged by threads of the model's own."""

    def __init__(self, connection: WorkerConnection) -> None:
        super().__init__()
        self.emit = connection.say


def wire_error(error: ForebayError) -> list[Any]:
    """Return an error in the form that frames carry."""
    return [error.kind, error.message, error.detail, error.trace]


def _open(connection: WorkerConnection) -> Runner | None:
    options = connection.options
    if "log" in options:
        origin.set(connection)
        capture(options["log"], _BesideBatches(connection))
    for path in options.get("path", ()):
        if path not in sys.path:
            sys.path.append(path)
    try:
        with user_code():
            runner = RunnerSpec(factory=options["factory"], kwargs=options["kwargs"]).build()
            runner.open(WorkerContext(options["index"], options["threads"], device_in(os.environ)))
    except ForebayError as error:
        connection.send(["failed", *wire_error(error)])
        return None
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not walk over it again and again
    return runner


def main(arguments: Sequence[str] | None = None) -> int:
    """Be a worker; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", required=True, help="where the server listens, unix:PATH")
    parser.add_argument("--worker", type=int, help="number of this worker in its pool")
    parser.add_argument("--life", type=int, default=1, help="number of this process among those of this worker")
    parser.add_argument("--server", type=int, help="the process to end with")
    parser.add_argument("--cores", default="", help="the processors it may use")
    options = parser.parse_args(arguments)
    run_on([int(core) for core in options.cores.split(",") if core])
    if options.server is not None:
        end_with(options.server)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # They may reach the whole group; only the server decides what they mean. A handler instead of SIG_IGN, because
        # ignored signals stay ignored in programs that a model starts.
        signal.signal(number, _leave_it_to_the_server)
    sigterm.keep_from_children(_leave_it_to_the_server)
    keep_freed_memory()
    try:
        address = parse_address(options.connect)
        connection = WorkerConnection(address, _about(options, first=True))
        runner = _open(connection)
        if runner is None:
            return 1
        metrics = MetricReporter(lambda data: connection.send_aside(["metrics", data]))
        metrics.look()
        _serve_all(connection, address, options, runner, metrics)
        close_runner(runner.close)
        metrics.report()
        connection.close()
    except (EOFError, ConnectionError, FileNotFoundError):
        pass  # the server is gone, and a worker without one has nothing to do
    release()  # what `atexit` runs may print
    return 0


def _serve_all(
    first: WorkerConnection, address: Address, options: argparse.Namespace, runner: Runner, metrics: MetricReporter
) -> None:
    """Be all slots of the worker: in a thread each, or on one loop if the runner awaits."""
    others = range(first.options["threads"] - 1)
    if others and runner.shares_loop and not first.options.get("seats"):
        slots = [first, *(WorkerConnection(address, _about(options, first=False)) for _ in others)]

        async def serve_all() -> None:
            await asyncio.gather(*(_serve_on_loop(slot, runner, metrics) for slot in slots))

        runner.run_on_loop(serve_all())
        return
    threads = [threading.Thread(target=_join, args=(address, options, runner), daemon=True) for _ in others]
    for thread in threads:
        thread.start()
    serve(first, runner, metrics)
    for thread in threads:
        thread.join()


def _leave_it_to_the_server(_number: int, _frame: object) -> None:
    """Go on: the worker ends when the server says so or is gone."""


def _about(options: argparse.Namespace, *, first: bool) -> dict[str, Any]:
    return {"pid": os.getpid(), "worker": options.worker, "life": options.life, "first": first, "phases": True}


def _join(address: Address, options: argparse.Namespace, runner: Runner) -> None:
    try:
        connection = WorkerConnection(address, _about(options, first=False))
        serve(connection, runner)
        connection.close()
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    # The package is imported under its real name so that classes exist once, not also under __main__.
    from forebay.types.served_file import stand_in_for_main
    from forebay.workers.processes.child import main as run

    stand_in_for_main()
    sys.exit(run())
