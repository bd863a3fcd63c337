# SPDX-License-Identifier: Apache-2.0
"""JSON that is read in segments: the same parts, or the same refusal, as from a decoder in one call."""

import base64
import contextlib
import json

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.arrays.numpy_tensors import as_raw
from forebay.errors import ForebayError, InvalidRequest, TooLarge, ValidationError
from forebay.protocols.kserve import rest as kserve
from forebay.protocols.samples import MAX_SAMPLES
from forebay.protocols.tfserving import json_tensors, odd_numbers
from forebay.protocols.tfserving.predict_bodies import as_samples, as_tensors, read_predict
from forebay.serving.tensor_face import TensorFace
from forebay.types import json_segments
from forebay.types.element_limits import ElementLimits, at_once
from forebay.types.json_segments import elements, members
from forebay.types.tensor import TensorMetadata

ODD_TEXTS = st.text(alphabet='",[]{}:\\é😀\x00 x', max_size=12)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ODD_TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=8) | st.dictionaries(ODD_TEXTS, inner, max_size=5), max_leaves=60
)
LAYOUTS = st.fixed_dictionaries(
    {"ensure_ascii": st.booleans()},
    optional={"indent": st.just(1), "separators": st.sampled_from([(",", ":"), (" ,", ": ")])},
)
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([*'",[]{}:\\0 \n', ""])), max_size=3)
SIZES = st.sampled_from([1, 2, 5, 16, 64])


@contextlib.contextmanager
def short_steps(segment_bytes=16):
    """Everything is long, and read in steps of some bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_segments, "SEGMENT_BYTES", segment_bytes)
        for module in (json_segments, kserve):
            patch.setattr(module, "LONG_BYTES", 8)
        for module in (json_segments, json_tensors, odd_numbers):
            patch.setattr(module, "STEP_BYTES", 11)
        patch.setattr(kserve, "_SHORT_BYTES", 8)
        yield


def edited(text, edits):
    for number, found in edits:
        at = number % (len(text) + 1)
        text = text[:at] + found + text[at + 1 :]
    return text.encode()


def read(call):
    try:
        return call()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "malformed"


def said(value):
    return bytes(value).strip()


@given(st.lists(VALUES, max_size=12) | VALUES, LAYOUTS, EDITS, SIZES)
def test_the_elements_of_an_array_are_those_of_the_decoder(value, layout, edits, size):
    data = edited(json.dumps(value, **layout), edits)
    expected = read(lambda: [said(one) for one in msgspec.json.decode(data, type=list[msgspec.Raw])])
    for steps in (contextlib.nullcontext(), short_steps(size)):
        with steps:
            assert read(lambda: [*map(said, at_once(elements(data, 10**6)) or ())]) == expected


@given(st.dictionaries(ODD_TEXTS, VALUES, max_size=12) | VALUES, LAYOUTS, EDITS, SIZES)
def test_the_members_of_an_object_are_those_of_the_decoder(value, layout, edits, size):
    data = edited(json.dumps(value, **layout), edits)

    def said_of(named):
        return {name: said(one) for name, one in (named or {}).items()}

    expected = read(lambda: said_of(msgspec.json.decode(data, type=dict[str, msgspec.Raw])))
    for steps in (contextlib.nullcontext(), short_steps(size)):
        with steps:
            assert read(lambda: said_of(at_once(members(data, 10**6)))) == expected


FACES = [
    TensorFace(inputs=[TensorMetadata("x", kind, (-1, -1))], outputs=[TensorMetadata("y", kind, (-1,))])
    for kind in ("FP32", "FP16", "INT64", "BYTES", "BOOL")
]
FACES += [TensorFace(is_open=True), TensorFace(inputs=[*FACES[0].inputs, TensorMetadata("z", "BYTES", (-1,))])]
B64 = st.builds(
    lambda data, more: {"b64": base64.b64encode(data).decode() + more},
    st.binary(max_size=60),
    st.sampled_from(["", "", "", "=", "==", "A", "=A", "é"]),
)
NUMBERS = st.recursive(
    st.integers(-9, 9) | st.floats(-9, 9) | B64 | st.text(alphabet='",[]x', max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=20,
)
BLOCKS = st.builds(
    lambda shape, value: np.full(shape, value).tolist(),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.sampled_from([1, 0.25, True, "a", -70000]),
)
COLUMNS = BLOCKS | NUMBERS | st.dictionaries(st.sampled_from("xz"), BLOCKS | NUMBERS, max_size=2) | VALUES
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "instances": COLUMNS | st.lists(COLUMNS, max_size=5),
        "inputs": COLUMNS,
        "signature_name": st.text(max_size=3),
    },
)


def tensors_of(body, face):
    return at_once(as_tensors(at_once(read_predict(body, MAX_SAMPLES)), face))


def is_same(found, expected):
    """Compare answers; what is malformed may be told as such, or as what is missing."""
    return found == expected or all(one in (InvalidRequest, ValidationError) for one in (found, expected))


def answered(read, body, face):
    try:
        tensors = [as_raw(one) for one in read(body, face)]
        return [(one.name, one.datatype, one.shape, bytes(one.data)) for one in tensors]
    except ForebayError as error:
        return type(error)


@example({"instances": {}, "signature_name": "Inf"}, FACES[0], {"ensure_ascii": False}, [])
@given(BODIES, st.sampled_from(FACES), LAYOUTS, EDITS | st.just([]))
def test_long_bodies_of_tensorflow_serving_are_read_like_short_ones(value, face, layout, edits):
    body = edited(json.dumps(value, **layout), edits)
    expected = answered(tensors_of, body, face)
    with short_steps():
        found = answered(tensors_of, body, face)
    assert is_same(found, expected), (found, expected)


@given(BODIES, st.sampled_from(["", "x"]), LAYOUTS)
def test_so_are_rows_that_go_as_samples(value, name, layout):
    body = json.dumps(value, **layout).encode()
    rows = value.get("instances")
    if not isinstance(rows, list) or not rows or "inputs" in value:
        return
    for sizes in (contextlib.nullcontext, short_steps):
        with sizes():
            samples = at_once(as_samples(at_once(read_predict(body, MAX_SAMPLES)), name))
            with pytest.raises(TooLarge, match="expected at most"):
                at_once(read_predict(body, len(rows) - 1))
        is_bare = [not isinstance(row, dict) or next(iter(row), "") == "b64" for row in rows]
        expected = [{name: row} if name and bare else row for row, bare in zip(rows, is_bare, strict=True)]
        assert [json.loads(bytes(one)) for one in samples] == expected


def call_of(read):
    try:
        found = read()
    except ForebayError as error:
        return type(error)
    tensors = [(one.name, one.datatype, one.shape, bytes(one.data).strip()) for one in found.inputs]
    return tensors, found.id, found.outputs, found.parameters


@given(
    st.fixed_dictionaries(
        {
            "inputs": st.lists(
                st.fixed_dictionaries(
                    {"name": st.sampled_from("xz"), "datatype": st.just("FP32"), "data": BLOCKS | VALUES},
                    optional={"shape": st.lists(st.integers(0, 5), max_size=4) | LEAVES, "parameters": VALUES},
                ),
                max_size=3,
            )
        },
        optional={"id": ODD_TEXTS, "outputs": st.lists(st.fixed_dictionaries({"name": ODD_TEXTS})), "z": VALUES},
    ),
    LAYOUTS,
    EDITS | st.just([]),
)
def test_so_are_calls_of_kserve(value, layout, edits):
    body = edited(json.dumps(value, **layout), edits)

    def in_steps():
        with short_steps():
            return read_in_steps()

    def read_in_steps():
        envelope = at_once(kserve.counting(body, limits=ElementLimits(elsewhere=8)))
        return kserve.decode_request(body, is_counted=True, envelope=envelope)

    found, expected = call_of(in_steps), call_of(lambda: kserve.decode_request(body, is_counted=True))
    assert found is TooLarge or is_same(found, expected), (found, expected)


class Read(bytes):
    """Bytes that count how many of them were copied."""

    copied = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.copied += len(found)
        return found


STEPS = {
    "numbers": b"[%b]" % b",".join([b"1.5"] * 400_000),
    "lists": b"[%b]" % b",".join([b"[[1.5],[2]]"] * 100_000),
    "text": b'["%b"]' % (b"x" * 1_600_000),
    "escapes": b'["%b"]' % (rb"\ud83d\ude00" * 150_000),
    "value": b'{"b64":"%b"}' % (b"x" * 1_600_000),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_step_reads_more_than_its_part(name):  # F73, F75
    with pytest.MonkeyPatch.context() as patch:
        read = [0]
        cut = json_segments.next_segment

        def counted(*args):
            segment = cut(*args)
            read[-1] += segment.end - segment.start
            return segment

        patch.setattr(json_segments, "next_segment", counted)
        steps = members(b'{"inputs":{"x":%b}}' % STEPS[name], 1)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                (inputs,) = end.value.values()
                break
            read.append(0)
        assert bytes(inputs) == b'{"x":%b}' % STEPS[name]
        assert sum(read) > len(STEPS[name]) - 100
        assert max(read) <= json_segments.STEP_BYTES + json_segments.SEGMENT_BYTES


@pytest.mark.parametrize("data", [b'"%b"', b'{"b64":"%b"}', b'[{"b64":"%b"}]'])
def test_long_bytes_are_read_in_steps_too(data):  # F75
    with pytest.MonkeyPatch.context() as patch:
        decoded: list[int] = []

        class Decoder:
            def __init__(self, decode):
                self.usual = decode

            def decode(self, text):
                decoded.append(len(text))
                return self.usual.decode(text)

        for name in ("_rows", "_fields", "_text"):
            patch.setattr(json_segments, name, Decoder(getattr(json_segments, name)))
        body = b'{"inputs":{"x":%b}}' % (data % (b"QUFB" * 400_000))
        face = TensorFace(inputs=[TensorMetadata("x", "BYTES", (-1,)), TensorMetadata("z", "BYTES", (-1,))])
        (tensor,) = tensors_of(body, face)
        assert max(decoded, default=0) <= json_segments.SEGMENT_BYTES + 100
        told = as_raw(tensor).data
        assert bytes(told[4:]) == (b"AAA" * 400_000 if b"b64" in data else b"QUFB" * 400_000)


UNCUT = {
    "brackets": b"[",
    "objects": b'{"a":',
    "blanks": b" ",
    "digits": b"1",
    "texts": b'""',
    "name": b"x",
    "closed": b"[]",
}


@pytest.mark.parametrize("name", UNCUT)
def test_what_has_no_place_to_be_cut_at_is_refused_once_a_step_was_read(name):  # F73, F75
    """A million lists in one another were read again and again, twice as many each time."""
    data = Read(b"[" * (name != "name") + b'{"' * (name == "name") + UNCUT[name] * 2_000_000)
    with pytest.raises(msgspec.DecodeError):
        json_segments.next_segment(data, 0, b"", json_segments.SEGMENT_BYTES)
    assert 0 < data.copied <= 2 * json_segments.UNCUT_BYTES
