# SPDX-License-Identifier: Apache-2.0
"""What the fast lane and Starlette share: from headers to a request, and from an outcome to an answer.

No bytes are moved here; `connection.py` and `asgi.py` do that, each in its own way, and one contract suite holds
both to the same answers.
"""

from __future__ import annotations

import copy
import functools
import re
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

from forebay.errors import ForebayError, InvalidRequest, NotFound, QueueFull, TooLarge, Unavailable, UserCodeError
from forebay.observe.logs.request_ids import next_id, request_id_of
from forebay.protocols import native
from forebay.protocols.samples import samples_in_steps, samples_of
from forebay.transports.api_keys import KeyHolders, key_is_known, no_key
from forebay.transports.http.error_answers import error_answer
from forebay.transports.http.foreign_page import FORWARDED
from forebay.transports.http.forms_and_gzip import PACKINGS, Staged, Staging
from forebay.transports.http.head import NEVER, Head
from forebay.transports.http.http_errors import ForeignPage, Unauthorized, UnsupportedEncoding
from forebay.types.author_view import for_author
from forebay.types.call import ALONE, Media, Origin, Reply, Request, head_of, status_in
from forebay.types.context import PARAM, told
from forebay.types.element_limits import DEFAULT, ElementLimits, Steps, too_long
from forebay.types.failures import without_frames
from forebay.types.json_elements import json_elements
from forebay.types.json_segments import LONG_BYTES
from forebay.types.loopback import is_loopback
from forebay.types.msgpack_elements import msgpack_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from forebay.server.byte_budget import ByteBudget
    from forebay.server.served import AskedEndpoint, Served, StandIn
    from forebay.types.tensor import Data

_MAX_DIGITS: Final = 20
_SECONDS: Final = re.compile(rb"[0-9]{1,20}(?:\.[0-9]{1,20})?")

SIMPLE_TYPES: Final = frozenset({"", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"})
"""What a page of another origin may post without its browser asking the server beforehand."""


def whole_number(value: bytes) -> int:
    """Read a length or a time; one of too many digits to be read is above any limit, and what is not a number is 0."""
    return int(value.lstrip(b"0")[:_MAX_DIGITS] or b"0") if value.isdigit() else 0


class Route:
    """An endpoint as HTTP sees it.

    Attributes:
        is_retired: Whether its target has another route by now, or none. It then takes no further request.
        places: Where a long body lands, so that workers see it; None if it does not.
        successor: The route of its target after it was retired.
        is_one_of_several: Whether the next request to the same target may have another route.
        head_class: What `read_head` makes.
        elements: How many elements a body may have.
        passes_bytes: A body of this length cannot have more of them.
        show_failures: Whether clients are told what a model raised; None for those that may be its author.
        unpacks: Whether packed bodies are unpacked; who takes any bytes gets them as they come.
        frames_parts: Whether parts of a stream become events; otherwise they are sent as they are.
    """

    head_class: ClassVar[type[Head]] = Head
    show_failures: bool | None = False

    def __init__(
        self,
        served: Served | StandIn,
        max_body_bytes: int,
        api_keys: Sequence[str],
        origins: Iterable[str] = (),
        staging: Staging | None = None,
        *,
        elements: ElementLimits = DEFAULT,
        is_one_of_several: bool = False,
    ) -> None:
        self.endpoint: AskedEndpoint = served.endpoint
        self.is_retired = False
        self._may_return = False
        self.is_one_of_several = is_one_of_several
        self.successor: Route | None = None
        contract = served.contract
        # An array of samples is taken apart on the loop.
        self.places = None if contract.batchable else self.endpoint.places
        self.is_simple = not (contract.batchable or contract.streams or contract.has_context)
        self.contract = served.contract
        self.unpacks = not contract.raw_input
        self.frames_parts = not contract.raw_output
        self.max_body_bytes = max_body_bytes
        self.elements = elements
        self.passes_bytes = min(elements.tensors, elements.elsewhere)
        self._staging = staging
        self._api_keys = [key.encode() for key in api_keys]
        self._holders = KeyHolders(api_keys)
        self._origins = frozenset(origin.encode() for origin in origins)
        self._max_samples = self.endpoint.batching.capacity if served.contract.batchable else 1

    def turn(self) -> Route:
        """Return the route of the next request."""
        return self

    def retire(self, successor: Route | None, *, may_return: bool = False) -> None:
        """Take no further request: what names this target goes to another route, or nowhere.

        Args:
            successor: The other one.
            may_return: Whether the model has left to make room, and comes back for who asks again.
        """
        self.is_retired = True
        self.successor = successor
        self._may_return = may_return

    def now(self, head: Head, headers: Iterable[tuple[bytes, bytes]], query: bytes) -> Head:
        """Return a head as the present route of its target reads it: a version may have left while the body arrived."""
        route: Route | None = self
        while route is not None and route.is_retired:
            route = route.successor
        if route is None:
            head = copy.copy(head)  # it may be remembered, and others may have sent the same
            head.problem = NotFound(f"nothing answers at {head.target.decode('latin-1')[:100]} any more")
            if self._may_return:
                head.problem = Unavailable(f"the model '{self.endpoint.name}' has just left the memory; try again")
            return head
        found = route.turn().read_head(headers, query, in_query=head.params["in"] == "query")
        found.keep_alive, found.chunked, found.is_simple = head.keep_alive, head.chunked, False
        found.method, found.target = head.method, head.target
        return found

    def is_staged(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Tell whether a body is read in steps, beside the loop or by the model."""
        if self.contract.in_pieces:
            return True
        for name, value in headers:
            if name == b"content-encoding" or (name == b"content-type" and value[:10].lower() == b"multipart/"):
                return self._staging is not None
        return False

    def read_head(self, headers: Iterable[tuple[bytes, bytes]], query: bytes = b"", *, in_query: bool = False) -> Head:
        """Read the headers of a request; names are in lower case. What is wrong with them becomes its `problem`."""
        endpoint = self.endpoint
        head = self.head_class(self, is_full=endpoint.is_full)
        head.is_usual = not self.is_one_of_several
        content_type = accept = host = origin = packing = b""
        keys: list[bytes] = []
        for name, value in headers:
            wanted = _HEADERS.get(name)
            if wanted is None:
                continue
            if wanted == _CONTENT_TYPE:
                content_type = value
            elif wanted == _CONTENT_LENGTH:
                head.length = whole_number(value)
            elif wanted == _ACCEPT:
                accept = accept + b"," + value if accept else value
            elif wanted == _TIMEOUT:
                self._read_timeout(head, value)
            elif wanted == _TIMEOUT_S:
                self._read_timeout_s(head, value)
            elif wanted == _KEY:
                keys.append(value)
            elif wanted == _HOST:
                host = value
            elif wanted == _PARENT:
                head.parent = value
            elif wanted == _FORWARDED:
                head.is_forwarded = True
            elif wanted != _CONNECTION or value.lower() != b"keep-alive":
                head.is_usual = False
                if wanted == _REQUEST_ID_HEADER:
                    head.id = request_id_of(value)
                elif wanted == _EXPECT:
                    head.expects_continue = value.lower() == b"100-continue"
                elif wanted == _ORIGIN:
                    origin = value
                elif wanted == _ENCODING:
                    packing = value.strip().lower()
        if self._api_keys and not any(key_is_known(self._api_keys, key) for key in keys):
            head.problem = Unauthorized(no_key(headers))
        elif self._holders and (tenant := self._holders.of(keys)) is not None:
            if self._holders.has_children:
                try:
                    tenant = self._holders.child_of(tenant, headers)
                except InvalidRequest as error:
                    head.problem = head.problem or without_frames(error)
            head.tenant = tenant
            head.is_full = functools.partial(endpoint.is_full_for, tenant)
        if self.contract.has_context:
            head.texts = _texts(headers)
        if origin and head.problem is None:
            head.problem = self._origin_problem(origin, host, content_type)
        try:
            named = content_type.decode("latin-1"), accept.decode("latin-1")
            head.params = native.params_of(self.contract, *named, in_query=in_query)
            if head.params["in"] == "form":
                self._require_staging()
                head.form = content_type
            if packing and (head.form or self.unpacks):
                self._read_packing(head, packing)
            if query and (self.contract.query or (self.contract.is_named and self.contract.fields)):
                head.params = native.params_with_query(self.contract, head.params, query)
        except ForebayError as error:
            head.problem = head.problem or without_frames(error)  # its frames hold the head
        # Mailboxes do not count: they get only bodies too short for too many elements.
        is_plain = self.is_simple and head.tenant is None and head.length <= self.passes_bytes
        head.is_simple = is_plain and head.timeout_s == NEVER and head.is_usual and head.problem is None
        return head

    @property
    def byte_budget(self) -> ByteBudget | None:
        """What counts bodies that come over another server; None if nothing does."""
        return None if self._staging is None else self._staging.memory

    def stage(self, head: Head) -> Staged:
        """Begin to read a body in steps; raises ForebayError if it is refused before."""
        assert self._staging is not None
        return self._staging.open(head, self.max_body_bytes)

    def refusal_before_body(self, head: Head) -> QueueFull | None:
        """Return why a request is refused whatever its body is, because of others; None if it is not."""
        if head.is_full():
            return self.is_full_error
        allowance = None if head.tenant is None else head.tenant.allowance
        return None if allowance is None else allowance.reached(time.monotonic())

    @functools.cached_property
    def is_full_error(self) -> QueueFull:
        """The error of a request that comes to a full queue."""
        return QueueFull(f"the queue of '{self.endpoint.name}' is full; try again later")

    def too_large(self, size: int | None = None) -> TooLarge:
        """Return the error for a body over the limit."""
        return too_long("body", self.max_body_bytes, size)

    def counting(self, head: Head, body: bytes | memoryview) -> Steps[Any] | None:
        """Count the elements of a body before anything is made of it; None if they need not be counted.

        What the steps return is given to `request`: what they have read of a long body.

        Raises:
            TooLarge: If there are too many.
        """
        form, limits = head.params["in"], self.elements
        if self.contract.raw_input or form not in {"json", "msgpack"}:
            return None
        counting = json_elements(body, limits.tensors, limits.elsewhere) if form == "json" else None
        if self.contract.batchable and len(body) > LONG_BYTES:
            return self._samples(counting, head, body)
        return counting or msgpack_elements(body, limits.tensors)

    def _samples(self, counting: Steps[None] | None, head: Head, body: bytes | memoryview) -> Steps[list[memoryview]]:
        if counting is not None:
            yield from counting
        return (yield from samples_in_steps(body, head.params, self._max_samples, self.elements.tensors))

    def request(
        self, head: Head, body: bytes | memoryview, reply: Reply, origin: Origin | None, read: Any = None
    ) -> Request:
        """Make a request of a head and its body, or of what `counting` has read of it.

        Raises:
            InvalidRequest: If the body should be an array of samples and is none.
            TooLarge: If it is an array of more samples than may wait.
        """
        request = Request(body, reply, params=head.params, origin=origin, id=head.id)
        if self.contract.in_pieces:
            request.key = ALONE
            if body:  # it was read for a version that has left
                raise Unavailable("the model was replaced by one that takes bodies as they arrive; try again")
        elif self.contract.batchable:
            assert type(body) is bytes  # only where samples come one a request do bodies land
            request.body = read or samples_of(body, head.params, self._max_samples)
            request.size = len(request.body)
        self.complete(request, head, origin)
        return request

    def complete(self, request: Request, head: Head, origin: Origin | None) -> None:
        """Give a request its tenant, its time limit, and what its model is told beside the sample."""
        request.tenant = head.tenant
        if head.texts is not None:
            request.id = head.id or next_id()
            client = getattr(origin, "client", None)
            timeout_s = head.timeout_s
            if timeout_s == NEVER:
                timeout_s = self.endpoint.config.usual_s(streams=self.contract.streams)
            request.params = {**request.params, PARAM: told(head.texts, request.id, client, timeout_s)}
        if head.timeout_s != NEVER:
            request.deadline = request.due = time.monotonic() + head.timeout_s

    def answer(self, request: Request, outcome: Any) -> tuple[list[tuple[bytes, bytes]], Sequence[Data]]:
        """Return headers and the pieces of the body of a successful answer."""
        if type(outcome) is Media:
            kind = outcome.type or native.content_type_of(self.contract, request.params)
            return [(b"content-type", kind.encode()), *_own_headers(outcome)], [outcome.body]
        body = native.joined(outcome, request.params) if self.contract.batchable else outcome
        return [(b"content-type", native.content_type_of(self.contract, request.params).encode())], [body]

    def stream_head(self, first: Any, request_id: str) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Return status and headers of a streamed answer; its first part may bring some."""
        own = _own_headers(first) if type(first) is Media else []
        kind = getattr(first, "type", "") or (native.RAW_TYPE if self.contract.raw_output else native.STREAM_TYPE)
        usual = [
            (b"content-type", kind.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", request_id.encode()),
        ]
        named = {name.lower() for name, _ in own}
        return status_in(first), [*(one for one in usual if one[0] not in named), *own]

    def part(self, part: Any, request: Request) -> bytes:
        """Return a part of the streamed answer to a request as it is sent."""
        del request
        return native.event(part) if self.frames_parts else part

    def bundle(self, parts: Sequence[Any], request: Request) -> bytes:
        """Return several parts of the streamed answer to a request as they are sent."""
        del request
        return native.event(b"\n\ndata: ".join(parts)) if self.frames_parts else b"".join(parts)

    def cost_event(self, cost: bytes) -> bytes:
        """Write the end of a streamed answer that says what it has cost; nothing where parts are bytes as they are."""
        return b"" if self.contract.raw_output or not cost else native.cost_event(cost)

    def last_part(self, error: ForebayError, request_id: str) -> bytes:
        """Write an error that ends a stream."""
        return native.error_event(native.error_body(error, request_id))

    def seen_by(self, client: tuple[str, int] | None, error: ForebayError, *, is_forwarded: bool) -> ForebayError:
        """Return an error as a client may see it: what a model raised is for its author alone.

        Whoever develops is taken for the author: a program on the machine of a server without keys, if no proxy speaks
        for others; anybody where the server is told so.
        """
        if not isinstance(error, UserCodeError) or self.show_failures is False:
            return error
        is_near = client is not None and is_loopback(client[0]) and not is_forwarded and not self._api_keys
        return for_author(error) if self.show_failures or is_near else error

    def fault(self, error: ForebayError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body of an answer that is an error."""
        return error_answer(error, request_id)

    def _origin_problem(self, origin: bytes, host: bytes, content_type: bytes) -> ForebayError | None:
        """Return why the page that calls may not.

        It may if it is the server's own, if its origin was named, or if what it sends is of a type that a browser asks
        the server about beforehand: then it did, and was let in.
        """
        if origin.partition(b"://")[2] == host or origin in self._origins or b"*" in self._origins:
            return None
        if content_type.partition(b";")[0].strip().lower().decode("latin-1") not in SIMPLE_TYPES:
            return None
        shown = origin[:100].decode("latin-1")
        return ForeignPage(f"a page of {shown!r} calls; let its origin in with --cors-origin, or name the body's type")

    def _read_packing(self, head: Head, packing: bytes) -> None:
        if packing == b"identity":
            return
        if packing not in PACKINGS or self._staging is None:
            found = packing[:40].decode("latin-1")
            takes = "none" if self._staging is None else "gzip, deflate or none"
            error = UnsupportedEncoding(f"Content-Encoding: expected {takes}, got {found!r}")
            if self._staging is not None:
                error.takes = b"gzip, deflate, identity"
            raise error
        head.packing = packing

    def _require_staging(self) -> None:
        """Refuse forms where none can be read: as arrays of samples, and on a lane that does not read in steps."""
        if self._staging is None or self.contract.batchable:
            types = f"{native.JSON_TYPE} or {native.MSGPACK_TYPE}"
            msg = f"Content-Type: expected {types} for an array of samples, got a form, which is one sample"
            raise native.UnsupportedMedia(msg)

    def _read_timeout(self, head: Head, value: bytes) -> None:
        milliseconds = whole_number(value)
        if milliseconds < 1:
            msg = f"X-Request-Timeout-Ms: expected a whole number >= 1, got {value[:40].decode('latin-1')!r}"
            head.problem = InvalidRequest(msg)
        else:
            head.timeout_s = min(head.timeout_s, milliseconds / 1000, self.endpoint.config.max_timeout_s)

    def _read_timeout_s(self, head: Head, value: bytes) -> None:
        found = _SECONDS.fullmatch(value)
        if found is None or not float(found[0]):
            shown = value[:40].decode("latin-1")
            msg = f"Request-Timeout: expected a number of seconds > 0, such as 2 or 0.25, got {shown!r}"
            head.problem = InvalidRequest(msg)
        else:
            head.timeout_s = min(head.timeout_s, float(found[0]), self.endpoint.config.max_timeout_s)


class SharedRoute(Route):
    """A target whose requests are shared by several versions, each with a route of its own."""

    def __init__(self, routes: Mapping[Served, Route], next_one: Callable[[], Served]) -> None:
        """Ask `next_one` for each request whose turn it is."""
        self.is_retired = False
        self.is_one_of_several = True
        self.endpoint, self.contract = next(iter(routes)).endpoint, next(iter(routes)).contract
        self.successor = None
        self._routes = routes
        self._next = next_one

    def is_staged(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Tell whether a body is read in steps; for the route whose turn it is, its reader asks."""
        return any(route.is_staged(headers) for route in self._routes.values())

    def turn(self) -> Route:
        """Return the route of the next request."""
        return self._routes[self._next()]

    def retire(self, successor: Route | None, *, may_return: bool = False) -> None:
        """Take no further request, nor do those who share."""
        super().retire(successor, may_return=may_return)
        for route in self._routes.values():
            route.retire(successor, may_return=may_return)


(_CONTENT_TYPE, _CONTENT_LENGTH, _ACCEPT, _REQUEST_ID_HEADER, _TIMEOUT, _EXPECT, _KEY, _CONNECTION, _UNUSUAL) = range(9)
_HOST, _ORIGIN, _ENCODING, _PARENT, _TIMEOUT_S, _FORWARDED = range(9, 15)
_HEADERS: Final = {
    b"content-type": _CONTENT_TYPE,
    b"content-length": _CONTENT_LENGTH,
    b"accept": _ACCEPT,
    b"x-request-id": _REQUEST_ID_HEADER,
    b"x-request-timeout-ms": _TIMEOUT,
    b"request-timeout": _TIMEOUT_S,
    b"expect": _EXPECT,
    b"x-api-key": _KEY,
    b"authorization": _KEY,
    b"transfer-encoding": _UNUSUAL,
    b"connection": _CONNECTION,
    b"upgrade": _UNUSUAL,
    b"origin": _ORIGIN,
    b"host": _HOST,
    b"traceparent": _PARENT,
    b"content-encoding": _ENCODING,
    **dict.fromkeys(FORWARDED, _FORWARDED),
}


def _own_headers(media: Media) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in head_of(media)[1]]


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in headers:
        text, before = value.decode("latin-1"), found.get(name.decode("latin-1"))
        found[name.decode("latin-1")] = text if before is None else f"{before}, {text}"
    return found
