# SPDX-License-Identifier: Apache-2.0
"""`forebay serve file.py` for files written for ventu: its HTTP service, with batches in worker processes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError
from forebay.server.app import App
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.contract import Options, Project
from forebay.surfaces.imported_names import imported_in
from forebay.surfaces.ventu.asgi_service import VentuHttp
from forebay.surfaces.ventu.media_codecs import Json, MsgPack
from forebay.surfaces.ventu.metrics import FOLDER, merged, shared_folder, write
from forebay.surfaces.ventu.server import OPAQUE
from forebay.surfaces.ventu.service_pages import Reply, ServicePages
from forebay.types.call import ALONE
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.processes.private_folder import PrivateFolder
from forebay.workers.runner import RunnerSpec

if TYPE_CHECKING:
    from forebay.surfaces.container.recipe import Recipe

log = logging.getLogger("forebay")

MODULES: Final = frozenset({"ventu", "forebay.surfaces.ventu"})
"""A file that imports one of these is a project of this kind."""

BATCH: Final = 32
CAPACITY: Final = 1024
TIMEOUT_S: Final = 5.0
"""As the original's batching service has them."""

SLOW_S: Final = 10.0
"""A file that takes longer to load is named in the log."""

ABOUT_S: Final = 60.0
"""Time a worker has to say what it serves, however little time requests have."""


class VentuSurface:
    """Serves ventu projects."""

    name = "ventu"

    def detect(self, target: str) -> bool:
        """Tell whether the target is a Python file, with or without a name in it, that imports ventu."""
        path, _ = _split(target)
        if path.suffix != ".py" or not path.is_file():
            return False
        return any(name in MODULES or name.startswith("ventu.") for name in imported_in(path))

    def build(self, target: str, options: Options) -> Project:
        """Build the project's one endpoint; none of its code is run here."""
        from forebay.transports.http.asgi import beside_dashboard, with_cors
        from forebay.transports.http.pages import ServerPages

        path, name = _split(target)
        environment = dict(os.environ)
        pool = ProcessPool(
            RunnerSpec(
                factory="forebay.surfaces.ventu.runner:build", kwargs={"path": str(path.resolve()), "name": name}
            ),
            workers=options.overrides.fixed_workers or 1,
            threads=options.overrides.threads,
            stuck_s=options.overrides.stuck_s,
            env=environment,
        )
        endpoint = _endpoint(path.stem, options, pool)
        app = _App(path, endpoint, pool, environment)
        native = ServerPages(app, options.http)
        app.face = VentuHttp(
            endpoint,
            lambda: _metrics(app, native if options.extra_routes else None),
            max_body_bytes=options.http.max_body_bytes,
            api_keys=options.http.api_keys,
            public=["/metrics"] if options.http.public_metrics else (),
            more=_probes(native) if options.extra_routes else None,
        )
        return Project(
            app=app,
            http=options.http,
            asgi=with_cors(
                beside_dashboard(app.face, native if options.extra_routes else None, options.http), options.http
            ),
            summary=_summary(path, name, endpoint),
            warnings=_warnings(options),
        )

    def recipe(self, target: str, options: Options) -> Recipe:
        """Return what a container of the project needs."""
        from forebay.surfaces.container.project_recipe import recipe_of

        path, _ = _split(target)
        inner = (target[len(str(path.parent)) + 1 :] if str(path.parent) != "." else target,)
        return recipe_of(self.build(target, options), options, folder=path.absolute().parent, target=inner, protocol="")


class _App(App):
    """An app that, once it is up, asks its object what it serves, and shares a folder with its workers for metrics."""

    def __init__(
        self, path: Path, endpoint: Endpoint, pool: ProcessPool, environment: MutableMapping[str, str]
    ) -> None:
        """Describe it.

        Args:
            environment: That of the workers, to be completed before they start.
        """
        super().__init__([Served(endpoint, OPAQUE)])
        self.face: VentuHttp | None = None
        self._path = path
        self._endpoint = endpoint
        self._pool = pool
        self._environment = environment
        self._folder: PrivateFolder | None = None

    async def start(self) -> None:
        """Bring up the workers and learn what they serve; raises ConfigError if there is no room for a folder."""
        try:
            self._folder = PrivateFolder()
        except OSError as error:
            raise ConfigError(f"no folder can be made for the metrics of the workers: {error.strerror}") from error
        self._folder.guard()
        self._environment.setdefault(FOLDER, shared_folder(self._environment) or str(self._folder.path))
        slow = asyncio.get_running_loop().call_later(SLOW_S, self._tell_slow)
        try:
            await super().start()
        finally:
            slow.cancel()
        about: dict[str, Any] = await self._endpoint.call(b"", params={"verb": "about"}, key=ALONE, timeout_s=ABOUT_S)
        assert self.face is not None
        if about["left_out"]:
            log.info("%s: skipped %s(): forebay does the HTTP serving and the batching", self._path, about["left_out"])
        self.face.pages = ServicePages(MsgPack() if about["use_msgpack"] else Json(), about["document"])

    def _tell_slow(self) -> None:
        why = "it loads a large model, or its top level never finishes"
        log.warning("%s is still loading after %g s: %s", self._path, SLOW_S, why)

    async def drain(self, grace_s: float) -> None:
        """Stop, and remove the folder."""
        await super().drain(grace_s)
        if self._folder is not None:
            self._folder.remove()

    def scrape(self) -> bytes:
        """Return what all workers have counted."""
        folder = self._environment[FOLDER]
        is_ours = self._folder is not None and folder == str(
            self._folder.path
        )  # in another one there may be processes of somebody else's
        page, _ = write(merged(folder, self._pool.pids() if is_ours else None))
        return page


def _split(target: str) -> tuple[Path, str | None]:
    """Split `file.py:name` into the file and the name."""
    file, colon, name = target.rpartition(":")
    return (Path(file), name) if colon and file.endswith(".py") else (Path(target), None)


def _endpoint(name: str, options: Options, pool: ProcessPool) -> Endpoint:
    overrides = options.overrides
    timeout_s = TIMEOUT_S if overrides.timeout_ms is None else overrides.timeout_ms / 1000
    wait_ms = overrides.max_wait_ms
    return Endpoint(
        EndpointConfig(name=name, timeout_s=timeout_s, deadline_ms=overrides.deadline_ms),
        BatchConfig(
            max_size=overrides.max_batch_size or BATCH,
            max_wait_s=(wait_ms or 0.0) / 1000,
            capacity=overrides.max_queue or CAPACITY,
            idle=overrides.idle or ("gather" if wait_ms is None else "wait"),
        ),
        pool,
    )


async def _metrics(app: _App, native: Any) -> tuple[bytes, str]:
    """Return the workers' numbers and, if they are wanted, those of the server before them."""
    page = await asyncio.to_thread(app.scrape)
    media = "text/plain; version=0.0.4; charset=utf-8"
    if native is None:
        return page, media
    pieces, _ = await native.written_metrics("")
    return b"".join([page, *pieces]), media


def _probes(native: Any) -> dict[str, Callable[[], Awaitable[Reply]]]:
    """Return forebay's own probes; they need no key."""

    def probe(page: Callable[[Any], Awaitable[Any]]) -> Callable[[], Awaitable[Reply]]:
        async def answer() -> Reply:
            response = await page(None)
            return Reply(response.status_code, response.media_type, response.body)

        return answer

    return {"/healthz": probe(native.healthz), "/readyz": probe(native.readyz)}


def _warnings(options: Options) -> list[str]:
    """Say which of the given options do nothing here."""
    found: list[str] = []
    if "worker_kind" in options.given and options.overrides.worker_kind != "process":
        found.append("--worker-kind: a ventu project always runs in processes of its own")
    found += [
        f"--{name.replace('_', '-')} holds for models of forebay's own, a ventu project ignores it"
        for name in ("policy", "latency_objective_ms", "isolate_errors", "single_flight", "stream_idle_ms")
        if name in options.given
    ]
    return found


def _summary(path: Path, name: str | None, endpoint: Endpoint) -> list[str]:
    batching = endpoint.batching
    waits = f"waits {batching.max_wait_s * 1000:g} ms" if batching.idle == "wait" else batching.idle
    where = f"{path}:{name}" if name else str(path)
    slots = endpoint.pool.statistics().slots
    return [
        (
            f"POST /inference  {where}, batches of up to {batching.max_size} ({waits}), "
            f"{slots} worker slot{'s' * (slots != 1)}, timeout {round(endpoint.config.timeout_s * 1000)} ms"
        )
    ]
