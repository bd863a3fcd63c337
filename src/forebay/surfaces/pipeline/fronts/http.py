# SPDX-License-Identifier: Apache-2.0
"""The REST gateway of a pipeline, in the same process: `POST /{name}/{method}` with a request in JSON.

Every POST to a path of two segments is a service's, so that a service may have any name. Forebay's own pages have one
segment, or are only read.
Plain requests to plain paths are answered on the fast lane; all others come by the ASGI application, which takes the
same routes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ForebayError, QueueFull, TooLarge
from forebay.protocols.native import Contract, status_of
from forebay.remote_servers.servers import PARENT
from forebay.server.served import StandIn
from forebay.serving.endpoint import EndpointConfig
from forebay.surfaces.pipeline.protocol import rest
from forebay.transports.api_keys import lets_in, no_key
from forebay.transports.http.asgi_calls import failed
from forebay.transports.http.asgi_inference import Peer, Predict, send_answer
from forebay.transports.http.error_answers import error_headers
from forebay.transports.http.http_errors import Unauthorized
from forebay.transports.http.kserve_calls import PUBLIC_PATHS, is_inference_path
from forebay.transports.http.route import Route
from forebay.types.call import Failure, Origin, Outcome, Reply, Request
from forebay.types.json_elements import json_elements

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from forebay.server.config import HttpConfig
    from forebay.surfaces.pipeline.dag.predictions import Prediction, Predictions
    from forebay.transports.http.head import Head
    from forebay.transports.http.kserve_pages import InferencePages
    from forebay.transports.http.pages import ServerPages
    from forebay.types.batch import EntryBatch
    from forebay.types.element_limits import Steps
    from forebay.types.tenant import Tenant

MAX_ROUTES: Final = 1024
"""Paths that are remembered; any client can name new ones."""

_PATH: Final = re.compile(rb"/([A-Za-z0-9_.~-]{1,128})/([A-Za-z0-9_.~-]{1,128})")
_TOLD: Final = frozenset({b"www-authenticate", b"retry-after", b"retry-after-ms"})
"""Headers of errors."""
_IGNORED: Final = frozenset({b"content-type", b"accept", b"content-encoding", b"origin"})
_CONTRACT: Final = Contract(raw_input=False, raw_output=False, batchable=False, streams=False)
_OPEN_PAGES: Final = frozenset({"/healthz", "/readyz"})
_JSON: Final = (b"content-type", b"application/json")
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")


class Gateway(Mapping[bytes, Route]):
    """The routes of a pipeline: any path of two segments has one."""

    def __init__(self, inference: Predictions, config: HttpConfig) -> None:
        self._inference = inference
        self._config = config
        self._routes: dict[bytes, Route] = {}
        self.others: Mapping[bytes, Route] = {}
        """Routes of other protocols."""

    def __getitem__(self, target: bytes) -> Route:
        route = self.others.get(target) or self._routes.get(target)
        if route is not None:
            return route
        found = _PATH.fullmatch(target)
        if found is None:
            raise KeyError(target)
        if len(self._routes) >= MAX_ROUTES:
            self._routes.clear()
        name, method = (part.decode() for part in found.groups())
        route = self._routes[target] = self.route(name, method)
        return route

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._routes)

    def __len__(self) -> int:
        return len(self._routes)

    def route(self, name: str, method: str) -> Route:
        """Return the route of a service and a method."""
        return _GatewayRoute(AskedPipeline(self._inference, name, method), self._config)


class AskedPipeline:
    """A service and a method in the form of an endpoint, as far as routes need one."""

    places = None

    def __init__(self, inference: Predictions, name: str, method: str) -> None:
        self.name = name
        self.config = EndpointConfig(name=name, max_timeout_s=inference.endpoint.config.max_timeout_s)
        self.batching = inference.endpoint.batching
        self.is_full = inference.endpoint.is_full
        self.is_full_for = inference.endpoint.is_full_for
        self._inference = inference
        self._method = method
        self._open: dict[Request, Callable[[], object] | None] = {}

    @property
    def answering(self) -> EntryBatch | None:
        """The graph's batch that is being replied to right now."""
        return self._inference.endpoint.answering

    def submit(self, request: Request) -> None:
        """Answer a request."""
        body, params = request.body, request.params

        def respond(found: Any, asked: Prediction | None) -> None:
            if request in self._open:
                request.body = asked  # for those who are told of calls
                outcome = Failure(found) if isinstance(found, ForebayError) else self.written(found, params)
                del self._open[request]
                request.reply(request, outcome)

        self._open[request] = None
        call_off = self._inference.submit(
            partial(self.read, body, params),
            is_quick=self.is_quick(body),
            deadline=request.deadline,
            peer=_peer(request),
            respond=respond,
            parent=request.params.get(PARENT, ""),
            tenant=request.tenant,
        )
        if request in self._open:
            self._open[request] = call_off

    def is_quick(self, body: Any) -> bool:
        """Tell whether reading a body takes a moment only."""
        return rest.is_quick(body, self._inference.request_class)

    def read(self, body: Any, _params: Mapping[str, Any]) -> Any:
        """Return a body as a message; raises InvalidRequest if it is none."""
        asked = rest.request_of(body, self._inference.request_class)
        # The service and method of the path count, and not those in the body.
        fields = asked.DESCRIPTOR.fields_by_name
        if "name" in fields:
            asked.name = self.name
        if "method" in fields:
            asked.method = self._method
        return asked

    def written(self, found: Any, _params: Mapping[str, Any]) -> Outcome:
        """Return an answer as an outcome."""
        return rest.response_json(found)

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away."""
        call_off = self._open.pop(request, None)
        if call_off is not None:
            call_off()

    def reject(self, error: ForebayError, times: int = 1, tenant: Tenant | None = None) -> None:
        """Count requests that were refused before they came here: those of a full queue are the graph's."""
        if isinstance(error, QueueFull):
            self._inference.endpoint.reject(error, times, tenant)


class _GatewayRoute(Route):
    """Speaks JSON whatever the headers say, and tells errors as the gateway does."""

    def __init__(self, asked: AskedPipeline, config: HttpConfig) -> None:
        super().__init__(StandIn(asked, _CONTRACT), config.max_body_bytes, config.api_keys, elements=config.elements)

    def read_head(self, headers: Iterable[tuple[bytes, bytes]], query: bytes = b"", *, in_query: bool = False) -> Head:
        return super().read_head([(name, value) for name, value in headers if name not in _IGNORED])

    def counting(self, head: Head, body: bytes | memoryview) -> Steps[Any] | None:
        """Count the elements of a body, those of its tensors as well: protobuf makes Python objects of all JSON."""
        del head
        return json_elements(body, self.elements.elsewhere, self.elements.elsewhere)

    def request(
        self, head: Head, body: bytes | memoryview, reply: Reply, origin: Origin | None, read: Any = None
    ) -> Request:
        """Make a request of a head and its body."""
        request = super().request(head, body, reply, origin, read)
        if head.parent:
            request.params = {**head.params, PARENT: head.parent.decode("latin-1")}
        return request

    def fault(self, error: ForebayError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body of an answer that is an error."""
        if isinstance(error, Unauthorized):
            status, body = 401, rest.fault_json(16, error.message)
        elif isinstance(error, TooLarge):
            status, body = 413, rest.fault_json(8, error.message)
        else:
            status, body = rest.fault_of(error)
            if status == 400:
                status = status_of(error) if status_of(error) in {408, 421, 431} else 400
        headers = [_JSON, (b"x-request-id", request_id.encode())]
        return status, [*headers, *(pair for pair in error_headers(error) if pair[0] in _TOLD)], body


class PipelineHttp:
    """The ASGI application."""

    def __init__(
        self,
        gateway: Gateway,
        config: HttpConfig,
        pages: ServerPages | None,
        protocol: InferencePages | None = None,
    ) -> None:
        """Describe the face.

        Args:
            config: Its port; if it has API keys, a request needs one of them.
            pages: Forebay's own pages; None leaves them out.
        """
        self._gateway = gateway
        self._protocol = protocol
        self._api_keys = [key.encode() for key in config.api_keys]
        self._open = {*_OPEN_PAGES, "/metrics"} if config.public_metrics else _OPEN_PAGES
        self._pages: dict[str, Any] = {}
        if pages is not None:
            self._pages = {
                "/healthz": pages.healthz,
                "/readyz": pages.readyz,
                "/metrics": pages.metrics,
                "/models": pages.models,
                "/trace": pages.trace,
            }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path, verb = scope["path"], scope["method"]
        segments = path.split("/")
        is_service = len(segments) == 3 and segments[1] and segments[2]
        protocol = None if is_service or not is_inference_path(path) else self._protocol
        if not self._is_allowed(scope, path):
            told = rest.fault_json(16, no_key(scope["headers"]))
            await send_answer(send, 401, [_JSON, (b"www-authenticate", b"Bearer")], told)
        elif protocol is not None:
            await protocol(scope, receive, send)
        elif not is_service and path not in self._pages:
            await send_answer(send, 404, [_TEXT], b"Not Found\n")
        elif verb not in ({"POST"} if is_service else {"GET", "HEAD"}):
            allowed = b"POST" if is_service else b"GET, HEAD"
            await send_answer(send, 405, [_TEXT, (b"allow", allowed)], b"Method Not Allowed\n")
        elif is_service:
            route = self._gateway.route(segments[1], segments[2])
            await Predict(route, Peer(scope.get("client")))(scope, receive, send)
        else:
            await self._page(path, scope, receive, send)

    async def _page(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request

        try:
            response = await self._pages[path](Request(scope, receive))
        except ForebayError as error:
            failed(scope, error)
            status, body = rest.fault_of(error)
            await send_answer(send, status, [_JSON], body)
        else:
            await response(scope, receive, send)

    def _is_allowed(self, scope: Scope, path: str) -> bool:
        return path in self._open or path in PUBLIC_PATHS or lets_in(self._api_keys, scope["headers"])


def _peer(request: Request) -> str:
    client = getattr(request.origin, "client", None)
    return ":".join(map(str, client)) if client else ""
