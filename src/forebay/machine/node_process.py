# SPDX-License-Identifier: Apache-2.0
"""The process that runs a node: it is given a plan, and sees to it that exactly these children run.

Theory of operation. A plan is a sequence of children with names. `converge` starts what is new, wave by wave, and ends
what is not in the plan any more once all that is new is ready; so an upgrade is a plan with other names. If something
new cannot be started, what this call has started ends again, and what ran before goes on. Calls of `converge` follow
each other; the end of the node process interrupts the one that is under way. `adjust` waits for nothing: what is new
is started again until it is of use, and what is not in the plan any more ends meanwhile. It is for plans of somebody
who looks at `states` and decides what comes next.

`run` is the life of such a process in the foreground: signals end it, the highest wave first. A second signal is
passed on to all children at once. What a plan is about, and who makes it, is no matter here.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from forebay.errors import ConfigError
from forebay.machine.children import Child, ChildFailed, ChildState, RunningChild
from forebay.transports.signals import LAST_S, Signals

log = logging.getLogger("forebay")


class NodeProcess:
    """The children of a node."""

    def __init__(self) -> None:
        """Begin with none."""
        self._running: dict[str, RunningChild] = {}
        self._coming: list[RunningChild] = []
        self._leaving: list[RunningChild] = []
        self._adjusted: Sequence[Child] = ()
        self._lock = threading.Lock()
        self._converging = threading.Lock()
        self._is_over = False
        self._status = 0

    def states(self) -> list[ChildState]:
        """Return how each child is, also of those that have not ended yet."""
        with self._lock:
            return [one.state for one in [*self._running.values(), *self._leaving]]

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a child, if it is there."""
        with self._lock:
            child = self._running.get(name)
        if child is not None:
            child.signal(number)

    def converge(self, plan: Sequence[Child]) -> bool:
        """Have these children run and no others; False if the node process was ended meanwhile.

        Raises:
            ConfigError: Two children have one name.
            ChildFailed: One that is new cannot be started; all is as it was before.
        """
        names = [one.name for one in plan]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"two children of the plan are called '{twice}'; give one of them another name")
        with self._converging:
            return self._converge(plan)

    def adjust(self, plan: Sequence[Child]) -> None:
        """Start what is new, end what is not in the plan any more, and wait for neither.

        A child that has changed is left as it is: give the changed one another name. One that comes back while it is
        still ending is started once it has ended.
        """
        with self._converging, self._lock:
            if self._is_over:
                return
            self._adjusted = plan
            wanted = {one.name: one for one in plan}
            for name in [name for name in self._running if name not in wanted]:
                gone = self._running.pop(name)
                self._leaving.append(gone)
                threading.Thread(target=self._see_it_leave, args=(gone,), daemon=True).start()
            leaving = {one.child.name for one in self._leaving}
            for name, child in wanted.items():
                if name not in self._running and name not in leaving:
                    self._running[name] = RunningChild(child)
                    self._running[name].begin()

    def _see_it_leave(self, gone: RunningChild) -> None:
        gone.stop()
        gone.join()
        with self._lock:
            self._leaving.remove(gone)
            plan = self._adjusted
        if gone.child.name in {one.name for one in plan}:
            self.adjust(plan)

    def end(self) -> None:
        """End all children, the highest wave first; nothing is started any more."""
        with self._lock:
            self._is_over = True
            for one in self._coming:
                one.stop()
        with self._converging:
            self._end([*self._running.values(), *self._leaving])
            self._running.clear()

    def hurry(self) -> None:
        """Have all children end at once, as far as they have not."""
        with self._lock:
            for one in self._running.values():
                one.stop()

    def run(
        self,
        plan: Sequence[Child],
        *,
        ready: Callable[[Sequence[ChildState]], None] = lambda _states: None,
        reload: Callable[[], None] | None = None,
    ) -> int:
        """Run until a signal; returns the exit status: that of the child that could not be started, or the highest.

        Args:
            plan: What runs first.
            ready: Called in a thread once all of it is ready.
            reload: What SIGHUP asks for; None has it end the node process as well.

        Raises:
            ConfigError: Two children have one name.
            ChildFailed: One cannot be started, and has not said why.
        """
        return asyncio.run(self._run(plan, ready, reload))

    async def _run(
        self, plan: Sequence[Child], ready: Callable[[Sequence[ChildState]], None], reload: Callable[[], None] | None
    ) -> int:
        stopped, is_ready = asyncio.Event(), threading.Event()

        def act(number: int) -> None:
            if stopped.is_set():
                self.hurry()
            else:
                log.info("%s: draining", signal.Signals(number).name)
            stopped.set()

        def patience_s() -> float:
            return LAST_S + sum(max(one.child.end_s for one in wave) for wave in _waves(self._running.values()))

        def status() -> int:
            return 1 if is_ready.is_set() else 0

        def start() -> None:
            if self.converge(plan):
                is_ready.set()
                ready(self.states())

        with Signals(act, patience_s, status, reload) as signals:
            signals.attend(asyncio.get_running_loop())
            starting = asyncio.ensure_future(asyncio.to_thread(start))
            stopping = asyncio.ensure_future(stopped.wait())
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done() or starting.exception() is None:
                await stopping
            stopping.cancel()
            await asyncio.to_thread(self.end)
            try:
                await starting
            except ChildFailed as error:
                if error.status is None:
                    raise
                return error.status
        return self._status

    def _converge(self, plan: Sequence[Child]) -> bool:
        new = [RunningChild(one) for one in plan if self._of(one) is None]
        try:
            for _, wave in groupby(sorted(new, key=_wave), key=_wave):
                self._start([*wave])
        except BaseException:
            self._end(self._coming)
            raise
        finally:
            with self._lock:
                started, self._coming = self._coming, []
        if self._is_over:
            self._end(started)
            return False
        with self._lock:
            before, self._running = self._running, {}
            coming = {one.child.name: one for one in started}
            self._running = {one.name: coming.get(one.name) or before[one.name] for one in plan}
            gone = [one for one in before.values() if one not in self._running.values()]
        self._end(gone)
        return True

    def _of(self, child: Child) -> RunningChild | None:
        """Return what runs this child already."""
        found = self._running.get(child.name)
        return found if found is not None and found.child == child else None

    def _start(self, wave: Iterable[RunningChild]) -> None:
        """Start children together, and wait until all are ready; raises a `ChildFailed` if one cannot be started."""
        begun: list[RunningChild] = []
        for one in wave:
            with self._lock:
                if self._is_over:
                    return
                self._coming.append(one)
                one.begin()
            begun.append(one)
        for one in begun:
            one.wait_ready()

    def _end(self, children: Sequence[RunningChild]) -> None:
        """End children, the highest wave first."""
        for wave in _waves(children):
            for one in wave:
                one.stop()
            for one in wave:
                one.join()
                if one.status is not None and one.status > 0:
                    self._status = max(self._status, one.status)


def _wave(one: RunningChild) -> int:
    return one.child.wave


def _waves(children: Iterable[RunningChild]) -> list[list[RunningChild]]:
    """Return children by their waves, the highest first."""
    ordered = sorted(children, key=_wave, reverse=True)
    return [[*wave] for _, wave in groupby(ordered, key=_wave)]
