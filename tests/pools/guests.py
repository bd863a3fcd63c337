# SPDX-License-Identifier: Apache-2.0
"""A pool of attached workers that brings its own guests: threads of the test that dial in through a real door."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading

from tests.waiting import PATIENCE_S

from forebay.errors import ModelError, revive
from forebay.types.failures import failure_of
from forebay.workers.pools.attached_pool import AttachedPool
from forebay.workers.pools.worker_slot import WorkerSlot
from forebay.workers.processes.child import serve, wire_error
from forebay.workers.runner import WorkerContext
from forebay.workers.wire.address import UnixAddress
from forebay.workers.wire.worker_connection import WorkerConnection
from forebay.workers.wire.worker_listener import WorkerListener


class AttachedByThreads(AttachedPool[WorkerSlot]):
    def __init__(self, spec, *, workers=1, threads=1, **options):
        super().__init__("told", **{"grace_s": None, **options})
        self._spec, self._workers, self._threads_each = spec, workers, threads
        self._error = None
        self._guests = []
        self._home = tempfile.mkdtemp(prefix="door-")
        self.door = WorkerListener(UnixAddress(f"{self._home}/socket"), native=lambda about: WorkerSlot(self))
        self.shared = self.door.shared

    async def start(self):
        await super().start()
        await self.door.start()
        for index in range(self._workers):
            self._guests.append(threading.Thread(target=self._serve, args=(index,), daemon=True))
            self._guests[-1].start()
        while len(self._slots) < self._workers * self._threads_each:
            await asyncio.sleep(0.002)
            if self._error is not None:
                await self.stop(0.0)
                raise self._error

    async def stop(self, grace_s):
        await super().stop(grace_s)
        self.door.stop()
        for guest in self._guests:
            await asyncio.to_thread(guest.join, PATIENCE_S if grace_s > 1.0 else 0.2)
        shutil.rmtree(self._home, ignore_errors=True)

    def failed(self, slot, kind, message, detail, trace):
        error = revive(kind, message, detail, trace)
        self._error = ModelError(error.message, trace=trace)

    def dial(self, token="a worker of the test"):
        return WorkerConnection(self.door.address, {"worker": token})

    def _serve(self, index):
        first = self.dial(f"worker {index}")
        try:
            runner = self._spec.build()
            runner.open(WorkerContext(index, self._threads_each))
        except BaseException as error:
            first.send(["failed", *wire_error(failure_of(error).error)])
            first.close()
            return
        connections = [first, *(self.dial(f"worker {index}") for _ in range(self._threads_each - 1))]
        slots = [threading.Thread(target=_serve, args=(each, runner), daemon=True) for each in connections]
        for slot in slots:
            slot.start()
        for slot in slots:
            slot.join()
        runner.close()


def _serve(connection, runner):
    try:
        serve(connection, runner)
    except (EOFError, OSError):
        pass
    finally:
        connection.close()
