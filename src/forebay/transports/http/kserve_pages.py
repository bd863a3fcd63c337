# SPDX-License-Identifier: Apache-2.0
"""The pages of the Open Inference Protocol (KServe v2): health, metadata, statistics, settings, the repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, unquote

import msgspec
from starlette.requests import Request as HttpRequest

from forebay.errors import ForebayError, InvalidRequest, NotFound
from forebay.server.kserve_facts import (
    config_of,
    find_served,
    in_tritons_words,
    is_model_ready,
    log_settings,
    model_metadata,
    server_metadata,
    statistics,
    trace_settings,
    unchangeable,
)
from forebay.server.shared_regions import CudaRegions, Region, SharedRegions
from forebay.transports.http.asgi_calls import failed, id_of, path_of_as_sent
from forebay.transports.http.bodies import read_body
from forebay.transports.http.http_errors import MethodNotAllowed
from forebay.transports.http.kserve_calls import CALLS, JSON, fault_of
from forebay.types.did_you_mean import meant
from forebay.types.first_use import known

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from forebay.server.app import App
    from forebay.transports.http.management import Management
    from forebay.transports.http.route import Route

_MAX_LOAD_BYTES: Final = 64 * 1024
_LOADS: Final = ("load", "unload")
_PATHS: Final = [
    *("/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/repository/index", "/v2/logging"),
    *("/v2/trace/setting", "/v2/systemsharedmemory/status"),
]
"""What is there whatever is served."""
_VERSIONED: Final = ("v2", "models", "NAME", "versions", "VERSION", "infer")


class InferencePages:
    """Everything below `/v2`, as an ASGI application; calls themselves go by the routes."""

    def __init__(self, app: App, routes: Mapping[bytes, Route], management: Management, predict: Any) -> None:
        """Describe the pages.

        Args:
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
            request_id = id_of(scope)
            failed(scope, error, request_id)
            answer = fault_of(in_tritons_words(error), request_id)
        if answer is not None:
            status, headers, body = answer
            length = (b"content-length", str(len(body)).encode())
            await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
        path = path_of_as_sent(scope)
        segments = [unquote(segment) for segment in path.split("/")[1:]]
        at = 3 if segments[1:2] == ["repository"] else 2
        if segments[at - 1 : at] == ["models"] and segments[at:]:
            name, rest = self._app.split_name(segments[at:])
            segments[at:] = [name, *rest]
        target = "".join(f"/{quote(one, safe='/' * (place == at))}" for place, one in enumerate(segments))
        if segments[-1] in CALLS and (route := self._route(target, segments)) is not None:
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
                found = await statistics(self._app)
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
            case ["v2", "cudasharedmemory", *asked]:
                return self._told_shared(scope, asked, {}, CudaRegions())
            case ["v2", "systemsharedmemory", *asked]:
                return self._told_shared(scope, asked, await _json_body(receive), self._app.shared_regions)
            case ["v2", "repository", "models", name, ("load" | "unload") as what]:
                _require("POST", scope)
                await self._manage(name, what, scope, await _json_body(receive))
                return self._told(scope, {}, verb="POST")
            case ["v2", "models", name, "versions", version, *rest_of] if version and len(rest_of) < 2:
                return await self._model(scope, name, version, *rest_of)
            case ["v2", "models", name, *rest_of] if len(rest_of) < 2:
                return await self._model(scope, name, "", *rest_of)
            case ["v2", "repository", "models", _, *rest_of]:
                what = "/".join(rest_of)
                raise NotFound(
                    f"a model of the repository has no '{what[:40]}'; there is load, unload{meant(what, _LOADS)}"
                )
            case _:
                raise NotFound(f"nothing is served at {path[:100]}{meant(path, _PATHS)}")
        return self._told(scope, found)

    def _route(self, target: str, segments: Sequence[str]) -> Route | None:
        """Return the route that answers calls to a target, also for a version that is not its own by its name."""
        found = self._routes.get(target.encode())
        if found is None and len(segments) == len(_VERSIONED):
            name, version = segments[2], segments[4]
            served = find_served(self._app, name, version) if version and name in self._app.served else None
            if served is not None and served.endpoint.config.version != version:
                found = self._routes.get(f"/v2/models/{quote(name)}/{segments[-1]}".encode())
        return found

    def _told(
        self, scope: Scope, found: Any, status: int = 200, *, verb: str = "GET"
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        _require(verb, scope)
        return status, [JSON], msgspec.json.encode(found)

    async def _model(
        self, scope: Scope, name: str, version: str, what: str = ""
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        if what in CALLS:
            served = find_served(self._app, name, version)
            if served.tensors is not None:
                raise NotFound(f"the model '{name}' takes inputs of any name, which are called by infer alone")
            raise NotFound(f"the model '{name}' does not accept tensors; see GET /models/{name}")
        if what not in {"", "ready", "config", "stats"}:
            there = ("ready", "config", "stats", *CALLS)
            raise NotFound(f"a model has no '{what[:40]}'; there is {', '.join(there)}{meant(what, there)}")
        if what == "ready":
            is_ready = is_model_ready(self._app, name, version)
            return self._told(scope, {"name": name, "ready": is_ready}, 200 if is_ready else 503)
        one = find_served(self._app, name, version)
        if what == "stats":
            return self._told(scope, await statistics(self._app, name, version))
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
            raise _allowing("GET", unchangeable(changed))
        return self._told(scope, told, verb=verb)

    def _told_shared(
        self, scope: Scope, asked: Sequence[str], body: Mapping[str, Any], regions: SharedRegions | CudaRegions | None
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Register, unregister and show regions of shared memory.

        Raises:
            ForebayError: If they are not used here, or the region is not what it should be.
        """
        if regions is None:
            raise NotFound("shared memory is read and written by a server with --shared-memory only")
        self._management.refuse_foreign_page(HttpRequest(scope))
        match asked:
            case ["status"] | ["region", _, "status"]:
                return self._told(scope, [*regions.status(asked[1] if len(asked) > 1 else "").values()])
            case ["unregister"] | ["region", _, "unregister"]:
                _require("POST", scope)
                regions.unregister(asked[1] if len(asked) > 1 else "")
            case ["region", name, "register"]:
                _require("POST", scope)
                if isinstance(regions, CudaRegions):
                    regions.register(name)
                else:
                    regions.register(_region(name, body))
            case _:
                raise NotFound("shared memory has status, region/NAME/status, register and unregister")
        return self._told(scope, {}, verb="POST")

    async def _manage(self, name: str, what: str, scope: Scope, asked: Mapping[str, Any]) -> None:
        """Load or unload all versions of a model; raises ForebayError if it is not allowed, or fails."""
        self._management.check(HttpRequest(scope))
        parameters: Any = asked.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidRequest(f"parameters: expected an object, got {parameters!r:.40}")
        if what == "load" and parameters:
            told = ", ".join(cast("dict[str, Any]", parameters))[:100]
            raise InvalidRequest(f"a model is loaded as the project says, and not with {told}")
        if what == "unload":
            await self._app.model_index.unload(name)
        else:
            await self._app.model_index.load(name)


def _region(name: str, body: Mapping[str, Any]) -> Region:
    try:
        return msgspec.convert({"offset": 0, **body, "name": name}, known(Region))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a region has a key, an offset and a byte_size: {error}") from None


def _single(settings: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return settings as JSON has them: all but the level have a value each."""
    return {name: values if name == "trace_level" else values[0] for name, values in settings.items()}


def _require(verb: str, scope: Scope) -> None:
    """Refuse another method, naming the one that is possible."""
    method = scope["method"]
    if method != verb and not (method == "HEAD" and verb == "GET"):
        raise _allowing(verb, f"{method[:20]} is not allowed here; use {verb}")


def _allowing(verb: str, message: str) -> MethodNotAllowed:
    error = MethodNotAllowed(message)
    error.allow = b"GET, HEAD" if verb == "GET" else verb.encode()
    return error


async def _json_body(receive: Receive) -> Mapping[str, Any]:
    """Read an object in JSON; no body is an empty one.

    Raises:
        InvalidRequest: If it is something else.
        TooLarge: If it is too long.
    """
    body = await read_body(receive, _MAX_LOAD_BYTES)
    try:
        return msgspec.json.decode(body, type=dict[str, Any]) if body and body.strip() else {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"body: expected a JSON object: {error}") from None
