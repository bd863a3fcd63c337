# SPDX-License-Identifier: Apache-2.0
"""`forebay bench`: what it sends and counts, what it refuses, what it draws."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import threading
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from tests.conftest import FOREBAY
from tests.waiting import PATIENCE_S

from forebay.cli import load_generator, plots
from forebay.cli.main import main
from forebay.errors import ConfigError

QUICK = ("--seconds", "0.3", "--warmup-s", "0")


@pytest.fixture
def said(capsys):
    """Runs a command in this process; what is asked of many of them would take long otherwise."""

    def run(*arguments):
        try:
            status = main([*map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


@pytest.fixture(scope="module")
def zoo(launch):
    return launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")


def test_a_closed_loop_shows_answers_percentiles_and_bars(cli, zoo, tmp_path):
    picture = tmp_path / "echo.svg"
    result = cli("bench", f"{zoo.url}/models/echo", '{"a": 1}', "--clients", "4", *QUICK, "--svg", picture)
    assert (result.returncode, result.stderr) == (0, "")
    good = re.search(r"(\d+) good answers, ", result.stdout)
    assert good
    assert int(good[1]) > 3
    assert "4 clients" in result.stdout
    for percent in ("p50", "p90", "p99", "p99.9", "slowest"):
        assert re.search(rf"{percent} [\d.]+ (us|ms|s)", result.stdout), result.stdout
    assert "█" in result.stdout
    assert sum(int(count) for count in re.findall(r"█\S* +(\d+)$", result.stdout, re.MULTILINE)) <= int(good[1])
    assert ET.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize("load", [("--clients", "2"), ("--rate", "100")])
def test_an_interrupted_measurement_shows_what_it_has(zoo, eventually, load):
    answered = zoo.metric("forebay_requests_total")
    command = [*FOREBAY, "bench", f"{zoo.url}/models/echo", "1", *load, "--seconds", "10m", "--warmup-s", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        eventually(lambda: zoo.metric("forebay_requests_total") > answered + 20)
        bench.send_signal(signal.SIGINT)
        said, _ = bench.communicate(timeout=PATIENCE_S)
    assert bench.returncode == 0
    assert re.search(r", [\d.]+ s of 600 s, then Ctrl\+C\n  \d{2,} good answers", said)
    assert "p99" in said


def test_an_open_loop_asks_as_often_as_it_says(cli, zoo):
    result = cli("bench", f"{zoo.url}/models/echo", "1", "--rate", "50", *QUICK)
    good = re.search(r"(\d+) good answers", result.stdout)
    assert good, result.stdout + result.stderr
    assert 14 <= int(good[1]) <= 16


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--clients", "0"], ["--clients", "'0'", "from 1 to 5000"]),
        (["--clients", "1e9"], ["--clients", "1e9"]),
        (["--rate", "-1"], ["--rate", "'-1'", "0.1"]),
        (["--rate", "nan"], ["--rate", "nan"]),
        (["--rate", "5", "--clients", "5"], ["--rate", "--clients", "not allowed"]),
        (["--seconds", "0"], ["--seconds", "0.2 to 3600"]),
        (["--seconds", "inf"], ["--seconds", "inf"]),
        (["--svg", "/nowhere/at/all.svg"], ["--svg", "there is no folder /nowhere/at"]),
        (["--header", "none"], ["--header", "NAME:VALUE"]),
        (["--header", "a:b\r\nc:d"], ["--header", "NAME:VALUE"]),
        (["--api-key", "a\nb"], ["--api-key", "of one line"]),
        (["--clinets", "5"], ["--clinets", "did you mean --clients?"]),
    ],
)
def test_silly_values_are_refused(said, arguments, words):
    status, out, err = said("bench", "http://127.0.0.1:1/", "1", *arguments)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    for word in words:
        assert word in err


def test_nothing_is_measured_where_the_first_answer_is_bad(said, zoo):
    for path, data, word in (("/models/ech0", "1", "did you mean 'echo'"), ("/models/typed", "1", "422")):
        status, out, err = said("bench", zoo.url + path, data, *QUICK)
        assert (status, out) == (2, "")
        assert word in err
        assert "nothing was measured" in err
    for url, word in (("http://127.0.0.1:1/", "does not answer"), ("ftp://x/", "is not a URL"), ("http://x:y/", "URL")):
        assert word in said("bench", url)[2]


class Scripted:
    """A server of one kind of answer."""

    def __init__(self, answer, *, closes=False):
        self.answer = answer
        self.closes = closes
        self.asked = 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with connection, contextlib.suppress(OSError):
            while connection.recv(65536):
                self.asked += 1
                if not (answer := self.answer(self.asked)):
                    return
                connection.sendall(answer)
                if self.closes:
                    return


def measure(
    answer, loop: Any = load_generator.closed_loop, how: float = 2, timeout_s=5.0, *, closes=False, seconds=0.3
):
    server = Scripted(answer, closes=closes)
    target = load_generator.target_of(server.url, None, {})
    result = asyncio.run(loop(target, how, seconds, 0.0, timeout_s))
    server.listening.close()
    return result


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def test_errors_and_lost_connections_are_counted_apart():
    mixed = measure(lambda number: OK if number % 2 else b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
    assert mixed.took
    assert abs(mixed.statuses[200] - mixed.statuses[503]) <= 2
    assert len(mixed.took) == mixed.statuses[200]
    lost = measure(lambda number: b"" if number % 5 == 0 else OK)
    assert lost.lost["the connection was closed without an answer"] > 0
    assert lost.took
    assert measure(lambda number: b"SSH-2.0\r\n").lost["the answer is not HTTP"] > 0


def test_a_connection_that_the_server_closes_is_opened_again():
    closing = measure(lambda number: OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    assert len(closing.took) > 3
    assert not closing.lost


@pytest.mark.parametrize("version, header", [("1.0", ""), ("1.1", "connection: close\r\n"), ("1.1", "")])
def test_an_answer_may_end_with_its_connection(said, version, header):
    head = f"HTTP/{version} 200 OK\r\n{header}".encode()
    whole = measure(lambda _: head + b"\r\nok", closes=True)
    assert len(whole.took) > 3
    assert not whole.lost
    short = measure(lambda _: head + b"content-length: 3\r\n\r\nok", closes=True)
    assert (len(short.took), set(short.lost)) == (0, {"the connection was closed without an answer"})
    server = Scripted(lambda _: head + b"\r\nok", closes=True)
    assert said("bench", server.url, *QUICK)[::2] == (0, "")
    server.listening.close()


def test_what_is_never_answered_is_lost():
    """Also what was sent just before the end."""
    asked, is_over = itertools.count(1), threading.Event()

    def silent(_):
        if next(asked) == 5:
            os.kill(os.getpid(), signal.SIGINT)  # ends the measurement, however few a crowded machine sends in a while
        is_over.wait(PATIENCE_S)
        return b""

    try:
        result = measure(silent, load_generator.open_loop, 20.0, timeout_s=0.1, seconds=PATIENCE_S)
    finally:
        is_over.set()
    assert (len(result.took), set(result.lost)) == (0, {"no answer within 0.1 s"})
    assert result.failed == sum(result.lost.values()) >= next(asked) - 1


def test_no_connection_stays_open(monkeypatch):
    """Neither one whose answer never came, nor one that was being opened when the time was over."""
    made, connect, result = [], load_generator._connect, load_generator._Run.result

    async def slowly(target, done):
        await asyncio.sleep(0.02)
        made.append(await connect(target, done))
        return made[-1]

    async def late(run):
        found = await result(run)
        await asyncio.sleep(0.1)
        return found

    monkeypatch.setattr(load_generator, "_connect", slowly)
    monkeypatch.setattr(load_generator._Run, "result", late)
    measure(lambda number: OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    server = Scripted(lambda number: threading.Event().wait(0.2) or b"")
    with pytest.raises(ConfigError, match="no answer came"):
        asyncio.run(load_generator.ask_once(load_generator.target_of(server.url, None, {}), 0.05))
    server.listening.close()
    assert len(made) > 3
    assert all(one._transport.is_closing() for one in made)


def test_percentiles_and_steps_take_every_answer():
    took = [0.001] * 50 + [0.002] * 49 + [1.0]
    random.Random(1).shuffle(took)
    ordered = sorted(took)
    assert [plots.percentile(ordered, percent) for percent in (0, 50, 51, 99, 100)] == [0.001, 0.001, 0.002, 0.002, 1.0]
    for times in (took, [0.5], [0.0, 0.0], [1e-7, 3600.0]):
        assert sum(count for *_, count in plots.histogram(times)) == len(times)
        assert len(plots.bars(times)) == 16
        ended = [0.1 * number for number in range(len(times))]
        ET.fromstring(plots.svg("a < b", times, ended, 10.0))


def test_times_are_spelled_in_a_unit_that_suits_them():
    assert [plots.spelled(seconds) for seconds in (0.0000123, 0.00999, 0.5, 12.0)] == [
        "12.3 us",
        "9.99 ms",
        "500 ms",
        "12 s",
    ]
