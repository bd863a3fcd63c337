# SPDX-License-Identifier: Apache-2.0
"""App of a Nucleus project, and the HTTP or gRPC port at which it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.config import HttpConfig, grpc_like
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint
from forebay.surfaces.nucleus.project_models import info_of
from forebay.surfaces.nucleus.worker_requests import Desk
from forebay.types.call import ALONE
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire.frames import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from forebay.surfaces.contract import Options
    from forebay.surfaces.nucleus.model_store import ModelStore
    from forebay.surfaces.nucleus.project_settings import NucleusConfig
    from forebay.surfaces.nucleus.proto import UserService
    from forebay.transports.grpc.listener import GrpcListener
    from forebay.transports.http.route import Route


class NucleusApp(App):
    """An app that, once it is up, asks its handler what it can do, and answers what its workers ask.

    Attributes:
        desk: Where its workers ask.
        store: The models of the project, if it has any.
        learn: Called with what the handler can do.
    """

    def __init__(self, endpoint: Endpoint, spec: RunnerSpec) -> None:
        super().__init__([Served(endpoint, Contract(raw_input=True, raw_output=True, batchable=False, streams=True))])
        self.desk = Desk()
        self.store: ModelStore | None = None
        self.learn: Callable[[Any], None] = lambda _about: None
        self.endpoint = endpoint
        self._spec = spec
        self._has_learned = False

    async def start(self) -> None:
        """Bring up the workers and learn what their handler can do."""
        if "desk" in self._spec.kwargs:
            cast("dict[str, Any]", self._spec.kwargs)["desk"] = await self.desk.open()
        if self.store is not None:
            await self.store.start()
        await super().start()
        self.learn(await self.endpoint.call(b"", params={"verb": "about", "rpc": ""}, key=ALONE))
        self._has_learned = True

    async def drain(self, grace_s: float) -> None:
        """Stop the workers, and then what they ask."""
        await super().drain(grace_s)
        self.desk.close()
        if self.store is not None:
            self.store.stop()

    def problems(self) -> list[str]:
        """Return why the server is not ready; a handler whose verbs are not known yet is not."""
        found = super().problems()
        return found or ([] if self._has_learned else ["the handler is loading"])


def http_door(
    app: NucleusApp, config: NucleusConfig, options: Options, http: HttpConfig
) -> tuple[ASGIApp, Mapping[bytes, Route]]:
    """Return the HTTP application of a project, and its routes on the fast lane."""
    from forebay.surfaces.nucleus import kserve
    from forebay.surfaces.nucleus.http import POST_KEY, NucleusHttp
    from forebay.surfaces.nucleus.in_flight import InFlight
    from forebay.transports.http.asgi import beside_dashboard
    from forebay.transports.http.asgi_inference import Predict
    from forebay.transports.http.kserve_calls import routes_alone
    from forebay.transports.http.kserve_pages import InferencePages
    from forebay.transports.http.management import Management
    from forebay.transports.http.pages import ServerPages

    is_batched = config.post_batching is not None
    served = app.served[app.endpoint.name]
    in_flight = InFlight(config.max_concurrency)
    kserve.let_in(served, POST_KEY if is_batched else ALONE, in_flight)
    pages: ServerPages | None = None
    protocol: InferencePages | None = None
    routes: Mapping[bytes, Route] = {}
    if options.extra_routes:
        pages = ServerPages(app, http)
        routes = routes_alone(served, http, lambda: app.shared_regions)
        protocol = InferencePages(app, routes, Management(app, http), Predict)
    face = NucleusHttp(
        app.endpoint,
        batched=is_batched,
        in_flight=in_flight,
        max_body_bytes=http.max_body_bytes if "max_body_bytes" in options.given else None,
        http=http,
        pages=pages,
        protocol=protocol,
    )
    app.learn = face.learn
    if app.store is not None:
        face.info = info_of(config, app.store)
    return beside_dashboard(face, pages, http), routes


def grpc_door(
    app: NucleusApp, config: NucleusConfig, options: Options, http: HttpConfig, service: UserService, source: str
) -> GrpcListener:
    """Return the gRPC port of a project whose handler has a service of its own."""
    from forebay.surfaces.nucleus.inflow import Inflows
    from forebay.surfaces.nucleus.rpc import NucleusRpc
    from forebay.transports.grpc.listener import GrpcListener

    face = NucleusRpc(app.endpoint, service, Inflows(app.desk), max_concurrency=config.max_concurrency)
    app.learn = face.learn
    max_message_bytes = http.max_body_bytes if "max_body_bytes" in options.given else MAX_FRAME_BYTES
    grpc = msgspec.structs.replace(
        grpc_like(http, options.grpc),
        port=http.port,
        max_message_bytes=max_message_bytes,
        max_buffered_bytes=max(http.max_buffered_bytes, 2 * max_message_bytes),
    )
    return GrpcListener(grpc, [face.service()], lambda: not app.problems(), source, byte_budget=app.byte_budget)
