# SPDX-License-Identifier: Apache-2.0
"""How a server ends, with an app and a port that only note what they are told."""

from __future__ import annotations

import asyncio

import pytest

from forebay.server.app import App
from forebay.server.byte_budget import ByteBudget
from forebay.transports.http.port import HttpPort
from forebay.transports.server import Server

DRAIN_S = 60.0


class NotingApp(App):
    """Serves nothing."""

    def __init__(self):
        super().__init__([])
        self.grace_s = None

    async def drain(self, grace_s):
        self.grace_s = grace_s


class Port:
    """Opens and closes."""

    async def start(self):
        return "127.0.0.1", 1

    async def stop(self, grace_s):
        pass


def test_what_follows_the_last_answer_has_the_rest_of_the_drain():
    # F40, F48: it was a second, whatever was left to do
    app = NotingApp()
    server = Server(app, Port(), drain_s=DRAIN_S, ready=lambda _host, _port: server.fail(0))
    assert server.run() == 0
    assert app.grace_s == pytest.approx(DRAIN_S, abs=30.0)


def test_an_app_says_that_it_drains_once_its_connections_close_with_their_answers():
    seen = []

    class Draining(Port):
        async def stop(self, grace_s):
            seen.append(app.is_draining)
            await asyncio.sleep(0)
            seen.append(app.is_draining)

    app = NotingApp()
    server = Server(app, Draining(), drain_s=DRAIN_S, ready=lambda _host, _port: server.fail(0))
    assert server.run() == 0
    assert seen == [False, True]


class Broken:
    """A connection with a defect."""

    aborted = False

    def sweep(self, epoch):
        raise RuntimeError("a defect")

    def abort(self):
        self.aborted = True


class Looked:
    """A connection that is looked at."""

    epoch = 0

    def sweep(self, epoch):
        self.epoch = epoch


def test_a_sweep_that_raises_ends_the_connection_and_not_the_sweeps(caplog):
    # F26
    class Loop:
        asked = ()

        def call_later(self, *what):
            self.asked = what

    class State:
        default_headers = ()

    lane = HttpPort.__new__(HttpPort)
    lane.epoch = 0
    lane.byte_budget = ByteBudget()
    broken, looked = Broken(), Looked()
    lane.awake = [broken, looked, broken]  # type: ignore[assignment]
    lane._asleep = {}
    lane.loop = loop = Loop()  # type: ignore[assignment]
    lane.server_state = State()  # type: ignore[assignment]
    lane._sweep()
    assert loop.asked
    assert broken.aborted
    assert looked.epoch == 1
    assert "a defect" in caplog.text
