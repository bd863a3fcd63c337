# SPDX-License-Identifier: Apache-2.0
"""Methods that ask for the context of their requests: F52."""

import time
from typing import Any

import pytest

from forebay import ConfigError, Context, Model, Pad, ValidationError
from forebay.serving.models.model import settings_of
from forebay.serving.models.model_runner import ModelRunner
from forebay.types.call import Failure, Request
from forebay.types.context import PARAM, told
from forebay.workers.runner import WorkerContext


def request(body, number):
    params = {"in": "json", "out": "json", PARAM: told({"n": str(number)}, f"r{number}", None, 1.0)}
    return Request(body=body, reply=lambda *_: None, params=params)


def run(model, bodies, **worker):
    runner: Any = ModelRunner(model)
    runner.open(WorkerContext(**worker))
    return [
        outcome.error.message if type(outcome) is Failure else outcome
        for outcome in runner.run([request(body, number) for number, body in enumerate(bodies)])
    ]


def test_what_is_padded_and_what_fails_keep_their_requests():
    class Padding(Model):
        isolate_errors = True
        pad = Pad(("length",), buckets={"length": [2, 4]})

        def preprocess(self, sample: list[int], context: Context) -> list[int]:
            if not sample:
                raise ValidationError("empty " + context.request_id)
            return sample

        def predict(self, batch, context: list[Context]) -> list[str]:
            if any(row[0] == 9 for row in batch):
                raise RuntimeError
            return [f"{len(row)} {one.request_id}" for row, one in zip(batch, context, strict=True)]

    found = run(Padding, [b"[1]", b"[]", b"[1,2,3]", b"[9]", b"[1,2]"])
    assert found[:3] == [b'"2 r0"', "empty r1", b'"4 r2"']
    assert found[4] == b'"2 r4"'


def test_a_worker_tells_its_number_and_its_device():
    class Where(Model):
        def predict(self, batch: list[int], context: list[Context]) -> list[list]:
            return [[one.worker, one.device] for one in context]

    assert run(Where, [b"1"], index=3) == [b'[3,"cpu"]']
    assert run(Where, [b"1"], index=3, device="cuda:1") == [b'[3,"cuda:1"]']


def test_the_time_that_remains_does_not_follow_a_clock_that_is_set(monkeypatch):  # F117
    now = time.time()
    one = Context(deadline=now + 100)
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert 0 < one.remaining_s <= 100
    assert one == Context(deadline=now + 100)
    assert one != Context(deadline=now + 101)
    assert Context().remaining_s == float("inf")


def test_a_request_that_came_otherwise_has_an_empty_context():
    class Any(Model):
        def predict(self, batch: list[int], context: list[Context]) -> list[list]:
            return [[one.headers, one.client, one.deadline > 1e300] for one in context]

    runner = ModelRunner(Any)
    runner.open(WorkerContext())
    plain = Request(body=b"1", reply=lambda *_: None, params={"in": "json", "out": "json"})
    assert runner.run([plain]) == [b"[{},null,true]"]


def test_only_models_that_ask_are_told():
    class Plain(Model):
        def predict(self, batch):
            return batch

    class Asking(Model):
        def preprocess(self, sample, context: Context):
            return sample

        def predict(self, batch):
            return batch

    assert not settings_of(Plain).has_context
    assert settings_of(Asking).has_context
    with pytest.raises(ConfigError, match="cannot be called with one argument"):
        settings_of(Asking, one_input=False)  # a node of a graph has no request
