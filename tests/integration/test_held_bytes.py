# SPDX-License-Identifier: Apache-2.0
"""Clients that never end their heads and clients that never read: what they make the server hold is bounded."""

import contextlib
import socket
from pathlib import Path

import pytest
import trustme

MIB = 1 << 20
BUDGET = 32 * MIB


@pytest.fixture(scope="module")
def server(launch):
    return launch("zoo.py", "--worker-kind", "process", "--max-buffered-bytes", str(BUDGET))


@pytest.fixture(scope="module")
def encrypted(launch, tmp_path_factory):
    authority = trustme.CA()
    chain = tmp_path_factory.mktemp("tls") / "chain.pem"
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(chain)
    limits = ("--max-buffered-bytes", str(BUDGET))
    return launch("zoo.py", "--worker-kind", "process", *limits, "--certfile", str(chain), ca=authority)


def peak_mib(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@contextlib.contextmanager
def grows_at_most(server, mib):
    """Fails if the memory of the server rises further than this meanwhile."""
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    before = peak_mib(server)
    yield
    assert peak_mib(server) - before <= mib


def test_heads_that_never_end_hold_little_and_are_refused(server):  # F77: they held 1.4 MB each
    head = b"POST /models/echo HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 12_900
    with contextlib.ExitStack() as stack, grows_at_most(server, 64):
        wires = [stack.enter_context(server.connect()) for _ in range(100)]
        for wire in wires:
            wire.send(head)
        assert server.call("echo", 1).json() == 1
        for wire in wires:
            answer = wire.read()
            assert answer.status == 431
            assert "more than 128 headers" in answer.error["message"]


def test_long_heads_count_together(server):  # F77
    lines = b"".join(b"name-%d: %b\r\n" % (index, b"x" * 450) for index in range(125))
    head = b"POST /models/echo HTTP/1.1\r\nhost: localhost\r\n" + lines
    count = 2 * BUDGET // len(head)
    with contextlib.ExitStack() as stack, grows_at_most(server, 3 * BUDGET // MIB):
        wires = [stack.enter_context(server.connect()) for _ in range(count)]
        for wire in wires:
            wire.send(head)
        assert server.call("echo", 1).json() == 1
        refused = 0
        for wire in wires:
            wire.send(b"\r\n")
            refused += wire.read().status == 503
        assert refused > count // 4


@pytest.mark.parametrize("how", ["plain", "TLS"])
def test_clients_that_do_not_read_are_closed_and_others_are_served(
    how, request, eventually
):  # F78: 4 MB each were held
    server = request.getfixturevalue("server" if how == "plain" else "encrypted")
    size, count = 8 * MIB, 50
    with contextlib.ExitStack() as stack, grows_at_most(server, 4 * BUDGET // MIB + 64):
        for _ in range(count):
            wire = stack.enter_context(server.connect())
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.send(wire.request("POST", "/models/large", str(size).encode()))
            assert wire.socket.recv(1)  # its answer is there, all by itself
        assert server.call("echo", 1).json() == 1
        for _ in range(3):  # large answers reach those who read
            assert len(server.call("large", size).content) == size
        # At once, or when those who do not read have been seen not to.
        eventually(lambda: server.call("upper", "x" * 4_000_000).status_code != 503)
    eventually(lambda: "does not read" in server.log)
    told = [line for line in server.lines if "was refused: the client does not read" in line]
    assert "client 127.0.0.1:" in told[0]
    assert "--max-buffered-bytes" in told[0]
