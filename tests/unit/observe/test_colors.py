# SPDX-License-Identifier: Apache-2.0
"""Colors where a terminal has them, and nowhere else."""

import io
import os
import pty
import subprocess

import pytest
from tests.forked import COMMAND, Forked
from tests.unit.observe.test_log import record
from tests.waiting import PATIENCE_S

from forebay.observe.logs.colors import colored, has_colors
from forebay.observe.logs.log import TextFormatter


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "variables,stream,expected",
    [
        ({}, Terminal(), True),
        ({}, io.StringIO(), False),
        ({}, object(), False),
        ({"TERM": "dumb"}, Terminal(), False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, Terminal(), True),
        ({"FORCE_COLOR": "1"}, io.StringIO(), True),
        ({"FORCE_COLOR": ""}, io.StringIO(), False),
        ({"NO_COLOR": "1"}, Terminal(), False),
        ({"NO_COLOR": ""}, Terminal(), True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, Terminal(), False),
    ],
)
def test_a_stream_has_colors_as_the_environment_says(monkeypatch, variables, stream, expected):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_colors(stream) is expected


def test_an_error_is_red_its_hint_dim_and_an_address_underlined():
    assert colored("no a; did you mean b?", is_error=True) == "\x1b[31mno a\x1b[39m\x1b[2m; did you mean b?\x1b[22m"
    assert colored("broken\n  at line 1", is_error=True) == "\x1b[31mbroken\x1b[39m\n  at line 1"
    assert colored("ready at http://a:1/b.", is_error=False) == "ready at \x1b[4mhttp://a:1/b\x1b[24m."


def test_only_the_level_of_an_error_is_red_in_the_log():
    formatter = TextFormatter()
    formatter.has_colors = True
    assert "\x1b" not in formatter.format(record())
    assert " \x1b[31merror  \x1b[39m it broke" in formatter.format(record(levelno=40, levelname="ERROR"))


@pytest.mark.parametrize("more,is_red", [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_command_at_a_terminal_has_colors(more, is_red):
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", **more}
    with Forked([*COMMAND, "serv"], stderr=theirs, env=env) as command:
        assert command.wait(PATIENCE_S) == 2
    told = os.read(ours, 1000)
    os.close(ours)
    os.close(theirs)
    assert (b"\x1b[31m" in told, b"serve" in told) == (is_red, True)
    shown = subprocess.run([*COMMAND, "serv"], stderr=subprocess.PIPE, env=env, check=False)
    assert b"\x1b" not in shown.stderr
