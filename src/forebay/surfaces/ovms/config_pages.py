# SPDX-License-Identifier: Apache-2.0
"""`GET /v1/config` and `POST /v1/config/reload`, as the original has them: what is there, and having it read anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from forebay.transports.http.management import Management

if TYPE_CHECKING:
    from starlette.requests import Request

    from forebay.server.config import HttpConfig
    from forebay.surfaces.ovms.app import OvmsApp
    from forebay.surfaces.ovms.project_reload import GraphReloading

_STATES: Final = {"ready": "AVAILABLE", "loading": "LOADING", "leaving": "UNLOADING", "failed": "LOADING"}
_PRECONDITION_FAILED: Final = 412


class ConfigPages:
    """Tells what is served, and has the configuration read anew."""

    def __init__(self, app: OvmsApp, reloading: GraphReloading, config: HttpConfig) -> None:
        """Answer for an app; reading anew is for those who may manage it."""
        self._app = app
        self._reloading = reloading
        self._management = Management(app, config)

    def routes(self) -> list[BaseRoute]:
        """Return where they are."""
        return [
            Route("/v1/config", self.config, methods=["GET"]),
            Route("/v1/config/reload", self.reload, methods=["POST"]),
        ]

    async def config(self, _request: Request) -> Response:
        """Tell where every version of every graph and model is."""
        return _json(self._told())

    async def reload(self, request: Request) -> Response:
        """Read what changed anew; answers once that is loaded, or says what could not be."""
        self._management.check(request)
        has_changed, errors = await self._reloading.reload_all()
        if errors:
            return _json({"error": "; ".join(errors)}, _PRECONDITION_FAILED)
        return _json(self._told(), 201 if has_changed else 200)

    def _told(self) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {
            name: {version: _version(version, "END") for version in versions}
            for name, versions in self._app.retired.items()
        }
        for model in self._app.describe_all():
            versions = found.setdefault(model["name"], {})
            for one in model["versions"]:
                before = versions.get(one["version"])
                if before is not None and before["state"] == "AVAILABLE":  # what was to take its place is told of it
                    before["status"] = _status(one.get("error", ""))
                else:
                    versions[one["version"]] = _version(one["version"], _STATES[one["state"]], one.get("error", ""))
        return {name: {"model_version_status": [*versions.values()]} for name, versions in found.items()}


def _version(version: str, state: str, error: str = "") -> dict[str, Any]:
    return {"version": version, "state": state, "status": _status(error)}


def _status(error: str) -> dict[str, str]:
    return {"error_code": "FAILED_PRECONDITION" if error else "OK", "error_message": error or "OK"}


def _json(told: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(told), status, media_type="application/json")
