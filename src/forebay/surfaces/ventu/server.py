# SPDX-License-Identifier: Apache-2.0
"""`run_http`: a Ventu object of this process behind forebay's own listener, its hooks in a few threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.batching.queue import BatchConfig
from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.config import HttpConfig
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.ventu.asgi_service import HEALTH, VentuHttp
from forebay.surfaces.ventu.service_pages import ServicePages
from forebay.transports.http.listener import HttpListener
from forebay.transports.server import Server
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import Runner, RunnerSpec

if TYPE_CHECKING:
    from forebay.surfaces.ventu.service import Service
    from forebay.types.call import Item, Outcome

log = logging.getLogger("ventu.service")

OPAQUE: Final = Contract(raw_input=True, raw_output=True, batchable=False, streams=False)
NEVER_S: Final = 24 * 3600.0
"""Time a request has: the original sets none, and nothing may wait for ever."""
CAPACITY: Final = 65_536
"""Requests that may wait; the original takes any number."""
DRAIN_S: Final = 30.0


def serve(service: Service, host: str, port: int, threads: int) -> None:
    """Serve until SIGTERM or SIGINT; raises ConfigError if the address cannot be bound."""
    spec = RunnerSpec(factory=f"{__name__}:SingleRunner", local=lambda: SingleRunner(service))
    endpoint = Endpoint(
        EndpointConfig(name="ventu", timeout_s=NEVER_S, max_timeout_s=NEVER_S),
        BatchConfig(max_size=1, capacity=CAPACITY, idle="go"),
        ThreadPool(spec, threads=threads),
    )
    app = App([Served(endpoint, OPAQUE)])

    async def metrics() -> tuple[bytes, str]:
        return await asyncio.to_thread(service.metrics.page)

    face = VentuHttp(endpoint, metrics, max_body_bytes=service.model.max_body_bytes)
    face.pages = ServicePages(service.media, service.document())
    http = HttpConfig(host=host, port=port, max_body_bytes=service.model.max_body_bytes, allowed_hosts=("*",))
    listener = HttpListener(http, {}, face, byte_budget=app.byte_budget)

    def ready(host: str, port: int) -> None:
        log.info("Run HTTP service on %s:%d", host, port)

    Server(app, listener, drain_s=DRAIN_S, ready=ready).run()


class SingleRunner(Runner):
    """Runs each request by itself, with `inference` of a model that the program has made."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Answer each item; see `Runner.run`."""
        return [self._answer(item) for item in items]

    def _answer(self, item: Item) -> Any:
        return self._service.is_well() if item.params == HEALTH else self._service.answer(item.body)
