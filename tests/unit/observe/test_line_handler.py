# SPDX-License-Identifier: Apache-2.0
"""The log reaches whoever reads it, and has nobody wait for whoever does not."""

import json
import logging
import os
import re
import select
import subprocess
import sys
import threading

import pytest
from tests.waiting import PATIENCE_S, eventually

from forebay.observe.logs import line_handler
from forebay.observe.logs.line_handler import LineHandler

LONG = "x" * (2 * select.PIPE_BUF)


@pytest.fixture
def pipe():
    """The end of a pipe to read from, and a handler that writes into the other."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "w") as written:
        handler = LineHandler(written, "utf-8")
        yield read, handler
        read.close()  # what still waits for a reader learns that there is none
        eventually(lambda: handler._writer is None)


def log(handler, text):
    handler.handle(logging.makeLogRecord({"msg": text}))


def fill(handler):
    """Logs more than a pipe takes; comes back whether anybody reads or not. Returns what was logged."""
    lines = [f"{number} {LONG}" for number in range(16)]
    filling = threading.Thread(target=lambda: [log(handler, line) for line in lines], daemon=True)
    filling.start()
    filling.join(PATIENCE_S)
    assert not filling.is_alive()
    return lines


@pytest.mark.parametrize("line", ["short", LONG])
def test_a_line_is_read_as_it_was_logged(pipe, line):
    read, handler = pipe
    log(handler, line)
    assert read.readline().decode() == f"{line}\n"


def test_what_nobody_reads_has_nobody_wait_and_is_read_later_in_its_order(pipe):
    read, handler = pipe
    lines = fill(handler)
    log(handler, "the last")
    assert [read.readline().decode().rstrip("\n") for _ in range(len(lines) + 1)] == [*lines, "the last"]


def test_lines_beyond_the_bound_are_dropped_and_counted(pipe, monkeypatch):
    monkeypatch.setattr(line_handler, "KEPT_BYTES", 2 * len(LONG))
    read, handler = pipe
    lines = fill(handler)
    seen, dropped = [], 0
    while len(seen) + dropped < len(lines):  # the writer may catch up in between, and then counts in parts  # F110
        line = read.readline().decode().rstrip("\n")
        if found := re.fullmatch(r"(\d+) log lines were dropped because their reader was too slow", line):
            dropped += int(found[1])
        else:
            seen.append(line)
    assert dropped
    assert len(seen) + dropped == len(lines)
    assert seen == [line for line in lines if line in seen]


def test_a_pipe_that_nobody_will_read_is_no_reason_to_wait(pipe):
    read, handler = pipe
    fill(handler)
    read.close()
    eventually(lambda: handler._writer is None)


def test_the_last_lines_are_waited_for(pipe, monkeypatch):
    monkeypatch.setattr(line_handler, "LAST_S", PATIENCE_S)  # they are read below, however slowly  # F110
    read, handler = pipe
    lines = fill(handler)
    ended = threading.Thread(target=handler.close)
    ended.start()
    assert [read.readline().decode().rstrip("\n") for _ in lines] == lines
    ended.join(PATIENCE_S)
    assert handler._writer is None


CONFIGURED = """
import logging
from forebay.observe.logs.log import configure

configure("info", "json")
logging.getLogger("forebay").info("é 日 \N{GRINNING FACE}")
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_line_of_json_can_be_read_whatever_the_terminal_speaks(encoding):
    ended = subprocess.run(
        [sys.executable, "-c", CONFIGURED],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )
    assert json.loads(ended.stderr)["message"] == "é 日 \N{GRINNING FACE}"
