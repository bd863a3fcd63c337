# SPDX-License-Identifier: Apache-2.0
"""Everything HTTP beside the fast lane, as an ASGI application on Starlette.

It answers inference as well, so that an `App` can be mounted in any ASGI server: `asgi_app(app, config)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.routing import Route as PathRoute

from forebay.errors import Cancelled, ForebayError, NotFound, TooLarge, Unavailable, nearest
from forebay.protocols import native, openapi
from forebay.protocols.openai.requests import PATHS
from forebay.serving.endpoint import next_id
from forebay.serving.models.model import Model
from forebay.transports.api_keys import lets_in
from forebay.transports.http import inference, tfserving
from forebay.transports.http.asgi_calls import TOLD
from forebay.transports.http.bodies import BodyTooLong, left, read_body
from forebay.transports.http.dashboard.page import PREFIX, Dashboard, is_public, to_page, wants_page
from forebay.transports.http.errors import (
    ForeignPage,
    MethodNotAllowed,
    NothingThere,
    Unauthorized,
    error_answer,
)
from forebay.transports.http.forms_and_gzip import packed
from forebay.transports.http.model_routes import routes_of
from forebay.transports.http.openai import fault
from forebay.transports.http.pages import ServerPages, path_of, response_of
from forebay.transports.http.route import request_id_of
from forebay.types.call import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from forebay.observe.access_log import EndedCall
    from forebay.server.app import App
    from forebay.server.config import HttpConfig
    from forebay.transports.http.forms_and_gzip import Staged
    from forebay.transports.http.route import Head, Route
    from forebay.types.call import Origin, Request

    Fault: TypeAlias = Callable[[ForebayError, str], tuple[int, list[tuple[bytes, bytes]], bytes]]
    """What writes errors: status, headers and body."""

_MAX_DIGITS: Final = 9
_MODEL: Final = re.compile(r"(?:/v[12])?/models/([^/:]+)(?:/versions/([^/:]+))?")
_ABOUT: Final = re.compile(r"/v2/models/[^/]+(?:/versions/[^/]+)?(?:/config)?$")
"""What tells of a model what only the model knows."""
_MANAGED: Final = re.compile(r"/(?:load|swap|unload|weights)$")


def asgi_app(app: App, config: HttpConfig, more: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Return an ASGI application that answers for `app`, and more that a project has.

    Whoever runs it starts and drains the app.
    """
    by_target = routes_of(app, config, ("GET", "POST"))
    pages = ServerPages(app, config)
    protocol = inference.InferencePages(app, by_target, pages.management, Predict)
    predictions = _Predictions(by_target, pages.model)
    routes = _paths(pages, protocol)

    async def unknown(request: HttpRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status != 404:
            return Response(str(error), status)
        path = path_of(request.scope)
        prefix = request.scope["path"].removesuffix(path)
        hint = nearest(path, [*predictions.paths, *(route.path for route in routes if "{" not in route.path)])
        msg = f"nothing is served at {prefix}{path[:100]}" + (f"; did you mean {prefix}{hint}?" if hint else "")
        is_openai = path.startswith("/v1/") and any(f"/v1/{one}".encode() in by_target for one in PATHS)
        return _error(request, NothingThere(msg), fault if is_openai else error_answer)

    async def failed(request: HttpRequest, error: Exception) -> Response:
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
                expose_headers=["x-request-id"],
            )
        )
    if config.api_keys:
        keys = [key.encode() for key in config.api_keys]
        middleware.append(Middleware(_KeyCheck, keys=keys, has_dashboard=config.dashboard, routes=by_target))
    middleware.append(Middleware(_Lending, lender=app, by_target=by_target))
    handlers: Any = {ForebayError: failed, HTTPException: unknown}
    answering = Starlette(routes=[predictions, *more, *routes], middleware=middleware, exception_handlers=handlers)
    return _without_last_slash(answering)


def beside_dashboard(project: ASGIApp, pages: ServerPages | None, config: HttpConfig) -> ASGIApp:
    """Return an application that answers as a project's own, and has the dashboard at `/ui`.

    Nothing but reading `/ui` and what is below it is taken from the project: the page asks for all else by addresses
    relative to its own.
    """
    board = None if pages is None else pages.dashboard
    if pages is None or board is None:
        return project

    async def failed(request: HttpRequest, error: Exception) -> Response:
        known = error if isinstance(error, ForebayError) else NotFound(f"nothing is served at {request.url.path[:100]}")
        return _error(request, known)

    routes = [PathRoute("/", _Methods(get=board.file)), *_dashboard(board)]
    routes += [PathRoute(f"/{name}", _Methods(get=getattr(pages, name))) for name in ("models", "metrics", "trace")]
    keys = [key.encode() for key in config.api_keys]
    middleware = [Middleware(_KeyCheck, keys=keys, has_dashboard=True, routes={})] if keys else []
    below = Starlette(
        routes=routes, middleware=middleware, exception_handlers={ForebayError: failed, HTTPException: failed}
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
        PathRoute(PREFIX, _Methods(get=board.file)),
        PathRoute(f"{PREFIX}/events", _Methods(get=board.events)),
        PathRoute(f"{PREFIX}/graph/{{name:path}}", _Methods(get=board.graph)),
        PathRoute(f"{PREFIX}/{{file:path}}", _Methods(get=board.file)),
    ]


def _without_last_slash(app: ASGIApp) -> ASGIApp:
    """Let a path with a slash at its end mean the same as without."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and path_of(scope) not in {"/", PREFIX + "/"}:
            scope = {**scope, "path": scope["path"][:-1]}
        await app(scope, receive, send)

    return answer


def _paths(pages: ServerPages, protocol: inference.InferencePages) -> list[PathRoute]:
    routes = [] if pages.dashboard is None else _dashboard(pages.dashboard)
    return [
        PathRoute("/", _Methods(get=pages.index)),
        *routes,
        *(PathRoute(path, protocol) for path in ("/v2", "/v2/{rest:path}")),
        PathRoute("/models", _Methods(get=pages.models)),
        PathRoute("/models/{name}/weights", _Methods(post=pages.management.share)),
        PathRoute("/models/{name}/versions/{version}/load", _Methods(post=pages.management.load)),
        PathRoute("/models/{name}/versions/{version}/swap", _Methods(post=pages.management.swap)),
        PathRoute("/models/{name}/versions/{version}/unload", _Methods(post=pages.management.unload)),
        PathRoute("/models/{name:path}", _Methods(get=pages.model, post=pages.model)),
        PathRoute("/v1/models", _Methods(get=pages.v1_models, fault=fault)),
        PathRoute("/v1/models/{name}", _Methods(get=pages.v1_model, post=pages.v1_missing)),
        PathRoute("/v1/models/{name}/{below:path}", _Methods(get=pages.v1_version, post=pages.v1_missing)),
        PathRoute("/healthz", _Methods(get=pages.healthz)),
        PathRoute("/readyz", _Methods(get=pages.readyz)),
        PathRoute("/metrics", _Methods(get=pages.metrics)),
        PathRoute("/trace", _Methods(get=pages.trace)),
        PathRoute("/openapi.json", _Methods(get=pages.openapi)),
        PathRoute("/docs", _Methods(get=pages.docs)),
        PathRoute("/docs/{asset}", _Methods(get=pages.asset)),
    ]


class _Predictions(BaseRoute):
    """The paths of models, which are looked up when somebody asks."""

    def __init__(self, by_target: Mapping[bytes, Route], page: Any) -> None:
        self._by_target = by_target
        self._page = page

    @property
    def paths(self) -> list[str]:
        """All that there are."""
        return [target.decode() for target in self._by_target if _is_path(target)]

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Tell whether a path is that of a model, and who answers there."""
        target = _target_of(scope)
        route = self._by_target.get(target) if scope["type"] == "http" and _is_path(target) else None
        return (Match.NONE, {}) if route is None else (Match.FULL, {"endpoint": Predict(route).methods(self._page)})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the request answered."""
        await scope["endpoint"](scope, receive, send)


def _target_of(scope: Scope) -> bytes:
    """Return a path as targets are written."""
    return quote(path_of(scope), safe="/:").encode()


def _is_path(target: bytes) -> bool:
    """Tell whether a target is one that pages have: those of the inference protocol go another way."""
    return target == b"/" or not (target.endswith(b"/") or inference.is_inference_path(target.decode()))


def _fault_at(path: str) -> Fault:
    """Return what writes errors at a path that no model has."""
    if inference.is_inference_path(path) or tfserving.is_tfserving_path(path):
        return inference.fault_of
    return fault if path == "/v1/models" or path.startswith("/v1/models/") else error_answer


class _Lending:
    """Has models of repositories loaded for requests that name them, before anything else looks at the path."""

    def __init__(self, app: ASGIApp, lender: App, by_target: Mapping[bytes, Route]) -> None:
        self._app = app
        self._lender = lender
        self._by_target = by_target

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lend the model while the request is answered."""
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
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(_patience_s(scope)):
                    await stack.enter_async_context(stock.lend(found[1], found[2]))
            except TimeoutError:
                problem = Unavailable(f"the model '{found[1]}' is still being loaded; try again later")
                await _error(HttpRequest(scope), problem, _fault_at(path))(scope, receive, send)
                return
            except ForebayError as problem:
                await _error(HttpRequest(scope), problem, _fault_at(path))(scope, receive, send)
                return
            await self._app(scope, receive, send)


def _patience_s(scope: Scope) -> float:
    """Return how long a request waits for its model: no longer than for its answer."""
    told = dict(scope["headers"]).get(b"x-request-timeout-ms", b"")
    return (int(told) if told.isdigit() and len(told) < _MAX_DIGITS else Model.timeout_ms) / 1000


class Predict:
    """One model's POST, as an ASGI application."""

    def __init__(self, route: Route, origin: Origin | None = None) -> None:
        """Answer for a route; `origin` is who sends the request, if that is to be known."""
        self._route = route
        self._origin = origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, submit, and write the answer or the parts of it as they come."""
        in_query = scope["method"] != "POST"
        route = self._route.turn()
        head = route.read_head(scope["headers"], scope["query_string"], in_query=in_query)
        answer: AsgiAnswer | None = None
        staged: Staged | None = None
        try:
            if head.problem is not None:
                raise head.problem
            if in_query:
                _require_no_foreign_page(scope["headers"])
                body = scope["query_string"]
            elif head.is_staged:
                staged = route.stage(head)
                body = await self._read_staged(head, staged, receive)
            else:
                body = await self._read_body(route, head, receive)
            if route.is_retired:
                head = route.now(head, scope["headers"], scope["query_string"])
                route = head.route or route
                if head.problem is not None:
                    raise head.problem
            answer = AsgiAnswer(route, head, send, scope.get(TOLD))
            origin = self._origin
            if origin is None and route.contract.has_context:
                origin = Peer(scope.get("client"))
            outcome = await answer.wait(body, receive, origin)
            await answer.end(outcome)
        except Cancelled:
            return
        except ForebayError as error:
            if answer is None or answer.request is None:
                route.endpoint.reject(error)
            await _send(send, *route.fault(error, (head.id if answer is None else answer.id) or next_id()))
        finally:
            if answer is not None:
                answer.let_go()
            if staged is not None:
                staged.close()

    def methods(self, page: Any) -> _Methods:
        """Return the handlers of a path by verb: a model also describes itself, a further method only answers."""
        contract = self._route.contract
        if not contract.call:
            return _Methods(post=self, get=_Get(self, page))
        is_got = "GET" in contract.verbs or (contract.streams and contract.is_named)
        post = self if "POST" in contract.verbs else None
        return _Methods(post=post, get=self if is_got else None, fault=self._route.fault)

    def runs_for(self, scope: Scope) -> bool:
        """Tell whether a GET runs the model: one that streams is asked so by an `EventSource`, or with a query."""
        contract = self._route.contract
        if not contract.is_named or not contract.streams:
            return False
        accepts = b",".join([value for name, value in scope["headers"] if name == b"accept"])
        return bool(scope["query_string"]) or native.STREAM_TYPE.encode() in accepts.lower()

    async def _read_staged(self, head: Head, staged: Staged, receive: Receive) -> bytes:
        if head.length > staged.max_bytes:
            msg = f"the body has {head.length} bytes, at most {staged.max_bytes} are taken"
            raise TooLarge(msg)
        return _arrived(await staged.read(receive))

    async def _read_body(self, route: Route, head: Head, receive: Receive) -> bytes:
        limit = route.max_body_bytes
        if head.length > limit:
            raise route.too_large(head.length)
        try:
            body = await read_body(receive, limit)
        except BodyTooLong:
            raise route.too_large() from None
        return _arrived(body)


def _arrived(body: bytes | None) -> bytes:
    if body is None:
        msg = "the client went away"
        raise Cancelled(msg)
    return body


def _require_no_foreign_page(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse what a page of another site fetches as a picture or the like: such a request has no Origin to judge by."""
    said = dict(headers)
    if said.get(b"sec-fetch-site") == b"cross-site" and b"origin" not in said:
        msg = (
            "a page of another site calls, as if this were a picture or a link; call from a script, with --cors-origin"
        )
        raise ForeignPage(msg)


class Peer(msgspec.Struct, eq=False):
    """Who sent a request that came over ASGI."""

    client: tuple[str, int] | None
    release: int = 0


def _not_asked(_request: Request, _outcome: Any) -> None:
    """Stand where nobody waits any more."""


class AsgiAnswer:
    """The answer to one request over ASGI."""

    def __init__(self, route: Route, head: Head, send: Send, call: EndedCall | None = None) -> None:
        self.id = head.id
        self.request: Request | None = None
        self._route = route
        self._head = head
        self._send = send
        self._call = call
        self._started = False
        self._parts: asyncio.Queue[tuple[bytes, Callable[[], object]] | None] = asyncio.Queue()
        self._outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def wait(self, body: bytes, receive: Receive, origin: Origin | None) -> Any:
        """Submit and wait for the outcome, sending parts meanwhile.

        Raises:
            Cancelled: If the client goes away before; its request is then cancelled.
        """
        route = self._route
        request = self.request = route.request(self._head, body, self._reply, origin)
        request.on_part = self._part
        self.id = request.id
        route.endpoint.submit(request)
        gone = asyncio.ensure_future(left(receive))
        writing = asyncio.ensure_future(self._write_parts()) if route.contract.streams else None
        waiting: set[asyncio.Future[Any]] = {gone, writing or self._outcome}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not self._outcome.done():
                msg = "the client went away"
                raise Cancelled(msg)
            if writing is not None:
                await writing
            return self._outcome.result()
        finally:
            gone.cancel()
            if writing is not None:
                writing.cancel()
            route.endpoint.cancel(request)

    def let_go(self) -> None:
        """Refer to the request no longer: it refers to this answer, and the collector does not look at requests."""
        request, self.request = self.request, None
        if request is not None:
            request.reply, request.on_part = _not_asked, None  # the traceback of an error may hold it for longer

    async def end(self, outcome: Any) -> None:
        """Write the answer, or the end of a streamed one.

        Raises:
            ForebayError: The outcome's, if nothing was written yet.
        """
        if type(outcome) is Failure:
            if not self._started:
                raise outcome.error
            last = self._route.last_part(outcome.error, self.id)
            await self._send({"type": "http.response.body", "body": last})
        elif outcome is None and self._route.contract.streams:
            await self._start_stream()
            await self._send({"type": "http.response.body", "body": b""})
        else:
            assert self.request is not None
            headers, pieces = self._route.answer(self.request, outcome)
            body, packing = b"".join(pieces), self._head.answer_packing
            if packing:
                body = await asyncio.to_thread(packed, body, packing)
                headers = [*headers, (b"content-encoding", packing)]
            await _send(self._send, 200, [*headers, (b"x-request-id", (self.id or next_id()).encode())], body)

    def _reply(self, request: Request, outcome: Any) -> None:
        self.id = request.id or self.id
        if self._call is not None:
            self._call.answered_by(self._route.endpoint, request)
        if not self._outcome.done():
            self._outcome.set_result(outcome)
        self._parts.put_nowait(None)

    def _part(self, part: bytes, release: Callable[[], object]) -> None:
        self._parts.put_nowait((part, release))

    async def _write_parts(self) -> None:
        while (given := await self._parts.get()) is not None:
            part, release = given
            try:
                await self._start_stream()
                await self._send({"type": "http.response.body", "body": self._route.part(part), "more_body": True})
            finally:
                release()

    async def _start_stream(self) -> None:
        if self._started:
            return
        self._started = True
        self.id = (self.request.id if self.request is not None else self.id) or next_id()
        if self.request is not None:
            self.request.id = self.id
        headers = [
            (b"content-type", self._route.stream_type),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self.id.encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})


class _Get:
    """The GET of a model: its page, unless it is asked for a stream."""

    def __init__(self, predict: Predict, page: Any) -> None:
        self._predict = predict
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET" and self._predict.runs_for(scope):
            await self._predict(scope, receive, send)
        else:
            await (await self._page(HttpRequest(scope, receive)))(scope, receive, send)


class _Methods:
    """Calls the function for the request's method; every other method gets 405, or 204 for OPTIONS."""

    def __init__(self, *, get: Any = None, post: Any = None, fault: Fault = error_answer) -> None:
        self._fault = fault
        self._handlers = {"GET": get, "HEAD": get, "POST": post}
        self._allow = ", ".join([name for name, handler in self._handlers.items() if handler] + ["OPTIONS"]).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        handler = self._handlers.get(method)
        allow = [(b"allow", self._allow)]
        if method == "OPTIONS":
            await _send(send, 204, allow, b"")
        elif handler is None:
            error = MethodNotAllowed(f"{method[:20]} is not possible here, {self._allow.decode()} are")
            status, headers, body = self._fault(error, "")
            await _send(send, status, headers + allow, body)
        elif isinstance(handler, Predict | _Get):
            await handler(scope, receive, send)
        else:
            response = await handler(HttpRequest(scope, receive))
            await response(scope, receive, send)


class _KeyCheck:
    """Asks for an API key wherever one is needed."""

    def __init__(self, app: ASGIApp, keys: list[bytes], *, has_dashboard: bool, routes: Mapping[bytes, Route]) -> None:
        self._app = app
        self._routes = routes
        self._keys = keys
        self._has_dashboard = has_dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_public(scope) and not lets_in(self._keys, scope["headers"]):
            error = Unauthorized("an API key is needed, as X-API-Key or as Authorization: Bearer")
            await _send(send, *self._answer_of(path_of(scope))(error, ""))
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
        if path in openapi.PUBLIC_PATHS or path in inference.PUBLIC_PATHS or path.startswith("/docs/"):
            return True
        if not self._has_dashboard:
            return False
        return is_public(path) or (path == "/" and scope["method"] == "GET" and wants_page(HttpRequest(scope)))


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    if status != 204:
        start["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
    await send(start)
    await send({"type": "http.response.body", "body": body})


def _error(request: HttpRequest, error: ForebayError, fault: Fault = error_answer) -> Response:
    request_id = request_id_of(request.headers.get("x-request-id", "").encode("latin-1"))
    return response_of(fault(error, request_id))
