# SPDX-License-Identifier: Apache-2.0
"""Batch keys: asked of the user before a sample is queued, so that only samples of equal keys share a batch."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.batching.queue import BatchConfig
from forebay.errors import Code, InvalidRequest, RunnerFailed, TooLarge, ValidationError
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.models.batch_keys import SampleKeys
from forebay.serving.models.schema import WireType
from forebay.testing import FakeClock, ManualPool
from forebay.types.call import Failure, Request

JSON = {"in": "json", "out": "json"}


def key_of(sample) -> Any:
    match sample:
        case 13:
            raise ValueError("thirteen")
        case 14:
            raise ValidationError("not fourteen", detail={"path": "$"})
        case 15:
            return [15]
        case 16:
            sys.exit(3)
    return sample % 3


def reader(*, annotation=int):
    return SampleKeys(key_of, "My.batch_key", WireType(annotation))


def request(*bodies, batchable=False):
    encoded = [msgspec.json.encode(body) if not isinstance(body, bytes) else body for body in bodies]
    return Request(body=encoded if batchable else encoded[0], reply=print, params=JSON, size=len(bodies))


def test_the_function_is_given_the_decoded_sample():
    assert reader()(request(5)) == [2]
    pack = Request(body=msgspec.msgpack.encode(5), reply=print, params={"in": "msgpack", "out": "json"})
    assert reader()(pack) == [2]


def test_each_sample_of_an_array_has_a_key_of_its_own():
    assert reader()(request(1, 2, 3, 4, batchable=True)) == [1, 2, 0, 1]


@pytest.mark.parametrize(
    "bad, error, told",
    [
        (b"nope", InvalidRequest, "JSON is malformed"),
        ("x", ValidationError, "Expected `int`, got `str`"),
        (13, RunnerFailed, "ValueError: thirteen"),
        (14, ValidationError, "not fourteen"),
        (
            15,
            RunnerFailed,
            r"My\.batch_key returned a list, which cannot be hashed; return a number, a string or a tuple",
        ),
        (16, RunnerFailed, "SystemExit: 3"),
    ],
)
def test_what_goes_wrong_is_the_error_of_the_request(bad, error, told):
    with pytest.raises(error, match=told):
        reader()(request(bad))


def test_a_bad_sample_of_an_array_is_told_by_its_number():
    with pytest.raises(ValidationError, match="sample 1: Expected `int`, got `str`") as caught:
        reader()(request(1, "x", batchable=True))
    assert caught.value.detail == {"path": "$[1]"}
    with pytest.raises(ValidationError, match="sample 2: not fourteen") as caught:
        reader()(request(1, 2, 14, batchable=True))
    assert caught.value.detail == {"path": "$[2]"}


# The endpoint


class Keyed:
    """An endpoint whose samples are (request, row, key) and whose keys are the last of these."""

    def __init__(self, *, slots=2, split=True, **batching):
        self.pool = ManualPool(slots)
        self.endpoint = Endpoint(
            EndpointConfig(name="keyed", split=split),
            BatchConfig(**{"idle": "go", "max_size": 4, **batching}),
            self.pool,
            lambda request: [self.key_of(row) for row in request.body],
        )
        self.replies = {}

    def key_of(self, row):
        if row[2] == "bad":
            raise RunnerFailed("ValueError: bad", trace="its trace")
        return row[2]

    def submit(self, keys):
        number = len(self.replies)
        body = [(number, row, key) for row, key in enumerate(keys)]
        self.replies[number] = []
        self.endpoint.submit(
            Request(body=body, reply=lambda request, outcome: self.replies[number].append(outcome), size=len(body))
        )
        return body

    async def play(self, requests, *, failing=frozenset(), limit=500):
        await self.endpoint.start()
        bodies = [self.submit(keys) for keys in requests]
        for _ in range(limit):
            await asyncio.sleep(0)
            for batch in list(self.pool.running):
                if self.pool.seen.index(batch) in failing:
                    self.pool.fail(ValueError("boom"), batch)
                else:
                    self.pool.complete(batch)
            if not self.endpoint.in_flight:
                break
        assert not self.endpoint._slices
        await self.endpoint.drain(0.0)
        return bodies

    @property
    def batches(self):
        return [[row for entry in batch.entries for row in entry.body] for batch in self.pool.seen]


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=11), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_no_batch_has_two_keys_and_every_answer_is_in_order(requests):
    desk = Keyed()
    bodies = FakeClock().run(desk.play(requests))
    assert [len({key for _, _, key in batch}) for batch in desk.batches] == [1] * len(desk.batches)
    assert all(len(batch) <= 4 for batch in desk.batches)
    assert sorted(row for batch in desk.batches for row in batch) == sorted(row for body in bodies for row in body)
    assert desk.replies == {number: [body] for number, body in enumerate(bodies)}


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=11), min_size=1, max_size=6),
    st.sets(st.integers(0, 9)),
)
@settings(max_examples=60, deadline=None)
def test_a_batch_that_fails_fails_the_requests_it_had_rows_of_and_no_others(requests, failing):
    desk = Keyed()
    bodies = FakeClock().run(desk.play(requests, failing=failing))
    failed = {row[0] for number, batch in enumerate(desk.batches) if number in failing for row in batch}
    for number, body in enumerate(bodies):
        (outcome,) = desk.replies[number]  # exactly one (G2)
        assert (type(outcome) is Failure) == (number in failed)
        assert number in failed or outcome == body


def test_rows_of_one_request_run_with_those_of_others():
    desk = Keyed()
    FakeClock().run(desk.play(["ab", "ab", "b"]))
    assert [len(batch) for batch in desk.batches] == [2, 3]


def test_keys_may_differ_where_large_requests_are_refused():
    desk = Keyed(split=False)
    FakeClock().run(desk.play(["aabbb", "aaaaa"]))
    assert [len(batch) for batch in desk.batches] == [2, 3]
    ((refused,),) = [desk.replies[1]]
    assert isinstance(refused.error, TooLarge)


def test_a_request_without_room_for_all_its_slices_is_refused_whole():
    desk = Keyed(capacity=3)
    bodies = FakeClock().run(desk.play(["ab", "bca"]))
    assert desk.replies[0] == [bodies[0]]
    assert desk.replies[1][0].error.code == Code.RESOURCE_EXHAUSTED
    assert {number for batch in desk.batches for number, _, _ in batch} == {0}


def test_a_request_larger_than_the_queue_comes_in_as_there_is_room_whatever_its_keys():  # F36
    desk = Keyed(capacity=3)
    bodies = FakeClock().run(desk.play(["abcaabbc"]))
    assert desk.replies[0] == [bodies[0]]


def test_a_key_that_fails_is_logged_and_concerns_nobody_else(caplog):
    desk = Keyed()
    with caplog.at_level(logging.ERROR):
        bodies = FakeClock().run(desk.play(["aa", ["a", "bad"], "ab"]))
    assert desk.replies[0] == [bodies[0]]
    assert type(desk.replies[1][0]) is Failure
    assert desk.replies[2] == [bodies[2]]
    (record,) = [record for record in caplog.records if record.name == "forebay.requests"]
    assert record.trace == "its trace"
    assert len(record.request_ids) == 1
    assert desk.endpoint.metrics.codes[Code.INTERNAL] == 1


async def two_fail(desk):
    """A slice of the first request and the whole second one fail, each in its own way."""
    await desk.endpoint.start()
    desk.submit("ab")
    desk.submit("b")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first, second = desk.pool.running
    desk.pool.complete(first)
    failures = [Failure(RunnerFailed(f"ValueError: {text}", trace=text)) for text in ("one", "two")]
    desk.pool.complete(second, failures)
    await desk.endpoint.drain(0.0)


def test_each_failure_of_a_batch_is_logged_with_the_requests_it_concerns(caplog):
    desk = Keyed()
    with caplog.at_level(logging.ERROR):
        FakeClock().run(two_fail(desk))
    records = [record for record in caplog.records if record.name == "forebay.requests"]
    assert [record.trace for record in records] == ["one", "two"]
    assert [len(record.request_ids) for record in records] == [1, 1]
    assert records[0].request_ids != records[1].request_ids
    assert [replies[0].error.message for replies in desk.replies.values()] == ["ValueError: one", "ValueError: two"]
