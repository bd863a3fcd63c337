# SPDX-License-Identifier: Apache-2.0
"""`forebay.start(Model)`: a server on a port, in a thread of the program that calls it."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from forebay.errors import ConfigError
from forebay.surfaces.embedding.targets import Target, read_one, read_targets
from forebay.surfaces.project_server import server_of
from forebay.workers.processes.loop_thread import LoopThread


def start(*targets: Target, drain_s: float = 30.0, **settings: Any) -> StartedServer:
    """Serve models on a port, in a thread beside the program; returns once they are loaded and the port answers.

        with forebay.start(Iris, port=0) as server:
            print(server.url)  # http://127.0.0.1:41233

        forebay.start("model.py").wait()  # until Ctrl+C

    Signals stay the program's. A server that nobody stops ends with the program's last thread that is not a daemon, and
    answers what it has accepted; but Python closes executors before that, so models that use any need the `with`.

    Args:
        *targets: Model classes and composed functions, or one path of what `forebay serve` takes.
        drain_s: Time that open requests have to end once it is stopped.
        **settings: Options of `forebay serve` by their names in Python: `host`, `port` (0 takes a free one),
            `api_keys`, `workers=2`, `max_batch_size=16`. Classes run in threads if `worker_kind` says nothing else,
            files in processes.

    Raises:
        ConfigError: If a target or a setting is wrong, or the port cannot be had.
        ModelError: If a model cannot be loaded.
    """
    if getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "") == "forebay.workers.processes.child":
        msg = "forebay.start() is called while a worker imports this file; write `if __name__ == '__main__':` before it"
        raise ConfigError(msg)
    server = StartedServer(targets, settings, drain_s)
    server.start()
    return server


class StartedServer:
    """A server in a thread; what `start` returns.

    Attributes:
        url: Where it answers.
    """

    def __init__(self, targets: tuple[Target, ...], settings: dict[str, Any], drain_s: float) -> None:
        self.url: str = ""
        self._ready: Callable[[], None] = lambda: None
        self._project = read_targets("forebay.start", targets, settings)
        self._server = server_of(self._project, drain_s=drain_s, ready=self._is_ready)
        self._thread = LoopThread("forebay-server", self._serve)

    def __repr__(self) -> str:
        return f"<forebay server at {self.url}>" if self.is_running else "<forebay server, stopped>"

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_running

    def start(self) -> None:
        """Load the models and open the port; see the function `start`."""
        try:
            self._thread.start()
        except BaseException:
            self._thread.call(self._server.stop)  # Ctrl+C while the models are loading
            raise
        atexit.register(self.stop)  # not before threads of the program have ended, which may still call

    def load(self, target: Target, **settings: Any) -> None:
        """Load a version of a model beside those that answer; returns once it is ready.

            server.load(NewIris, name="iris", version="2")

        One of the same name and version is replaced without a failed request. A further version has no weight until
        `share` gives it some; `/models/iris/versions/2` asks it.

        Args:
            target: A class, a composition, or the path of a file, which is imported anew.
            **settings: Options of `forebay serve` for models, by their names in Python.

        Raises:
            ForebayError: Why it cannot be loaded; what is served goes on.
        """
        self._change("load", target, settings, self._project.app.load)

    def swap(self, target: Target, **settings: Any) -> None:
        """Load a version as `load` does; once it is ready it answers in place of those that did, which leave.

        Raises:
            ForebayError: Why it cannot be loaded; what is served goes on.
        """
        self._change("swap", target, settings, self._project.app.swap)

    def unload(self, name: str, version: str) -> None:
        """Let a version answer what it has accepted and leave.

        Raises:
            ForebayError: If it is not there, or nobody would answer in its place.
        """
        self._thread.run(self._project.app.unload(name, version))

    def share(self, name: str, weights: Mapping[str, int]) -> None:
        """Say which versions answer what names none, and in which parts: `{"1": 90, "2": 10}`.

        Raises:
            ForebayError: If one of them is not there, or nobody would answer.
        """

        async def share() -> None:
            self._project.app.share(name, weights)

        self._thread.run(share())

    def reload(self) -> None:
        """Have the project read anew, as SIGHUP does where `forebay serve` runs; returns at once.

        Raises:
            ConfigError: If classes are served, which have no file to be read.
        """
        if self._project.reload is None:
            msg = "classes are served, so there is no file to reload; pass the new class to `load` or `swap`"
            raise ConfigError(msg)
        self._thread.call(self._project.reload)

    def stop(self) -> None:
        """Close the port, answer what was accepted, end the workers; once it has ended nothing is left to do."""
        atexit.unregister(self.stop)
        self._thread.call(self._server.stop)
        self._thread.join()

    def wait(self) -> None:
        """Wait until it is stopped, or ends by itself; a Ctrl+C stops it."""
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _change(self, what: str, target: Target, settings: dict[str, Any], change: Callable[..., Any]) -> None:
        served = read_one(f"server.{what}", target, settings)
        config = served.endpoint.config
        self._thread.run(change(config.name, config.version, lambda: served))

    async def _serve(self, ready: Callable[[], None]) -> int:
        self._ready = ready
        return await self._server.serve()

    def _is_ready(self, url: str) -> None:
        self.url = url
        self._ready()
