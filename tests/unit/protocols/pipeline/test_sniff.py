# SPDX-License-Identifier: Apache-2.0
"""Both layouts of a request on one port."""

import contextlib
import time
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidRequest
from forebay.surfaces.pipeline.protocol.messages import OldRequest, Request, Tensor
from forebay.surfaces.pipeline.protocol.sniff import is_old, request_of

FIELDS = ("key", "value", "name", "method", "logid", "clientip")


def fields(request):
    return {name: getattr(request, name) for name in FIELDS}


def varint(number):
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def text(field, value):
    data = value.encode()
    return varint(field << 3 | 2) + varint(len(data)) + data


def test_a_frame_of_the_old_layout_written_by_hand():  # P9, trap 2
    frame = text(1, "words") + text(2, "i am sad") + text(3, "imdb") + text(4, "prediction")
    frame += varint(5 << 3) + varint(77) + text(6, "10.0.0.1")
    request = request_of(frame)
    assert type(request) is Request
    assert fields(request) == fields(
        Request(key=["words"], value=["i am sad"], name="imdb", method="prediction", logid=77, clientip="10.0.0.1")
    )


def test_numbers_of_the_present_layout():  # P8
    frame = text(1, "x") + text(2, "1") + text(4, "uci") + text(5, "prediction")
    frame += varint(6 << 3) + varint(77) + text(7, "10.0.0.1")
    frame += varint(3 << 3 | 2) + varint(9) + b"\xa0\x01\x03" + b"\xaa\x01\x01\x01" + b"\x1a\x00"
    request = request_of(frame)
    assert (request.name, request.method, request.logid, request.clientip) == ("uci", "prediction", 77, "10.0.0.1")
    assert (request.tensors[0].elem_type, list(request.tensors[0].shape)) == (3, [1])
    answers = {field.name: field.number for field in Tensor.DESCRIPTOR.fields}
    assert [answers[name] for name in ("str_data", "byte_data", "elem_type", "shape", "lod", "name")] == [
        9,
        10,
        20,
        21,
        22,
        23,
    ]


words = st.text(st.characters(min_codepoint=0x20, exclude_categories=["Cs", "Cc"]), max_size=20)
int64 = st.integers(-(2**63), 2**63 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
tensors = st.builds(
    Tensor,
    name=words.filter(bool),
    int64_data=st.lists(int64, max_size=4),
    float_data=st.lists(st.floats(width=32), max_size=4),
    int_data=st.lists(int32, max_size=4),
    float64_data=st.lists(st.floats(), max_size=4),
    uint32_data=st.lists(st.integers(0, 2**32 - 1), max_size=4),
    bool_data=st.lists(st.booleans(), max_size=4),
    complex64_data=st.lists(st.floats(width=32), max_size=4),
    str_data=st.lists(words, max_size=3),
    byte_data=st.binary(max_size=20),
    elem_type=st.integers(0, 13),
    shape=st.lists(int32, max_size=4),
    lod=st.lists(int32, max_size=4),
)
texts = st.lists(words, max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Request,
        key=texts, value=texts, name=words, method=words, logid=int64, clientip=words,
        tensors=st.lists(tensors, max_size=2),
    )
)  # fmt: skip
@example(Request(tensors=[Tensor()]))
def test_frames_of_the_present_layout_are_never_misread(request):  # P9
    assert request_of(request.SerializeToString()) == request


def test_a_thousand_random_frames_with_tensors():  # P9
    random = Random(7)
    for _ in range(1000):
        given_fields = {
            "key": ["x"] * random.randrange(3),
            "value": ["1"] * random.randrange(3),
            "name": random.choice(["", "uci", "ADetector"]),
            "method": random.choice(["", "prediction"]),
            "logid": random.choice([0, 1, random.getrandbits(60)]),
            "clientip": random.choice(["", "10.0.0.1"]),
        }
        request = Request(**given_fields)
        for _ in range(random.randrange(1, 3)):
            numbers = [random.getrandbits(31) for _ in range(random.randrange(20))]
            field = random.choice(["int64_data", "float_data", "int_data", "float64_data", "uint32_data", "lod"])
            tensor = Tensor(
                elem_type=random.randrange(14), shape=[len(numbers)], name=random.choice(["", "x", "image"])
            )
            getattr(tensor, field).extend(numbers)
            tensor.byte_data = random.randbytes(random.randrange(50))
            request.tensors.append(tensor)
        assert request_of(request.SerializeToString()) == request


@settings(max_examples=300, deadline=None)
@given(
    st.builds(OldRequest, key=texts, value=texts, name=words, method=words, logid=int64.filter(bool), clientip=words)
)
def test_frames_of_the_old_layout_with_a_logid(old):  # P9
    assert fields(request_of(old.SerializeToString())) == fields(old)


@pytest.mark.parametrize("name", ["imdb", "ocr", "uci", "ADetector", "BERT", "J", "R2", "名字", "a b", "x" * 300, "2"])
@pytest.mark.parametrize("method", ["", "prediction"])
def test_names_of_the_old_layout_are_told_from_tensors(name, method):  # P9
    data = OldRequest(name=name, method=method).SerializeToString()
    assert is_old(data)
    assert request_of(data).name == name


def test_tensors_with_numbers_one_by_one_are_tensors():
    tensor = b"\x0d\x15\x00\x00\x80\x3f\xa0\x01\x01\xba\x01\x01x"
    assert not is_old(b"\x1a" + varint(len(tensor) - 1) + tensor[1:])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_of_any_kind_are_read_or_refused(data):
    with contextlib.suppress(InvalidRequest):
        assert type(request_of(data)) is Request


def test_what_is_no_message_is_refused():
    with pytest.raises(InvalidRequest, match=r"expected a baidu\.paddle_serving\.pipeline_serving\.Request message"):
        request_of(b"\xff\xff")


def test_a_frame_of_countless_fields_takes_a_moment():
    frame = b"\x0a\x00" * 5_000_000
    started = time.process_time()
    assert not is_old(frame)
    assert time.process_time() - started < 1.0
