# SPDX-License-Identifier: Apache-2.0
"""The HTTP service without I/O: which path is what, and what an answer looks like. All faces share it."""

from __future__ import annotations

import gzip
import http
import json
from collections.abc import Mapping
from enum import Enum, auto
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from forebay.surfaces.ventu.inference import Answered, BodyRefused, Garbled, Outcome, UnfitResult
from forebay.surfaces.ventu.media_codecs import JSON, Serialisation
from forebay.transports.http.page_headers import API_PAGE, NOT_GUESSED


class Action(Enum):
    """What a request asks for whose answer is not known in advance."""

    HEALTH = auto()
    METRICS = auto()
    INFERENCE = auto()


class Reply(NamedTuple):
    """One answer."""

    status: int
    media: str
    body: bytes
    allow: str = ""
    more: Mapping[str, str] = {}

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Its headers."""
        headers = [("content-type", self.media), ("content-length", str(len(self.body)))]
        headers += self.more.items()
        return [*headers, ("allow", self.allow)] if self.allow else headers

    @property
    def line(self) -> str:
        """Status and reason."""
        return f"{self.status} {http.HTTPStatus(self.status).phrase}"


HOME: Final = {
    "health check": {"/health": "GET"},
    "metrics": {"/metrics": "GET"},
    "inference": {"/inference": "POST"},
    "API document": {"/apidoc/redoc": "GET", "/apidoc/swagger": "GET"},
}

_ASSETS: Final = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}


class ServicePages:
    """The paths of a service."""

    def __init__(self, media: Serialisation, document: str) -> None:
        """Prepare the answers that never change.

        Args:
            document: Its OpenAPI document, in JSON.
        """
        self.media = media
        text = resources.files("forebay.surfaces.ventu").joinpath("apidoc.html").read_bytes()
        page = Reply(200, "text/html", text, more=API_PAGE)
        self._posts = {"/inference": Action.INFERENCE}
        self._gets: dict[str, Reply | Action] = {
            "/": Reply(200, media.name, _bytes(media.dumps(HOME))),
            "/health": Action.HEALTH,
            "/metrics": Action.METRICS,
            "/apidoc/openapi.json": Reply(200, JSON, document.encode()),
            "/apidoc/redoc": page,
            "/apidoc/swagger": page,
            "/apidoc/swagger-init.js": Reply(200, "text/javascript", _INIT, more=NOT_GUESSED),
        }

    def find(self, method: str, path: str) -> Reply | Action:
        """Return the answer to a request, or what has to be done for it."""
        asset = path.removeprefix("/apidoc/")
        if asset in _ASSETS:
            known, allowed = Reply(200, _ASSETS[asset], _asset(asset), more=NOT_GUESSED), "GET"
        elif path in self._posts:
            known, allowed = self._posts[path], "POST"
        elif path in self._gets:
            known, allowed = self._gets[path], "GET"
        else:
            return Reply(404, self.media.name, b"")
        if method == allowed:
            return known
        if method == "OPTIONS":
            return Reply(200, self.media.name, b"", allowed)
        return Reply(405, self.media.name, b"", f"{allowed}, OPTIONS")

    def unsupported(self, content_type: str) -> Reply | None:
        """Return the refusal of a body of this type, None if it is read; a body without a type is."""
        given = content_type.partition(";")[0].strip().lower()
        if not given or given in self.media.names:
            return None
        return problem(415, "Unsupported media type", f"{content_type[:200]} is an unsupported media type.")

    def health(self, is_well: bool) -> Reply:
        """Return the answer to a health check."""
        status = {"inference": "OK" if is_well else "Error", "service": "OK"}
        return Reply(200, self.media.name, _bytes(self.media.dumps(status)))


def reply_to(outcome: Outcome, media: Serialisation) -> Reply:
    """Return the answer that an outcome makes."""
    if isinstance(outcome, Answered):
        return Reply(200, media.name, _bytes(outcome.body))
    if isinstance(outcome, Garbled):
        text = f"Could not parse {media.label} body - {outcome.reason}"
        return problem(400, f"Invalid {media.label}", text)
    if isinstance(outcome, BodyRefused | UnfitResult):
        return Reply(422 if isinstance(outcome, BodyRefused) else 500, media.name, _bytes(outcome.body))
    return broken()


def problem(status: int, title: str, description: str) -> Reply:
    """Return an answer that says what is wrong; it is JSON whatever the service speaks."""
    return Reply(status, JSON, json.dumps({"title": title, "description": description}).encode())


def broken() -> Reply:
    """Return the answer for a request on which the user's code failed; why stands in the log only."""
    return problem(500, "Internal Server Error", "The model failed on this request; the log says why.")


def too_large(limit: int) -> Reply:
    """Return the answer to a body over the limit."""
    return problem(413, "Payload too large", f"At most {limit} bytes are taken.")


def _bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text


@cache
def _asset(name: str) -> bytes:
    packed = resources.files("forebay.transports.http").joinpath("assets", name + ".gz")
    return gzip.decompress(packed.read_bytes())


_INIT: Final = b"""\
"use strict";
window.ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis],
});
"""
