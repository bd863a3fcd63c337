# SPDX-License-Identifier: Apache-2.0
"""What is read and written of tensors for several requests together is what is read and written for each alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.serving.models.tensor_codec import TensorCodec, TensorPort, TensorSide
from forebay.workers.user_calls.user_code import caught

TYPES = {"FP32": "f4", "FP64": "f8", "INT64": "i8", "UINT8": "u1", "BOOL": "?", "FP16": "f2"}
RESULTS = [*TYPES.values(), ">f4", ">i8", "c8", "U1", "O"]


class Asked(NamedTuple):
    body: Any
    params: dict[str, Any]
    size: int


def params(name: str, datatype: str, shape: list[int], wanted: list[list[Any]]) -> dict[str, Any]:
    given = [[name, datatype, shape, False]]
    return {"in": "tensors", "out": "tensors", "given": given, "wanted": wanted, "is_json": False}


def told(sample: Any) -> Any:
    """All there is to say of a sample: its fields, or the type, shape and bytes of an array."""
    if isinstance(sample, dict):
        return {name: told(value) for name, value in sample.items()}
    return (sample.dtype, sample.shape, sample.tobytes()) if isinstance(sample, np.ndarray) else sample


def plain(outcome: list[Any]) -> list[Any]:
    return [outcome[0], *map(bytes, outcome[1:])]


@st.composite
def results(draw: st.DrawFn) -> tuple[list[Any], int, int]:
    """Results of several requests of as many samples, mostly arrays of one kind."""
    kind, shape = draw(st.sampled_from(RESULTS)), draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    items, size = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    made: list[Any] = []
    for number in range(items * size):
        one = np.arange(number, number + max(int(np.prod(shape)), 1))[: int(np.prod(shape))].reshape(shape)
        one = np.asarray(one).astype(kind)
        odd = draw(st.sampled_from(["plain"] * 12 + ["turned", "other type", "other shape", "list", "number"]))
        if odd == "turned" and one.ndim == 2:
            one = one.T
        elif odd == "other type" and kind in TYPES.values():
            one = one.astype("f8")
        elif odd == "other shape":
            one = np.zeros(5, kind)
        made.append(one.tolist() if odd == "list" else 1 if odd == "number" else one)
    return made, items, size


@given(
    results(),
    st.sampled_from(["", "BYTES", *TYPES]),
    st.booleans(),
    st.sampled_from([[], [["output", False]], [["output", True]], [["no", False]]]),
)
@settings(max_examples=300, deadline=None)
def test_outcomes_written_together_are_those_written_alone(made, declared, is_record, wanted):
    values, items, size = made
    name = "output"
    side = TensorSide(
        [TensorPort(name, declared, None, "array")] if declared else (), is_record=is_record and bool(declared)
    )
    codec = TensorCodec(TensorSide(), side)
    samples = [{name: one} for one in values] if is_record else values
    asked = params("input", "FP32", [size], wanted)
    together = codec.encode_all(samples, [Asked([], asked, size)] * items)
    if together is None:
        return
    alone = [codec.encode(samples[at : at + size], asked) for at in range(0, len(samples), size)]
    assert [plain(one) for one in together] == [plain(one) for one in alone]
    for one in samples:  # its memory is the model's own, who may write there
        array: Any = one[name] if is_record else one
        array[...] = 0
    assert [plain(one) for one in together] == [plain(one) for one in alone]


@given(
    st.sampled_from(list(TYPES)),
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.booleans(),
    st.sampled_from([2, 20_000]),
)
@settings(max_examples=60, deadline=None)
def test_samples_read_together_are_those_read_alone(datatype, sizes, sees, length):
    port = TensorPort("input", datatype, (length,), "array")
    codec = TensorCodec(TensorSide([port]), TensorSide())
    items = []
    for at, size in enumerate(sizes):
        data = bytearray((np.arange(length * size) + at).astype(TYPES[datatype]).tobytes())
        shape = [sizes[0], length]
        items.append(Asked([memoryview(data) if sees else data], params("input", datatype, shape, []), size))
    together = codec.decode_all(items)
    alone = [sample for item in items for sample in codec.decode(item.body, item.params, item.size)]
    assert together is not None
    assert [(one.dtype, one.tobytes()) for one in together] == [(one.dtype, one.tobytes()) for one in alone]
    assert not any(one.flags.writeable for one in together)
    if length > 2:  # not copied
        assert all(map(np.shares_memory, together, alone))


ODD = {
    "type": lambda given: [[given[0][0], "INT32", *given[0][2:]], *given[1:]],
    "order": lambda given: given[::-1],
    "names": lambda given: [[other[0], *one[1:]] for one, other in zip(given, given[::-1], strict=True)],
    "shape": lambda given: [[name, kind, [*shape[:-1], shape[-1], 1], is_json] for name, kind, shape, is_json in given],
    "json": lambda given: [[*one[:3], True] for one in given],
}
"""Parameters that differ from the others' although as many bytes came."""


@given(
    st.lists(st.sampled_from(["same"] * 3 + list(ODD)), min_size=2, max_size=4),
    st.sampled_from(["pair", "array", "open"]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_requests_whose_parameters_differ_are_read_as_each_says(kinds, side, is_large):  # F119
    length, names = 5_000 if is_large else 2, ["a", "b"] if side == "pair" else ["a"]
    ports = [TensorPort(name, "FP32", (length,), "array") for name in names]
    codec = TensorCodec(TensorSide([] if side == "open" else ports, is_record=side == "pair"), TensorSide())
    items = []
    for at, kind in enumerate(kinds):
        asked = params("a", "FP32", [1, length], [])
        asked["given"] = [[name, "FP32", [1, length], False] for name in names]
        if kind != "same":
            asked["given"] = ODD[kind](asked["given"])
        held = [(np.arange(length, dtype="f4") + at + place / 2).tobytes() for place in range(len(names))]
        if kind == "json":
            held = [np.frombuffer(data, "f4").tolist() for data in held]
        items.append(Asked(held, asked, 1))
    together, problem = caught(codec.decode_all, items)
    if together is None or problem is not None:
        return
    alone = [sample for item in items for sample in codec.decode(item.body, item.params, item.size)]
    assert [*map(told, together)] == [*map(told, alone)]


def test_what_has_another_size_or_type_is_read_alone():
    codec = TensorCodec(TensorSide([TensorPort("input", "FP64", (20_000,), "array")]), TensorSide())
    right = Asked([bytes(160_000)], params("input", "FP64", [1, 20_000], []), 1)
    assert codec.decode_all([right, right]) is not None
    assert codec.decode_all([right, right._replace(body=[bytes(159_992)])]) is None
    assert codec.decode_all([right, right._replace(size=2)]) is None
    narrow = Asked([bytes(80_000)], params("input", "FP32", [1, 20_000], []), 1)
    assert codec.decode_all([narrow, narrow]) is None
    assert {one.dtype.name for one in codec.decode(narrow.body, narrow.params, 1)} == {"float64"}
