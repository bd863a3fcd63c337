# SPDX-License-Identifier: Apache-2.0
"""Tells of calls that an ASGI application answers: pages, everything unknown, and what other surfaces serve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from forebay.errors import CapacityError, ForebayError, UserCodeError
from forebay.observe.logs.access_log import CALLED_OFF, COST, Answering, EndedCall
from forebay.observe.logs.noted_refusals import LastRefusals
from forebay.observe.logs.request_ids import next_id, request_id_of
from forebay.protocols import native
from forebay.types.server_state import here

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from forebay.types.call import Request

log = logging.getLogger("forebay.requests")

HELD: Final = "forebay.held"
"""Where a scope has the bytes that its connection counts for the request; other servers count none."""
TOLD: Final = "forebay.call"
"""Where a scope holds its `EndedCall`, for those who know more of it; without it nothing is told."""


def path_as_sent(scope: Scope) -> str:
    """Return the path as it was asked for: percent-encoded, and without the query."""
    return (scope.get("raw_path") or quote(scope["path"]).encode()).decode("latin-1").partition("?")[0]


def path_of(scope: Scope) -> str:
    """Return what follows the place where the application is mounted; some servers leave that place out of the path."""
    path, mount = scope["path"], scope.get("root_path", "")
    return path[len(mount) :] or "/" if path == mount or path.startswith(f"{mount}/") else path


def path_of_as_sent(scope: Scope) -> str:
    """Return the same percent-encoded, without a slash at its end.

    Some frameworks shorten the path and leave `root_path` and `raw_path` as they were, so it is looked for at the end.
    """
    path, sent = path_of(scope).rstrip("/"), path_as_sent(scope).rstrip("/")
    whole, start = unquote(sent), 0
    before = len(whole) - len(path) if whole.endswith(path) else -1
    while before > 0 and (end := sent.find("/", start + 1)) > 0:
        before -= len(unquote(sent[start:end]))
        start = end
    return quote(path) if before else sent[start:]


def answered_by(scope: Scope, endpoint: Answering, request: Request) -> None:
    """Note who answers a call, while the endpoint replies."""
    call = scope.get(TOLD)
    if call is not None:
        call.answered_by(endpoint, request)


def id_of(scope: Scope) -> str:
    """Return the id of a request: the one its client gave it, or a new one."""
    own = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return request_id_of(own) or next_id()


def failed(scope: Scope, error: ForebayError, request_id: str = "") -> None:
    """Note which error a call is answered with; the status alone stands for several.

    What the user's code raised where no endpoint was asked, such as while a version is loaded, is logged here: clients
    are sent to the log for it.
    """
    if isinstance(error, UserCodeError) and not error.is_logged:
        error.is_logged = True
        extra = {"path": path_as_sent(scope), "request_ids": [request_id], "trace": error.trace}
        log.error("%s: %s", error.kind, error.message, extra=extra)
    if request_id and isinstance(error, CapacityError):
        here(LastRefusals).note(error, request_id)
    call = scope.get(TOLD)
    if call is not None:
        call.code = native.code_of(error)


def telling(app: ASGIApp, tell: Callable[[EndedCall], object], *, says_cost: bool = False) -> ASGIApp:
    """Return an application that answers as this one and tells of each call that has ended.

    Args:
        says_cost: Whether each answer says what it has cost.
    """

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        call = EndedCall(scope["method"], path_as_sent(scope), started=time.monotonic(), says_cost=says_cost)
        call.client = ":".join(map(str, scope["client"] or ()))
        call.parent = next((value for name, value in scope["headers"] if name == b"traceparent"), b"").decode("latin-1")
        scope[TOLD] = call
        is_whole = False

        async def sending(message: Message) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                call.status = message["status"]
                ids = [value for name, value in message["headers"] if name == b"x-request-id"]
                call.request_id = ids[0].decode("latin-1") if ids else call.request_id
                if call.cost:
                    message = {**message, "headers": [*message["headers"], (COST, call.cost)]}
            else:
                call.body_bytes += 0 if scope["method"] == "HEAD" else len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await app(scope, receive, sending)
        finally:
            if TOLD in scope:
                call.code = call.code if is_whole else "cancelled"
                call.status = call.status or CALLED_OFF
                tell(call)

    return told
