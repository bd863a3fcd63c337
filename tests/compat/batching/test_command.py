# SPDX-License-Identifier: Apache-2.0
"""`forebay batching` as a command: its options, how it starts and how it ends."""

import re
import signal
import socket
import time

import pytest
from tests.waiting import PATIENCE_S


def test_help_names_the_original_s_options_with_their_defaults(cli):  # B1
    told = cli("batching", "--help").stdout
    for name, default in {
        "address": "batch.socket",
        "batch": "32",
        "capacity": "1024",
        "host": "127.0.0.1",
        "latency": "10",
        "port": "8080",
        "protocol": "unix",
        "timeout": "5000",
    }.items():
        assert re.search(rf"^  -{name}[ ,].*--{name} [^\n]*\s+[^(]*\({re.escape(default)}\)", told, re.MULTILINE), name


@pytest.mark.parametrize(
    "flags",
    [
        ["-batch", "0"],
        ["--capacity=0"],
        ["-latency=-1"],
        ["-timeout", "0"],
        ["-port", "65536"],
        ["-protocol", "udp"],
        ["-batch", "many"],
        ["-protocol", "tcp"],
        ["-address", "x" * 200],
        ["-nosuch", "1"],
        ["-address", "unix:foo.socket"],  # F47
        ["-address", "tcp:127.0.0.1:9000"],  # F47
        ["-name", ""],  # F47
        ["-address", ""],  # F47
        ["-host", "127.0.0..1"],  # F47
        ["-host", "."],  # F47
        ["-protocol", "tcp", "-address", "127.0.0..1:0"],  # F47
    ],
    ids=" ".join,
)
def test_what_is_not_possible_is_said_in_a_sentence(cli, tmp_path, flags):  # B1, B3
    ended = cli("batching", *flags, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("forebay: ")
    assert ended.stderr.count("\n") == 1
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["batch.socket", "127.0.0.1:nine", "127.0.0.1:99999", "127.0.0.1:", ":8989"])
def test_an_address_of_tcp_is_a_host_and_a_port(cli, address):  # B3, B6
    given = ["-address", address] if address != "batch.socket" else []
    told = cli("batching", "-protocol", "tcp", *given).stderr
    hint = "; did you mean 127.0.0.1:8989, or 0.0.0.0:8989 to let other machines in?" if address[0] == ":" else ""
    assert told == f"forebay: workers cannot join at '{address}': -protocol tcp needs -address HOST:PORT{hint}\n"


def test_options_are_written_with_one_dash_or_two_with_or_without_a_sign(start, tmp_path):  # B1, B2
    front = start("-name", "foo", "--batch=3", "-capacity=7", "--timeout", "3000")
    assert front.address == str(tmp_path / "foo.socket")  # B4: in full
    with front.peer() as peer:
        job = front.send(b"x")
        assert peer.serve() == [b"x"]
        assert job.read().status == 200


def test_a_socket_nobody_listens_on_is_replaced(start, tmp_path):  # B4, B5
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "batch.socket"))
    stale.close()
    front = start()
    assert front.address == str(tmp_path / "batch.socket")
    with front.peer() as peer:
        job = front.send(b"x")
        assert peer.serve() == [b"x"]
        assert job.read().status == 200


def test_a_file_at_the_address_is_left_alone(start, tmp_path):  # B5
    (tmp_path / "batch.socket").write_text("mine")
    front = start(ready=False)
    assert front.wait() == 2
    assert "batch.socket exists and is not a socket" in front.log
    assert "Traceback" not in front.log
    assert (tmp_path / "batch.socket").read_text() == "mine"


def test_a_second_front_does_not_take_the_first_one_s_address(start):  # B5
    first = start()
    second = start(ready=False)
    assert second.wait() == 2
    assert "another server listens on" in second.log
    with first.peer() as peer:
        job = first.send(b"x")
        assert peer.serve() == [b"x"]
        assert job.read().status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_jobs_end(start, tmp_path, number):  # B29
    front = start()
    with front.peer() as peer:
        job = front.send(b"x")
        held = peer.take()
        front.process.send_signal(number)
        front.wait_for(lambda: "draining" in front.log)
        front.wait_for(lambda: _refuses(front.port))
        time.sleep(0.7)  # longer than idle connections are kept while draining
        peer.answer(held)
        assert (job.read().status, job.body) == (200, b"did x")
        began = time.monotonic()
        assert front.wait() == 0
        assert time.monotonic() - began < 20
        assert peer.is_hung_up_on()
    assert not (tmp_path / "batch.socket").exists()


def test_an_idle_front_ends_at_once(start, tmp_path):  # B29
    front = start("-timeout", "50000")
    with front.idle_peer():
        began = time.monotonic()
        front.process.send_signal(signal.SIGTERM)
        assert front.wait() == 0
        assert time.monotonic() - began < 30
    assert not (tmp_path / "batch.socket").exists()


def test_a_second_signal_does_not_wait_for_a_stuck_worker(start):  # B30
    front = start("-timeout", "50000")
    with front.peer() as peer:
        job = front.send(b"x")
        peer.take()
        front.process.send_signal(signal.SIGTERM)
        front.wait_for(lambda: "draining" in front.log)
        began = time.monotonic()
        front.process.send_signal(signal.SIGTERM)
        front.wait()
        assert time.monotonic() - began < 30
        job.leave()


def _refuses(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
    except ConnectionRefusedError:
        return True
    return False
