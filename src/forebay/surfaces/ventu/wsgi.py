# SPDX-License-Identifier: Apache-2.0
"""The HTTP service as a WSGI application."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from forebay.surfaces.ventu.service_pages import Action, Reply, ServicePages, too_large

if TYPE_CHECKING:
    from forebay.surfaces.ventu.service import Service


class WsgiApp:
    """Answers for one Ventu object, in whichever thread it is called."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._pages = ServicePages(self.service.media, self.service.document())

    def __call__(self, environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        reply = self._reply(environ)
        start_response(reply.line, reply.headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [reply.body]

    def _reply(self, environ: Mapping[str, Any]) -> Reply:
        wanted = self._pages.find(environ["REQUEST_METHOD"], environ.get("PATH_INFO") or "/")
        if isinstance(wanted, Reply):
            return wanted
        if wanted is Action.METRICS:
            body, media = self.service.metrics.page()
            return Reply(200, media, body)
        if wanted is Action.HEALTH:
            return self._pages.health(self.service.is_well())
        limit = self.service.model.max_body_bytes
        body = _read(environ, limit)
        if len(body) > limit:
            return too_large(limit)
        refused = self._pages.unsupported(environ.get("CONTENT_TYPE") or "") if body else None
        return refused or self.service.answer(body)


def _read(environ: Mapping[str, Any], limit: int) -> bytes:
    """Read the body, or one byte more than the limit if it is longer."""
    stream: BinaryIO = environ["wsgi.input"]
    length: str = environ.get("CONTENT_LENGTH") or ""
    if length.isdigit():
        return stream.read(min(int(length), limit + 1))
    # Without a length, only a server that ends the stream itself can be asked for all of it.
    return stream.read(limit + 1) if environ.get("wsgi.input_terminated") else b""
