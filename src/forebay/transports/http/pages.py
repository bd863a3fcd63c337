# SPDX-License-Identifier: Apache-2.0
"""What a server tells about itself: its models, its health, its numbers and its documents, as pages of HTTP."""

from __future__ import annotations

import asyncio
import gzip
import re
import time
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from forebay._version import __version__
from forebay.errors import Cancelled, ForebayError, InvalidRequest, NotFound
from forebay.observe.logs.noted_refusals import MAX_EACH, MAX_ID, MAX_PAIRS, LastRefusals
from forebay.observe.metrics.author_metrics import MetricStore
from forebay.observe.metrics.exposition import Exposition, Reading, finish_in_turns, pieces
from forebay.observe.metrics.repository_metrics import RepositoryCollector
from forebay.observe.metrics.serving_metrics import ServingCollector
from forebay.protocols import openapi
from forebay.server import stock_report
from forebay.server.model_index import in_turns
from forebay.serving.nx_serving import registry
from forebay.transports.http import kserve_calls, openai, tfserving
from forebay.transports.http.asgi_calls import failed, id_of, path_as_sent, path_of
from forebay.transports.http.dashboard.page import Dashboard, from_root, wants_page, without_last_slash
from forebay.transports.http.management import ACTIONS, Management
from forebay.transports.http.page_headers import API_PAGE, NOT_GUESSED
from forebay.transports.http.trace_page import TracePage
from forebay.types.did_you_mean import meant

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from forebay.server.app import App
    from forebay.server.config import HttpConfig
    from forebay.server.served import Served
    from forebay.serving.endpoint import Endpoint

_ASSETS: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "docs-init.js": "text/javascript",
    "docs.css": "text/css",
}
_LINK_BACK: Final = b'<a href="ui">Dashboard</a>'
_NAMED: Final = 3
"""Models that a sentence names."""


class ServerPages:
    """What a server tells about itself."""

    def __init__(self, app: App, config: HttpConfig) -> None:
        self._app = app
        self._config = config
        servings = ServingCollector(lambda: [process.reading() for process in registry.running()])
        self._repositories = RepositoryCollector()
        self._exposition = Exposition(
            self._endpoints, self._reading_once, servings, self._repositories, app.state.of(MetricStore)
        )
        self._openapi: bytes | None = None
        self._changes = 0
        self._created = int(time.time())
        self._describing = asyncio.Lock()
        self._adding_up = asyncio.Lock()
        app.watch(self._changed)
        self.trace = TracePage(app)
        self.management = Management(app, config)
        self.dashboard = Dashboard(app, config, self._endpoints, self._reading) if config.dashboard else None

    async def index(self, request: HttpRequest) -> Response:
        """Say where to go when several models are served; a browser is sent to the dashboard."""
        if self.dashboard is not None and wants_page(request):
            return from_root(request)
        models, root = self._names(), request.scope.get("root_path", "")
        return _json({"models": models, "docs": f"{root}/docs", "call": f"POST {root}/models/{{name}}"})

    def where_models_are(self, scope: Scope) -> str:
        """Say where models are, for a request that names none of several."""
        names, root = self._names(), scope.get("root_path", "")
        shown = " and ".join(f"{root}/models/{name}" for name in names[:_NAMED])
        return f"; models here are asked at {shown}{' and so on' if len(names) > _NAMED else ''}" if names else ""

    def _names(self) -> list[str]:
        names = [] if self._app.stock is None else self._app.stock.offer.names
        return list(dict.fromkeys([*self._app.served, *names]))

    async def models(self, _request: HttpRequest) -> Response:
        """List the models."""
        models = await in_turns(self._app.describe_each()) + [process.describe() for process in registry.running()]
        problem = {"problem": self._app.problem} if self._app.problem else {}
        stock = {} if self._app.stock is None else stock_report.describe(self._app.stock)
        return _json({"models": models, **problem, **stock})

    async def model(self, request: HttpRequest) -> Response:
        """Describe one model."""
        only, path = self._app.only, path_of(request.scope)
        name = request.path_params.get("name") or path.removeprefix("/models/")
        if path == "/" and only is not None:
            if self.dashboard is not None and wants_page(request):
                return from_root(request)
            name = only.endpoint.name
        name, below = self._app.split_name(name.split("/"))
        path, _, version = "/".join(["", *below]).partition("/versions/")
        version, _, action = version.partition("/")
        name += path
        if action:
            further = self._app.served[name].contracts if name in self._app.served else ()
            there = [*ACTIONS, *(path.removeprefix("/") for path in further if path)]
            told = f"there is {', '.join(there)}{meant(action, there)}"
            raise NotFound(f"a version of a model has no '{action[:40]}'; {told}")
        started = None if name in self._app.served else registry.find(name)
        return _json(self._app.describe(name, version or None) if started is None else started.describe())

    async def v1_models(self, _request: HttpRequest) -> Response:
        """List the models for clients of OpenAI's protocol, and of the first one of KServe."""
        return _json(openai.models_page(self._app, self._created))

    async def v1_model(self, request: HttpRequest) -> Response:
        """Describe one model for them, or a version of it as TensorFlow Serving does."""
        app, path = self._app, request.path_params["path"]
        name, below = app.split_name(path.split("/"))
        if ":" in name:
            return await self.v1_missing(request)
        try:
            return _json(tfserving.about(app, name, below) if below else openai.model_page(app, name, self._created))
        except ForebayError as error:
            failed(request.scope, error)
            in_form = openai.fault if not below and openai.names(app) else kserve_calls.fault_of
            return response_of(in_form(error, id_of(request.scope)))

    async def v1_missing(self, request: HttpRequest) -> Response:
        """Say why nothing answers to a verb of a model."""
        error = tfserving.not_there(self._app, request.path_params["path"])
        failed(request.scope, error)
        return response_of(kserve_calls.fault_of(error, id_of(request.scope)))

    async def healthz(self, _request: HttpRequest) -> Response:
        """Tell that the process answers."""
        return _json({"status": "alive"}, 200 if self._app.is_live else 503)

    async def readyz(self, _request: HttpRequest) -> Response:
        """Tell whether the models can be called now; one of a repository may be broken while others are served."""
        problems = self._app.problems()
        if problems:
            return _json({"status": "not ready", "problems": problems}, 503)
        return _json({"status": "ready"})

    async def metrics(self, request: HttpRequest) -> Response:
        """Return the Prometheus page."""
        return _Pieces(*await self.written_metrics(request.headers.get("accept", "")))

    async def costs(self, request: HttpRequest) -> Response:
        """Return what tenants have cost in the last `since_s` seconds, for each version of a model."""
        cost_log = self._app.cost_log
        if cost_log is None:
            raise NotFound("costs are not written here; start the server with --cost-log FOLDER")
        text = request.query_params.get("since_s", "3600")
        if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text, re.ASCII) is None:
            raise InvalidRequest(f"since_s is a number of seconds, such as 3600, got {text[:40]!r}")
        async with self._adding_up:  # one at a time, in a thread
            if await request.is_disconnected():
                raise Cancelled("the client went away")
            costs = await asyncio.to_thread(cost_log.since, time.time() - float(text))
        return _json(costs)

    async def refusal(self, request: HttpRequest) -> Response:
        """Return why a request was refused, by the id of its answer."""
        request_id = request.path_params["request_id"]
        found = self._app.state.of(LastRefusals).find(request_id)
        if found is None:
            msg = f"no refusal of a request '{request_id[:MAX_ID]}' is kept; the last {MAX_EACH} of each tenant and"
            raise NotFound(f"{msg} reason are, of {MAX_PAIRS} such pairs")
        return _json(found)

    async def written_metrics(self, accept: str) -> tuple[list[bytes], str]:
        """Write the Prometheus page, with turns of the loop for others; returns its pieces and its media type."""
        if self._app.clients is not None:
            await self._app.clients.refresh()
        columns = await finish_in_turns(self._exposition.write())
        stock = self._app.stock
        self._repositories.reading = None if stock is None else stock_report.reading(stock)
        # The user's collectors may take long, so they run in a thread.
        rest, media_type = await asyncio.to_thread(self._exposition.others, accept)
        written: list[bytes] = []
        for piece in pieces(columns, media_type):
            written.append(piece)
            await asyncio.sleep(0)
        return [*written, rest], media_type

    async def openapi(self, _request: HttpRequest) -> Response:
        """Return the OpenAPI document."""
        async with self._describing:
            document = self._openapi
            if document is None:
                changes = self._changes
                described = [one.described for one in self._served() if one.described is not None]
                apart = [one.described for one in self._served() if not self._app.is_shared(one)]
                title, version = "forebay", __version__
                if len({one.name for one in described}) == 1:
                    title, version = described[0].name, described[0].version or __version__
                public = openapi.public_paths(metrics=self._config.public_metrics)
                access: dict[str, Any] = {"api_key": bool(self._config.api_keys), "public": public}
                access["manages"] = self.management.is_open
                # In a thread, as many of them take seconds, and requests must not wait for that.
                document = await asyncio.to_thread(openapi.written, title, version, described, apart=apart, **access)
                if changes == self._changes:
                    self._openapi = document
        return Response(document, media_type="application/json")

    async def docs(self, request: HttpRequest) -> Response:
        """Return the page that shows the document."""
        if path_as_sent(request.scope).endswith("/"):
            return without_last_slash(request)
        body = _file("docs.html")
        if self.dashboard is None:
            body = body.replace(_LINK_BACK, b"")
        return Response(body, media_type="text/html", headers=API_PAGE)

    async def asset(self, request: HttpRequest) -> Response:
        """Return a file of that page."""
        name = request.path_params["asset"]
        media_type = _ASSETS.get(name)
        if media_type is None:
            raise NotFound(f"the documentation page has no file '{name[:100]}'")
        body = _asset(name)
        headers = {"cache-control": "max-age=86400", **NOT_GUESSED}
        if body[:2] == b"\x1f\x8b":
            if "gzip" in request.headers.get("accept-encoding", ""):
                headers["content-encoding"] = "gzip"
            else:
                body = gzip.decompress(body)
        return Response(body, media_type=media_type, headers=headers)

    def _changed(self, _name: str) -> None:
        self._openapi = None
        self._changes += 1

    def _served(self) -> Iterator[Served]:
        """All versions of all models; for each model, first the one that answers requests that name no version."""
        for name, default in self._app.served.items():
            yield default
            yield from (one for one in self._app.versions(name).ready.values() if one is not default)

    def _reading(self, endpoint: Endpoint) -> Reading:
        found, clients = reading(endpoint), self._app.clients
        return found if clients is None else msgspec.structs.replace(found, metrics=clients.of(endpoint))

    def _reading_once(self, endpoint: Endpoint) -> Reading:
        """Return the numbers without requests that are on the pages of the servers which have handed them on."""
        found, metrics = self._reading(endpoint), endpoint.metrics
        if self._app.clients is not None or metrics.own is None:
            return found
        return msgspec.structs.replace(found, metrics=metrics.with_clients(metrics.own))

    def _endpoints(self) -> Iterator[Endpoint]:
        for served in self._app.every:
            yield served.endpoint
            yield from served.nodes.values()


def reading(endpoint: Endpoint) -> Reading:
    """Return the numbers of an endpoint at this moment."""
    pool = endpoint.pool.statistics()
    return Reading(
        endpoint.name,
        endpoint.config.version,
        endpoint.metrics,
        endpoint.in_flight,
        endpoint.waiting,
        pool.alive,
        pool.restarts,
        None if endpoint.auto is None else endpoint.auto.objective_held,
        pool.idle,
        pool.slots,
        pool.problem,
        pool.devices,
        endpoint.pool.is_elsewhere,
        endpoint.tenants_waiting,
        pool.wanted,
        endpoint.waiting_requests,
        pool.unhealthy,
    )


class _Pieces(Response):
    """A long answer that is handed to the connection piece by piece, with a turn for others between them."""

    def __init__(self, pieces: list[bytes], media_type: str) -> None:
        length = str(sum(map(len, pieces)))
        super().__init__(headers={"content-type": media_type, "content-length": length})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


def response_of(answer: tuple[int, list[tuple[bytes, bytes]], bytes]) -> Response:
    """Return status, headers and body as Starlette has them."""
    status, headers, body = answer
    return Response(body, status, headers={name.decode(): value.decode() for name, value in headers})


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


@cache
def _file(name: str) -> bytes:
    return resources.files("forebay.transports.http").joinpath(name).read_bytes()


@cache
def _asset(name: str) -> bytes:
    folder = resources.files("forebay.transports.http").joinpath("assets")
    packed = folder.joinpath(name + ".gz")
    return packed.read_bytes() if packed.is_file() else folder.joinpath(name).read_bytes()
