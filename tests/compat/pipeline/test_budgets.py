# SPDX-License-Identifier: Apache-2.0
"""A request costs what its length allows for, and what is much is read beside the loop."""

import contextlib
import threading

import msgspec
import numpy as np
import pytest
from google.protobuf import json_format
from tests.compat.pipeline.fronts import Echo, Fronts

from forebay.errors import ForebayError, InvalidRequest
from forebay.surfaces.pipeline.dag import service
from forebay.surfaces.pipeline.ops import packing
from forebay.surfaces.pipeline.protocol import rest, sniff, tensors
from forebay.surfaces.pipeline.protocol.array_texts import array_text
from forebay.surfaces.pipeline.protocol.messages import Request

PRIME = 2**61 - 1
"""What hashes of integers are taken by, so that all its multiples have the same."""


def unpacked(*texts: str, mode: packing.RequestParse = "literal"):
    return packing.unpack(Request(key=[f"k{index}" for index in range(len(texts))], value=texts), mode)


def size_of(value):
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 0


# ---------------------------------------------------------------------------------------------------------------------
# texts


WIDE = "array(['a'],dtype='<U6000000')"


@pytest.mark.parametrize(
    "texts", [[WIDE], [WIDE] * 4, [f"[{','.join([WIDE] * 4)}]"], ["array(['a'],dtype='<U100000')"] * 40]
)
@pytest.mark.parametrize("mode", ["literal", "ndarray"])
def test_values_take_no_more_room_than_their_texts_allow_for(texts, mode):  # F62
    found = {}
    with contextlib.suppress(ForebayError):
        found = unpacked(*texts, mode=mode)
    assert sum(map(size_of, found.values())) <= 2 << 20


def test_an_empty_array_takes_room_for_an_element():  # F62
    text = "array([], dtype='<U250000000')"
    assert unpacked(text) == {"k0": text}
    with pytest.raises(ForebayError, match="take too much"):
        unpacked("array([], dtype='<U60000000')")


def test_a_request_that_would_take_too_much_is_told_so():  # F62
    with pytest.raises(ForebayError, match="take too much") as raised:
        unpacked(*[WIDE] * 4)
    assert raised.value.detail == {"err_no": 8000, "product": False}


def test_arrays_of_texts_that_are_long_for_once_are_read():
    texts = ["short"] * 1000 + ["long" * 60]
    (found,) = unpacked(array_text(np.array(texts))).values()
    assert found.tolist() == texts
    texts = ["short"] * 20_000 + ["long" * 15]
    (found,) = unpacked(f"array({texts}, dtype='<U60')").values()
    assert found.nbytes == 20_001 * 240


COLLIDING = ", ".join(str(index * PRIME) for index in range(1, 1900))
MANY = str([set(range(base, base + 300)) for base in range(0, 3000, 300)])


@pytest.mark.parametrize(
    "text",
    [
        f"{{{COLLIDING}}}",
        f"{{{COLLIDING.replace(',', ':1,')}:1}}",
        str([set(range(PRIME, 90 * PRIME, PRIME))] * 20),
        MANY,
    ],
    ids=["a set", "a dict", "many sets", "many sets that do not collide"],
)
def test_keys_that_may_collide_are_counted_for_each_text(text):  # F64
    assert unpacked(text) == {"k0": text}


def test_keys_that_may_collide_are_counted_for_each_request():  # F64
    text = str(set(range(1900)))
    assert unpacked(text) == {"k0": set(range(1900))}
    with pytest.raises(ForebayError, match="keys that are not strings"):
        unpacked(*[text] * 20)


# ---------------------------------------------------------------------------------------------------------------------
# numbers of things


def test_tensors_are_counted():  # F63
    request = Request()
    for _ in range(2000):
        request.tensors.add()
    with pytest.raises(InvalidRequest, match="2000 tensors"):
        tensors.unpack_all(request.tensors)


HUGE = {
    "tensors": b'{"tensors":[' + b",".join([b"{}"] * 300_000) + b"]}",
    "few tensors": b'{"tensors":[' + b",".join([b"{}"] * 3000) + b"]}",
    "tensors with another name": b'{"\\u0074ensors":[' + b",".join([b"{}"] * 3000) + b"]}",
    "keys": b'{"key":[' + b",".join([b'""'] * 500_000) + b"]}",
    "values": b'{"value":[' + b",".join([b'"\\\\"'] * 500_000) + b"]}",
}


@pytest.mark.parametrize("name", HUGE)
def test_json_with_too_many_things_is_refused_before_they_are_made(name, monkeypatch):  # F63
    monkeypatch.setattr(json_format, "Parse", None)
    monkeypatch.setattr(rest, "Request", None)
    with pytest.raises(InvalidRequest, match="at most"):
        rest.request_of(HUGE[name], None)


def test_json_with_large_texts_is_read_though_they_look_like_many():
    text = '["\\"", {}, ' * 200_000
    request = rest.request_of(msgspec.json.encode({"key": ["a"], "value": [text], "tensors": [{"name": "{" * 5000}]}))
    assert request.value == [text]
    assert len(request.tensors) == 1


MANY_FIELDS = {
    "keys": b"\x0a\x00" * 500_000,
    "tensors": b"\x1a\x00" * 500_000,
    "texts of a tensor": b"\x1a\xc0\x84\x3d" + b"\x4a\x00" * 500_000,
    "numbers of a tensor": b"\x1a\xc0\x84\x3d" + b"\x08\x01" * 500_000,
}


@pytest.mark.parametrize("name", MANY_FIELDS)
def test_messages_with_too_many_things_are_refused_before_they_are_made(name, monkeypatch):  # F63
    monkeypatch.setattr(sniff, "Request", None)
    with pytest.raises(InvalidRequest, match="at most"):
        sniff.request_of(MANY_FIELDS[name])


def test_many_short_values_are_not_read_on_the_loop():  # F63
    request = Request(key=[""] * 20_000, value=[""] * 20_000)
    assert service._bytes_of(request) > service.SMALL_BYTES
    assert service._bytes_of(Request(key=["a"], value=["b"])) <= service.SMALL_BYTES


# ---------------------------------------------------------------------------------------------------------------------
# where it is read


@pytest.fixture
def threads(monkeypatch):
    """Who has read a request."""
    found = []
    for module in (rest, sniff):

        def read(data, *kind, real=module.request_of):
            found.append(threading.current_thread())
            return real(data, *kind)

        monkeypatch.setattr(module, "request_of", read)
    return found


LARGE = Request(key=["a"], value=["x" * 300_000])
TENSORS = Request(key=["a"], value=["x"])
TENSORS.tensors.add(int64_data=range(10_000), shape=[10_000], elem_type=0)


@pytest.mark.parametrize("request_", [LARGE, TENSORS], ids=["long text", "tensor"])
@pytest.mark.parametrize("port", ["rest", "grpc"])
def test_large_requests_are_read_beside_the_loop(threads, port, request_):  # F63
    with Fronts(Echo()) as fronts:
        if port == "grpc":
            assert fronts.call(request_).key == ["a"]
        else:
            answer = fronts.post("/svc/inference", json_format.MessageToJson(request_).encode())
            assert answer.json()["key"] == ["a"]
        assert threads
        assert fronts._thread not in threads
        threads.clear()
        small = Request(key=["a"], value=["b"])
        assert fronts.call(small).value == ["b"]
        assert threads == [fronts._thread]


def test_large_requests_that_are_wrong_are_told_so():
    with Fronts(Echo()) as fronts:
        answer = fronts.post("/svc/inference", b'{"key": [' + b" " * 100_000)
        assert answer.status_code == 400
        assert "expected a Request in JSON" in answer.json()["error"]
