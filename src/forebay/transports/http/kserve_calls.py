# SPDX-License-Identifier: Apache-2.0
"""Calls of the Open Inference Protocol (KServe v2) over HTTP: `POST /v2/models/NAME[/versions/V]/infer`, on both lanes.

`generate` and `generate_stream` are Triton's: the same calls as plain JSON, for models of text.

`kserve_pages.py` has everything else below `/v2`, `tfserving.py` the protocol's first version.

The loop reads the JSON of a call as far as names, types and shapes; the data goes to the worker as it came. A client
mostly sends the same JSON in front of other data, so what was made of it is remembered by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

import msgspec

from forebay.errors import ForebayError, InvalidRequest, UserCodeError, ValidationError
from forebay.protocols import native
from forebay.protocols.kserve import generate_bodies, rest
from forebay.protocols.kserve.infer_calls import InferRequest
from forebay.server.infer_exchange import offered, require_one_sample, response_to, wish
from forebay.server.served import Served, StandIn
from forebay.serving.tensor_face import TensorFace, TensorRequest
from forebay.transports.http.error_answers import error_headers
from forebay.transports.http.head import Head
from forebay.transports.http.route import Route
from forebay.types.call import EMPTY, Origin, Outcome, Reply, Request
from forebay.types.element_limits import at_once

if TYPE_CHECKING:
    from forebay.protocols.kserve.places import Place
    from forebay.server.config import HttpConfig
    from forebay.server.shared_regions import SharedRegions
    from forebay.transports.http.forms_and_gzip import Staging
    from forebay.types.element_limits import Steps
    from forebay.types.tensor import Data

CALLS: Final = ("infer", "generate", "generate_stream")
"""What a model is called at."""
PUBLIC_PATHS: Final = frozenset({"/v2/health/live", "/v2/health/ready"})
MAX_REMEMBERED: Final = 1024
"""Calls that are remembered by their JSON; when there are more, all are forgotten."""
MAX_REMEMBERED_BYTES: Final = 4096
_LENGTH: Final = rest.LENGTH_HEADER.lower().encode()
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
        self,
        served: Served,
        config: HttpConfig,
        staging: Staging | None = None,
        *,
        is_one_of_several: bool = False,
        may_stream: bool = False,
    ) -> None:
        asked = served.in_tensors
        streams = may_stream and asked.contract.streams
        plain = {"batchable": False, "streams": streams, "is_named": False, "query": (), "in_pieces": False}
        contract = msgspec.structs.replace(asked.contract, raw_input=True, raw_output=True, **plain)
        super().__init__(
            StandIn(asked.endpoint, contract),
            config.max_body_bytes,
            config.api_keys,
            config.cors_origins,
            staging,
            elements=config.elements,
            is_one_of_several=is_one_of_several,
        )
        self.is_simple, self.unpacks = False, True
        self._streams = asked.contract.streams

    def is_staged(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Tell whether a request takes the slow lane: what is packed, or is to be."""
        return super().is_staged(headers) or bool(_answer_packing(headers))

    def fault(self, error: ForebayError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body of an answer that is an error."""
        return fault_of(error, request_id)

    def require_whole(self) -> None:
        """Refuse calls of a model that streams; raises InvalidRequest if it does."""
        if self._streams:
            name = self.endpoint.name
            msg = f"the model '{name}' streams its answers; ask it over gRPC, at generate_stream, or at /models/NAME"
            raise InvalidRequest(msg)


class InferRoute(InferenceRoute):
    """`infer` of one version of a model."""

    head_class: ClassVar[type[Head]] = InferHead

    def __init__(
        self,
        served: Served,
        face: TensorFace,
        config: HttpConfig,
        regions: Callable[[], SharedRegions | None],
        staging: Staging | None = None,
        *,
        is_one_of_several: bool = False,
    ) -> None:
        """Answer for a version, with what it says of tensors, and with shared memory if there is any."""
        super().__init__(served, config, staging, is_one_of_several=is_one_of_several)
        self._face = face
        self._regions = regions
        self._calls: dict[bytes, _Call] = {}
        self._answered: tuple[Any, int, list[tuple[bytes, bytes]], Data] = None, 0, [], b""
        """What the last answer said of its only tensor, how long that was, its headers and its JSON."""

    def read_head(self, headers: Iterable[tuple[bytes, bytes]], query: bytes = b"", *, in_query: bool = False) -> Head:
        """Read the headers of a request."""
        head = super().read_head(headers, query, in_query=in_query)
        assert isinstance(head, InferHead)
        for name, value in headers:
            if name == _LENGTH:
                head.json_bytes = value.decode("latin-1")
        head.answer_packing = _answer_packing(headers)
        return head

    def counting(self, head: Head, body: bytes | memoryview) -> Steps[Any] | None:
        """Count the elements of the JSON in a body, and read its envelope if it is long."""
        assert isinstance(head, InferHead)
        return rest.counting(body, head.json_bytes, self.elements)

    def request(
        self, head: Head, body: bytes | memoryview, reply: Reply, origin: Origin | None, read: Any = None
    ) -> Request:
        """Make a request of a head and its body; raises ForebayError if the model does not take it."""
        assert isinstance(head, InferHead)
        call = self._call(body, head.json_bytes, read)
        if isinstance(call, _Call):
            view = memoryview(body)  # of what landed in shared memory it is one already, and its slices stay there
            data: list[Any] = [view[place] for place in call.places]
            asked, params, size = call.asked, call.params, call.size
        else:
            asked, data = call, [one.data for one in call.inputs]
            params, size = self._asked(asked)
            for place in asked.places.values():
                offered(self._regions()).require(place)
        request = TensorRequest(data, reply, params, origin, size=size, id=head.id, call=asked)
        self.complete(request, head, origin)
        if asked.parameters:
            wish(request, asked.parameters)
        return request

    def answer(self, request: Request, outcome: Outcome) -> tuple[list[tuple[bytes, bytes]], list[Data]]:
        """Return headers and body of a successful answer."""
        assert isinstance(request, TensorRequest)
        is_plain = outcome.__class__ is list and len(outcome) == 2 and not request.call.id and not request.call.places
        if is_plain:
            told, size, headers, text = self._answered
            if outcome[0] == told and len(outcome[1]) == size:  # as nearly always
                return headers, [text, outcome[1]]
        config, regions = self.endpoint.config, self._regions()
        response, places = response_to(request.call.id, outcome, config, regions, request.call.places)
        pieces, json_bytes = rest.encode_response(response, places)
        if json_bytes is None:
            return [JSON], pieces
        headers = [(b"content-type", b"application/octet-stream"), (_LENGTH, str(json_bytes).encode())]
        if is_plain:
            self._answered = outcome[0], len(outcome[1]), headers, pieces[0]
        return headers, pieces

    def _call(
        self, body: bytes | memoryview, json_bytes: str | None, read: rest.Envelope | None
    ) -> _Call | InferRequest:
        """Read a call; one whose data is all behind its JSON is remembered by that."""
        if json_bytes is None:
            is_counted = len(body) > self.passes_bytes
            return rest.decode_request(body, read=self._reader(), is_counted=is_counted, envelope=read)
        if json_bytes == "0":
            return rest.decode_raw(body, self._face)
        size = rest.head_size(json_bytes, len(body))
        text = bytes(body[:size]) if size <= MAX_REMEMBERED_BYTES else b""
        known = self._calls.get(text)
        if known is not None and known.length == len(body):
            return known
        is_counted = len(body) > self.passes_bytes
        asked = rest.decode_request(body, json_bytes, self._reader(), is_counted=is_counted, envelope=read)
        is_behind = all(type(one.data) is memoryview and not one.is_json for one in asked.inputs)
        if not text or asked.places or not is_behind:
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

    def _reader(self) -> Callable[[Place], bytearray] | None:
        regions = self._regions()
        return None if regions is None else regions.reader()

    def _asked(self, asked: InferRequest) -> tuple[Mapping[str, Any], int]:
        self.require_whole()
        return self._face.ask(
            asked.inputs,
            asked.outputs,
            is_json=not asked.is_binary,
            in_json={name: not is_binary for name, is_binary in asked.binary.items()},
            parameters=asked.parameters,
        )


class GenerateRoute(InferenceRoute):
    """`generate` of one version of a model, or `generate_stream`."""

    def __init__(
        self,
        served: Served,
        face: TensorFace,
        config: HttpConfig,
        staging: Staging | None = None,
        *,
        is_streamed: bool,
        is_one_of_several: bool = False,
    ) -> None:
        """Answer for a version, with what it says of tensors."""
        super().__init__(served, config, staging, is_one_of_several=is_one_of_several, may_stream=is_streamed)
        self._face = face
        self._is_streamed = is_streamed

    def fault(self, error: ForebayError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body of an answer that is an error, which calls an input as requests do."""
        status, headers, body = super().fault(error, request_id)
        is_unnamed = [one.name for one in self._face.inputs] == ["input"]
        return status, headers, generate_bodies.UNNAMED.sub(rb"\1 'text_input'", body) if is_unnamed else body

    def counting(self, head: Head, body: bytes | memoryview) -> Steps[Any] | None:
        """Count the elements of a body, and read its members."""
        del head
        return generate_bodies.fields_of(body, self.elements)

    def request(
        self, head: Head, body: bytes | memoryview, reply: Reply, origin: Origin | None, read: Any = None
    ) -> Request:
        """Make a request of a head and its body; raises ForebayError if the model does not take it."""
        if not self._is_streamed:
            self.require_whole()
        fields = at_once(generate_bodies.fields_of(body, self.elements)) if read is None else read
        asked = generate_bodies.request_of(fields, self._face)
        params, size = self._face.ask(asked.inputs, is_json=True, parameters=asked.parameters)
        if self._streams:
            require_one_sample(self.endpoint.name, size)
        data: list[Any] = [one.data for one in asked.inputs]
        asked = msgspec.structs.replace(asked, inputs=())  # they refer to the body
        request = TensorRequest(data, reply, params, origin, size=size, id=head.id, call=asked)
        self.complete(request, head, origin)
        wish(request, asked.parameters)
        return request

    def answer(self, request: Request, outcome: Outcome) -> tuple[list[tuple[bytes, bytes]], list[Data]]:
        """Return headers and body of a successful answer."""
        if self._is_streamed:
            _, headers = self.stream_head(outcome, request.id)
            return headers[:-1], [self.part(outcome, request)]
        return [JSON], [self._object(outcome, request)]

    def stream_head(self, first: Any, request_id: str) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Return status and headers of a streamed answer."""
        status, headers = super().stream_head(first, request_id)
        return status, [(b"content-type", b"text/event-stream; charset=utf-8"), *headers[1:]]

    def part(self, part: Any, request: Request) -> bytes:
        """Return a part of the streamed answer to a request as it is sent."""
        return b"data: %b\n\n" % self._object(part, request)

    def bundle(self, parts: Sequence[Any], request: Request) -> bytes:
        """Return several parts of the streamed answer to a request as they are sent."""
        return b"".join([self.part(part, request) for part in parts])

    def last_part(self, error: ForebayError, request_id: str) -> bytes:
        """Write an error that ends a stream."""
        return b"data: %b\n\n" % fault_of(error, request_id)[2]

    def _object(self, outcome: Outcome, request: Request) -> bytes:
        assert isinstance(request, TensorRequest)
        return generate_bodies.encode_answer(
            response_to(request.call.id, outcome, self.endpoint.config, None, EMPTY)[0]
        )


def routes_for(
    served: Served,
    config: HttpConfig,
    staging: Staging,
    regions: Callable[[], SharedRegions | None],
    version: str = "",
) -> dict[str, Callable[..., Route]]:
    """Return what makes the routes of a version, by target; it is told whether the route `is_one_of_several`."""
    if served.tensors is None:
        return {}
    below = quote(served.endpoint.name) + (f"/versions/{quote(version, safe='')}" if version else "")
    found: dict[str, Callable[..., Route]] = {
        f"/v2/models/{below}/infer": partial(InferRoute, served, served.tensors, config, regions, staging)
    }
    if not served.tensors.is_open:  # else nobody knows which members are inputs
        make = partial(GenerateRoute, served, served.tensors, config, staging)
        found[f"/v2/models/{below}/generate"] = partial(make, is_streamed=False)
        found[f"/v2/models/{below}/generate_stream"] = partial(make, is_streamed=True)
    return found


def routes_alone(served: Served, config: HttpConfig, regions: Callable[[], SharedRegions | None]) -> dict[bytes, Route]:
    """Return the routes of the only model of a server, by target: with its version and without."""
    if served.tensors is None:
        return {}
    route = InferRoute(served, served.tensors, config, regions)
    name, version = quote(served.endpoint.name), quote(served.endpoint.config.version, safe="")
    return {f"/v2/models/{name}{of}/infer".encode(): route for of in ("", f"/versions/{version}")}


def fault_of(error: ForebayError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an error in the protocol's form."""
    message = error.message
    if isinstance(error, UserCodeError):
        message = "the model failed; the server's log has the details under this request id"
    status = 400 if isinstance(error, ValidationError) else native.status_of(error)
    own = [(b"x-request-id", request_id.encode())] if request_id else []
    body = msgspec.json.encode({"error": message.encode(errors="replace").decode()})
    return status, [JSON, *own, *error_headers(error)], body


def is_inference_path(path: str) -> bool:
    """Tell whether a path belongs to the protocol; where Cohere's clients rank does not."""
    return path == "/v2" or (path.startswith("/v2/") and path != "/v2/rerank")


def _answer_packing(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return what the answer is to be packed with.

    Only where a client names a single coding: lists of several are what HTTP libraries say by themselves, and packing
    numbers takes longer than sending them.
    """
    for name, value in headers:
        if name == b"accept-encoding" and (said := value.strip().lower()) in {b"gzip", b"deflate"}:
            return said
    return b""
