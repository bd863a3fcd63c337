# SPDX-License-Identifier: Apache-2.0
"""The clients that people have, in an environment of their own, against a server with a gRPC port."""

import re
import subprocess
from pathlib import Path

import pytest
import trustme
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


def run(script, server, *more, address=None):
    """Runs a script of the clients to its end, which is good."""
    command = [PYTHON, HERE / "clients" / script, address or address_of(server), *more]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_calls(server):
    run("unary.py", server)


def test_wrong_inputs_are_named(launch):
    limit = ("--max-body-bytes", str(4 << 20))
    server = launch("tensors_rpc.py", "--worker-kind", "thread", "--grpc-port", "0", *limit)
    run("wrong.py", server, server.url.removeprefix("http://"))


def test_a_key_tls_pings_and_packed_messages(launch, tmp_path):
    authority = trustme.CA()
    both, trusted = tmp_path / "both.pem", tmp_path / "ca.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(both)
    authority.cert_pem.write_to_path(trusted)
    options = ("--worker-kind", "thread", "--grpc-port", "0", "--api-key", "secret", "--certfile", str(both))
    server = launch("tensors_rpc.py", *options, ca=authority)
    run("guarded.py", server, server.url.removeprefix("https://"), str(trusted))


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
    run("shared_memory_http.py", server, address=server.url.removeprefix("http://"))
