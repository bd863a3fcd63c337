# SPDX-License-Identifier: Apache-2.0
"""Several tasks in one call: what they cost, and who is told when the client goes away."""

import asyncio
from typing import Any

import pytest

from forebay.errors import InvalidRequest
from forebay.protocols.tfserving.messages import SERVING
from forebay.transports.grpc.multi_inference import multi_inference
from forebay.transports.grpc.statuses import NONE

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Call:
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
    multi_inference({"Classify": classify})(message(5000), call)
    assert (await call.told).message == "no such signature"
    assert len(asked) == 1


async def test_a_client_that_goes_away_calls_off_what_is_asked():
    called_off = []

    def classify(_message, part):
        part.on_cancel = lambda: called_off.append(part)

    call: Any = Call()
    multi_inference({"Classify": classify})(message(2), call)
    await asyncio.sleep(0)
    call.on_cancel()
    await asyncio.sleep(0)
    assert len(called_off) == 1
