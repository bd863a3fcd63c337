# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol (KServe v2) over HTTP, for all that is served; its first version is in `tfserving.py`.

    InferRoute      POST /v2/models/NAME[/versions/V]/infer, on both lanes of HTTP
    InferencePages  everything else below /v2: health, metadata, statistics, the repository

The loop reads the JSON of a call as far as names, types and shapes; the data goes to the worker as it came. A client
mostly sends the same JSON in front of other data, so what was made of it is remembered by its bytes.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote, unquote

import msgspec
from starlette.requests import Request as HttpRequest

from forebay.errors import (
    ForebayError,
    InvalidRequest,
    NotFound,
    TooLarge,
    UserCodeError,
    ValidationError,
)
from forebay.protocols import native
from forebay.protocols.kserve import rest
from forebay.protocols.kserve.calls import InferRequest, InferResponse
from forebay.server.inference_facts import (
    config_of,
    every_version,
    find_served,
    is_model_ready,
    log_settings,
    model_metadata,
    server_metadata,
    statistics_of,
    trace_settings,
    unchangeable,
)
from forebay.server.shared_regions import Region
from forebay.serving.tensor_face import TensorRequest, parameters_of, tensors_of
from forebay.transports.http.bodies import BodyTooLong, read_body
from forebay.transports.http.errors import MethodNotAllowed, error_headers
from forebay.transports.http.route import Head, Route
from forebay.types.call import EMPTY, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from forebay.protocols.kserve.places import Place
    from forebay.server.app import App
    from forebay.server.config import HttpConfig
    from forebay.server.served import Served
    from forebay.server.shared_regions import SharedRegions
    from forebay.serving.tensor_face import TensorFace
    from forebay.transports.http.forms_and_gzip import Staging
    from forebay.transports.http.management import Management
    from forebay.types.call import Origin, Outcome, Reply
    from forebay.types.tensor import Data

PUBLIC_PATHS: Final = frozenset({"/v2/health/live", "/v2/health/ready"})
MAX_REMEMBERED: Final = 1024
"""Calls that are remembered by their JSON; when there are more, all are forgotten."""
MAX_REMEMBERED_BYTES: Final = 4096
_MAX_LOAD_BYTES: Final = 64 * 1024
_LENGTH: Final = rest.LENGTH_HEADER.lower().encode()
_VERSIONED: Final = ("v2", "models", "NAME", "versions", "VERSION", "infer")
JSON: Final = (b"content-type", b"application/json")


class InferHead(Head):
    """The head of an inference request.

    Attributes:
        json_bytes: What it says of the length of the JSON; None if everything is.
    """

    json_bytes: str | None = None


class _Call(msgspec.Struct, frozen=True, eq=False):
    """What the JSON of a call says, and where its data lies behind it."""

    asked: InferRequest
    params: Mapping[str, Any]
    size: int
    places: Sequence[slice]
    length: int


class InferenceRoute(Route):
    """What the protocols that speak tensors have in common."""

    def __init__(
        self, served: Served, config: HttpConfig, staging: Staging | None = None, *, is_one_of_several: bool = False
    ) -> None:
        contract = msgspec.structs.replace(
            served.contract, raw_input=True, raw_output=True, batchable=False, streams=False, is_named=False, query=()
        )
        super().__init__(
            msgspec.structs.replace(served, contract=contract),
            config.max_body_bytes,
            config.api_keys,
            config.cors_origins,
            staging,
            is_one_of_several=is_one_of_several,
        )
        self.is_simple, self.unpacks = False, True
        self._streams = served.contract.streams

    def is_staged(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Tell whether a request takes the slow lane: what is packed, or is to be."""
        return super().is_staged(headers) or bool(_answer_packing(headers))

    def fault(self, error: ForebayError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body of an answer that is an error."""
        return fault_of(error, request_id)

    def require_whole(self) -> None:
        """Refuse calls of a model that streams.

        Raises:
            InvalidRequest: If it does.
        """
        if self._streams:
            msg = f"the model '{self.endpoint.name}' streams its answers; ask it over gRPC, or at /models/NAME"
            raise InvalidRequest(msg)


def _no_regions() -> None:
    """Have no shared memory."""


class InferRoute(InferenceRoute):
    """`infer` of one version of a model."""

    head_class: ClassVar[type[Head]] = InferHead

    def __init__(
        self,
        served: Served,
        face: TensorFace,
        config: HttpConfig,
        staging: Staging | None = None,
        regions: Callable[[], SharedRegions | None] = _no_regions,
        *,
        is_one_of_several: bool = False,
    ) -> None:
        """Answer for a version, with what it says of tensors, and with shared memory if there is any."""
        super().__init__(served, config, staging, is_one_of_several=is_one_of_several)
        self._face = face
        self._regions = regions
        self._calls: dict[bytes, _Call] = {}

    def read_head(self, headers: Iterable[tuple[bytes, bytes]], query: bytes = b"", *, in_query: bool = False) -> Head:
        """Read the headers of a request."""
        head = super().read_head(headers, query, in_query=in_query)
        assert isinstance(head, InferHead)
        for name, value in headers:
            if name == _LENGTH:
                head.json_bytes = value.decode("latin-1")
        head.answer_packing = _answer_packing(headers)
        return head

    def request(self, head: Head, body: bytes | memoryview, reply: Reply, origin: Origin | None) -> Request:
        """Make a request of a head and its body.

        Raises:
            ForebayError: If the model does not take it.
        """
        assert isinstance(head, InferHead)
        call = self._call(body, head.json_bytes)
        if isinstance(call, _Call):
            view = memoryview(body)  # of what landed in shared memory it is one already, and its slices stay there
            data: list[Any] = [view[place] for place in call.places]
            asked, params, size = call.asked, call.params, call.size
        else:
            asked, data = call, [one.data for one in call.inputs]
            params, size = self._asked(asked)
            for place in asked.places.values():
                self._shared().require(place.region, place.offset, place.size)
        request = TensorRequest(data, reply, params, origin, size=size, id=head.id, call=asked)
        self.complete(request, head, origin)
        timeout_us = asked.parameters.get("timeout")
        if type(timeout_us) is int and timeout_us > 0:
            request.deadline = min(request.deadline, time.monotonic() + timeout_us / 1e6)
        return request

    def answer(self, request: Request, outcome: Outcome) -> tuple[list[tuple[bytes, bytes]], list[Data]]:
        """Return headers and body of a successful answer."""
        assert isinstance(request, TensorRequest)
        config = self.endpoint.config
        specs, *data = outcome
        outputs, places = tensors_of(specs, data), EMPTY
        if request.call.places:
            outputs, places = self._shared().put(outputs, request.call.places)
        response = InferResponse(
            outputs=outputs,
            model=config.name,
            version=config.version,
            id=request.call.id,
            parameters=parameters_of(outcome),
        )
        pieces, json_bytes = rest.encode_response(response, places)
        if json_bytes is None:
            return [JSON], pieces
        length = (rest.LENGTH_HEADER.encode(), str(json_bytes).encode())
        return [(b"content-type", b"application/octet-stream"), length], pieces

    def _call(self, body: bytes | memoryview, json_bytes: str | None) -> _Call | InferRequest:
        """Read a call; one whose data is all behind its JSON is remembered by that."""
        if json_bytes is None:
            return rest.decode_request(body, read=self._read)
        text = bytes(body[: rest.head_size(json_bytes, len(body))])
        known = self._calls.get(text)
        if known is not None and known.length == len(body):
            return known
        read: list[Place] = []
        asked = rest.decode_request(body, json_bytes, lambda place: (read.append(place), self._read(place))[1])
        if len(text) > MAX_REMEMBERED_BYTES or read or asked.places or any(one.is_json for one in asked.inputs):
            return asked
        params, size = self._asked(asked)
        places: list[slice] = []
        at = len(text)
        for one in asked.inputs:
            places.append(slice(at, at + len(one.data)))
            at += len(one.data)
        if len(self._calls) >= MAX_REMEMBERED:
            self._calls.clear()
        asked = msgspec.structs.replace(asked, inputs=())  # they refer to this body
        known = self._calls[text] = _Call(asked, params, size, places, len(body))
        return known

    def _read(self, place: Place) -> bytearray:
        if place.size > self.max_body_bytes:
            raise self.too_large(place.size)
        return self._shared().read(place.region, place.offset, place.size)

    def _shared(self) -> SharedRegions:
        regions = self._regions()
        if regions is None:
            msg = "tensors in shared memory are read and written by a server with --shared-memory only"
            raise InvalidRequest(msg)
        return regions

    def _asked(self, asked: InferRequest) -> tuple[Mapping[str, Any], int]:
        self.require_whole()
        return self._face.ask(
            asked.inputs,
            asked.outputs,
            is_json=not asked.is_binary,
            in_json={name: not is_binary for name, is_binary in asked.binary.items()},
            parameters=asked.parameters,
        )


def routes_for(
    served: Served,
    config: HttpConfig,
    staging: Staging,
    version: str = "",
    regions: Callable[[], SharedRegions | None] = _no_regions,
) -> dict[str, Callable[..., Route]]:
    """Return what makes the routes of a version, by target; it is told whether the route `is_one_of_several`."""
    if served.tensors is None:
        return {}
    below = quote(served.endpoint.name, safe="") + (f"/versions/{quote(version, safe='')}" if version else "")
    return {f"/v2/models/{below}/infer": partial(InferRoute, served, served.tensors, config, staging, regions)}


def fault_of(error: ForebayError, request_id: str = "") -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an error in the protocol's form."""
    message = error.message
    if isinstance(error, UserCodeError):
        message = "the model failed; the server's log has the details under this request id"
    status = 400 if isinstance(error, ValidationError) else native.status_of(error)
    own = [(b"x-request-id", request_id.encode())] if request_id else []
    body = msgspec.json.encode({"error": message.encode(errors="replace").decode()})
    return status, [JSON, *own, *error_headers(error)], body


def is_inference_path(path: str) -> bool:
    """Tell whether a path belongs to the protocol."""
    return path == "/v2" or path.startswith("/v2/")


class InferencePages:
    """Everything below `/v2`, as an ASGI application; calls themselves go by the routes."""

    def __init__(self, app: App, routes: Mapping[bytes, Route], management: Management, predict: Any) -> None:
        """Describe the pages.

        Args:
            app: What is served.
            routes: The calls, by target.
            management: Who may load and unload.
            predict: Makes an ASGI application of a route.
        """
        self._app = app
        self._routes = routes
        self._management = management
        self._predict = predict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            answer = await self._answer(scope, receive, send)
        except ForebayError as error:
            answer = fault_of(error)
        if answer is not None:
            status, headers, body = answer
            length = (b"content-length", str(len(body)).encode())
            await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
        root = scope.get("root_path", "")
        path = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("latin-1").partition("?")[0]
        path = path.removeprefix(quote(root)).rstrip("/")
        segments = [unquote(segment) for segment in path.split("/")[1:]]
        target = "".join(f"/{quote(segment, safe='')}" for segment in segments)
        if segments[-1:] == ["infer"] and (route := self._route(target, segments)) is not None:
            _require("POST", scope)
            await self._predict(route)(scope, receive, send)
            return None
        match segments:
            case ["v2"]:
                found = server_metadata(self._app)
            case ["v2", "health", "live"]:
                found, is_well = {"live": self._app.is_live}, self._app.is_live
                return self._told(scope, found, 200 if is_well else 503)
            case ["v2", "health", "ready"]:
                is_well = not self._app.problems()
                return self._told(scope, {"ready": is_well}, 200 if is_well else 503)
            case ["v2", "models", "stats"]:
                found = {"model_stats": [statistics_of(one) for one in every_version(self._app, "")]}
            case ["v2", "repository", "index"]:
                _require("POST", scope)
                return self._told(scope, await self._index(receive), verb="POST")
            case ["v2", "logging"]:
                return await self._settings(scope, receive, log_settings())
            case ["v2", "trace", "setting"]:
                return await self._settings(scope, receive, _single(trace_settings(self._app)))
            case ["v2", "models", name, "trace", "setting"]:
                return await self._settings(scope, receive, _single(trace_settings(self._app, name)))
            case ["v2", "models", name, "versions", version, "trace", "setting"]:
                return await self._settings(scope, receive, _single(trace_settings(self._app, name, version)))
            case ["v2", "systemsharedmemory", *asked]:
                return self._told_shared(scope, asked, await _json_body(receive))
            case ["v2", "repository", "models", name, ("load" | "unload") as what]:
                _require("POST", scope)
                await self._manage(name, what, scope, await _json_body(receive))
                return self._told(scope, {}, verb="POST")
            case ["v2", "models", name, "versions", version, *rest_of] if len(rest_of) < 2:
                return self._model(scope, name, version, *rest_of)
            case ["v2", "models", name, *rest_of] if len(rest_of) < 2:
                return self._model(scope, name, "", *rest_of)
            case _:
                raise NotFound(f"nothing is served at {path[:100]}")
        return self._told(scope, found)

    def _route(self, target: str, segments: Sequence[str]) -> Route | None:
        """Return who answers calls to a target; of what has no versions the same, whichever is named."""
        found = self._routes.get(target.encode())
        if found is None and len(segments) == len(_VERSIONED):
            name, version = segments[2], segments[4]
            if name in self._app.served and not find_served(self._app, name, version).has_versions:
                found = self._routes.get(f"/v2/models/{quote(name, safe='')}/infer".encode())
        return found

    def _told(
        self, scope: Scope, found: Any, status: int = 200, *, verb: str = "GET"
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        _require(verb, scope)
        return status, [JSON], msgspec.json.encode(found)

    def _model(
        self, scope: Scope, name: str, version: str, what: str = ""
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        if what == "infer":
            find_served(self._app, name, version)
            raise NotFound(f"the model '{name}' takes no tensors; see GET /models/{name}")
        if what not in {"", "ready", "config", "stats"}:
            raise NotFound(f"a model has no '{what[:40]}'; there is ready, config, stats and infer")
        if what == "ready":
            is_ready = is_model_ready(self._app, name, version)
            return self._told(scope, {"name": name, "ready": is_ready}, 200 if is_ready else 503)
        one = find_served(self._app, name, version)
        if what == "stats":
            every = every_version(self._app, name, version)
            return self._told(scope, {"model_stats": [statistics_of(each) for each in every]})
        return self._told(scope, config_of(one) if what == "config" else model_metadata(self._app, name, version))

    async def _index(self, receive: Receive) -> list[dict[str, str]]:
        asked = await _json_body(receive)
        return await self._app.model_index.index(only_ready=asked.get("ready") is True)

    async def _settings(
        self, scope: Scope, receive: Receive, told: Any
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Tell settings of traces or logs; clients of Triton ask for them by a change of nothing, too.

        Raises:
            MethodNotAllowed: If a client wants to change some.
        """
        verb = "POST" if scope["method"] == "POST" else "GET"
        if verb == "POST" and (changed := await _json_body(receive)):
            raise MethodNotAllowed(unchangeable(changed))
        return self._told(scope, told, verb=verb)

    def _told_shared(
        self, scope: Scope, asked: Sequence[str], body: Mapping[str, Any]
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Register, unregister and show regions of shared memory.

        Raises:
            ForebayError: If they are not used here, or the region is not what it should be.
        """
        regions = self._app.shared_regions
        if regions is None:
            raise NotFound("shared memory is read and written by a server with --shared-memory only")
        match asked:
            case ["status"]:
                return self._told(scope, [*regions.status().values()])
            case ["region", name, "status"]:
                return self._told(scope, [*regions.status(name).values()])
            case ["unregister"]:
                _require("POST", scope)
                regions.unregister()
            case ["region", name, "unregister"]:
                _require("POST", scope)
                regions.unregister(name)
            case ["region", name, "register"]:
                _require("POST", scope)
                try:
                    region = msgspec.convert({"offset": 0, **body, "name": name}, Region)
                except msgspec.ValidationError as error:
                    raise InvalidRequest(f"a region has a key, an offset and a byte_size: {error}") from None
                regions.register(region)
            case _:
                raise NotFound("shared memory has status, region/NAME/status, register and unregister")
        return self._told(scope, {}, verb="POST")

    async def _manage(self, name: str, what: str, scope: Scope, asked: Mapping[str, Any]) -> None:
        """Load or unload all versions of a model.

        Raises:
            ForebayError: If it is not allowed, or fails.
        """
        self._management.check(HttpRequest(scope))
        parameters: dict[str, Any] = asked.get("parameters") or {}
        if what == "load" and parameters:
            told = ", ".join(map(str, parameters))[:100]
            raise InvalidRequest(f"a model is loaded as the project says, and not with {told}")
        if what == "unload":
            await self._app.model_index.unload(name)
        else:
            await self._app.model_index.load(name)


def _single(settings: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return settings as JSON has them: all but the level have a value each."""
    return {name: values if name == "trace_level" else values[0] for name, values in settings.items()}


def _require(verb: str, scope: Scope) -> None:
    """Refuse another method.

    Raises:
        MethodNotAllowed: Naming the one that is possible.
    """
    method = scope["method"]
    if method != verb and not (method == "HEAD" and verb == "GET"):
        raise MethodNotAllowed(f"{method[:20]} is not possible here, {verb} is")


async def _json_body(receive: Receive) -> Mapping[str, Any]:
    """Read an object in JSON; no body is an empty one.

    Raises:
        InvalidRequest: If it is something else.
    """
    try:
        body = await read_body(receive, _MAX_LOAD_BYTES)
    except BodyTooLong:
        raise TooLarge(f"the body is too long, at most {_MAX_LOAD_BYTES} bytes are taken") from None
    try:
        return msgspec.json.decode(body, type=dict[str, Any]) if body and body.strip() else {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is no object in JSON: {error}") from None


def _answer_packing(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return what the answer is to be packed with.

    Only where a client names a single coding: lists of several are what HTTP libraries say by themselves, and packing
    numbers takes longer than sending them.
    """
    for name, value in headers:
        if name == b"accept-encoding" and (said := value.strip().lower()) in {b"gzip", b"deflate"}:
            return said
    return b""
