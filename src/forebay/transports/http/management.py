# SPDX-License-Identifier: Apache-2.0
"""Versions of models over HTTP: `POST /models/NAME/versions/V/load`, `swap`, `unload`, `POST /models/NAME/weights`.

Only what the project names can be loaded, so that nobody has the server run a file of their choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from starlette.responses import Response

from forebay.errors import Cancelled, InvalidRequest
from forebay.transports.http.bodies import read_body
from forebay.transports.http.http_errors import ForeignPage, NotManaged
from forebay.types.first_use import known

if TYPE_CHECKING:
    from starlette.requests import Request

    from forebay.server.app import App
    from forebay.server.config import HttpConfig

ACTIONS: Final = ("load", "swap", "unload")
"""What can be done with a version."""
MAX_BODY_BYTES: Final = 64 * 1024

Weight = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class Management:
    """Changes what is served, for callers who are allowed to.

    Attributes:
        is_open: Whether anybody is allowed to.
    """

    def __init__(self, app: App, config: HttpConfig) -> None:
        self._app = app
        self.is_open = bool(config.api_keys) if config.manage is None else config.manage
        self._origins = config.cors_origins

    async def load(self, request: Request) -> Response:
        """Load a version that the project names, or load it anew; answers once it is ready."""
        name, version = await self._to_load(request)
        if self._app.stock is not None:
            self._app.stock.offer.require_choice(name, version)
        make = self._app.model_index.maker(name, version)
        await self._app.load(name, version, make, timeout_s=self._app.load_timeout_s)
        return self._told(name)

    async def swap(self, request: Request) -> Response:
        """Load a version, and have it answer in place of those that did."""
        name, version = await self._to_load(request)
        make = self._app.model_index.maker(name, version)
        await self._app.swap(name, version, make, timeout_s=self._app.load_timeout_s)
        return self._told(name)

    async def unload(self, request: Request) -> Response:
        """Let a version leave; answers when it accepts nothing more."""
        name, version = self._asked(request)
        await self._app.unload(name, version)
        return self._told(name)

    async def share(self, request: Request) -> Response:
        """Give versions their weights, as `{"1": 90, "2": 10}`."""
        name, _ = self._asked(request)
        body = await read_body(request.receive, MAX_BODY_BYTES)
        if body is None:
            raise Cancelled("the client went away")
        try:
            weights = msgspec.json.decode(body, type=known(dict[str, Weight]))
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest(f'weights are an object such as {{"1": 90, "2": 10}}: {error}') from error
        self._app.share(name, weights)
        return self._told(name)

    def _asked(self, request: Request) -> tuple[str, str]:
        """Return which model and version a request is about; raises as `check` does."""
        self.check(request)
        asked: dict[str, Any] = request.path_params
        return asked["name"], asked.get("version", "")

    async def _to_load(self, request: Request) -> tuple[str, str]:
        """Return which one is to be loaded, once its repository has it, if it was written there just now."""
        name, version = self._asked(request)
        if self._app.stock is not None:
            await self._app.stock.wait_for(name, version)
        return name, version

    def check(self, request: Request) -> None:
        """Refuse who may not.

        Raises:
            NotManaged: If versions are not managed over HTTP here.
            ForeignPage: If a page of another origin asks.
        """
        if not self.is_open:
            raise NotManaged("versions are managed over HTTP where requests need a key (--api-key), or with --manage")
        self.refuse_foreign_page(request)

    def refuse_foreign_page(self, request: Request) -> None:
        """Refuse pages of others, which may also send what their browsers ask nobody about.

        Raises:
            ForeignPage: If a page of another origin asks.
        """
        origin = request.headers.get("origin", "")
        is_own = not origin or origin.partition("://")[2] == request.headers.get("host")
        if not is_own and origin not in self._origins and "*" not in self._origins:
            raise ForeignPage(f"a page of {origin[:100]!r} calls; let its origin in with --cors-origin")

    def _told(self, name: str) -> Response:
        body = msgspec.json.encode({"name": name, "versions": self._app.describe_versions(name)})
        return Response(body, media_type="application/json")
