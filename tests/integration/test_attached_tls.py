# SPDX-License-Identifier: Apache-2.0
"""Workers that dial in over TLS: what is believed on both sides, and what is said of what is not."""

import os
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import trustme
from tests.integration.test_attached import Worker, door_of, joined, sentence, workers_of
from tests.waiting import PATIENCE_S

SECRET = "the secret of these tests"

MODEL = """
import logging, prometheus_client, forebay

calls = prometheus_client.Counter("test_calls", "How often it was called")

class Echo(forebay.Model):
    name = "echo"

    def predict(self, batch: list[bytes]) -> list[bytes]:
        calls.inc(len(batch))
        logging.getLogger("model").info("a line of %d bytes", len(batch[0]))
        return batch

class Count(forebay.Model):
    name = "count"

    def predict(self, batch: list[int]):
        for number in range(max(batch)):
            yield [number if number < sample else None for sample in batch]
"""


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    """What an authority and two strangers have signed, and a model to serve."""
    folder = tmp_path_factory.mktemp("tls")
    stranger = trustme.CA()
    for name, signer in (("", authority), ("stranger-", stranger)):
        signer.cert_pem.write_to_path(folder / f"{name}ca.pem")
        signer.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
            folder / f"{name}both.pem"
        )
    authority.issue_cert("elsewhere.example").private_key_and_cert_chain_pem.write_to_path(folder / "elsewhere.pem")
    (folder / "model.py").write_text(MODEL)
    return folder


@pytest.fixture
def opened(serve):
    """Starts a server with a door over TCP."""

    def start(*options, host="127.0.0.1", **more):
        server = door_of(serve(None, "--attach", f"tcp:{host}:0", *map(str, options), **more))
        server.door = server.door.replace("0.0.0.0", "127.0.0.1")
        return server

    return start


@pytest.fixture
def work(request, files):
    """Starts workers for a server."""

    def start(server, *options, model="Echo"):
        worker = Worker(f"{files}/model.py:{model}", server.door, *map(str, options))
        request.addfinalizer(worker.stop)
        return worker

    return start


def test_batches_streams_lines_and_metrics_travel_over_tls(opened, work, files, eventually):
    server = opened("--attach-certfile", files / "both.pem")
    options = ("--cafile", files / "ca.pem", "--threads", "3")
    echo, count = work(server, *options).ready(), work(server, *options, model="Count").ready()
    joined(server, "echo", 1, eventually)
    joined(server, "count", 1, eventually)
    bodies = [os.urandom(size) for size in (0, 1, 70_000, 600_000, 5_000_000)] * 4
    kind = {"content-type": "application/octet-stream"}
    with ThreadPoolExecutor(8) as executor:
        answers = executor.map(lambda body: server.client.post("/models/echo", content=body, headers=kind), bodies)
        streams = [executor.submit(server.call, "count", 50) for _ in range(8)]
        assert [answer.content for answer in answers] == bodies
    assert all(stream.result().text.count("data:") == 50 for stream in streams)
    eventually(lambda: "a line of 600000 bytes" in server.log)
    eventually(lambda: server.metric("test_calls_total") == len(bodies))
    assert echo.signal().wait() == 0
    assert count.signal().wait() == 0


def test_what_a_worker_had_not_read_when_it_was_killed_is_handed_on(opened, work, files, eventually):
    server = opened("--attach-certfile", files / "both.pem", "--worker-grace-s", "60")
    doomed = work(server, "--cafile", files / "ca.pem").ready()
    joined(server, "echo", 1, eventually)
    doomed.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(server.client.post, "/models/echo", content=bytes(3_000_000))
        eventually(lambda: workers_of(server, "echo")["idle"] == 0)
        doomed.stop()  # so the kernel ends the connection with an error
        work(server, "--cafile", files / "ca.pem").ready()
        assert answer.result().content == bytes(3_000_000)
    assert "Traceback" not in server.log


def test_both_sides_may_show_a_certificate_instead_of_a_secret(opened, work, files, eventually):
    options = ("--attach-certfile", files / "both.pem", "--attach-cafile", files / "ca.pem")
    server = opened(*options, host="0.0.0.0")
    assert "not encrypted" not in server.log
    worker = work(server, "--cafile", files / "ca.pem", "--certfile", files / "both.pem").ready()
    joined(server, "echo", 1, eventually)
    assert worker.signal().wait() == 0


def test_a_port_for_other_machines_without_tls_is_warned_of(opened):
    server = opened("--attach-secret", SECRET, host="0.0.0.0")
    (line,) = [line for line in server.records if "not encrypted" in line["message"]]
    assert line["level"] == "warning"
    assert line["message"].endswith("set a certificate: --attach-certfile PEM")


@pytest.mark.parametrize(
    "sides, words, log",
    [
        (
            ("stranger-both", "ca"),
            "shows a certificate that is not believed",
            "it does not believe this server's certificate",
        ),
        (("elsewhere", "ca"), "not valid for '127.0.0.1'", "it does not believe this server's certificate"),
        (
            (None, "ca"),
            "does not speak TLS; start it with --attach-certfile",
            "it speaks TLS, and this server does not",
        ),
        (("both", None), "it does not speak TLS, and this server does: --cafile", "it does not speak TLS"),
    ],
)
def test_a_server_that_cannot_be_believed_is_left_with_a_sentence_on_both_sides(
    opened, work, files, eventually, sides, words, log
):
    shown, trusted = sides
    server = opened(*(("--attach-certfile", files / f"{shown}.pem") if shown else ()))
    assert words in sentence(work(server, *(("--cafile", files / f"{trusted}.pem") if trusted else ())))
    eventually(lambda: f"was refused: {log}" in server.log)


@pytest.mark.parametrize(
    "shown, log",
    [
        (None, "it has no certificate, and --attach-cafile asks for one: --certfile, --keyfile"),
        ("stranger-both", "its certificate is not of an authority in --attach-cafile"),
    ],
)
def test_a_worker_that_cannot_be_believed_is_let_wait_with_a_sentence_on_both_sides(
    opened, work, files, eventually, shown, log
):
    server = opened("--attach-certfile", files / "both.pem", "--attach-cafile", files / "ca.pem")
    worker = work(server, "--cafile", files / "ca.pem", *(("--certfile", files / f"{shown}.pem") if shown else ()))
    worker.says("what it is shown must be signed by an authority in its --attach-cafile (--certfile, --keyfile)")
    eventually(lambda: log in server.log)
    worker.signal()
    worker.wait()


@pytest.mark.parametrize("linger", [None, struct.pack("ii", 1, 0)], ids=["closed", "reset"])
def test_a_hangup_says_the_same_however_it_arrives(work, files, linger):
    """What a server has not read yet makes a reset of its hangup."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(PATIENCE_S)
        worker = work(SimpleNamespace(door=f"tcp:127.0.0.1:{door.getsockname()[1]}"))
        connection = door.accept()[0]
        with connection:
            connection.recv(1)
            if linger is None:
                connection.settimeout(PATIENCE_S)
                connection.recv(1 << 16)
                connection.shutdown(socket.SHUT_WR)
            else:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        worker.says(": the connection was closed before it answered\n")


@pytest.mark.parametrize(
    "command, words",
    [
        ("serve --attach unix:s --attach-certfile both.pem", "unix:s stays on this machine and is not encrypted"),
        (
            "serve --attach tcp:127.0.0.1:0 --attach-keyfile both.pem",
            "-keyfile was given without --attach-cert",
        ),
        ("serve --attach tcp:127.0.0.1:0 --attach-certfile ca.pem", "name the file that does with --attach-keyfile"),
        ("serve --attach tcp:0.0.0.0:0 --attach-certfile both.pem", "so set a secret: --attach-secret @FILE"),
        ("worker model.py:Echo --connect unix:s --cafile ca.pem", "unix:s stays on this machine and is not encrypted"),
        ("worker model.py:Echo --connect tcp:a:1 --certfile both.pem", "--certfile was given without --cafile"),
        ("worker model.py:Echo --connect tcp:a:1 --cafile model.py", "model.py holds no certificate in PEM"),
        ("worker model.py:Echo --connect tcp:a:1 --cafile none", "the TLS file none: No such file or directory"),
    ],
)
def test_what_cannot_be_is_one_sentence(cli, files, command, words, monkeypatch):
    monkeypatch.delenv("FOREBAY_SECRET", raising=False)
    done = cli(*command.split(), cwd=files)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_strangers_in_a_handshake_take_no_place_from_workers(opened, work, files, eventually):
    server = opened("--attach-certfile", files / "both.pem")
    host, _, port = server.door.removeprefix("tcp:").rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(100)]
    for stranger in strangers[::2]:
        stranger.sendall(b"\x16\x03\x01\x02\x00\x01")
    worker = work(server, "--cafile", files / "ca.pem").ready()
    joined(server, "echo", 1, eventually)
    for stranger in strangers:
        stranger.close()
    assert worker.signal().wait() == 0
