# SPDX-License-Identifier: Apache-2.0
"""Requests of `ModelInfer` read from their bytes, without objects of protobuf.

Theory of operation. A request is a head (names, types, shapes, parameters) and a body (what the tensors hold). `scan`
walks over the head and notes where the body lies, which is never copied. What it found is a `RequestLayout`: it says
which bytes of the message it was read from. Another message as long that has the same bytes in these places has the
same head and the same places for its body, and is not walked over again: clients repeat themselves but for data and id.

What is a request here is one for the protobuf library as well, and means the same; a property test compares them. Two
things are refused that it takes: a head of more fields than any real one has, and typed contents that would grow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Final

import msgspec

from forebay.errors import InvalidRequest, TooLarge
from forebay.protocols.kserve import contents
from forebay.protocols.kserve.infer_calls import InferRequest, Parameter
from forebay.protocols.kserve.messages import parsed
from forebay.protocols.kserve.places import Place, place_of, place_wanted
from forebay.types.datatypes import DATATYPES
from forebay.types.tensor import Data, Tensor, check_size

MAX_FIELDS: Final = 20_000
"""Fields of a head, with the axes of shapes; each is a step of Python."""
MAX_TYPED_BYTES: Final = 16 * 1024 * 1024
"""Typed contents of one tensor but for floats; they take up to eight times as much once they are read."""
MAX_DEPTH: Final = 100
"""How deep groups may be nested, as for the library."""
MAX_LAYOUTS: Final = 256
MAX_FIXED_BYTES: Final = 4 * 1024
"""Longer heads are read each time."""

_VARINT, _FIXED64, _LENGTH, _GROUP, _END_GROUP, _FIXED32 = range(6)
_NAME_BYTES: Final = 64
_FIXED: Final = {"FP32": 6, "FP64": 7}
"""Fields of typed contents that hold elements as they lie in memory."""
_DOUBLE: Final = Struct("<d")

Span = tuple[int, int]
_SOMEWHERE: Final[Span] = 0, 0
"""Of what does not lie in the message."""


class GivenInput(msgspec.Struct, frozen=True):
    """What the head says of one input.

    Attributes:
        contents: Where its typed contents lie, which are a message in pieces.
        place: Where in shared memory it lies instead.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Mapping[str, Parameter]
    contents: tuple[Span, ...]
    place: Place | None = None


class WantedOutput(msgspec.Struct, frozen=True):
    """What the head says of an output that is asked for.

    Attributes:
        place: Where in shared memory it shall lie.
    """

    name: str
    parameters: Mapping[str, Parameter]
    place: Place | None = None


class RequestLayout(msgspec.Struct, frozen=True, eq=False):
    """The head of a request, and where in the message the rest lies.

    Attributes:
        id: Where what the answer repeats lies; None without one.
        data: Where what each input holds lies; None for one whose typed contents have to be read.
        fixed: What another message of the same length must have in the same places to be laid out like this one; None
            if none can be.
        places: Where in shared memory outputs are wanted, by name.
        is_elsewhere: Whether something of it lies in shared memory, or shall.
    """

    model: str
    version: str
    id: Span | None
    parameters: Mapping[str, Parameter]
    inputs: Sequence[GivenInput]
    outputs: Sequence[WantedOutput]
    data: Sequence[Span | None]
    fixed: Sequence[tuple[int, bytes]] | None
    places: Mapping[str, Place]
    is_elsewhere: bool

    def is_of(self, message: Data) -> bool:
        """Tell whether another message, as long as the one that was read, is laid out like this for certain."""
        for at, fixed in self.fixed or ():
            if message[at : at + len(fixed)] != fixed:
                return False
        return self.fixed is not None

    def id_in(self, message: Data) -> str:
        """Return what the answer repeats; raises InvalidRequest if it is not text."""
        return "" if self.id is None else _text(message, self.id, "id")

    def tensors(self, message: Data, read: Callable[[Place], Data] | None = None) -> list[Tensor]:
        """Return the inputs of a request laid out like this; raw ones are views of its message.

        Args:
            read: Reads what lies in shared memory; without it nothing may.

        Raises:
            InvalidRequest: If typed contents are not what they should be.
            ForebayError: What `read` raises.
        """
        view = memoryview(message)
        found: list[Tensor] = []
        for one, span in zip(self.inputs, self.data, strict=True):
            if one.place is not None:
                if read is None:
                    msg = f"input '{one.name}' lies in shared memory, which a server reads with --shared-memory only"
                    raise InvalidRequest(msg)
                data = read(one.place)
            else:
                data = _typed(view, one) if span is None else view[span[0] : span[1]]
            found.append(Tensor(one.name, one.datatype, one.shape, data))
        return found

    def request(self, message: Data, read: Callable[[Place], Data] | None = None) -> InferRequest:
        """Return the request that lies in a message laid out like this; raises what `tensors` does."""
        return InferRequest(
            model=self.model,
            version=self.version,
            id=self.id_in(message),
            inputs=self.tensors(message, read),
            outputs=[one.name for one in self.outputs],
            parameters=self.parameters,
        )


class RequestLayouts:
    """RequestLayouts of the last messages."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], RequestLayout] = {}
        self._last: dict[int, RequestLayout] = {}

    def of(self, message: Data) -> RequestLayout:
        """Return how a message is laid out; raises InvalidRequest if it is not a request, or contradicts itself."""
        # The name of the model comes first, and keeps those of different models apart.
        size = len(message)
        layout = self._last.get(size)
        if layout is not None and layout.is_of(message):
            return layout
        key = size, bytes(message[: 2 + message[1]] if size > 1 and message[1] < _NAME_BYTES else message[:1])
        layout = self._known.get(key)
        if layout is None or not layout.is_of(message):
            layout = scan(message)
            if layout.fixed is None:
                return layout
            if len(self._known) >= MAX_LAYOUTS:
                self._known.clear()
                self._last.clear()
            self._known[key] = layout
        self._last[size] = layout
        return layout


def scan(message: Data) -> RequestLayout:
    """Read the head of a request; raises InvalidRequest if it is not a request, or contradicts itself."""
    walk = _Walk(message)
    model = version = ""
    id_at: Span | None = None
    parameters: dict[str, Parameter] = {}
    inputs: list[GivenInput] = []
    outputs: list[WantedOutput] = []
    raw: list[Span] = []
    for field, kind, start, end in walk.fields(0, len(message)):
        if kind != _LENGTH:
            continue
        if field == 1:
            model = _text(message, (start, end), "model_name")
        elif field == 2:
            version = _text(message, (start, end), "model_version")
        elif field == 3:
            id_at = start, end
            _text(message, id_at, "id")
        elif field == 4:
            walk.parameter(start, end, parameters)
        elif field == 5:
            inputs.append(walk.input(start, end))
        elif field == 6:
            outputs.append(walk.output(start, end))
        elif field == 7:
            raw.append((start, end))
    data = _data(walk, inputs, raw)
    for one, span in zip(inputs, data, strict=True):
        if one.place is not None:
            check_size(one.name, one.datatype, one.shape, one.place.size)
        elif span is not None and one.datatype in DATATYPES:
            check_size(one.name, one.datatype, one.shape, span[1] - span[0])
    places = {one.name: one.place for one in outputs if one.place is not None}
    return RequestLayout(
        model=model,
        version=version,
        id=id_at,
        parameters=parameters,
        inputs=inputs,
        outputs=outputs,
        data=data,
        fixed=_fixed(message, [*data, id_at or _SOMEWHERE]),
        places=places,
        is_elsewhere=bool(places) or any(one.place is not None for one in inputs),
    )


def id_of(message: Data) -> str:
    """Return what a request is called that has no layout; empty if even that cannot be read."""
    with contextlib.suppress(InvalidRequest):
        for field, kind, start, end in _Walk(message).fields(0, len(message)):
            if field == 3 and kind == _LENGTH:
                return _text(message, (start, end), "id")
    return ""


class _Walk:
    """Reads fields, at most so many."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._left = MAX_FIELDS

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the fields of a message: number, wire type, and where the content starts and ends.

        A number stands in place of the start of a varint. No field here is a group: these are passed over.
        """
        data = self._data
        while at < end:
            self._spend()
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = self._long(at - 1, end, 5)
            field, kind = tag >> 3, tag & 7
            if kind == _LENGTH:
                start, at = self._span(at, end)
                yield field, kind, start, at
            elif kind == _VARINT:
                value, at = self._long(at, end, 10)
                yield field, kind, value, at
            elif kind == _GROUP:
                at = self._after_group(field, at, end)
                yield field, kind, at, at
            else:
                start = at
                at += 8 if kind == _FIXED64 else 4
                if kind not in _FIXED_KINDS or at > end:
                    raise self._malformed(start)
                yield field, kind, start, at
            if not field or tag > 0xFFFFFFFF:
                raise self._malformed(at)

    def input(self, at: int, end: int) -> GivenInput:
        """Read an InferInputTensor."""
        name = datatype = ""
        shape: list[int] = []
        parameters: dict[str, Parameter] = {}
        contents: list[Span] = []
        for field, kind, start, stop in self.fields(at, end):
            if field == 3 and kind == _VARINT:
                shape.append(_signed(start))
            if kind != _LENGTH:
                continue
            if field == 1:
                name = _text(self._data, (start, stop), "name of an input")
            elif field == 2:
                datatype = _text(self._data, (start, stop), "datatype of an input")
            elif field == 3:
                while (place := start) < stop:
                    self._spend()
                    value, start = self._long(place, stop, 10)  # noqa: PLW2901
                    shape.append(_signed(value))
            elif field == 4:
                self.parameter(start, stop, parameters)
            elif field == 5:
                contents.append((start, stop))
        place = place_of(f"input '{name}'", parameters) if parameters else None
        return GivenInput(name, datatype, tuple(shape), parameters, tuple(contents), place)

    def output(self, at: int, end: int) -> WantedOutput:
        """Read an InferRequestedOutputTensor."""
        name = ""
        parameters: dict[str, Parameter] = {}
        for field, kind, start, stop in self.fields(at, end):
            if field == 1 and kind == _LENGTH:
                name = _text(self._data, (start, stop), "name of an output")
            elif field == 2 and kind == _LENGTH:
                self.parameter(start, stop, parameters)
        return WantedOutput(name, parameters, place_wanted(name, parameters) if parameters else None)

    def parameter(self, at: int, end: int, into: dict[str, Parameter]) -> None:
        """Read an entry of a map from names to InferParameters.

        One without a value is left out. So is one with anything else in it, as by the library.
        """
        key = ""
        found: Parameter | None = None
        is_known = True
        for field, kind, start, stop in self.fields(at, end):
            if field == 1 and kind == _LENGTH:
                key = _text(self._data, (start, stop), "name of a parameter")
            elif field == 2 and kind == _LENGTH:
                for number, how, value, last in self.fields(start, stop):
                    if (how, number) == (_VARINT, 1):
                        found = value != 0
                    elif (how, number) == (_VARINT, 2):
                        found = _signed(value)
                    elif (how, number) == (_LENGTH, 3):
                        found = _text(self._data, (value, last), "value of a parameter")
                    elif (how, number) == (_FIXED64, 4):
                        (found,) = _DOUBLE.unpack_from(self._data, value)
                    elif (how, number) == (_VARINT, 5):
                        found = value
            else:
                is_known = False
        if is_known:
            into.pop(key, None)
            if found is not None:
                into[key] = found

    def only(self, at: int, end: int, field: int) -> Span | None:
        """Return where the content of a message lies that has one field and nothing else; None if it is another."""
        if at < end and self._data[at] == field << 3 | _LENGTH:
            start, stop = self._span(at + 1, end)
            if stop == end:
                return start, stop
        return None

    def _after_group(self, field: int, at: int, end: int) -> int:
        """Return where a group ends."""
        open_groups = [field]
        while open_groups:
            self._spend()
            if at >= end or len(open_groups) > MAX_DEPTH:
                raise self._malformed(at)
            tag, at = self._long(at, end, 5)
            field, kind = tag >> 3, tag & 7
            if kind == _GROUP:
                open_groups.append(field)
            elif kind == _END_GROUP:
                if open_groups.pop() != field:
                    raise self._malformed(at)
            elif kind == _LENGTH:
                _, at = self._span(at, end)
            elif kind == _VARINT:
                _, at = self._long(at, end, 10)
            elif kind in _FIXED_KINDS:
                at += 8 if kind == _FIXED64 else 4
            else:
                raise self._malformed(at)
            if tag > 0xFFFFFFFF or at > end:
                raise self._malformed(min(at, end))
        return at

    def _span(self, at: int, end: int) -> Span:
        """Return where what follows its length starts and ends."""
        if at >= end:
            raise self._malformed(at)
        size = self._data[at]
        at += 1
        if size >= 0x80:
            size, at = self._long(at - 1, end, 5)
        if size > end - at:
            raise self._malformed(at)
        return at, at + size

    def _long(self, at: int, end: int, longest: int) -> tuple[int, int]:
        """Read a varint; returns it, and where it ends."""
        data, value = self._data, 0
        for shift in range(0, 7 * longest, 7):
            if at >= end:
                break
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF, at
        raise self._malformed(at)

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            msg = f"the head of the request has more than {MAX_FIELDS} fields; tensors belong into raw_input_contents"
            raise InvalidRequest(msg)

    @staticmethod
    def _malformed(at: int) -> InvalidRequest:
        return InvalidRequest(f"expected a ModelInferRequest, got a malformed field at byte {at}")


_FIXED_KINDS: Final = frozenset({_FIXED64, _FIXED32})


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _text(data: Data, span: Span, what: str) -> str:
    try:
        return str(data[span[0] : span[1]], "utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"expected a ModelInferRequest, got one whose {what} is not UTF-8") from None


def _data(walk: _Walk, inputs: Sequence[GivenInput], raw: Sequence[Span]) -> list[Span | None]:
    """Return where what the inputs hold lies; raises InvalidRequest if what is raw does not belong to the inputs."""
    here = [one for one in inputs if one.place is None]
    for one in inputs:
        if one.contents and (raw or one.place is not None):
            where = "raw_input_contents" if raw else "shared memory"
            msg = f"input '{one.name}' has contents beside {where}; send it in one way, and none raw if one is not"
            raise InvalidRequest(msg)
    if not raw:
        return [_SOMEWHERE if one.place is not None else _floats(walk, one) for one in inputs]
    if len(raw) != len(here):
        names = ", ".join(f"'{one.name}'" for one in here[:10])
        msg = f"raw_input_contents are {len(raw)}, and the inputs {len(here)} ({names}); there must be one for each"
        raise InvalidRequest(msg)
    left = iter(raw)
    return [next(left) if one.place is None else _SOMEWHERE for one in inputs]


def _floats(walk: _Walk, one: GivenInput) -> Span | None:
    """Return where the elements of typed contents lie as in memory; None if these have to be read."""
    field = _FIXED.get(one.datatype)
    return None if field is None or len(one.contents) != 1 else walk.only(*one.contents[0], field)


def _fixed(message: Data, holes: Sequence[Span | None]) -> Sequence[tuple[int, bytes]] | None:
    """Return all that is not one of the holes, with its places; None if it is too much, or the holes are not all."""
    fixed: list[tuple[int, bytes]] = []
    at = size = 0
    for hole in sorted(hole or (-1, -1) for hole in holes):
        if hole[0] < 0:
            return None
        if hole[1] == 0:
            continue
        fixed.append((at, bytes(message[at : min(hole[0], at + MAX_FIXED_BYTES + 1)])))
        size += hole[0] - at
        at = hole[1]
    size += len(message) - at
    fixed.append((at, bytes(message[at : at + MAX_FIXED_BYTES + 1])))
    return [piece for piece in fixed if piece[1]] if size <= MAX_FIXED_BYTES else None


def _typed(message: memoryview, one: GivenInput) -> Data:
    """Return the elements of typed contents as they lie in memory.

    Raises:
        InvalidRequest: If they are not what datatype and shape say.
    """
    contents.field_of(one.name, one.datatype)
    size = sum(end - start for start, end in one.contents)
    if size > MAX_TYPED_BYTES:
        raise TooLarge(
            f"input '{one.name}' has {size} bytes of typed contents; at most {MAX_TYPED_BYTES} are allowed, and any "
            "number of raw ones"
        )
    whole = b"".join(message[start:end] for start, end in one.contents)
    if one.datatype == "BYTES":
        return contents.taken_texts(one.name, one.shape, whole)
    return contents.taken(one.name, one.datatype, one.shape, parsed("InferTensorContents", whole))
