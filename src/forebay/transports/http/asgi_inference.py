# SPDX-License-Identifier: Apache-2.0
"""Inference over ASGI: a request is read as the fast lane reads it, and answered from a task of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from starlette.requests import Request as HttpRequest

from forebay.errors import Cancelled, ForebayError
from forebay.observe.logs.request_ids import next_id
from forebay.protocols import native
from forebay.transports.http.asgi_calls import HELD, TOLD, failed, id_of
from forebay.transports.http.bodies import CountedReceive, left, read_body
from forebay.transports.http.error_answers import error_answer
from forebay.transports.http.forms_and_gzip import Staged, packed
from forebay.transports.http.head import NEVER
from forebay.transports.http.http_errors import ForeignPage, MethodNotAllowed
from forebay.transports.reading_turns import in_turns
from forebay.types.body_pieces import BodyPieces
from forebay.types.call import Failure, Media, Origin, Request, nothing, status_in
from forebay.types.element_limits import too_long
from forebay.types.failures import without_frames

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from forebay.observe.logs.access_log import EndedCall
    from forebay.transports.http.head import Head
    from forebay.transports.http.route import Route

    Fault: TypeAlias = Callable[[ForebayError, str], tuple[int, list[tuple[bytes, bytes]], bytes]]
    """What writes errors: status, headers and body."""


class Predict:
    """One model's POST, as an ASGI application."""

    def __init__(self, route: Route, origin: Origin | None = None) -> None:
        """Answer for a route; `origin` is who sends the request, if that is to be known."""
        self._route, self._origin = route, origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, submit, and write the answer or the parts of it as they come."""
        in_query = scope["method"] != "POST"
        route = self._route.turn()
        head = route.read_head(scope["headers"], scope["query_string"], in_query=in_query)
        answer: AsgiAnswer | None = None
        staged: Staged | None = None
        counted: CountedReceive | None = None
        try:
            if head.problem is not None:
                raise head.problem
            if (refusal := route.refusal_before_body(head)) is not None:
                raise refusal
            if head.length > route.max_body_bytes and not head.is_staged:
                raise route.too_large(head.length)
            pieces = BodyPieces() if route.contract.in_pieces else None
            if in_query:
                _require_no_foreign_page(scope["headers"])
                body = scope["query_string"]
            elif pieces is not None:
                body = b""
            elif head.is_staged:
                staged = route.stage(head)
                if head.length > staged.max_bytes:
                    raise too_long("body", staged.max_bytes, head.length)
                body = _arrived(await staged.read(receive))
            else:
                if HELD not in scope and route.byte_budget is not None:
                    receive = counted = CountedReceive(receive, route.byte_budget)
                body = _arrived(await read_body(receive, route.max_body_bytes))
            if route.is_retired:
                head = route.now(head, scope["headers"], scope["query_string"])
                route = head.route or route
                if head.problem is not None:
                    raise head.problem
            read = None
            if len(body) > route.passes_bytes and (counting := route.counting(head, body)) is not None:
                read = await in_turns(counting)
            answer = AsgiAnswer(route, head, send, scope.get(TOLD))
            origin = self._origin
            if origin is None and route.contract.has_context:
                origin = Peer(scope.get("client"))
            outcome = await answer.wait(body, receive, origin, read, pieces)
            await answer.end(outcome)
        except Cancelled:
            return
        except ForebayError as error:
            if answer is None or answer.request is None:
                route.endpoint.reject(error, tenant=head.tenant)
            request_id = (head.id if answer is None else answer.id) or next_id()
            failed(scope, error, request_id)
            seen = route.seen_by(scope.get("client"), error, is_forwarded=head.is_forwarded)
            await send_answer(send, *route.fault(seen, request_id))
            without_frames(error)  # its frames hold the outcome that it is
        finally:
            if answer is not None:
                answer.let_go()
            if staged is not None:
                staged.close()
            if counted is not None:
                counted.close()

    def methods(self, page: Any) -> Methods:
        """Return the handlers of a path by verb: a model also describes itself if it has a page, others only answer."""
        contract = self._route.contract
        if not contract.call:
            return Methods(post=self, get=None if page is None else _Get(self, page), fault=self._route.fault)
        is_got = "GET" in contract.verbs or (contract.streams and contract.is_named and not contract.openai)
        post = self if "POST" in contract.verbs else None
        return Methods(post=post, get=self if is_got else None, fault=self._route.fault)

    def runs_for(self, scope: Scope) -> bool:
        """Tell whether a GET runs the model: one that streams is asked so by an `EventSource`, or with a query."""
        contract = self._route.contract
        if not contract.is_named or not contract.streams:
            return False
        accepts = b",".join([value for name, value in scope["headers"] if name == b"accept"])
        return bool(scope["query_string"]) or native.STREAM_TYPE.encode() in accepts.lower()


def _arrived(body: bytes | None) -> bytes:
    if body is None:
        raise Cancelled("the client went away")
    return body


def _require_no_foreign_page(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse what a page of another site fetches as a picture or the like: such a request has no Origin to judge by."""
    said = dict(headers)
    if said.get(b"sec-fetch-site") == b"cross-site" and b"origin" not in said:
        raise ForeignPage(
            "a page of another site calls, as if this were a picture or a link; call from a script, with --cors-origin"
        )


class Peer(msgspec.Struct, eq=False):
    """The client of a request that came over ASGI."""

    client: tuple[str, int] | None
    release: int = 0


class AsgiAnswer:
    """The answer to one request over ASGI."""

    def __init__(self, route: Route, head: Head, send: Send, call: EndedCall | None = None) -> None:
        self.id = head.id
        self.request: Request | None = None
        self._route = route
        self._head = head
        self._send = send
        self._call = call
        self._started = False
        self._parts: asyncio.Queue[tuple[Any, Callable[[], object]] | None] = asyncio.Queue()
        self._outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def wait(
        self, body: bytes, receive: Receive, origin: Origin | None, read: Any = None, pieces: BodyPieces | None = None
    ) -> Any:
        """Submit and wait for the outcome, sending parts meanwhile; `read` is what was read in steps.

        Raises:
            Cancelled: If the client goes away before; its request is then cancelled.
        """
        route = self._route
        request = self.request = route.request(self._head, body, self._reply, origin, read)
        request.body = request.body if pieces is None else pieces
        request.on_part = self._part
        request.trace = "" if self._call is None else self._call.parent
        self.id = request.id
        route.endpoint.submit(request)
        gone = asyncio.ensure_future(left(receive) if pieces is None else self._feed(pieces, receive, request))
        writing = asyncio.ensure_future(self._write_parts()) if route.contract.streams else None
        waiting: set[asyncio.Future[Any]] = {gone, writing or self._outcome}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and isinstance(refusal := gone.exception(), ForebayError):
                return Failure(refusal)
            if not self._outcome.done():
                raise Cancelled("the client went away")
            if writing is not None:
                await writing
            return self._outcome.result()
        finally:
            gone.cancel()
            if writing is not None:
                writing.cancel()
            route.endpoint.cancel(request)
            if pieces is not None:
                pieces.close("the request is over")

    async def _feed(self, pieces: BodyPieces, receive: Receive, request: Request) -> None:
        """Hand a body over as it is taken; return once the client has left, raise a ForebayError to refuse the rest."""
        route, times, budget = self._route, self._route.endpoint.config, self._route.byte_budget
        assert budget is not None

        def took(size: int) -> None:
            budget.give(size)
            if request.due == NEVER:  # its client states no time, and the usual one begins anew
                latest = request.arrived + times.max_timeout_s
                request.deadline = max(request.deadline, min(time.monotonic() + times.timeout_s, latest))

        pieces.took = took
        length, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                pieces.close("the client went away")
                return
            piece: bytes = message.get("body", b"")
            if (length := length + len(piece)) > route.max_body_bytes:
                pieces.close("the body is too long")
                raise route.too_large()
            budget.take(len(piece))
            has_more = message.get("more_body", False)
            await pieces.put(piece, is_last=not has_more)
        await left(receive)

    def let_go(self) -> None:
        """Refer to the request no longer: it refers to this answer, and the collector does not look at requests."""
        request, self.request = self.request, None
        if request is not None:
            request.reply, request.on_part = nothing, None  # the traceback of an error may hold it for longer

    async def end(self, outcome: Any) -> None:
        """Write the answer, or the end of a streamed one; raises the outcome's error if nothing was written yet."""
        if type(outcome) is Failure:
            if not self._started:
                raise outcome.error
            if self._call is not None:
                self._call.code = native.code_of(outcome.error)
            cost = b"" if self._call is None else self._call.cost
            if not (last := self._route.last_part(outcome.error, self.id)):
                raise Cancelled("the answer is cut off")
            await self._send({"type": "http.response.body", "body": last + self._route.cost_event(cost)})
        elif outcome is None and self._route.contract.streams:
            await self._start_stream()
            last = b"" if self._call is None else self._route.cost_event(self._call.cost)
            await self._send({"type": "http.response.body", "body": last})
        else:
            assert self.request is not None
            headers, pieces = self._route.answer(self.request, outcome)
            body, packing = b"".join(pieces), self._head.answer_packing
            if packing:
                body = await asyncio.to_thread(packed, body, packing)
                headers = [*headers, (b"content-encoding", packing)]
            status = status_in(outcome)
            await send_answer(self._send, status, [*headers, (b"x-request-id", (self.id or next_id()).encode())], body)

    def _reply(self, request: Request, outcome: Any) -> None:
        self.id = request.id or self.id
        if self._call is not None:
            self._call.answered_by(self._route.endpoint, request)
        if not self._outcome.done():
            self._outcome.set_result(outcome)
        self._parts.put_nowait(None)

    def _part(self, part: Any, release: Callable[[], object]) -> None:
        self._parts.put_nowait((part, release))

    async def _write_parts(self) -> None:
        while (given := await self._parts.get()) is not None:
            part, release = given
            try:
                await self._start_stream(part)
                assert self.request is not None
                written = self._route.part(part.body if type(part) is Media else part, self.request)
                await self._send({"type": "http.response.body", "body": written, "more_body": True})
            finally:
                release()

    async def _start_stream(self, first: Any = None) -> None:
        if self._started:
            return
        self._started = True
        self.id = (self.request.id if self.request is not None else self.id) or next_id()
        if self.request is not None:
            self.request.id = self.id
        status, headers = self._route.stream_head(first, self.id)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class _Get:
    """The GET of a model: its page, unless it is asked for a stream."""

    def __init__(self, predict: Predict, page: Any) -> None:
        self._predict = predict
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET" and self._predict.runs_for(scope):
            await self._predict(scope, receive, send)
        else:
            await (await self._page(HttpRequest(scope, receive)))(scope, receive, send)


def _none(_scope: Scope) -> str:
    return ""


class Methods:
    """Calls the function for the request's method; every other method gets 405, or 204 for OPTIONS."""

    def __init__(
        self, *, get: Any = None, post: Any = None, fault: Fault = error_answer, instead: Callable[[Scope], str] = _none
    ) -> None:
        """Say what there is; `instead` says where a POST goes that is not possible here."""
        self._fault = fault
        self._instead = instead
        self._handlers = {"GET": get, "HEAD": get, "POST": post}
        self._allow = ", ".join([name for name, handler in self._handlers.items() if handler] + ["OPTIONS"]).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        method = scope["method"]
        handler = self._handlers.get(method)
        if method == "OPTIONS":
            await send_answer(send, 204, [(b"allow", self._allow)], b"")
        elif handler is None:
            instead = self._instead(scope) if method == "POST" else ""
            error = MethodNotAllowed(f"{method[:20]} is not allowed here; use {self._allow.decode()}{instead}")
            error.allow = self._allow
            failed(scope, error)
            await send_answer(send, *self._fault(error, id_of(scope)))
        elif isinstance(handler, Predict | _Get):
            await handler(scope, receive, send)
        else:
            response = await handler(HttpRequest(scope, receive))
            await response(scope, receive, send)


async def send_answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Send an answer that is there as a whole."""
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    if status != 204:
        start["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
    await send(start)
    await send({"type": "http.response.body", "body": body})
