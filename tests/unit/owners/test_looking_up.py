# SPDX-License-Identifier: Apache-2.0
"""The addresses of an owner's name: how often they are looked up, and what of them is dialled."""

import asyncio
import contextlib
import functools
import socket
import threading
from typing import Any

import pytest
from tests.waiting import reached

from forebay.owners import owner as module
from forebay.owners.owner import Owner
from forebay.owners.shard import LinkOptions
from forebay.workers.wire import frames
from forebay.workers.wire.address import TcpAddress

NAME = "owners.example"
OPTIONS = LinkOptions("x" * 16, None, None)


@pytest.fixture
def hosts(monkeypatch):
    """Addresses that the resolver returns; a test may change them."""
    hosts, usual = [], socket.getaddrinfo

    def getaddrinfo(host, port, *options, **more):
        assert host == NAME
        return [found for one in hosts for found in usual(one, port, *options, **more)]

    monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(module, "LOOK_UP_S", 0.01)
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    return hosts


def on_a_loop(test):
    """Runs a test that is a coroutine."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


class Listening:
    """Owners without models at these addresses, with one port; `links` has the address of each connection."""

    def __init__(self):
        self.links = []
        self.servers = []
        self.port = 0

    async def open(self, host):
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Link(self.links, host), host, self.port)
        self.port = server.sockets[0].getsockname()[1]
        self.servers.append(server)

    async def close(self):
        for server in self.servers:
            server.close()
        await reached(lambda: not self.links)


class Link(asyncio.Protocol):
    """A connection to an owner without models."""

    def __init__(self, links, host):
        self.links, self.host = links, host

    def connection_made(self, transport: Any):
        self.links.append(self.host)
        transport.write(frames.encode(["open", {"max_frame": 4096}]) + frames.encode(["models", []]))

    def connection_lost(self, exc):
        self.links.remove(self.host)


@contextlib.asynccontextmanager
async def dialled(*listening):
    there = Listening()
    for host in listening:
        await there.open(host)
    owner = Owner(TcpAddress(NAME, there.port), OPTIONS, lambda _owner, _names: None)
    owner.start()
    try:
        yield there, owner
    finally:
        owner.stop()
        await there.close()


@on_a_loop
async def test_shards_come_and_go_as_the_name_says_and_the_others_keep_their_links(hosts, caplog):
    hosts[:] = ["127.0.0.2"]
    caplog.set_level("INFO", "forebay.owners")
    async with dialled("127.0.0.2", "127.0.0.3", "127.0.0.4") as (there, _):
        await reached(lambda: there.links == ["127.0.0.2"])
        hosts[:] = ["127.0.0.3", "127.0.0.2", "127.0.0.4"]
        await reached(lambda: sorted(there.links) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"])
        hosts[:] = ["127.0.0.2", "127.0.0.3"]
        await reached(lambda: sorted(there.links) == ["127.0.0.2", "127.0.0.3"])
        hosts[:] = []  # the resolver knows nothing at the moment
        await asyncio.sleep(0.05)
        hosts[:] = ["127.0.0.2"]
        await reached(lambda: there.links == ["127.0.0.2"])
    assert caplog.text.count("connected to the owner") == 3


@on_a_loop
async def test_not_any_number_of_addresses_is_dialled(hosts, caplog, monkeypatch):
    hosts[:] = [f"127.0.0.{number}" for number in range(2, 9)]
    monkeypatch.setattr(module, "MAX_SHARDS", 3)
    async with dialled(*hosts) as (there, _):
        await reached(lambda: len(there.links) == 3)
        await reached(lambda: "has 7 addresses; 3 of them are dialled" in caplog.text)
        await asyncio.sleep(0.05)
        assert len(there.links) == 3


@on_a_loop
async def test_a_resolver_that_hangs_holds_up_nothing_and_is_asked_again(hosts, caplog, monkeypatch):
    hangs, found = threading.Event(), module.socket.getaddrinfo

    def getaddrinfo(*options, **more):
        hangs.wait()
        return found(*options, **more)

    hosts[:] = ["127.0.0.2"]
    monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(module, "LOOK_UP_WITHIN_S", 0.02)
    try:
        async with dialled("127.0.0.2") as (there, owner):
            await reached(lambda: "its name is not resolved in time" in caplog.text)
            assert "its name is not resolved in time" in owner.problem
            await asyncio.sleep(1.0)  # many more attempts
            assert sum(one.name == "forebay-beside-loop" for one in threading.enumerate()) < 20
            hangs.set()
            await reached(lambda: there.links == ["127.0.0.2"])
    finally:
        hangs.set()
