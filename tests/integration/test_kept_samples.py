# SPDX-License-Identifier: Apache-2.0
"""Samples that have landed are not copied for the model; what it keeps of them stays as it was all the same."""  # F72

import contextlib
import http.client
import json
import random
from pathlib import Path

import pytest
from tests.fuzz.serving import running
from tests.models.hoarding import FAILS, KEEPS, KEEPS_A_PART, LEAVES_TO_THE_COLLECTOR, LETS_GO

from forebay.workers.wire.worker_connection import MAX_COLLECTED

TARGET = Path(__file__).parents[1] / "models" / "hoarding.py"
LENGTH = 600_000


class Client:
    def __init__(self, server):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=60)
        self.dice = random.Random(3)

    def ask(self, does):
        """Whether the sample was not copied, how many were kept, and how many of those have changed."""
        data = bytes([does]) + self.dice.randbytes(LENGTH)
        tensor = {"name": "input", "datatype": "UINT8", "shape": [1, len(data)]}
        text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        self.connection.request("POST", "/v2/models/hoarding/infer", text + data, headers)
        answer = self.connection.getresponse()
        found = json.loads(answer.read())
        return found["outputs"][0]["data"] if answer.status == 200 else answer.status


@contextlib.contextmanager
def asking(kind):
    with running(str(TARGET), options=("--worker-kind", kind)) as server:
        client = Client(server)
        with contextlib.closing(client.connection):
            yield client


@pytest.fixture
def client():
    with asking("process") as found:
        yield found


@pytest.mark.parametrize("keeps", [KEEPS, KEEPS_A_PART])
def test_what_a_model_keeps_stays_as_it_was_and_is_copied_from_then_on(client, keeps):
    assert client.ask(LETS_GO) == [1, 0, 0]
    assert client.ask(LETS_GO) == [1, 0, 0]
    assert client.ask(keeps) == [1, 0, 0]
    for kept in range(1, 5):
        assert client.ask(keeps) == [0, kept, 0]
    for _ in range(20):  # the places are used again and again
        assert client.ask(LETS_GO) == [0, 5, 0]


def test_what_only_the_collector_lets_go_is_not_kept(client):
    for _ in range(MAX_COLLECTED):
        assert client.ask(LEAVES_TO_THE_COLLECTOR) == [1, 0, 0]
    assert client.ask(LETS_GO) == [1, 0, 0]
    assert client.ask(LEAVES_TO_THE_COLLECTOR) == [1, 0, 0], "it is not looked for any more, and taken to be kept"
    assert client.ask(LETS_GO) == [0, 0, 0]


def test_an_error_keeps_nothing(client):
    for _ in range(MAX_COLLECTED + 1):
        assert client.ask(FAILS) == 500
    assert client.ask(LETS_GO) == [1, 0, 0]


def test_in_a_thread_nothing_is_copied():
    with asking("thread") as client:
        for kept in range(8):
            assert client.ask(KEEPS) == [1, kept, 0]
        assert client.ask(LETS_GO) == [1, 8, 0]
