# SPDX-License-Identifier: Apache-2.0
"""Everything HTTP beside the fast lane, as an ASGI application on Starlette.

It answers inference as well, so that an `App` can be mounted in any ASGI server: `asgi_app(app, config)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.routing import Route as PathRoute

from forebay.errors import Cancelled, ForebayError, NotFound, Unavailable
from forebay.protocols import openapi
from forebay.protocols.openai.doors import DOORS
from forebay.transports.api_keys import lets_in, no_key
from forebay.transports.http import kserve_calls, tfserving
from forebay.transports.http.asgi_calls import failed, id_of, path_as_sent, path_of
from forebay.transports.http.asgi_inference import Methods, Predict, send_answer
from forebay.transports.http.dashboard.page import PREFIX, Dashboard, is_public, to_page, wants_page
from forebay.transports.http.error_answers import error_answer
from forebay.transports.http.http_errors import NothingThere, Unauthorized
from forebay.transports.http.kserve_pages import InferencePages
from forebay.transports.http.model_routes import routes_of
from forebay.transports.http.openai import fault, unspoken
from forebay.transports.http.pages import ServerPages, response_of
from forebay.transports.http.route import Route, whole_number
from forebay.types.did_you_mean import nearest

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from forebay.server.app import App
    from forebay.server.config import HttpConfig
    from forebay.transports.http.asgi_inference import Fault

_READ_AHEAD_BYTES: Final = 64 * 1024
"""What is read of the body of a request whose model is being loaded."""
_MODEL: Final = re.compile(r"(?:/v[12])?/models/([^/:]+)(?:/versions/([^/:]+))?")
_ABOUT: Final = re.compile(r"/v2/models/[^/]+(?:/versions/[^/]+)?(?:/config)?$")
"""What tells of a model what only the model knows."""
_EXPOSED: Final = ["x-request-id", "retry-after", "retry-after-ms", "ratelimit", "ratelimit-policy", "forebay-cost"]
"""Headers of answers that pages of other origins may read."""

_USUAL: Final = {
    **dict.fromkeys(("ping", "live", "livez", "liveness", "alive"), "/healthz"),
    **dict.fromkeys(("readiness", "status"), "/readyz"),
    **dict.fromkeys(("swagger", "swagger-ui", "redoc", "apidocs"), "/docs"),
    **dict.fromkeys(("dashboard", "admin", "console"), "/ui"),
}
"""What other servers call the pages of ours."""
_NAMED: Final = 3
"""So many models are named to who asks for something that is not there."""
_MANAGED: Final = re.compile(r"/(?:load|swap|unload|weights)$")


def asgi_app(app: App, config: HttpConfig, more: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Return an ASGI application that answers for `app`, and for whatever else a project serves.

    Whoever runs it starts and drains the app.
    """
    app.byte_budget.max_bytes = config.max_buffered_bytes  # there may be no port that says so
    by_target = routes_of(app, config, ("GET", "POST"))
    pages = ServerPages(app, config)
    protocol = InferencePages(app, by_target, pages.management, Predict)
    predictions = _Predictions(by_target, pages.model)
    routes = _paths(pages, protocol)

    async def unknown(request: HttpRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status != 404:
            return Response(str(error), status)
        path = path_of(request.scope)
        if path == "*" and request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": "GET, HEAD, POST, OPTIONS"})
        if (why := unspoken(path)) is not None:
            return _error(request, NothingThere(why), partial(fault, path=path))
        prefix = request.scope["path"].removesuffix(path)
        is_v1 = path.startswith("/v1/")
        models = [one for one in predictions.paths if is_v1 or not tfserving.is_tfserving_path(one)]
        here = [route.path for route in routes if "{" not in route.path]
        usual = _USUAL.get(path.rpartition("/")[2].lower(), "")
        hint = usual if usual in here else nearest(path, [*models, *here])
        msg = f"nothing is served at {prefix}{path[:100]}" + (f"; did you mean {prefix}{hint}?" if hint else "")
        spoken = [door.targets[0] for door in DOORS if is_v1 and door.targets[0].encode() in by_target]
        named = [one for name in app.served if (one := f"/models/{quote(name)}").encode() in by_target]
        if not hint and (asked := spoken or (named[:_NAMED] if request.method == "POST" else [])):
            msg += f"; models here are asked at {' and '.join(prefix + one for one in asked)}"
        return _error(request, NothingThere(msg), partial(fault, path=path) if spoken else error_answer)

    async def refused(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ForebayError)
        return _error(request, error)

    middleware: list[Middleware] = []
    if config.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=_EXPOSED,
            )
        )
    if config.api_keys:
        keys = [key.encode() for key in config.api_keys]
        middleware.append(Middleware(_KeyCheck, keys=keys, config=config, routes=by_target))
    middleware.append(Middleware(_Lending, lender=app, by_target=by_target))
    handlers: Any = {ForebayError: refused, HTTPException: unknown}
    answering = Starlette(routes=[predictions, *more, *routes], middleware=middleware, exception_handlers=handlers)
    return _without_last_slash(_kept_by_nobody(answering))


def with_cors(project: ASGIApp, config: HttpConfig) -> ASGIApp:
    """Allow calls from pages of other origins, if any were named."""
    if not config.cors_origins:
        return project
    origins, methods = config.cors_origins, ["GET", "POST"]
    return CORSMiddleware(
        project, allow_origins=origins, allow_methods=methods, allow_headers=["*"], expose_headers=_EXPOSED
    )


def beside_dashboard(project: ASGIApp, pages: ServerPages | None, config: HttpConfig) -> ASGIApp:
    """Return an application that answers as a project's own, and has the dashboard at `/ui`.

    Only requests that read `/ui`, or what is below it, are taken from the project; the page fetches everything else by
    addresses relative to its own.
    """
    board = None if pages is None else pages.dashboard
    if pages is None or board is None:
        return project

    async def refused(request: HttpRequest, error: Exception) -> Response:
        known = error if isinstance(error, ForebayError) else NotFound(f"nothing is served at {request.url.path[:100]}")
        return _error(request, known)

    routes = [PathRoute("/", Methods(get=board.file)), *_dashboard(board)]
    routes += [PathRoute(f"/{name}", Methods(get=getattr(pages, name))) for name in ("models", "metrics", "trace")]
    keys = [key.encode() for key in config.api_keys]
    middleware = [Middleware(_KeyCheck, keys=keys, config=config, routes={})] if keys else []
    below = Starlette(
        routes=routes, middleware=middleware, exception_handlers={ForebayError: refused, HTTPException: refused}
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_read = scope["type"] == "http" and scope["method"] in {"GET", "HEAD"}
        if is_read and scope["path"] == PREFIX:
            await to_page(f"{PREFIX[1:]}/")(scope, receive, send)
        elif is_read and scope["path"].startswith(f"{PREFIX}/"):
            await below({**scope, "root_path": scope.get("root_path", "") + PREFIX}, receive, send)
        else:
            await project(scope, receive, send)

    return answer


def _dashboard(board: Dashboard) -> list[PathRoute]:
    return [
        PathRoute(PREFIX, Methods(get=board.file)),
        PathRoute(f"{PREFIX}/events", Methods(get=board.events)),
        PathRoute(f"{PREFIX}/history", Methods(get=board.history)),
        PathRoute(f"{PREFIX}/nodes", Methods(get=board.nodes)),
        PathRoute(f"{PREFIX}/tenants", Methods(get=board.tenants)),
        PathRoute(f"{PREFIX}/graph/{{name:path}}", Methods(get=board.graph)),
        PathRoute(f"{PREFIX}/{{file:path}}", Methods(get=board.file)),
    ]


def _without_last_slash(app: ASGIApp) -> ASGIApp:
    """Treat a path with a trailing slash as the same path without it; some frameworks add one when they mount."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            own = {"/", PREFIX + "/", "/docs/"} if path_as_sent(scope).endswith("/") else {"/"}
            if path_of(scope) not in own:
                scope = {**scope, "path": scope["path"][:-1]}
        await app(scope, receive, send)

    return answer


def _kept_by_nobody(app: ASGIApp) -> ASGIApp:
    """Have no cache keep what is read, unless it says for how long: others (Varnish) take two minutes for granted."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unkept(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                if not any(name.lower() == b"cache-control" for name, _ in headers):
                    message = {**message, "headers": [*headers, (b"cache-control", b"no-store")]}
            await send(message)

        is_read = scope["type"] == "http" and scope["method"] in {"GET", "HEAD"}
        await app(scope, receive, send_unkept if is_read else send)

    return answer


def _paths(pages: ServerPages, protocol: InferencePages) -> list[PathRoute]:
    routes = [] if pages.dashboard is None else _dashboard(pages.dashboard)
    return [
        PathRoute("/", Methods(get=pages.index, instead=pages.where_models_are)),
        *routes,
        *(PathRoute(path, protocol) for path in ("/v2", "/v2/{rest:path}")),
        PathRoute("/models", Methods(get=pages.models)),
        PathRoute("/models/{name:path}/weights", Methods(post=pages.management.share)),
        PathRoute("/models/{name:path}/versions/{version}/load", Methods(post=pages.management.load)),
        PathRoute("/models/{name:path}/versions/{version}/swap", Methods(post=pages.management.swap)),
        PathRoute("/models/{name:path}/versions/{version}/unload", Methods(post=pages.management.unload)),
        PathRoute("/models/{name:path}", Methods(get=pages.model, post=pages.model)),
        PathRoute("/v1/models", Methods(get=pages.v1_models, fault=fault)),
        PathRoute("/v1/models/{path:path}", Methods(get=pages.v1_model, post=pages.v1_missing)),
        PathRoute("/healthz", Methods(get=pages.healthz)),
        PathRoute("/readyz", Methods(get=pages.readyz)),
        PathRoute("/metrics", Methods(get=pages.metrics)),
        PathRoute("/costs", Methods(get=pages.costs)),
        PathRoute("/refusals/{request_id:path}", Methods(get=pages.refusal)),
        PathRoute("/trace", Methods(get=pages.trace, post=pages.trace.end)),
        PathRoute("/openapi.json", Methods(get=pages.openapi)),
        *(PathRoute(path, Methods(get=pages.docs)) for path in ("/docs", "/docs/")),
        PathRoute("/docs/{asset}", Methods(get=pages.asset)),
    ]


class _Predictions(BaseRoute):
    """The paths of models, looked up on demand."""

    def __init__(self, by_target: Mapping[bytes, Route], page: Any) -> None:
        self._by_target = by_target
        self._page = page

    @property
    def paths(self) -> list[str]:
        return [target.decode() for target in self._by_target if _is_path(target)]

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Tell whether a path is that of a model, and who answers there."""
        target = _target_of(scope)
        route = self._by_target.get(target) if scope["type"] == "http" and _is_path(target) else None
        if route is None:
            return (Match.NONE, {})
        page = None if tfserving.is_tfserving_path(path_of(scope)) else self._page
        return (Match.FULL, {"endpoint": Predict(route).methods(page)})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["endpoint"](scope, receive, send)


def _target_of(scope: Scope) -> bytes:
    """Return a path as targets are written."""
    return quote(path_of(scope), safe="/:").encode()


def _is_path(target: bytes) -> bool:
    """Tell whether a target is one that pages have: those of the inference protocol go another way."""
    return target == b"/" or not (target.endswith(b"/") or kserve_calls.is_inference_path(target.decode()))


def _fault_at(path: str) -> Fault:
    """Return what writes errors at a path that no model has."""
    if kserve_calls.is_inference_path(path) or tfserving.is_tfserving_path(path):
        return kserve_calls.fault_of
    return fault if path == "/v1/models" or path.startswith("/v1/models/") else error_answer


class _Lending:
    """Has models of repositories loaded for requests that name them, before anything else looks at the path."""

    def __init__(self, app: ASGIApp, lender: App, by_target: Mapping[bytes, Route]) -> None:
        self._app = app
        self._lender = lender
        self._by_target = by_target

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stock = self._lender.stock
        found, path = None, path_of(scope) if scope["type"] == "http" else ""
        if (
            stock is not None
            and scope["type"] == "http"
            and (scope["method"] == "POST" or _ABOUT.search(scope["path"]))
        ):
            found = None if _target_of(scope) in self._by_target else _MODEL.match(path_of(scope))
            if found is not None and stock.is_ready and not stock.offer.has(found[1]):
                found = None
        if stock is None or found is None or _MANAGED.search(found.string):
            await self._app(scope, receive, send)
            return
        told_ms = whole_number(dict(scope["headers"]).get(b"x-request-timeout-ms", b""))
        patience_s = stock.offer.patience_s(found[1], told_ms / 1000 if told_ms else None)
        ahead = _Ahead(receive)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(patience_s) as limit, ahead.until_left(limit):
                    await stack.enter_async_context(stock.lend(found[1], found[2]))
            except (TimeoutError, ForebayError) as error:
                problem = error if isinstance(error, ForebayError) else None
                if ahead.has_left:
                    problem = Cancelled("the client went away")
                problem = problem or Unavailable(f"the model '{found[1]}' is still being loaded; try again later")
                await _error(HttpRequest(scope), problem, _fault_at(path))(scope, receive, send)
                return
            await self._app(scope, ahead.receive, send)


class _Ahead:
    """Reads a request while it waits for its model, as that tells whether its client has left.

    Attributes:
        has_left: Whether it has.
    """

    def __init__(self, receive: Receive) -> None:
        self.has_left = False
        self._receive = receive
        self._read: deque[Message] = deque()

    @contextlib.asynccontextmanager
    async def until_left(self, limit: asyncio.Timeout) -> AsyncGenerator[None]:
        """End a time limit as soon as the client has left."""
        is_waiting = True

        def over(_watching: asyncio.Task[None]) -> None:
            if is_waiting and not limit.expired():
                self.has_left = True
                limit.reschedule(0.0)

        watching = asyncio.ensure_future(self._watch())
        watching.add_done_callback(over)
        try:
            yield
        finally:
            is_waiting = False  # `over` may be on its way
            watching.cancel()

    async def receive(self) -> Message:
        """Return the next message of the request."""
        return self._read.popleft() if self._read else await self._receive()

    async def _watch(self) -> None:
        """Return once the client has left; a long body is not read to its end for that."""
        length = 0
        while length <= _READ_AHEAD_BYTES:
            message = await self._receive()
            self._read.append(message)
            if message["type"] == "http.disconnect":
                return
            length += len(message.get("body", b""))
        await asyncio.Event().wait()


class _KeyCheck:
    """Asks for an API key wherever one is needed."""

    def __init__(self, app: ASGIApp, keys: list[bytes], *, config: HttpConfig, routes: Mapping[bytes, Route]) -> None:
        self._app = app
        self._routes = routes
        self._keys = keys
        self._has_dashboard = config.dashboard
        self._public = openapi.public_paths(metrics=config.public_metrics) | kserve_calls.PUBLIC_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_public(scope) and not lets_in(self._keys, scope["headers"]):
            error = Unauthorized(no_key(scope["headers"]))
            failed(scope, error)
            await send_answer(send, *self._answer_of(path_of(scope))(error, id_of(scope)))
            return
        await self._app(scope, receive, send)

    def _answer_of(self, path: str) -> Fault:
        """Return what writes errors at a path."""
        route = self._routes.get(path.encode())
        if route is not None:
            return route.fault
        return _fault_at(path)

    def _is_public(self, scope: Scope) -> bool:
        path = path_of(scope)
        if path in self._public or path.startswith("/docs/"):
            return True
        if not self._has_dashboard:
            return False
        return is_public(path) or (path == "/" and scope["method"] == "GET" and wants_page(HttpRequest(scope)))


def _error(request: HttpRequest, error: ForebayError, fault: Fault = error_answer) -> Response:
    request_id = id_of(request.scope)
    failed(request.scope, error, request_id)
    return response_of(fault(error, request_id))
