# SPDX-License-Identifier: Apache-2.0
"""The clients that people have, in an environment of their own, against a server with a gRPC port."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, eventually

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv/environments/kserve-clients/bin/python"


@pytest.fixture(scope="module", params=["thread", "process"])
def server(launch, request):
    return launch(
        "tensors_rpc.py", "--worker-kind", request.param, "--grpc-port", "0", "--max-body-bytes", str(40 << 20)
    )


def address_of(server):
    found = re.search(r"gRPC at ([\d.:]+)", server.log)
    assert found is not None
    return found[1]


def run(script, server, address=None):
    """Runs a script of the clients to its end, which is good."""
    command = [PYTHON, HERE / "clients" / script, address or address_of(server)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_calls(server):
    run("unary.py", server)


def test_streams(server):
    run("streams.py", server)
    eventually(lambda: server.metric("forebay_in_flight") == 0)


def test_coroutines(server):
    run("coroutines.py", server)


def test_a_model_is_unloaded_and_loaded(launch):
    run("repository.py", launch("tensors_rpc.py", "--worker-kind", "thread", "--grpc-port", "0", "--manage"))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_shared_memory(launch, kind):
    server = launch("tensors_rpc.py", "--worker-kind", kind, "--grpc-port", "0", "--shared-memory")
    run("shared_memory.py", server)
    run("shared_memory_http.py", server, server.url.removeprefix("http://"))
