# SPDX-License-Identifier: Apache-2.0
"""The dashboard's own paths: its files, its event stream and drawings of graphs; the rest it fetches from other paths.

The files are the same on every server and need no API key. All that says something about this one does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from forebay._version import __version__
from forebay.errors import NotFound
from forebay.graph.drawing.draw import draw
from forebay.observe.metrics.endpoint_history import STEP_S, EndpointHistory
from forebay.observe.metrics.exposition import SLICE, Reading, finish_in_turns
from forebay.observe.metrics.pulse import Beat, Bounds, Pulse, for_strangers
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.observe.metrics.tenant_history import STEP_S as TENANT_STEP_S
from forebay.observe.metrics.tenant_history import TenantHistory
from forebay.server.links import Links
from forebay.transports.http.asgi_calls import path_as_sent
from forebay.transports.http.dashboard.audience import Audience, DashboardEvent
from forebay.transports.http.foreign_page import FORWARDED, refuse_foreign_page
from forebay.transports.http.page_headers import NOT_GUESSED, OWN_FILES
from forebay.types.loopback import is_loopback
from forebay.types.tenant import Tenants

if TYPE_CHECKING:
    from starlette.requests import Request

    from forebay.server.app import App
    from forebay.server.config import HttpConfig
    from forebay.serving.endpoint import Endpoint

PREFIX: Final = "/ui"
_GUARDED: Final = frozenset({"events", "graph", "history", "nodes", "tenants"})
"""What needs an API key of the paths below it, where there are keys."""

_ROOM: Final = "\N{NO-BREAK SPACE}" * 25
"""A line in the box of each node, which the page fills."""

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS: Final = {
    "content-security-policy": f"{OWN_FILES}; require-trusted-types-for 'script'; trusted-types 'none'",
    **NOT_GUESSED,
    "cache-control": "no-cache",
}


def is_public(path: str) -> bool:
    """Tell whether this is a path of the page that needs no API key."""
    below = path.removeprefix(f"{PREFIX}/")
    return path == PREFIX or (below != path and below.partition("/")[0] not in _GUARDED)


def wants_page(request: Request) -> bool:
    """Tell whether it is a person who asks."""
    return "text/html" in request.headers.get("accept", "")


def to_page(address: str = PREFIX[1:]) -> Response:
    """Send a browser to the page; the address is relative, so that it holds below the prefix of a proxy."""
    return Response(status_code=307, headers={"location": address, "vary": "accept", "cache-control": "no-store"})


def without_last_slash(request: Request) -> Response:
    """Send a browser to the same page without slashes at its end, from where it finds the page's files."""
    sent = path_as_sent(request.scope)
    bare = sent.rstrip("/")
    return to_page("../" * (len(sent) - len(bare)) + bare.rpartition("/")[2])


def from_root(request: Request) -> Response:
    """Send a browser from the root to the page; where that is mounted it may be asked for without a slash."""
    last = path_as_sent(request.scope).rpartition("/")[2]
    return to_page(f"./{last}{PREFIX}" if last else PREFIX[1:])


class Dashboard:
    """What is answered below `/ui`."""

    def __init__(
        self,
        app: App,
        config: HttpConfig,
        sources: Callable[[], Iterable[Endpoint]],
        read: Callable[[Endpoint], Reading],
    ) -> None:
        """Make the page.

        Args:
            sources: All endpoints, also those of nodes.
            read: Reads the numbers of one.
        """
        self._app = app
        self._has_keys = bool(config.api_keys)
        self._pulse = Pulse(sources, read)
        self._audience = Audience(self._make, self._pulse.stop, lambda: app.is_draining)
        self._sources, self._read = sources, read
        self._price = config.worker_second_price
        self._history = EndpointHistory(sources, read)
        self._tenant_history = TenantHistory(app.state.of(Accounts))
        app.links += [
            Sampler(STEP_S, self._history.look, lambda: True),
            Sampler(TENANT_STEP_S, self._tenant_history.look, lambda: self._tenants.are_told_apart),
        ]
        self._changes = 0
        app.watch(self._changed)

    async def file(self, request: Request) -> Response:
        """Return a file of the page; raises NotFound if there is none of this name."""
        name = request.path_params.get("file", "index.html")
        if not name:
            return without_last_slash(request)
        if name not in _files():
            raise NotFound(f"the dashboard has no file '{name[:100]}'")
        body, tag = _file(name)
        headers = {**_HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)

    async def events(self, request: Request) -> Response:
        """Return the stream of events.

        Raises:
            ForeignPage: If a page of somebody else asks.
            QueueFull: If there is no room for another viewer.
        """
        refuse_foreign_page(request.headers)
        is_trusted = self._has_keys or _is_from_here(request)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        standing = await finish_in_turns(self._pulse.standing())
        faults = self._pulse.faults()
        last = await finish_in_turns(self._history.tell(is_last=True))
        hello = {
            "forebay": __version__,
            "bounds": Bounds(),
            "now": time.time(),
            "monotonic": time.monotonic(),
            "started_s": self._app.started_s,
            "tells_all": is_trusted,
            "has_cluster": self._app.cluster is not None,
            "has_tenants": self._tenants.are_told_apart,
            "is_beside": request.scope.get("root_path", "").endswith(PREFIX),
            "faults": faults if is_trusted else for_strangers(faults),
            "standing": standing,
            "last": msgspec.Raw(last),
        }
        return self._audience.join(_event("hello", hello), is_trusted=is_trusted)

    async def history(self, request: Request) -> Response:
        """Return the last 15 minutes of the endpoints in coarse samples.

        Raises:
            ForeignPage: If a page of somebody else asks.
        """
        refuse_foreign_page(request.headers)
        told = await finish_in_turns(self._history.tell())
        return Response(told, media_type="application/json", headers=_HEADERS)

    async def nodes(self, request: Request) -> Response:
        """Return what is known of the cluster.

        Raises:
            ForeignPage: If a page of somebody else asks.
            NotFound: If this server is in none.
        """
        refuse_foreign_page(request.headers)
        if self._app.cluster is None:
            raise NotFound("this server has no peers and is not a front of a deployment")
        told = await self._app.cluster(self._has_keys or _is_from_here(request))
        return Response(msgspec.json.encode(told), media_type="application/json", headers=_HEADERS)

    async def tenants(self, request: Request) -> Response:
        """Return what each tenant has had of late, of the busiest ones.

        Raises:
            ForeignPage: If a page of somebody else asks.
            NotFound: If tenants are not told apart here.
        """
        refuse_foreign_page(request.headers)
        if not self._tenants.are_told_apart:
            raise NotFound("API keys have no names here, so there are no tenants; name them: http: {api_keys: {...}}")
        waiting = await finish_in_turns(self._waiting())
        await finish_in_turns(self._tenant_history.look())
        told = {"price": self._price, "tenants": self._tenant_history.rows(self._tenants, waiting)}
        return Response(msgspec.json.encode(told), media_type="application/json", headers=_HEADERS)

    @property
    def _tenants(self) -> Tenants:
        return self._app.state.of(Tenants)

    def _waiting(self) -> Generator[None, None, dict[str, int]]:
        """Return the samples of each tenant in queues, in turns."""
        waiting: dict[str, int] = {}
        for number, source in enumerate(list(self._sources()), 1):
            for name, rows in self._read(source).tenants_waiting.items():
                waiting[name] = waiting.get(name, 0) + rows
            if number % SLICE == 0:
                yield
        return waiting

    async def graph(self, request: Request) -> Response:
        """Return the drawing of a graph; raises NotFound if the model is none that is drawn."""
        drawing = self._app.find(request.path_params["name"]).drawing
        if drawing is None:
            raise NotFound(f"the model '{request.path_params['name'][:100]}' is not a graph")
        rows = {name: (*drawing.labels.get(name, ()), _ROOM) for name in drawing.runs_in}
        svg = await asyncio.to_thread(draw, msgspec.structs.replace(drawing, labels=rows), "svg")
        # The page has a style for it, and its policy forbids others.
        head, _, rest = svg.partition("<style>")
        return Response(head + rest.partition("</style>")[2], media_type=_TYPES["svg"], headers=_HEADERS)

    async def _make(self) -> DashboardEvent:
        beats = await finish_in_turns(self._pulse.beat())
        told = {"at": time.time(), "monotonic": time.monotonic(), "changes": self._changes}

        def write(is_trusted: bool) -> bytes:  # noqa: FBT001 - of `DashboardEvent`
            return _event("beat", told | {"beats": beats if is_trusted else [*map(_public, beats)]})

        return DashboardEvent(write)

    def _changed(self, _name: str) -> None:
        self._changes += 1


def _public(beat: Beat) -> Beat:
    return msgspec.structs.replace(beat, faults=for_strangers(beat.faults)) if beat.faults else beat


def _event(kind: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))


def _is_from_here(request: Request) -> bool:
    """Tell whether a program on this machine asks for itself, and does not relay for another machine."""
    if any(name.decode() in request.headers for name in FORWARDED):
        return False
    named = request.url.hostname or ""
    asking = request.client.host if request.client is not None else ""
    return is_loopback(asking) and is_loopback(named)


@cache
def _files() -> frozenset[str]:
    return frozenset(file.name for file in _folder().iterdir())


@cache
def _file(name: str) -> tuple[bytes, str]:
    body = _folder().joinpath(name).read_bytes()
    return body, f'"{sha256(body).hexdigest()[:32]}"'


def _folder() -> Any:
    return resources.files("forebay.transports.http.dashboard").joinpath("static")


class Sampler(Links):
    """Takes a sample of the counters every few seconds as long as the server runs, for histories that are shown."""

    def __init__(
        self, step_s: float, look: Callable[[], Generator[None, None, None]], is_wanted: Callable[[], bool]
    ) -> None:
        """Do nothing yet.

        Args:
            step_s: Time between two samples.
            look: Takes a sample, in turns.
            is_wanted: Tells at the start whether there is anything to sample.
        """
        self._step_s, self._look, self._is_wanted = step_s, look, is_wanted
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin with the first sample."""
        if self._is_wanted():
            self._task = asyncio.create_task(self._sample())

    def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()

    async def _sample(self) -> None:
        while True:
            await finish_in_turns(self._look())
            await asyncio.sleep(self._step_s)
