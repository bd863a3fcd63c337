# SPDX-License-Identifier: Apache-2.0
"""Calls to a graph: the tensors and parameters of a request become packets, and packets become an answer.

Timestamps of one stream rise, whoever gives them: those that nobody gives are the clock's microseconds, or the next
after the highest that was seen.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import InvalidRequest, NotPrepared, TooLarge
from forebay.graph.pool import PacketStream
from forebay.protocols.kserve.infer_calls import InferRequest, InferResponse, in_class
from forebay.serving.tensor_face import TENSORS, TensorFace, check_shape, outcome_of, require_once, tensors_of
from forebay.surfaces.ovms.handlers import UNARY
from forebay.surfaces.ovms.pyovms_tensor import CONVERTED
from forebay.surfaces.ovms.stream_values import ExecutionFailed, as_wanted, as_wire
from forebay.types.call import EMPTY, Failure, Item, Outcome, Request, nothing
from forebay.types.datatypes import DATATYPES
from forebay.types.did_you_mean import listed, nearest
from forebay.types.tensor import Tensor, TensorMetadata, check_size, elements

if TYPE_CHECKING:
    from forebay.graph.run import Emission
    from forebay.protocols.kserve.places import Parameter
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.ovms.linked_graph import GraphLayout, GraphOutput
    from forebay.types.tenant import Tenant

TIMESTAMP: Final = "OVMS_MP_TIMESTAMP"
WANTS_FINAL: Final = "triton_enable_empty_final_response"
IS_FINAL: Final = "triton_final_response"
VERSION: Final = "1"
"""What answers say: graphs have no versions."""

_LOWEST: Final = -(2**63) + 3
_HIGHEST: Final = 2**63 - 4
_RESERVED: Final = frozenset({TIMESTAMP, "priority", "timeout", "binary_data_output", "headers"})
_RESERVED_BEGIN: Final = ("triton_", "sequence_")
_DAY_S: Final = 24 * 3600.0
"""How long a stream may be open if nobody says."""

MAX_WAITING: Final = 1024
"""Requests of a stream that may wait for packets of others while nothing runs; with one more it ends."""

_CHANNELS: Final = {
    "FP32": (1, 2),
    **dict.fromkeys(("UINT8", "INT8", "UINT16", "INT16", "FP16"), (1, 3, 4)),
}
"""Channels that an image may have."""

UNTYPED: Final = "INVALID"
"""What clients are told of streams: any type may come."""


class GraphCalls:
    """What requests to one graph mean."""

    def __init__(
        self, name: str, layout: GraphLayout, declared: Sequence[TensorMetadata] = (), problem: str = ""
    ) -> None:
        """Say which graph, what is declared of its inputs, and why it could never answer."""
        self.name = name
        self.layout = layout
        self._declared: Mapping[str, TensorMetadata] = {one.name: one for one in declared}
        self._problem = problem
        self._leaving: Mapping[str, GraphOutput] = {one.name: one for one in layout.outputs}

    def ask(self, asked: InferRequest, *, is_json: bool, in_json: Mapping[str, bool]) -> dict[str, Any]:
        """Check a request that wants one answer; nothing runs unless all of its inputs are there.

        Returns:
            The params of what is submitted; its body is the data of the tensors.

        Raises:
            InvalidRequest: If an input is missing or given twice, or something else of it is wrong.
            NotPrepared: If it lacks a side packet, or the graph could never answer.
        """
        timestamp = self.timestamp_of(asked)
        self.check_side_packets(asked)
        packets = self.packets(asked)
        missing = [stream for stream in self.layout.inputs if stream not in packets]
        if missing:
            inputs = listed(self.layout.inputs)
            raise InvalidRequest(
                f"not all input packets came: '{missing[0]}' is missing; '{self.name}' has the inputs {inputs}"
            )
        names = [one.called for one in self.layout.outputs]
        require_once(asked.outputs)
        for name in asked.outputs:
            if name not in names:
                raise InvalidRequest(f"'{self.name}' has no output '{name[:100]}'; it has {', '.join(names)}")
        return {
            "in": TENSORS,
            "out": TENSORS,
            "given": [[one.name, one.datatype, list(one.shape), one.is_json] for one in asked.inputs],
            "wanted": [[name, in_json.get(name, is_json)] for name in asked.outputs],
            "is_json": is_json,
            UNARY: True,
            TIMESTAMP: timestamp,
        }

    def decode(self, item: Item) -> Mapping[str, Any]:
        """Return the packets of a request that wants one answer.

        Raises:
            InvalidRequest: If it did not come by the face of the graph.
        """
        if UNARY not in item.params:
            raise InvalidRequest(f"'{self.name}' is a graph of tensors; send them to /v2/models/{self.name}/infer")
        return {one.name: one for one in tensors_of(item.params["given"], item.body)}

    def encode(self, item: Item, results: Mapping[str, Any]) -> Outcome:
        """Return the answer to a request that wants one.

        Raises:
            ExecutionFailed: If an output never came.
            InvalidRequest: If one is wanted in JSON, which cannot say it.
        """
        params = item.params
        for output in self.layout.outputs:
            if output.name not in results:
                msg = f"no node of '{self.name}' has written the output '{output.name}' for this request"
                raise ExecutionFailed(msg)
        found = {one.called: as_wire(results[one.name], one.called) for one in self.layout.outputs}
        wanted = [name for name, _ in params["wanted"]] or list(found)
        timestamp = params[TIMESTAMP]
        told = {TIMESTAMP: _now_us() if timestamp is None else timestamp}
        return outcome_of([as_wanted(found[name], params) for name in wanted], told)

    def packets(self, request: InferRequest) -> dict[str, Any]:
        """Return the inputs of a request by their streams.

        Raises:
            InvalidRequest: If one is unknown, given twice, not as long as it says, or not what is declared.
        """
        packets: dict[str, Any] = {}
        for tensor in request.inputs:
            if tensor.name not in self.layout.spec.inputs:
                hint = nearest(tensor.name, self.layout.inputs)
                did_you_mean = f"did you mean '{hint}'?" if hint else f"it has {listed(self.layout.inputs)}"
                raise InvalidRequest(f"'{self.name}' has no input '{tensor.name[:100]}'; {did_you_mean}")
            if tensor.name in packets:
                raise InvalidRequest(f"the input '{tensor.name}' came twice")
            if tensor.name in self.layout.images:
                _check_image(tensor)
            if tensor.name in self._declared:
                _check_declared(tensor, self._declared[tensor.name])
            known = DATATYPES.get(tensor.datatype)
            if min(tensor.shape, default=0) < 0:
                elements(tensor.name, tensor.shape)  # raises
            if tensor.name in self.layout.numbers and (known is None or not known.size):
                found = tensor.datatype[:80]
                raise InvalidRequest(
                    f"input '{tensor.name}' is of the type '{found}'; {CONVERTED} hold numbers or BOOL"
                )
            if tensor.is_json:
                if known is None or known.name in {"FP16", "BF16"}:
                    kind = tensor.datatype[:80]
                    raise InvalidRequest(f"'{tensor.name}' is of the type '{kind}', which JSON cannot say; send it raw")
                elements(tensor.name, tensor.shape, known.size or 4)
            elif known is not None and known.size:
                check_size(tensor.name, tensor.datatype, tensor.shape, len(tensor.data))
            packets[tensor.name] = tensor
        return packets

    def timestamp_of(self, request: InferRequest) -> int | None:
        """Return the timestamp that a request gives; raises InvalidRequest if it is none."""
        given = request.parameters.get(TIMESTAMP)
        if given is None:
            return None
        if type(given) is not int or not _LOWEST <= given <= _HIGHEST:
            raise InvalidRequest(
                f"{TIMESTAMP}: expected a whole number from {_LOWEST} to {_HIGHEST}, got {given!r:.60}"
            )
        return given

    def check_side_packets(self, request: InferRequest) -> None:
        """Check the parameters that become side packets.

        Raises:
            InvalidRequest: If one is of a kind that cannot be one.
            NotPrepared: If one is missing, or reserved, or the graph takes none.
        """
        layout = self.layout
        given = side_packets(request.parameters)
        if "py" in given:
            raise NotPrepared("the parameter 'py' is the graph's own; give yours another name")
        for name, value in given.items():
            if isinstance(value, float) or (type(value) is int and not -(2**63) <= value < 2**63):
                raise InvalidRequest(
                    f"parameter '{name[:100]}': expected a string, a whole number, true or false, got {value!r:.60}"
                )
        if given and not layout.takes_side_packets:
            msg = (
                f"'{self.name}' is kept ready for requests and does not accept parameters such as '{min(given)[:100]}'"
            )
            raise NotPrepared(msg)
        for name in layout.side_packets:
            if name not in given:
                raise NotPrepared(f"'{self.name}' needs the parameter '{name}', an input_side_packet")
        if self._problem:
            raise NotPrepared(self._problem)
        for name in layout.missing:
            raise NotPrepared(f"nothing in the graph of '{self.name}' writes its output '{name}'")

    def answer(self, emission: Emission, id: str, *, wants_final: bool) -> InferResponse:
        """Return the part of a stream that a packet is."""
        leaving = self._leaving[emission.output]
        parameters: dict[str, Parameter] = {TIMESTAMP: emission.timestamp}
        if wants_final:
            parameters[IS_FINAL] = False
        tensor = as_wire(emission.value, leaving.called)
        return InferResponse(outputs=[tensor], model=self.name, version=VERSION, id=id, parameters=parameters)


class GraphFace(TensorFace, frozen=True, kw_only=True):
    """What a graph says of its tensors, and how it is asked."""

    calls: GraphCalls

    def ask(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[str] = (),
        *,
        is_json: bool = False,
        in_json: Mapping[str, bool] | None = None,
        parameters: Mapping[str, Any] = EMPTY,
    ) -> tuple[dict[str, Any], int]:
        """Check a call, as `TensorFace.ask`; of its data only the length is looked at."""
        asked = InferRequest(model=self.calls.name, inputs=inputs, outputs=outputs, parameters=parameters)
        return self.calls.ask(asked, is_json=is_json, in_json=in_json or {}), 1


def face_of(calls: GraphCalls, inputs: Sequence[TensorMetadata], outputs: Sequence[TensorMetadata]) -> GraphFace:
    """Return the face of a graph; the streams of which nobody says more have no type and no shape."""
    layout = calls.layout
    sides: list[list[TensorMetadata]] = []
    for names, declared in ((layout.inputs, inputs), ([one.called for one in layout.outputs], outputs)):
        known = {one.name: one for one in declared}
        sides.append([known.get(name) or TensorMetadata(name, UNTYPED, ()) for name in names])
    return GraphFace(inputs=sides[0], outputs=sides[1], has_rows=False, is_decoupled=layout.loops, calls=calls)


class _Asked(msgspec.Struct, eq=False):
    """A request on a stream: when it is, and what its answers repeat."""

    timestamp: int
    id: str
    wants_final: bool


_when: Final = attrgetter("timestamp")


class GraphStream:
    """One stream of requests to a graph, and of its answers; lives on the loop.

    A request that is wrong in itself is told of and the stream goes on; an error in the graph ends it.
    """

    def __init__(
        self,
        calls: GraphCalls,
        endpoint: Endpoint,
        on_answer: Callable[[InferResponse, Callable[[], object]], object],
        on_end: Callable[[Request | None, Outcome], object],
        on_progress: Callable[[], object] = lambda: None,
        *,
        deadline: float = float("inf"),
        tenant: Tenant | None = None,
    ) -> None:
        """Open a stream; the first request enters the graph.

        Args:
            on_answer: Called with each answer, and with what to call once there is room for the next.
            on_end: Called once, with the request to the endpoint, if there was one, and None or a `Failure`.
            on_progress: Called whenever requests were worked off.
            deadline: When it ends at the latest.
        """
        self._calls = calls
        self._tenant = tenant
        self._endpoint = endpoint
        self._on_answer = on_answer
        self._on_end = on_end
        self._on_progress = on_progress
        self._deadline = min(deadline, time.monotonic() + _DAY_S)
        self._packets = PacketStream(self._progressed)
        self._request: Request | None = None
        self._asked: list[_Asked] = []
        self._lacking: Sequence[str] = ()
        self._is_idle = True
        self._last = -(2**63)
        self._has_ended = False

    @property
    def pending(self) -> int:
        """Requests that have not been worked off; of those that have, the last one may count.

        None while they all wait for packets that have not been read.
        """
        return 0 if self._lacking else len(self._asked)

    @property
    def held(self) -> int:
        """How many of the last requests may still be in memory: none once all were worked off."""
        return 0 if self._is_idle and not self._lacking else len(self._asked)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs: only a further request would lead to an answer."""
        return self._has_ended or self._request is None or (self._is_idle and not self._packets.held)

    def send(self, asked: InferRequest) -> None:
        """Let a request enter.

        Raises:
            ForebayError: If it is wrong in itself; it has not entered, and others may.
        """
        if self._has_ended:
            return
        calls = self._calls
        given = calls.timestamp_of(asked)
        packets = calls.packets(asked)
        is_first = self._request is None
        if is_first:
            calls.check_side_packets(asked)
        timestamp = max(_now_us(), self._last + 1) if given is None else given
        if timestamp > _HIGHEST:
            raise InvalidRequest(f"no timestamp is left after {self._last}; open a new stream")
        self._last = max(self._last, timestamp)
        insort(self._asked, _Asked(timestamp, asked.id, asked.parameters.get(WANTS_FINAL) is True), key=_when)
        self._is_idle = False
        self._lacking = ()  # until the run says what it makes of this
        self._packets.feed(packets, timestamp)  # which may end the stream, and there is no request then either
        if is_first:
            self._request = Request(
                body=self._packets, reply=self._replied, on_part=self._part, deadline=self._deadline, id=asked.id
            )
            if self._tenant is not None:
                self._request.tenant = in_class(self._tenant, asked.parameters)
            self._endpoint.submit(self._request)

    def close(self) -> None:
        """Say that no further request comes; what runs goes on."""
        if self._has_ended:
            return
        if self._request is None:
            self._has_ended = True
            self._on_end(None, None)
        else:
            self._packets.close()

    def cancel(self) -> None:
        """End it now: nobody waits any more."""
        if self._request is not None:
            self._endpoint.cancel(self._request)

    def _replied(self, request: Request, outcome: Outcome) -> None:
        if type(outcome) is not Failure:
            self._progressed(None, ())
        self._has_ended, self._request = True, None
        self._packets.on_progress = nothing
        self._on_end(request, outcome)
        # The collector does not look at requests, and a traceback may hold this one: no circle may go through it.
        request.reply, request.on_part = nothing, None

    def _part(self, part: Any, taken: Callable[[], object]) -> None:
        emission: Emission = part
        self._last = max(self._last, emission.timestamp)
        asked = self._asked_at(emission.timestamp)
        self._on_answer(self._calls.answer(emission, asked.id, wants_final=asked.wants_final), taken)

    def _asked_at(self, timestamp: int) -> _Asked:
        """Return the request that led to what has this timestamp; of several that gave the same, the last one."""
        return self._asked[max(bisect_right(self._asked, timestamp, key=_when) - 1, 0)]

    def _progressed(self, lowest: int | None, lacking: Sequence[str]) -> None:
        """Say of requests that nothing more comes of them, if they want to know; forget all but the last one.

        Raises:
            TooLarge: If too many of those that are left wait for packets of others.
        """
        asked = self._asked
        over = len(asked) if lowest is None else bisect_left(asked, self._asked_at(lowest).timestamp, key=_when)
        for one in asked[:over]:
            if one.wants_final:
                one.wants_final = False
                parameters: dict[str, Parameter] = {TIMESTAMP: one.timestamp, IS_FINAL: True}
                name = self._calls.name
                last = InferResponse(outputs=[], model=name, version=VERSION, id=one.id, parameters=parameters)
                self._on_answer(last, lambda: None)
        del asked[: min(over, len(asked) - 1)]
        if lacking and len(asked) > MAX_WAITING:
            raise TooLarge(f"more than {MAX_WAITING} requests of this stream wait for packets on {listed(lacking)}")
        self._lacking = lacking
        self._is_idle = lowest is None or bool(lacking)
        self._on_progress()


def side_packets(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters that are the graph's, without those that clients send to any server."""
    return {
        name: value
        for name, value in parameters.items()
        if name not in _RESERVED and not name.startswith(_RESERVED_BEGIN)
    }


def _check_declared(tensor: Tensor, declared: TensorMetadata) -> None:
    """Hold a tensor to its declaration; a shape that is not said may be any.

    Raises:
        InvalidRequest: If it is another one.
    """
    if tensor.datatype != declared.datatype:
        raise InvalidRequest(f"input '{tensor.name}': expected {declared.datatype}, got {tensor.datatype[:80]}")
    if declared.shape:
        check_shape(tensor.name, tensor.shape, declared.shape)


def _check_image(tensor: Tensor) -> None:
    """Hold a tensor to what the original takes for an image; raises InvalidRequest if it is none."""
    shape = tensor.shape
    if len(shape) != len("HWC") or shape[-1] not in _CHANNELS.get(tensor.datatype, ()):
        found = f"{tensor.datatype[:80]}[{','.join(map(str, shape[:10]))}]"
        told = "rows, columns and channels, of FP32 with 1 or 2 channels, else of 8 or 16 bits with 1, 3 or 4"
        raise InvalidRequest(f"'{tensor.name}' is an image: {told}; found {found}")
    if tensor.is_json:
        raise InvalidRequest(f"'{tensor.name}' is an image, which is sent as binary data and not in JSON")


def _now_us() -> int:
    return time.time_ns() // 1000
