# SPDX-License-Identifier: Apache-2.0
"""Connections that come many at once are taken many at once, and none is lost when the door closes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import subprocess
import sys

import pytest
import uvloop
from tests.waiting import PATIENCE_S

from forebay.transports import acceptor
from forebay.transports.acceptor import TAKEN_AT_ONCE, Acceptor, adopting

CLIENTS = 600
assert CLIENTS > TAKEN_AT_ONCE


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


@contextlib.contextmanager
def clients(address, count):
    """Connect; the kernel shakes hands although nobody has accepted yet."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


def closing(taken):
    def take(accepted, peer):
        taken.append(peer)
        accepted.close()

    return take


def test_connections_that_wait_are_taken_in_a_few_turns_and_not_one_in_each(run):
    async def main():
        taken = []
        door = Acceptor(closing(taken))
        address = await door.open("127.0.0.1", 0, 1024)
        with clients(address, CLIENTS) as waiting:
            turns = 0
            while len(taken) < CLIENTS:
                await asyncio.sleep(0)
                turns += 1
            assert turns < CLIENTS / 50
            assert sorted(taken) == sorted(client.getsockname() for client in waiting)
        door.close()

    run(main())


def test_a_door_that_closes_takes_what_the_kernel_had_queued(run):
    async def main():
        taken = []
        door = Acceptor(closing(taken))
        address = await door.open("127.0.0.1", 0, 1024)
        with clients(address, CLIENTS):
            door.close()
            assert len(taken) == CLIENTS
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    run(main())


def test_the_last_descriptors_are_not_for_connections(run, monkeypatch, caplog):
    """A thousand clients who said nothing took them all, and no worker that had died could be replaced."""
    free = os.dup(0)
    os.close(free)
    limit = (free + 60) * 8 // 7
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))

    async def main():
        held = []
        door = Acceptor(lambda accepted, _: held.append(accepted))
        address = await door.open("127.0.0.1", 0, 1024)
        with clients(address, 40) as waiting:  # they take descriptors themselves
            while len(held) + sum(map(is_closed, waiting)) < 40:  # noqa: ASYNC110 - what is awaited are turns of the loop
                await asyncio.sleep(0)
            assert 0 < len(held) < 40
            assert max(each.fileno() for each in held) < limit - limit // 8
        while held:
            held.pop().close()
        with clients(address, 1):
            while not held:  # noqa: ASYNC110
                await asyncio.sleep(0)
        door.close()
        held.pop().close()

    run(main())
    assert "the last ones (ulimit -n) are kept for workers" in caplog.text
    assert len(caplog.records) == 1


def is_closed(client):
    """Whether the server has hung up."""
    client.setblocking(False)
    try:
        return not client.recv(1)
    except BlockingIOError:
        return False


def test_a_server_has_as_many_descriptors_as_it_may_ask_for():
    """Most shells begin processes with 1,024, and 16,384 connections are taken."""
    code = (
        "import resource; from forebay.transports.acceptor import ask_for_descriptors;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 500)); ask_for_descriptors();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert told.stdout == "(500, 500)\n"


def test_without_descriptors_it_waits_a_moment_says_so_once_and_goes_on(run, monkeypatch, caplog):
    class Starved(socket.socket):
        left = 5

        def accept(self):
            if Starved.left:
                Starved.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def main():
        taken = []
        with monkeypatch.context() as patched:
            patched.setattr(acceptor.socket, "socket", Starved)
            patched.setattr(acceptor, "PAUSE_S", 0.001)
            patched.setattr(acceptor, "TOLD_EVERY_S", 3600.0)
            door = Acceptor(closing(taken))
            address = await door.open("127.0.0.1", 0, 8)
            with clients(address, 1):
                while not taken:  # noqa: ASYNC110 - what is awaited are turns of the loop
                    await asyncio.sleep(0)
        door.close()

    with caplog.at_level(logging.WARNING, "forebay"):
        run(main())
    assert [record.getMessage() for record in caplog.records] == ["failed to accept a connection: Too many open files"]


def test_a_door_may_close_while_it_waits(run, monkeypatch):
    async def main():
        door = Acceptor(closing([]))
        address = await door.open("127.0.0.1", 0, 8)

        def starved(self):
            raise OSError(errno.ENFILE, "Too many open files in system")

        with monkeypatch.context() as patched, clients(address, 1):
            patched.setattr(socket.socket, "accept", starved)
            for _ in range(5):
                await asyncio.sleep(0)
            door.close()
            await asyncio.sleep(2 * acceptor.PAUSE_S)

    run(main())


def test_a_protocol_that_cannot_be_made_is_told_to_the_loop(run):
    async def main():
        loop = asyncio.get_running_loop()
        told = loop.create_future()
        loop.set_exception_handler(lambda _, context: told.done() or told.set_result(context["exception"]))

        def connect():
            raise LookupError("none left")

        door = Acceptor(adopting(connect))
        address = await door.open("127.0.0.1", 0, 8)
        with clients(address, 1):
            assert isinstance(await told, LookupError)
        door.close()

    run(main())
