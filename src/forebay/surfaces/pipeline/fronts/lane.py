# SPDX-License-Identifier: Apache-2.0
"""The REST gateway on the fast lane: plain requests to `/{name}/{method}`, answered without a task.

What is not plain (paths with escapes, other methods than POST, forebay's own pages) goes to `http.py`, which answers
the same; one set of tests asks both.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.errors import ForebayError, QueueFull, TooLarge
from forebay.protocols.native import Contract, status_of
from forebay.protocols.pipeline import rest
from forebay.server.app import Served
from forebay.serving.endpoint import EndpointConfig
from forebay.surfaces.pipeline.fronts import http
from forebay.surfaces.pipeline.fronts.inference import begin, read, told
from forebay.transports.http.exchange import Route, error_headers
from forebay.transports.http.refusals import Unauthorized
from forebay.types.call import Failure

if TYPE_CHECKING:
    from forebay.server.config import HttpConfig
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.dag.service import PipelineService
    from forebay.transports.http.exchange import Head
    from forebay.types.call import Request

MAX_ROUTES: Final = 1024
"""Paths that are remembered; any client can name new ones."""

_PATH: Final = re.compile(rb"/([A-Za-z0-9_.~-]{1,128})/([A-Za-z0-9_.~-]{1,128})")
_IGNORED: Final = frozenset({b"content-type", b"accept", b"content-encoding", b"origin"})
_JSON: Final = Contract(raw_input=False, raw_output=False, batchable=False, streams=False)


class Gateway(Mapping[bytes, Route]):
    """The routes of a pipeline: any path of two segments has one."""

    def __init__(self, service: PipelineService, config: HttpConfig) -> None:
        self._service = service
        self._config = config
        self._routes: dict[bytes, Route] = {}

    def __getitem__(self, target: bytes) -> Route:
        route = self._routes.get(target)
        if route is not None:
            return route
        found = _PATH.fullmatch(target)
        if found is None:
            raise KeyError(target)
        if len(self._routes) >= MAX_ROUTES:
            self._routes.clear()
        name, method = (part.decode() for part in found.groups())
        route = self._routes[target] = _GatewayRoute(_Asked(self._service, name, method), self._config)
        return route

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._routes)

    def __len__(self) -> int:
        return len(self._routes)


class _Asked:
    """A service and a method as an endpoint: what the lane asks of one."""

    def __init__(self, service: PipelineService, name: str, method: str) -> None:
        self.name = name
        self.config = EndpointConfig(name=name, max_timeout_s=service.endpoint.config.max_timeout_s)
        self._service = service
        self._method = method
        self._open: dict[Request, Callable[[], object] | None] = {}

    def is_full(self) -> bool:
        """Tell whether the graph would refuse a request now."""
        return self._service.endpoint.is_full()

    def submit(self, request: Request) -> None:
        """Answer a request."""
        kind = self._service.request_class
        if not rest.is_quick(request.body, kind):
            self._open[request] = asyncio.ensure_future(self._submit_large(request)).cancel
            return
        try:
            asked = rest.request_of(request.body, kind)
        except ForebayError as error:
            request.reply(request, Failure(error))
        else:
            self._begin(request, asked)

    async def _submit_large(self, request: Request) -> None:
        kind = self._service.request_class
        try:
            asked = await read(lambda: rest.request_of(request.body, kind))
        except Exception as error:  # noqa: BLE001 - this client is told, and no other hears of it
            self._reply(request, Failure(told(error)))
        else:
            self._begin(request, asked)

    def _begin(self, request: Request, asked: Any) -> None:
        service = self._service
        http.name_request(asked, self.name, self._method)

        def respond(found: Any) -> None:
            self._reply(request, Failure(found) if isinstance(found, ForebayError) else rest.response_json(found))

        self._open[request] = None
        call_off = begin(service, asked, deadline=request.deadline, peer=_peer(request), respond=respond)
        if request in self._open:
            self._open[request] = call_off

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away."""
        call_off = self._open.pop(request, None)
        if call_off is not None:
            call_off()

    def reject(self, error: ForebayError) -> None:
        """Count a request that was refused before it came here: those of a full queue are the graph's."""
        if isinstance(error, QueueFull):
            self._service.endpoint.reject(error)

    def _reply(self, request: Request, outcome: Any) -> None:
        if request in self._open:
            del self._open[request]
            request.reply(request, outcome)


class _GatewayRoute(Route):
    """Speaks JSON whatever the headers say, and tells errors as the gateway does."""

    def __init__(self, asked: _Asked, config: HttpConfig) -> None:
        super().__init__(Served(cast("Endpoint", asked), _JSON), config.max_body_bytes, config.api_keys)

    def read_head(self, headers: Iterable[tuple[bytes, bytes]], query: bytes = b"") -> Head:
        """Read the headers of a request."""
        return super().read_head([(name, value) for name, value in headers if name not in _IGNORED])

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
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        return status, [*headers, *(pair for pair in error_headers(error) if pair[0] == b"www-authenticate")], body


def _peer(request: Request) -> str:
    client = getattr(request.origin, "client", None)
    return ":".join(map(str, client)) if client else ""
