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
    # Each has a copy of the examples: a short message would become any amount of memory.
    asked = []

    def classify(_message, part):
        asked.append(part)
        asyncio.get_running_loop().call_soon(part.fail, InvalidRequest("no such signature"))

    call: Any = Call()
    multi_inference({"Classify": classify})(message(2000), call)
    assert (await call.told).message == "no such signature"
    assert len(asked) == 1


@pytest.mark.parametrize("task", [b"", b"\x12\x00", b"\x0a\x02\x0a\x00"], ids=["empty", "a name", "a model"])
async def test_tasks_are_counted_before_they_are_read(task, monkeypatch):  # F73
    monkeypatch.setattr("forebay.transports.grpc.multi_inference.SERVING", None)
    for other in (b"", b"\x12\x00"):  # the field of the examples, said again and again
        call: Any = Call()
        multi_inference({})((b"\x0a" + bytes([len(task)]) + task + other) * 20_000, call)
        error = await call.told
        assert isinstance(error, TooLarge)
        assert "at most 10000 are taken" in error.message


async def test_examples_are_not_counted_among_the_tasks():
    asked = []

    def classify(message, part):
        asked.append(len(SERVING.parsed("ClassificationRequest", message).input.example_list.examples))
        part.fail(InvalidRequest("no such signature"))

    call: Any = Call()
    multi_inference({"Classify": classify})(
        message(2) + b"\x12\x84\xea\x30\x0a\x80\xea\x30" + b"\x0a\x00" * 400_000, call
    )
    assert (await call.told).message == "no such signature"
    assert asked == [400_000]


async def test_a_client_that_goes_away_calls_off_what_is_asked():
    called_off, asked = [], asyncio.get_running_loop().create_future()

    def classify(_message, part):
        part.on_cancel = lambda: called_off.append(part)
        asked.set_result(None)

    call: Any = Call()
    multi_inference({"Classify": classify})(message(2), call)
    await asked
    call.on_cancel()
    await asyncio.sleep(0)
    assert len(called_off) == 1
