# SPDX-License-Identifier: Apache-2.0
"""The batching service as an app: one endpoint, and the door at which its workers join."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError
from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.config import HttpConfig
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.batching_service.http import BatchingHttp
from forebay.transports.http.asgi import asgi_app
from forebay.transports.http.listener import HttpListener
from forebay.workers.pools.attached_pool import AttachedPool
from forebay.workers.pools.job_slot import JobSlot
from forebay.workers.wire.address import parse_address
from forebay.workers.wire.worker_listener import VisitorLimits, WorkerListener

if TYPE_CHECKING:
    from forebay.surfaces.batching_service.service_settings import BatchingSettings

NAME: Final = "batching"

HELLO_S: Final = 60.0
"""Time a worker has from joining to asking for jobs: the original sets none, and some load their model in between."""

WORKERS: Final = 65_536
"""Workers at a time; the original takes any number."""


class BatchingApp(App):
    """The service; a server runs it behind its `listener`."""

    def __init__(self, settings: BatchingSettings) -> None:
        """Describe it; nothing is bound yet.

        Raises:
            ConfigError: If the address is none.
        """
        if settings.protocol == "tcp":
            _require_host_and_port(settings.address)
        self._settings = settings
        pool = AttachedPool[JobSlot](NAME, grace_s=None)
        timeout_s = settings.timeout_ms / 1000
        endpoint = Endpoint(
            EndpointConfig(name=NAME, timeout_s=timeout_s, max_timeout_s=timeout_s),
            BatchConfig(
                max_size=settings.batch, max_wait_s=settings.latency_ms / 1000, capacity=settings.capacity, idle="wait"
            ),
            pool,
        )
        super().__init__([Served(endpoint, Contract(raw_input=True, raw_output=True))])
        self.door = self._door = WorkerListener(
            parse_address(f"{settings.protocol}:{settings.address}"),
            jobs=lambda: JobSlot(pool, settings.max_frame_bytes),
            limits=VisitorLimits(hello_s=HELLO_S, connections=WORKERS, frame_bytes=settings.max_frame_bytes),
        )
        # The face limits the time of a body by itself; the connection's limit is for heads and must not be the shorter.
        http = HttpConfig(
            allowed_hosts=("*",),
            host=settings.host,
            port=settings.port,
            max_body_bytes=settings.max_body_bytes,
            read_timeout_s=timeout_s + 1.0,
        )
        face = BatchingHttp(endpoint, max_body_bytes=settings.max_body_bytes)
        self.listener = HttpListener(http, {}, face, byte_budget=self.byte_budget, is_any_method=True)
        self._pages: HttpListener | None = None
        self._pages_at = ""
        if settings.metrics_port is not None:
            http = HttpConfig(host=settings.host, port=settings.metrics_port, allowed_hosts=("*",))
            self._pages = HttpListener(http, {}, asgi_app(self, http), byte_budget=self.byte_budget)

    @property
    def summary(self) -> list[str]:
        """What a person is told once it has started."""
        settings = self._settings
        lines = [
            f"workers join at {self._door.shown}",
            f"jobs: any path, up to {settings.batch} in a batch, which leaves {settings.latency_ms} ms after its first",
        ]
        return (
            [*lines, f"metrics at {self._pages_at}/metrics, the dashboard at {self._pages_at}/ui"]
            if self._pages_at
            else lines
        )

    async def start(self) -> None:
        """Open the door and accept jobs; they wait while there is no worker.

        Raises:
            ConfigError: If an address cannot be used.
        """
        if self._pages is not None:
            host, port = await self._pages.start()
            self._pages_at = f"http://{host}:{port}"
        await super().start()

    async def drain(self, grace_s: float) -> None:
        """Let open jobs end within `grace_s`, then send the workers away and close the door."""
        await super().drain(grace_s)
        if self._pages is not None:
            await self._pages.stop(0.0)


def _require_host_and_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if host and is_port:
        return
    hint = f"; did you mean 127.0.0.1:{port}, or 0.0.0.0:{port} to let other machines in?" if is_port else ""
    raise ConfigError(f"workers cannot join at '{address}': -protocol tcp needs -address HOST:PORT{hint}")
