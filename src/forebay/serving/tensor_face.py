# SPDX-License-Identifier: Apache-2.0
"""The tensor face of an endpoint: what tensors it takes and gives, and how a call with tensors becomes a request.

Theory of operation. A protocol that speaks tensors reads the envelope of a call and nothing else: names, types and
shapes, and where the data lies. `TensorFace.ask` holds these to what the servable takes. What it returns are the
`params` of a request in the format `TENSORS`, whose body is the list of the data, as views of what arrived:

    params    {"in": "tensors", "out": "tensors", "given": [[name, datatype, shape, is_json], ...],
               "wanted": [[name, is_json], ...], "is_json": what holds for outputs that were not named}
    outcome   [[[name, datatype, shape, is_json], ...], data, ...], data in the order of the names
    part      the same, of a streamed answer

The worker decodes and encodes (`models/tensor_codec.py`), so the loop copies no data, and a request of n rows has
`size` n: it shares batches with others, and is cut in slices where it has more rows than a batch takes. All of it is
plain data, which goes to worker processes as everything else does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from forebay.arrays.numpy_tensors import raw_in_steps
from forebay.arrays.tensor_rows import JoinedRows, Rows
from forebay.errors import BadOutcome, InvalidRequest, ValidationError
from forebay.types.call import EMPTY, Joint, Request
from forebay.types.datatypes import DATATYPES, datatype_of, holds
from forebay.types.did_you_mean import nearest
from forebay.types.tensor import Tensor, TensorMetadata, check_size, elements

MAX_EMPTY_ROWS: Final = 1024
"""Samples of a call that have no data at all; others are bounded by the length of the call."""
TENSORS: Final = "tensors"
"""The format of such bodies and answers, in `params`."""


class TensorFace(msgspec.Struct, frozen=True, kw_only=True):
    """What tensors a servable takes and gives.

    Attributes:
        inputs: What it takes; -1 for an axis of any length.
        outputs: What it gives; empty where only its answers tell.
        optional: Inputs that may be left out.
        unranked: Inputs of any number of axes; of their shape only the first one is said.
        unranked_outputs: The same for outputs.
        input_tensors: What the graph of a SavedModel calls its inputs, by their names.
        output_tensors: The same for outputs.
        has_rows: Whether the first axis of all tensors counts samples.
        is_open: Whether it takes tensors of any name.
        is_bare: Whether an only input or output may go without its name where that is a choice of the protocol, as with
            models that are files: nobody gave them types in which the name counts.
        is_decoupled: Whether one request on a stream may have any number of answers.
        signature: What it is called where a model has several; empty if nobody said.
    """

    inputs: Sequence[TensorMetadata] = ()
    outputs: Sequence[TensorMetadata] = ()
    optional: frozenset[str] = frozenset()
    unranked: frozenset[str] = frozenset()
    unranked_outputs: frozenset[str] = frozenset()
    input_tensors: Mapping[str, str] = EMPTY
    output_tensors: Mapping[str, str] = EMPTY
    has_rows: bool = True
    is_open: bool = False
    is_bare: bool = False
    is_decoupled: bool = False
    signature: str = ""

    def ask(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[str] = (),
        *,
        is_json: bool = False,
        in_json: Mapping[str, bool] | None = None,
        parameters: Mapping[str, Any] = EMPTY,
    ) -> tuple[dict[str, Any], int]:
        """Check a call, without a look at its data.

        Args:
            outputs: What it wants; all of it if it does not say.
            is_json: Whether outputs are wanted as lists in JSON.
            in_json: The same for single outputs, by name.
            parameters: What else the call says; most servables know none.

        Returns:
            The params of its request, and how many samples it has.

        Raises:
            InvalidRequest: Naming the input, what was found and what is expected.
        """
        del parameters
        if not inputs:
            raise InvalidRequest(f"the call has no inputs; the model takes {_named(self.inputs) or 'at least one'}")
        known = {one.name: one for one in self.inputs}
        seen: dict[str, Tensor] = {}
        rows = None
        for sent in inputs:
            if sent.name in seen:
                raise InvalidRequest(f"input '{sent.name[:80]}' came twice")
            declared = known.get(sent.name)
            tensor = _without_spare_axis(sent) if declared is not None and self.spares_axis(declared) else sent
            seen[tensor.name] = tensor
            if declared is None and not self.is_open:
                raise InvalidRequest(_unknown("input", tensor.name, known))
            _check(tensor, declared, is_ranked=tensor.name not in self.unranked)
            if self.has_rows:
                rows = _rows(tensor, rows, declared)
        missing = [name for name in known if name not in seen and name not in self.optional]
        if missing and not self.is_open:
            raise InvalidRequest(f"input '{missing[0]}' is missing; the model takes {_named(self.inputs)}")
        given = {one.name: one for one in self.outputs}
        require_once(outputs)
        for name in outputs:
            if given and name not in given:
                raise InvalidRequest(_unknown("output", name, given))
        return {
            "in": TENSORS,
            "out": TENSORS,
            "given": [[one.name, one.datatype, list(one.shape), one.is_json] for one in seen.values()],
            "wanted": [[name, (in_json or {}).get(name, is_json)] for name in outputs],
            "is_json": is_json,
        }, rows or 1

    def spares_axis(self, given: TensorMetadata) -> bool:
        """Whether an input has samples without axes, which may have one of one element; a file says what it takes."""
        return self.has_rows and not self.is_bare and len(given.shape) == 1 and given.name not in self.unranked


class TensorRequest(Request, gc=False, eq=False):
    """A request whose body is a list of the data of tensors.

    Attributes:
        call: What the protocol keeps for the answer.
    """

    call: Any = None

    def opening(self) -> Iterator[None]:
        """Read lists in JSON, which `params` calls raw then, and find the rows of all.

        Raises:
            ValidationError: If what came is not what `params` says.
        """
        found: list[Rows] = []
        for one in tensors_of(self.params["given"], self.body):
            raw = yield from raw_in_steps(one)
            found.append(Rows(raw, self.size))
            yield from found[-1].finding()
        given = [[name, datatype, shape, False] for name, datatype, shape, _ in self.params["given"]]
        self.params = {**self.params, "given": given}
        self.body = found

    def cut(self, rows: Sequence[int]) -> list[Any]:
        """Return the data of some of its rows."""
        return [column.of(rows) for column in self.body]

    def joint(self) -> Joint:
        """Return what puts the outputs of its slices together."""
        return JoinedTensors(self.size)


class JoinedTensors:
    """Outputs of slices, which differ in nothing but the first axis."""

    def __init__(self, size: int, written: Callable[[list[Tensor]], list[Tensor]] = lambda outputs: outputs) -> None:
        """Begin without any; those of a slice are kept as `written` returns them."""
        self._written = written
        self._size = size
        self._forms: list[tuple[str, str, tuple[int, ...], bool]] = []
        self._joined: list[JoinedRows] = []

    def add(self, rows: Sequence[int], outcome: Any) -> None:
        """Take what a slice gave; raises a `BadOutcome` if it differs from that of others."""
        specs, *data = outcome
        tensors = self._written(tensors_of(specs, data))
        forms = [(one.name, one.datatype, one.shape[1:], one.is_json) for one in tensors]
        if not self._forms:
            self._forms = forms
            self._joined = [JoinedRows() for _ in forms]
        if forms != self._forms:
            name = next((one[0] for one, other in zip(self._forms, forms, strict=False) if one != other), None)
            name = name or (forms or self._forms)[-1][0]
            raise BadOutcome(f"output '{name}' has unlike shapes or types for the samples of the call; send fewer")
        for joined, one in zip(self._joined, tensors, strict=True):
            joined.add(rows, one)

    def whole(self) -> Any:
        """Return all as one outcome."""
        return outcome_of(
            [
                Tensor(name, datatype, (self._size, *row), joined.whole(is_json=is_json), is_json)
                for (name, datatype, row, is_json), joined in zip(self._forms, self._joined, strict=True)
            ]
        )


def require_once(outputs: Sequence[str]) -> None:
    """Refuse a call that wants an output twice; its answer could become any number of times as long as the output.

    Raises:
        InvalidRequest: Naming it, as Triton does.
    """
    seen: set[str] = set()
    for name in outputs:
        if name in seen:
            raise InvalidRequest(f"output '{name[:80]}' already exists in request; name each output once")
        seen.add(name)


def tensors_of(specs: Sequence[Sequence[Any]], data: Sequence[Any]) -> list[Tensor]:
    """Put what `params` or an outcome says of tensors together with their data."""
    return [
        Tensor(name, datatype, tuple(shape), held, is_json)
        for (name, datatype, shape, is_json), held in zip(specs, data, strict=True)
    ]


class TensorOutcome(list[Any]):
    """An outcome that says more than its tensors."""

    parameters: Mapping[str, Any] = EMPTY


def outcome_of(tensors: Sequence[Tensor], parameters: Mapping[str, Any] = EMPTY) -> list[Any]:
    """Return tensors as an outcome, and what else there is to say."""
    specs = [[one.name, one.datatype, list(one.shape), one.is_json] for one in tensors]
    outcome = TensorOutcome([specs, *(one.data for one in tensors)])
    outcome.parameters = parameters
    return outcome if parameters else list(outcome)


def parameters_of(outcome: Any) -> Mapping[str, Any]:
    """Return what an outcome says beside its tensors."""
    return outcome.parameters if type(outcome) is TensorOutcome else EMPTY


def check_outcome(outcome: Any) -> None:
    """Hold a foreign outcome to the form of one; raises an `InvalidRequest` if it has another one."""
    try:
        specs, *data = outcome
        told = msgspec.convert(specs, list[tuple[str, str, list[int], bool]])
        if any(type(one) is not bytes for one in data):
            raise TypeError("the data of a tensor must be bytes")
        for tensor in tensors_of(told, data):
            if not tensor.is_json:
                check_size(tensor.name, tensor.datatype, tensor.shape, len(tensor.data))
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InvalidRequest(f"it answered no tensors: {error}") from None


def _check(tensor: Tensor, declared: TensorMetadata | None, *, is_ranked: bool) -> None:
    """Hold a tensor to what is declared.

    Raises:
        ValidationError: If it is another one, or its shape and data do not agree.
    """
    name, expected = tensor.name, "" if declared is None else declared.datatype
    found = datatype_of(tensor.datatype, name, expected if expected in DATATYPES else "")
    if declared is not None and declared.datatype in DATATYPES and not holds(DATATYPES[declared.datatype], found):
        raise ValidationError(f"input '{name}': expected {declared.datatype}, got {found.name}")
    if tensor.is_json:
        if found.name in {"FP16", "BF16"}:
            raise ValidationError(f"input '{name}' is {found.name}, which JSON cannot express; send it as binary")
        elements(name, tensor.shape, found.size or 4)
    else:
        check_size(name, found.name, tensor.shape, len(tensor.data))
    if declared is not None and declared.datatype != found.name and declared.datatype in DATATYPES:
        # It becomes wider, and the axes beside an empty one are multiplied all the same.
        try:
            elements(name, tensor.shape, DATATYPES[declared.datatype].size or 4)
        except ValidationError:
            found_shape = str(list(tensor.shape))[:200]
            msg = f"input '{name}' has the shape {found_shape}; as {declared.datatype} it is larger than 2^63 bytes"
            raise ValidationError(msg) from None
    if declared is not None and is_ranked:
        check_shape(name, tensor.shape, declared.shape)


def _without_spare_axis(tensor: Tensor) -> Tensor:
    """Return a tensor of samples without axes as one; clients of Triton give each an axis, of one element."""
    has_one = len(tensor.shape) == 2 and tensor.shape[1] == 1
    return msgspec.structs.replace(tensor, shape=tensor.shape[:1]) if has_one else tensor


def check_shape(name: str, found: Sequence[int], declared: Sequence[int]) -> None:
    """Hold the shape of an input to the one that is declared, in which -1 is any length.

    Raises:
        ValidationError: If it is another one.
    """
    fits = len(found) == len(declared) and all(
        wanted in {-1, axis} for axis, wanted in zip(found, declared, strict=True)
    )
    if not fits:
        text = f"input '{name}': expected the shape {list(declared)}, got {list(found)}"
        raise ValidationError(f"{text} (-1 is any length)" if -1 in declared else text)


def _rows(tensor: Tensor, rows: int | None, declared: TensorMetadata | None) -> int:
    """Return how many samples a call has.

    Raises:
        ValidationError: If there are none, or inputs have unlike numbers of them.
    """
    found = tensor.shape[0] if tensor.shape else 0
    length = len(tensor.data) if all(tensor.shape[1:]) else 0  # lists in JSON have brackets for nothing, too
    if found > max(length, MAX_EMPTY_ROWS):
        raise ValidationError(
            f"input '{tensor.name}': expected at most {MAX_EMPTY_ROWS} samples without data, got the shape "
            f"{list(tensor.shape)} with {length} bytes"
        )
    if not found or found != (rows or found):
        wanted = f"[{rows or -1}, ...]" if declared is None else list(declared.shape)
        text = f"input '{tensor.name}': expected the shape {wanted}, got {list(tensor.shape)}"
        why = f"the other inputs have {rows}" if rows else "there must be at least one"
        raise ValidationError(f"{text}; the first axis counts samples, and {why}")
    return found


def _named(sides: Sequence[TensorMetadata]) -> str:
    return ", ".join(f"'{one.name}'" for one in sides)


def _unknown(what: str, name: str, known: Mapping[str, TensorMetadata]) -> str:
    hint = nearest(name, known)
    meant = f"did you mean '{hint}'?" if hint else f"there is {', '.join(map(repr, known)) or 'none'}"
    return f"the model has no {what} '{name[:80]}'; {meant}"
