# SPDX-License-Identifier: Apache-2.0
"""`forebay.asgi(Model)`: an ASGI application, alone under an ASGI server or mounted in another application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ConfigError, ForebayError
from forebay.surfaces.embedding.targets import Target, read_targets

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from forebay.server.app import App
    from forebay.surfaces.contract import Project

_HTTP: Final = ("max_body_bytes", "api_keys", "cors_origins", "dashboard")


def asgi(*targets: Target, drain_s: float = 30.0, **settings: Any) -> Mounted:
    """Return an ASGI application that answers for models, with all the paths of `forebay serve`.

        app = forebay.asgi(Iris)  # uvicorn module:app

        models = forebay.asgi(Iris)
        app = FastAPI(lifespan=models.lifespan)
        app.mount("/ml", models)  # POST /ml/models/iris

    Its lifespan loads the models and, at the end, answers what was accepted. An ASGI server runs it; an application it
    is mounted in does not, so give it to that one as its `lifespan`, or enter it in one of your own.

    Args:
        *targets: Model classes and composed functions, or one path of what `forebay serve` takes.
        drain_s: Time that open requests have to end.
        **settings: Options of `forebay serve` for models by their names in Python (`workers=2`, `max_batch_size=16`),
            and `max_body_bytes`, `api_keys`, `cors_origins` and `dashboard`. Classes run in threads if `worker_kind`
            says nothing else, files in processes.

    Raises:
        ConfigError: If a target or a setting is wrong.
    """
    return Mounted(targets, settings, drain_s)


class Mounted:
    """An ASGI application; what `asgi` makes."""

    def __init__(
        self, targets: tuple[Target, ...], settings: dict[str, Any], drain_s: float, caller: str = "forebay.asgi"
    ) -> None:
        self._caller = caller
        self._targets = targets
        self._settings = settings
        self._drain_s = drain_s
        self._next: Project | None = self._build()
        self._running: Project | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def app(self) -> App:
        """What answers while the lifespan lasts.

        Raises:
            ConfigError: If it does not.
        """
        return self._require().app

    @contextlib.asynccontextmanager
    async def lifespan(self, _outer: object = None) -> AsyncGenerator[None]:
        """Load the models, let them answer, drain; takes the application it is mounted in, and does not look at it.

        Raises:
            ModelError: If a model cannot be loaded.
            ConfigError: If it is entered twice, or where no loop of asyncio runs.
        """
        if self._running is not None:
            raise ConfigError("the lifespan of this forebay.asgi() has begun already; it is entered in one place")
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            msg = (
                "models run on asyncio, and the server that runs this forebay.asgi() uses another library, such as trio"
            )
            raise ConfigError(f"{msg}; start it with asyncio, for example `hypercorn --worker-class asyncio`") from None
        project, self._next = self._next or self._build(), None  # what was drained does not start again
        self._running = project
        try:
            await project.app.start()
            project.on_ready()
            try:
                yield
            finally:
                project.on_stop()
                await project.app.drain(self._drain_s)
        finally:
            self._running = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            project = self._require()
            if asyncio.get_running_loop() is not self._loop:
                raise ConfigError(
                    "the lifespan of this forebay.asgi() has begun on another event loop than this request came on, "
                    "and models answer on that one alone; run both on one (for pytest-asyncio, `loop_scope` of the "
                    "fixture that enters the lifespan and of the test are the same then)"
                )
            await project.asgi(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await receive()
            try:
                await stack.enter_async_context(self.lifespan())
            except ForebayError as error:
                trace = error.trace
                await send({"type": "lifespan.startup.failed", "message": f"{error.message}\n{trace}".rstrip()})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    def _build(self) -> Project:
        project = read_targets(self._caller, self._targets, self._settings, _HTTP)
        if project.asgi is None:
            msg = f"{self._caller}() cannot serve {self._targets[0]}: it answers on ports of its own, and not over HTTP"
            raise ConfigError(msg)
        return project

    def _require(self) -> Project:
        if self._running is None:
            raise ConfigError(
                "the models of this forebay.asgi() are not loaded: its lifespan has not begun. Where it is mounted, "
                "write FastAPI(lifespan=models.lifespan), or `async with models.lifespan():` in a lifespan of your "
                "own. The server must run lifespans: Daphne does not, nor uvicorn with --lifespan off"
            )
        return self._running
