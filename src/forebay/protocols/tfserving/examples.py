# SPDX-License-Identifier: Apache-2.0
"""`classify` and `regress`: examples become the tensors of a model, and what it gives becomes classes or a value.

A model whose inputs are called as features takes these. One that takes a single text for each sample, as models do
that TensorFlow trained on examples, takes them serialized.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.arrays.numpy_tensors import as_raw, bits_of, from_array, to_array
from forebay.errors import BadOutcome, InvalidRequest, TooLarge
from forebay.types.datatypes import datatype_of
from forebay.types.tensor import Tensor, TensorMetadata, join_elements
from forebay.types.tensorflow_messages import TENSORFLOW

if TYPE_CHECKING:
    from forebay.serving.tensor_face import TensorFace

Example = Mapping[str, Sequence[Any]]
"""Features by name: numbers, or bytes."""

MAX_CONTEXT_BYTES: Final = 16 * 1024 * 1024
"""What the context of examples may have once it is said for each of them."""
_VALUE_BYTES: Final = 8

_KINDS: Final = {"BYTES": (bytes,), "FP": (float, int), "BF": (float, int), "BOOL": (bool, int)}


def read_examples(given: Any) -> list[Example]:
    """Read the examples of a message `Input`, each with the features of the context they share.

    Raises:
        InvalidRequest: If there are none.
    """
    listed: Any = getattr(given, given.WhichOneof("kind") or "example_list")
    shared: Example = _features(listed.context) if hasattr(listed, "context") else {}
    return checked(with_context(shared, map(_features, listed.examples)))


def with_context(context: Example, examples: Iterable[Example]) -> list[Example]:
    """Return examples, each with the features of the context that they share.

    Raises:
        TooLarge: If the context is too long to be said for so many.
    """
    if not context:
        return list(examples)
    values = [value for row in context.values() for value in row]
    size = sum(len(name) + _VALUE_BYTES for name in context)
    size += sum(len(value) if isinstance(value, bytes) else _VALUE_BYTES for value in values)
    found: list[Example] = []
    for one in examples:
        found.append({**context, **one})
        if len(found) * size > MAX_CONTEXT_BYTES:
            msg = f"the context is too long to be said for each example; at most {MAX_CONTEXT_BYTES} bytes are"
            raise TooLarge(msg)
    return found


def checked(examples: list[Example]) -> list[Example]:
    """Return examples; raises InvalidRequest if there are none."""
    if not examples:
        raise InvalidRequest("expected at least one example, got none")
    return examples


def tensors_of(examples: Sequence[Example], face: TensorFace) -> list[Tensor]:
    """Return what a model is given of examples.

    Raises:
        InvalidRequest: Naming the example and the feature that is missing, too long or of another kind.
    """
    named = {name for one in examples for name in one}
    if len(face.inputs) == 1 and face.inputs[0].datatype == "BYTES" and face.inputs[0].name not in named:
        whole = [_serialized(one) for one in examples]
        return [Tensor(face.inputs[0].name, "BYTES", (len(whole),), join_elements(face.inputs[0].name, whole))]
    if face.is_open:
        msg = "this model takes inputs of any name, so examples do not say what it is to be given; use predict"
        raise InvalidRequest(msg)
    known = {one.name for one in face.inputs}
    if unknown := sorted(named - known):
        raise InvalidRequest(f"the model has no input '{unknown[0][:80]}'; there is {', '.join(map(repr, known))}")
    given = [one for one in face.inputs if one.name in named or one.name not in face.optional]
    # A feature is a list, so an input of any number of axes is given one with as many values as came.
    return [_column(examples, one, [-1] if one.name in face.unranked else one.shape[1:]) for one in given]


def count_of(params: Mapping[str, Any]) -> int:
    """Return how many examples a request was made of; it may be one sample of a model whose samples share no run."""
    _, _, shape, _ = params["given"][0]
    return shape[0] if shape else 1


def classes_of(tensors: Sequence[Tensor], count: int) -> list[list[tuple[str, float]]]:
    """Return the classes of each example: what they are called, and how likely they are.

    Raises:
        InvalidRequest: If the model gives nothing that looks like it.
    """
    labels = _named(tensors, "classes", is_text=True)
    scores = _named(tensors, "scores", is_text=False)
    if labels is None and scores is None:
        gives = ", ".join(f"'{one.name}' of {one.datatype}" for one in tensors)
        msg = f"the model does not classify: it gives {gives}, and no texts 'classes' or numbers 'scores'"
        raise InvalidRequest(msg)
    told = [_rows(one, count) for one in (labels, scores) if one is not None]
    width = max(len(row) for rows in told for row in rows)
    texts = [[""] * width] * count if labels is None else told[0]
    numbers = [[0.0] * width] * count if scores is None else told[-1]
    return [
        [(_text(label), float(score)) for label, score in zip(row, more, strict=True)]
        for row, more in zip(texts, numbers, strict=True)
    ]


def values_of(tensors: Sequence[Tensor], count: int) -> list[float]:
    """Return the value of each example; raises InvalidRequest if the model does not give one number for each."""
    found = _named(tensors, "outputs", is_text=False)
    rows = [] if found is None else _rows(found, count)
    if not rows or any(len(row) != 1 for row in rows):
        gives = ", ".join(f"'{one.name}' of {one.datatype}{list(one.shape)}" for one in tensors)
        msg = f"the model does no regression: it gives {gives}, and not one number for each of {count} examples"
        raise InvalidRequest(msg)
    return [float(row[0]) for row in rows]


def _features(example: Any) -> Example:
    return {
        name: list(getattr(feature, kind).value) if (kind := feature.WhichOneof("kind")) else []
        for name, feature in example.features.feature.items()
    }


def _serialized(example: Example) -> bytes:
    message = TENSORFLOW.classes().Example()
    for name, values in example.items():
        kinds = set(map(type, values))
        feature = message.features.feature[name]
        try:
            if kinds <= {bytes}:
                feature.bytes_list.value.extend(values)
            elif kinds <= {int, bool}:
                feature.int64_list.value.extend(values)
            else:
                feature.float_list.value.extend(values)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"feature '{name[:80]}': expected a list of bytes, whole numbers or floats: {error}"
            ) from None
    return message.SerializeToString(deterministic=True)


def _column(examples: Sequence[Example], port: TensorMetadata, axes: Sequence[int]) -> Tensor:
    """Return a feature of all examples; `axes` are those that it has in each.

    Raises:
        InvalidRequest: If it is not what the input is.
    """
    import numpy as np

    datatype = datatype_of(port.datatype)
    kinds = _KINDS.get(datatype.name.rstrip("0123456789"), (int,))
    if axes.count(-1) > 1:
        msg = f"input '{port.name}' has several axes of any length, which a feature does not say; use predict"
        raise InvalidRequest(msg)
    fixed = math.prod(axis for axis in axes if axis >= 0)
    values: list[Any] = []
    lengths: set[int] = set()
    for place, example in enumerate(examples):
        row = example.get(port.name)
        where = f"feature '{port.name}' of example {place}"
        if row is None:
            raise InvalidRequest(f"{where} is missing")
        if not all(isinstance(value, kinds) for value in row):
            raise InvalidRequest(f"{where}: expected values of {datatype.name}, got others")
        if (len(row) % fixed if fixed else len(row)) if -1 in axes else len(row) != fixed:
            raise InvalidRequest(f"{where}: expected {list(axes) or 'one'} values, got {len(row)}")
        lengths.add(len(row))
        values += row
    if len(lengths) > 1:
        raise InvalidRequest(f"feature '{port.name}' has unlike lengths {sorted(lengths)}; send such examples apart")
    shape = (len(examples), *(lengths.pop() // fixed if axis < 0 else axis for axis in axes))
    if datatype.name == "BYTES":
        return Tensor(port.name, "BYTES", shape, join_elements(port.name, values))
    try:
        with np.errstate(over="raise"):  # a number that is too large would be infinite
            array = np.array(values, "float32" if datatype.name == "BF16" else datatype.numpy).reshape(shape)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise InvalidRequest(f"feature '{port.name}': expected values of {datatype.name}: {error}") from None
    if datatype.name == "BF16":
        array = bits_of(array)
    return from_array(port.name, array, datatype.name)


def _named(tensors: Sequence[Tensor], name: str, *, is_text: bool) -> Tensor | None:
    """Return the output of this name, or the only one of its kind."""
    fitting = [one for one in tensors if (one.datatype == "BYTES") == is_text]
    return next((one for one in fitting if one.name == name), fitting[0] if len(fitting) == 1 else None)


def _rows(tensor: Tensor, count: int) -> list[list[Any]]:
    array = to_array(as_raw(tensor))
    if array.shape[:1] != (count,):
        raise BadOutcome(f"the output '{tensor.name}' has the shape {list(tensor.shape)} for {count} examples")
    return array.reshape(count, -1).tolist()


def _text(label: Any) -> str:
    return label.decode(errors="replace") if isinstance(label, bytes) else str(label)
