# SPDX-License-Identifier: Apache-2.0
"""Elements of protobuf are counted in bytes as its parser makes them, whatever the bytes are (F74)."""

import functools
import random
from itertools import islice

import pytest

pytest.importorskip("google.protobuf")

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from forebay.errors import TooLarge
from forebay.protocols.kserve.messages import messages
from forebay.protocols.tfserving.messages import SERVING
from forebay.surfaces.pipeline.protocol.messages import Request
from forebay.types import proto_elements
from forebay.types.element_limits import ElementLimits, at_once
from forebay.types.proto_elements import message_elements

KINDS = [
    SERVING.classes().PredictRequest,
    SERVING.classes().ClassificationRequest,
    SERVING.classes().ReloadConfigRequest,
    messages().ModelInferRequest,
    messages().RepositoryModelLoadRequest,
    Request,
]
MANY = 1 << 40
SHAPES = {"shape", "dims", "dim", "lod"}
TENSORS = {"TensorProto", "InferTensorContents", "Tensor", "BytesList", "FloatList", "Int64List"}


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Let runs come to lie in several steps."""
    monkeypatch.setattr(proto_elements, "_RUN_BYTES", 40)
    monkeypatch.setattr(proto_elements, "_STEPS", 3)


@functools.cache
def repeats(descriptor):
    """Tell whether a message may hold any number of things; else it counts as one."""
    inner = [field.message_type for field in descriptor.fields if field.message_type is not None]
    return any(field.is_repeated for field in descriptor.fields) or any(map(repeats, inner))


def made(message):
    """Count what a parser made: elements of tensors, and all other fields, with their entries."""
    tensors = elsewhere = 0
    for field, value in message.ListFields():
        if field.message_type is None:
            count = len(value) if field.is_repeated else 1
            is_text = field.type in {field.TYPE_STRING, field.TYPE_BYTES}
            is_tensor = field.is_repeated and field.name not in SHAPES
            if is_tensor and (not is_text or message.DESCRIPTOR.name in TENSORS):
                tensors += count
            else:
                elsewhere += count
            continue
        is_map = field.message_type.GetOptions().map_entry
        inside = [value] if not field.is_repeated else value.values() if is_map else value
        for one in inside:
            elsewhere += 1
            if hasattr(one, "ListFields") and repeats(field.message_type):
                more = made(one)
                tensors, elsewhere = tensors + more[0], elsewhere + more[1]
    return tensors, elsewhere


def varint(number, chosen=None):
    """Write a varint, now and then a longer one than is needed."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    while chosen is not None and len(found) < 5 and chosen.random() < 0.05:
        found[-1] |= 0x80
        found.append(0)
    return bytes(found)


def anything(chosen, descriptor, depth=0):
    """Write a message, with fields that repeat, are unknown, are of another wire type, or are groups."""
    parts = []
    for _ in range(chosen.randrange(0, 6)):
        fields = list(descriptor.fields_by_number.values())
        field = chosen.choice(fields) if fields and chosen.random() < 0.95 else None
        number = chosen.randrange(1, 40) if field is None else field.number
        wire = chosen.choice([0, 1, 2, 5, 3] if field is None or chosen.random() < 0.05 else [2, _wire(field)])
        repeat = chosen.choice([1, 1, 1, 2, 3, 7])
        is_same = chosen.random() < 0.5
        content = b""
        for turn in range(repeat):
            if not turn or not is_same:
                content = _content(chosen, field, wire, number, depth)
            parts.append(varint(number << 3 | wire, chosen) + content)
    return b"".join(parts)


def _wire(field):
    is_eight = field.type in {field.TYPE_DOUBLE, field.TYPE_FIXED64, field.TYPE_SFIXED64}
    is_four = field.type in {field.TYPE_FLOAT, field.TYPE_FIXED32, field.TYPE_SFIXED32}
    is_text = field.type in {field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_MESSAGE}
    return 1 if is_eight else 5 if is_four else 2 if is_text else 0


def _content(chosen, field, wire, number, depth):
    if wire == 0:
        return varint(chosen.choice([0, 1, 300, 2**63]))
    if wire in {1, 5}:
        return chosen.randbytes(8 if wire == 1 else 4)
    if wire == 3:
        inner = b"".join(varint(chosen.randrange(1, 9) << 3) + b"\1" for _ in range(chosen.randrange(3)))
        return inner + varint(number << 3 | 4)
    if field is not None and field.message_type is not None and depth < 5:
        data = anything(chosen, field.message_type, depth + 1)
    elif field is not None and field.is_repeated and _wire(field) != 2:
        each = {0: lambda: varint(chosen.choice([0, 5, 2**40])), 1: lambda: bytes(8), 5: lambda: bytes(4)}[_wire(field)]
        data = b"".join(each() for _ in range(chosen.randrange(4)))
    else:
        data = bytes(chosen.randrange(97, 122) for _ in range(chosen.choice([0, 0, 1, 2, 40, 200])))
    return varint(len(data), chosen) + data


def is_taken(data, kind, tensors, elsewhere):
    try:
        at_once(message_elements(data, kind.DESCRIPTOR, ElementLimits(tensors, elsewhere)))
    except TooLarge:
        return False
    return True


def refuses_fewer(data, kind):
    """Return whether what was made of data is all of what is counted, and more is refused."""
    tensors, elsewhere = made(kind.FromString(data))
    enough = len(data)  # for the parser keeps no field that is said again, nor an unknown one
    if tensors:
        assert not is_taken(data, kind, tensors - 1, enough)
    if elsewhere:
        assert not is_taken(data, kind, enough, elsewhere - 1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_what_is_parsed_was_counted(kind):
    chosen, parsed = random.Random(kind.DESCRIPTOR.name), 0
    for _ in range(150):
        data = anything(chosen, kind.DESCRIPTOR)
        if chosen.random() < 0.1 and data:
            data = bytearray(data)
            data[chosen.randrange(len(data))] = chosen.randrange(256)
            data = bytes(data)
        try:
            kind.FromString(data)
        except DecodeError:
            at_once(message_elements(data, kind.DESCRIPTOR, ElementLimits(1, 1))) if len(data) < 2 else None
            continue
        refuses_fewer(data, kind)
        parsed += 1
    assert parsed > 40


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_no_more_is_counted_than_was_written(kind):
    """Each element of a tensor that stands alone may count as another one elsewhere."""
    chosen = random.Random(kind.DESCRIPTOR.name)
    for _ in range(60):
        try:
            message = kind.FromString(anything(chosen, kind.DESCRIPTOR))
        except DecodeError:
            continue
        message.DiscardUnknownFields()
        tensors, elsewhere = made(message)
        data = message.SerializeToString()
        keys = data.count(b"\n") + data.count(b"\x12")  # names in maps are fields as well, also where they are empty
        assert is_taken(data, kind, tensors, elsewhere + tensors + keys)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_unknown_fields_count_as_well(kind):
    chosen = random.Random(kind.DESCRIPTOR.name)
    for _ in range(60):
        parts = []
        for _ in range(chosen.randrange(1, 6)):
            number, wire = chosen.choice([100, 101, 1999, 2048, 100_000]), chosen.choice([0, 1, 2, 5])
            part = varint(number << 3 | wire, chosen) + _content(chosen, None, wire, number, 0)
            parts.append(part * chosen.choice([1, 2, 3, 7, 40]))
        data = b"".join(parts)
        count = len(UnknownFieldSet(kind.FromString(data)))
        assert is_taken(data, kind, 1, count)
        assert not is_taken(data, kind, 1, count - 1)


def _policy(**fields):
    """A message whose fields have long tags."""
    config = SERVING.classes().ReloadConfigRequest().config.model_config_list.config.add()
    return type(config.model_version_policy)(**fields)


@pytest.mark.parametrize(
    "full, empty, name",
    [
        (messages().ModelInferRequest(inputs=[{"name": "a"}]), messages().ModelInferRequest(inputs=[{}]), "inputs"),
        (_policy(specific={"versions": [1]}), _policy(specific={}), "specific"),
    ],
)
def test_messages_count_with_a_field_in_each_before_they_are_looked_into(full, empty, name):
    kind = type(full)
    data = full.SerializeToString() * 600
    steps = message_elements(data, kind.DESCRIPTOR, ElementLimits(MANY, 1000))
    assert len(list(islice(steps, 501 // proto_elements._STEPS))) == 167
    with pytest.raises(TooLarge, match=rf"\.{name}: expected at most 1000 elements"):
        next(steps)
    assert is_taken(data, kind, MANY, 1200)
    data = empty.SerializeToString() * 600
    assert is_taken(data, kind, MANY, 600)
    assert not is_taken(data, kind, MANY, 599)


def test_fields_whose_long_tags_begin_alike_are_told_apart():
    policy = _policy(specific={"versions": [1]})
    data = policy.SerializeToString() + (varint(118 << 3 | 2) + b"\2ab") * 600
    assert is_taken(data, type(policy), MANY, 602)


def test_the_field_is_named_and_runs_are_counted():
    kind = SERVING.classes().PredictRequest
    proto = kind()
    proto.inputs["x"].string_val.extend([b"", b"a"] * 50)
    proto.inputs["x"].tensor_shape.dim.add(size=3)
    data = proto.SerializeToString()
    with pytest.raises(
        TooLarge, match=r"the field tensorflow\.TensorProto\.string_val: expected at most 99 elements of ten"
    ):
        at_once(message_elements(data, kind.DESCRIPTOR, ElementLimits(99, MANY)))
    assert is_taken(data, kind, 100, MANY)
    proto.inputs["x"].tensor_shape.dim.extend([proto.inputs["x"].tensor_shape.dim[0]] * 500)
    data = proto.SerializeToString()
    with pytest.raises(TooLarge, match=r"the field tensorflow\.TensorShapeProto\.dim: expected at most 300 elements"):
        at_once(message_elements(data, kind.DESCRIPTOR, ElementLimits(MANY, 300)))
