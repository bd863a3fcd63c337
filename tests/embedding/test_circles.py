# SPDX-License-Identifier: Apache-2.0
"""No call leaves anything in a circle: only a walk of the collector frees that, and its batch's bodies until then."""

import asyncio
import http.client
import json
import sys
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.circles import left_in_circles
from tests.waiting import PATIENCE_S

import forebay
from forebay.transports.http import port
from forebay.workers.wire import frames

CALLS = 20
EVENTS = {"accept": "text/event-stream"}
FORM = {"content-type": "multipart/form-data; boundary=B"}
FIELD = b'--B\r\nContent-Disposition: form-data; name="number"\r\n\r\n1\r\n'


class Sample(msgspec.Struct):
    number: int


class Plain(forebay.Model):
    def predict(self, batch: list[Sample]) -> list[object]:
        return [object() if one.number < 0 else one.number for one in batch]


class Waits(forebay.Model):
    async def predict(self, batch: list[int]) -> list[int]:
        if batch[0] < 0:
            raise ValueError("below zero")
        return batch


class Explains(forebay.Model):
    """Says why, in the way of Python."""

    def predict(self, batch: list[int]) -> list[float]:
        try:
            return [1 / one for one in batch]
        except ZeroDivisionError as error:
            raise forebay.RequestError("nothing can be divided by it") from error


class Tires(forebay.Model):
    def predict(self, batch: list[int]) -> Iterator[list[float]]:
        for number in range(max(batch), -1, -1):
            try:
                part = 1 / number
            except ZeroDivisionError as error:
                raise forebay.RequestError("nothing can be divided by it") from error
            yield [part for _ in batch]


class TiresAsync(forebay.Model):
    async def predict(self, batch: list[int]) -> list[int]:
        async with asyncio.TaskGroup() as group:
            for one in batch:
                group.create_task(self.count(one))
        return batch

    async def count(self, number: int) -> None:
        if number < 0:
            raise forebay.RequestError("below zero")


class Keyed(forebay.Model):
    @staticmethod
    def batch_key(sample: Sample) -> int:
        return sample.number

    def predict(self, batch: list[Sample]) -> list[Sample]:
        return batch


class Rows(forebay.Model):
    batchable = True
    max_batch_size = 2

    def predict(self, batch: list[int]) -> list[object]:
        return [forebay.RequestError("below zero") if one < 0 else one for one in batch]


class Column(forebay.Model):
    def predict(self, batch: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        return batch


class Row(forebay.Model):
    def predict(self, batch: list[np.ndarray[tuple[Literal[2]], np.dtype[np.int64]]]) -> list[int]:
        return [int(row[0]) for row in batch]


class Counts(forebay.Model):
    def predict(self, batch: list[int]) -> Iterator[list[int]]:
        for number in range(max(batch)):
            yield [number for _ in batch]


class CountsAsync(forebay.Model):
    async def predict(self, batch: list[int]) -> AsyncIterator[list[int]]:
        for number in range(max(batch)):
            yield [number for _ in batch]


@forebay.node
def anything(number: int):
    return object() if number < 0 else number


@forebay.compose
def composed(number: int):
    return anything(number)


@pytest.fixture(scope="module", params=["thread", "inline"])
def served(request):
    models = (Plain, Waits, Explains, Tires, TiresAsync, Keyed, Rows, Row, Column, Counts, CountsAsync, composed)
    with forebay.start(*models, port=0, worker_kind=request.param) as server:
        yield server


def ask(served, path, body, headers, times=CALLS):
    client = http.client.HTTPConnection(*served.url.removeprefix("http://").split(":"), timeout=PATIENCE_S)
    found = set()
    for number in range(times):
        client.request("POST", path, body, {**headers, "x-number": f"{number:04}"})
        answer = client.getresponse()
        found.add(answer.status)
        answer.read()
    client.close()
    return found


@pytest.mark.parametrize(
    "path, body, headers, status",
    [
        ("plain", b'{"number": 1}', {}, 200),
        ("plain", b"{", {}, 400),
        ("plain", b'{"number": "a"}', {}, 422),
        ("plain", b'{"nomber": 1}', {}, 422),
        ("plain", b'{"number": -1}', {}, 500),
        ("plain", b"a", {"content-type": "text/plain"}, 415),
        ("plain", b"{}", {"host": "elsewhere.example"}, 421),
        ("plain", FIELD + b"--B--\r\n", FORM, 200),
        ("plain", FIELD.replace(b"number", b"other") + b"--B--\r\n", FORM, 422),
        ("waits", b"1", {}, 200),
        ("waits", b"-1", {}, 500),
        ("explains", b"0", {}, 400),
        ("tires", b"2", EVENTS, 200),
        ("tires-async", b"-1", {}, 500),
        ("keyed", b'{"number": "a"}', {}, 422),
        ("rows", b"[1, -1, 2, 3, 4]", {}, 400),
        ("rows", b'[1, "a"]', {}, 422),
        ("column", b'[1, "a"]', {}, 422),
        ("composed", b"1", {}, 200),
        ("composed", b'"a"', {}, 422),
        ("composed", b"-1", {}, 500),
        ("counts", b"3", EVENTS, 200),
        ("counts-async", b"3", EVENTS, 200),
    ],
)
def test_a_call_leaves_nothing_in_a_circle(served, path, body, headers, status, monkeypatch):
    monkeypatch.setattr(port, "MAX_HEADS", 4)  # each call has a head of its own
    assert ask(served, f"/models/{path}", body, headers) == {status}
    with left_in_circles() as left:
        ask(served, f"/models/{path}", body, headers)
    assert len(left) < CALLS, json.dumps(sorted(set(left)))


class Loops:
    """Is left in a circle, with its function and its frame."""

    def __init__(self):
        self.frame = sys._getframe()


@pytest.mark.parametrize("folder", ["/home/me/forebay", "/home/me/a b", "/home/me/forebay/src/forebay"])
def test_circles_of_tests_are_not_ours_wherever_the_clone_is(folder, monkeypatch):
    """The folder's name was taken for the package's, in each clone that bears it."""  # F110
    file = f"{folder}/tests/embedding/test_circles.py"
    monkeypatch.setattr(
        Loops, "__init__", types.FunctionType(Loops.__init__.__code__.replace(co_filename=file), globals())
    )
    with left_in_circles() as left:
        Loops()
    assert left == []


def test_circles_of_the_package_are_ours():
    with left_in_circles() as left:
        circle = types.FunctionType(forebay.start.__code__, {})
        circle.__globals__["circle"] = circle
        del circle
    assert left == [forebay.start.__code__.co_qualname]


NESTED = b'{"inputs": [{"name": "input", "datatype": "INT64", "shape": [1, 2], "data": [[1, 2]]}]}'


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("/v2/models/row/infer", NESTED, 200),
        ("/v2/models/row/infer", NESTED.replace(b"2]]", b'"a"]]'), 400),
        ("/v2/models/nobody/infer", NESTED, 404),
        ("/v1/models/row:predict", b'{"inputs": [[1, 2]]}', 200),
        ("/v1/models/nobody:predict", b'{"inputs": [[1, 2]]}', 404),
        ("/v1/models/row/versions/7:predict", b'{"inputs": [[1, 2]]}', 404),
    ],
)
def test_tensors_in_json_leave_nothing_in_a_circle(served, path, body, status):
    assert ask(served, path, body, {}) == {status}
    with left_in_circles() as left:
        ask(served, path, body, {})
    assert len(left) < CALLS, json.dumps(sorted(set(left)))


@pytest.mark.parametrize("path", ["plain", "counts"])
def test_a_batch_that_is_too_large_for_a_process_leaves_nothing_in_a_circle(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where workers find what this file imports
    body = b'{"number": 1}' + b" " * 5000
    with forebay.start(Plain, Counts, port=0, worker_kind="process") as served:
        monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 2000)
        assert ask(served, f"/models/{path}", body, {}) == {413}
        with left_in_circles() as left:
            ask(served, f"/models/{path}", body, {})
    assert len(left) < CALLS, json.dumps(sorted(set(left)))
