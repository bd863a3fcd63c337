# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
"""Places where user code runs, each asked in the same way: a request of a number and a way, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tests.compat.pipeline.conftest import answer_of
from tests.misbehave import models, pipeline_project
from tests.waiting import PATIENCE_S
from tests.waiting import reached as eventually

from forebay.server.config import AttachConfig, HttpConfig, Overrides
from forebay.serving.nx_serving.process_partitions import ProcessPartitions
from forebay.surfaces.contract import Options
from forebay.surfaces.native.compositions import GraphTarget, serve_composition
from forebay.surfaces.native.model_endpoint import serve_model
from forebay.surfaces.native.servings import serve_serving
from forebay.surfaces.native.surface import NativeSurface
from forebay.surfaces.nucleus.http import POST_KEY
from forebay.surfaces.nucleus.surface import NucleusSurface

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
STUCK_S = 0.1
"""How long a worker may go on with what nobody waits for, where that is to end it."""
HANG_S = 2.0
"""How long a worker that attached may owe an answer here."""

MODELS = {
    "plain": models.Plain,
    "batched": models.Batched,
    "hooks": models.Hooked,
    "key": models.Keyed,
    "async": models.Awaited,
    "streamed": models.Streamed,
    "async streamed": models.AwaitedStream,
    "steps": models.Steps,
}
PARAMS: Mapping[str, Any] = {"in": "json", "out": "json"}


def _read(answer: Any) -> Any:
    return msgspec.json.decode(answer) if isinstance(answer, bytes) else answer


class Rig:
    """An endpoint in front of a pool of this process."""

    needs_relief = False
    """Whether a worker that hangs, and was given up, stays until somebody else ends it."""

    def __init__(self, endpoint: Any, pool: Any) -> None:
        self.endpoint = endpoint
        self.pool = pool
        self.ends: list[int] = []
        """The statuses the server would have ended with."""

    async def ask(self, number: int, way: int) -> Any:
        """Raises what the request failed with."""
        answer = await self.endpoint.call(msgspec.json.encode([number, way]), params=PARAMS, timeout_s=PATIENCE_S)
        return [*map(_read, answer)] if isinstance(answer, list) else _read(answer)

    def is_right(self, number: int, answer: Any) -> bool:
        return answer in (number, [number], [number, number])

    @property
    def slots(self) -> int:
        return self.pool.statistics().slots

    @property
    def replaced(self) -> int:
        return self.pool.statistics().restarts + self.pool.statistics().left

    @property
    def is_whole(self) -> bool:
        """Whether all workers are up and idle."""
        found = self.pool.statistics()
        return found.idle == found.slots > 0 and found.alive > 0

    def be_patient(self, *, is_patient: bool) -> None:
        """Say whether a worker may go on with what nobody waits for."""
        if getattr(self.pool, "_stuck_s", None) is not None:
            self.pool._stuck_s = PATIENCE_S if is_patient else STUCK_S

    def relieve(self) -> None:
        """Do what whoever runs the server would have to do once a worker hangs that the server cannot end."""


class AttachedRig(Rig):
    """The same with a worker that somebody else starts, and starts again when it ends."""

    needs_relief = True

    def __init__(self, app: Any, address: str, model: str) -> None:
        super().__init__(None, None)
        self._app = app
        self._command = [sys.executable, "-c", "import sys; from forebay.cli.main import main; sys.exit(main())"]
        self._command += ["worker", f"{FOLDER}/models.py:{model}", "--connect", address]
        self._name = model
        self.process: Any = None
        self._keeper: Any = None

    async def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep())
        await eventually(lambda: self._app.served, "an endpoint")
        (served,) = self._app.served.values()
        self.endpoint, self.pool = served.endpoint, served.endpoint.pool
        await eventually(lambda: self.endpoint.accepting and self.is_whole, "a worker")

    async def _keep(self) -> None:
        while True:
            if self.process is None or self.process.poll() is not None:
                self._begin()
            await asyncio.sleep(0.01)

    def _begin(self) -> None:
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def relieve(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class ServingRig(Rig):
    """A started serving, asked by tasks."""

    def __init__(self, started: Any) -> None:
        super().__init__(None, None)
        self.started = started

    async def ask(self, number: int, way: int) -> Any:
        import numpy as np

        from forebay import Batch

        rows = await self.started.batched_run_async(Batch.stack([np.array([number, way])]))
        return np.asarray(rows).tolist()

    @property
    def slots(self) -> int:
        return self.started._partitions.count

    @property
    def replaced(self) -> int:
        partitions = self.started._partitions
        return partitions.pool.restarts if isinstance(partitions, ProcessPartitions) else partitions.replaced

    @property
    def is_whole(self) -> bool:
        found = self.started.statistics()
        return found.idle == found.partitions

    def be_patient(self, *, is_patient: bool) -> None:
        self.started._partitions.stuck_s = PATIENCE_S if is_patient else STUCK_S


class NucleusRig(Rig):
    """A handler that answers batches of posts."""

    async def ask(self, number: int, way: int) -> Any:
        headers = [[b"content-type", b"application/json"]]
        params = {"verb": "post", "query": b"", "headers": headers}
        body = msgspec.json.encode([number, way])
        answer = await self.endpoint.call(body, params=params, key=POST_KEY, timeout_s=PATIENCE_S)
        status, _, body = answer
        if status >= 500:
            raise ValueError(body)
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            return body

    def relieve(self) -> None:
        for pid in self.pool.pids():
            os.kill(pid, signal.SIGKILL)


class PipelineRig(Rig):
    """A pipeline of one op."""

    def __init__(self, service: Any, pool: Any) -> None:
        super().__init__(None, pool)
        self.service = service

    async def ask(self, number: int, way: int) -> Any:
        request = pipeline_project.request(number, way)
        response = await answer_of(self.service, request, PATIENCE_S)
        if response.err_no:
            raise ValueError(response.err_msg)
        return int(dict(zip(response.key, response.value, strict=True))["n"])


@contextlib.asynccontextmanager
async def rig_of(kind: str, place: str, folder: Path) -> AsyncIterator[Rig]:
    """A place with workers of a kind."""
    slots = 2 if kind in {"thread", "inline"} and place != "steps" else 1  # one, for two are to share its steps
    overrides = Overrides(worker_kind=kind if kind != "attached" else "process", workers=slots)
    if kind == "attached":
        async with _attached(place, folder) as rig:
            yield rig
        return
    if place == "pipeline":
        async with pipeline_project.hosted(kind) as (service, pool):
            yield PipelineRig(service, pool)
        return
    if place == "Serving" and kind != "inline":
        started = await asyncio.to_thread(models.serving.start, worker_kind=kind, partitions=slots, shutdown_ms=100)
        rig: Rig = ServingRig(started)
        try:
            yield rig
        finally:
            await asyncio.to_thread(started.stop)
        return
    if place == "Nucleus":
        async with _nucleus(folder) as rig:
            yield rig
        return
    if place == "Serving":
        served = serve_serving(models.serving, FOLDER / "models.py", "serving", overrides)
        pool = served.endpoint.pool
    elif place == "graph":
        served = serve_composition(
            GraphTarget(models.graph, FOLDER / "models.py", "graph", overrides, frozenset({"worker_kind"}))
        )
        pool = served.nodes["misbehaving"].pool
    else:
        served = serve_model(MODELS[place], overrides)
        pool = served.endpoint.pool
    await served.endpoint.start()
    try:
        yield Rig(served.endpoint, pool)
    finally:
        await served.endpoint.drain(0.0)


_numbers = itertools.count()


@contextlib.asynccontextmanager
async def _attached(place: str, folder: Path) -> AsyncIterator[Rig]:
    address = f"unix:{folder}/door-{next(_numbers)}"
    options = Options(http=HttpConfig(), attach=AttachConfig(address=address, hang_s=HANG_S, grace_s=PATIENCE_S))
    app = NativeSurface().build(None, options).app
    await app.start()
    rig = AttachedRig(app, address, MODELS[place].__name__)
    try:
        await rig.start()
        yield rig
    finally:
        rig.stop()
        await app.drain(0.0)


HANDLER = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.misbehave import catalogue, models

class Handler:
    def handle_post(self, payload):
        return catalogue.perform(payload, models.ways(payload), models.numbers(payload))
"""
NUCLEUS = """
type: python
path: handler.py
server_side_batching:
  max_batch_size: 2
  batch_interval_seconds: 60
"""


@contextlib.asynccontextmanager
async def _nucleus(folder: Path) -> AsyncIterator[Rig]:
    project = folder / f"nucleus-{next(_numbers)}"
    project.mkdir()
    (project / "handler.py").write_text(HANDLER)
    (project / "nucleus.yaml").write_text(NUCLEUS)
    built = NucleusSurface().build(str(project), Options(http=HttpConfig(), state_dir=folder))
    endpoint = built.app.find(project.name).endpoint
    rig = NucleusRig(endpoint, endpoint.pool)
    endpoint.pool._on_death.fail = rig.ends.append
    await built.app.start()
    try:
        yield rig
    finally:
        await built.app.drain(0.0)
