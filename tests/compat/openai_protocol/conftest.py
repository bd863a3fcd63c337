# SPDX-License-Identifier: Apache-2.0
"""A server of models that OpenAI's clients ask, over both lanes and two kinds of workers, and clients of it."""

import pytest
from tests.compat.openai_protocol.clients import KEY, Asker, Client

ORIGIN = "http://page.example"


@pytest.fixture(scope="module")
def processes():
    """Two of them, so that one may wait for the other."""
    found = [Asker(), Asker()]
    yield found
    for one in found:
        one.close()


@pytest.fixture(scope="module", params=["fast lane, threads", "behind it, processes"])
def server(request, launch):
    kind = "thread" if "fast" in request.param else "process"
    options = ["--worker-kind", kind, "--max-body-bytes", "100000", "--api-key", KEY, "--max-form-bytes", "2000000"]
    options += ["--cors-origin", ORIGIN] if "behind" in request.param else []
    return launch("talkers.py", *options, "--access-log", "--log-format", "json", "--answer-cost")


@pytest.fixture
def client(server, processes):
    return Client(processes[0].owes_nothing(), server, {"origin": ORIGIN} if "--cors-origin" in server.command else {})


@pytest.fixture
def other(server, processes):
    return Client(processes[1].owes_nothing(), server, {})
