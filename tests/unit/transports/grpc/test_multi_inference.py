# SPDX-License-Identifier: Apache-2.0
"""Several tasks in one call: what they cost, and who is told when the client goes away."""

import asyncio
from typing import Any

import pytest

from forebay.errors import InvalidRequest, TooLarge
from forebay.protocols.tfserving.messages import SERVING
from forebay.transports.grpc.multi_inference import multi_inference
from forebay.transports.grpc.statuses import NONE

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Call:
    tenant = None

    def __init__(self):
        self.deadline, self.peer, self.metadata = float("inf"), "somebody", ()
        self.on_cancel: Any = None
        self.told = asyncio.get_running_loop().create_future()

    def fail(self, error, own=NONE):
        self.told.set_result(error)

    def reply(self, message):
        self.told.set_result(message)


def message(count):
    request = SERVING.classes().MultiInferenceRequest()
    for number in range(count):
        spec = {"name": "m", "signature_name": str(number)}
        request.tasks.add(model_spec=spec, method_name="tensorflow/serving/classify")
    return request.SerializeToString()


async def test_the_first_task_that_fails_is_the_last_that_is_asked():
    # Each is read into tensors of its own: a short message would become any amount of memory.
    asked = []

    async def ask(name, given, _call):
        asked.append((name, given.model_spec.signature_name))
        return InvalidRequest("no such signature")

    call: Any = Call()
    multi_inference(ask)(message(2000), call)
    assert (await call.told).message == "no such signature"
    assert asked == [("Classify", "0")]


@pytest.mark.parametrize("task", [b"", b"\x12\x00", b"\x0a\x02\x0a\x00"], ids=["empty", "a name", "a model"])
async def test_tasks_are_counted_before_they_are_read(task, monkeypatch):  # F73
    monkeypatch.setattr("forebay.transports.grpc.multi_inference.SERVING", None)
    for other in (b"", b"\x12\x00"):  # the field of the examples, said again and again
        call: Any = Call()
        multi_inference(never)((b"\x0a" + bytes([len(task)]) + task + other) * 20_000, call)
        error = await call.told
        assert isinstance(error, TooLarge)
        assert "expected at most 10000 elements, got more" in error.message


async def never(*_):
    raise AssertionError


async def test_examples_are_not_counted_among_the_tasks():
    asked = []

    async def ask(_name, given, _call):
        asked.append(len(given.input.example_list.examples))
        return InvalidRequest("no such signature")

    call: Any = Call()
    multi_inference(ask)(message(2) + b"\x12\x84\xea\x30\x0a\x80\xea\x30" + b"\x0a\x00" * 400_000, call)
    assert (await call.told).message == "no such signature"
    assert asked == [400_000]


async def test_a_client_that_goes_away_calls_off_what_is_asked():
    asked, called_off = (asyncio.get_running_loop().create_future() for _ in range(2))

    async def ask(_name, _given, call):
        asked.set_result(None)
        try:
            await call.told
        except asyncio.CancelledError:
            called_off.set_result(None)
            raise

    call: Any = Call()
    multi_inference(ask)(message(2), call)
    await asked
    call.on_cancel()
    await called_off
