# SPDX-License-Identifier: Apache-2.0
"""Versions behind HTTP: whatever was remembered, put off or half read, nobody is sent to a version that left."""

import asyncio
import random
from typing import Any, cast

import pytest
from tests.unit.transports.http.driven import Door, request

from forebay.errors import NotFound
from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.served import Served
from forebay.server.tfserving_facts import find_version
from forebay.transports.http.model_routes import routes_of
from forebay.transports.http.route import Route

FRESH = iter(range(1_000_000))


class Config:
    max_timeout_s = 60.0

    def __init__(self, version):
        self.version = version


class Endpoint:
    """Answers with its version and the body, at once or when it is told to; refuses nobody and notes who it should."""

    places = None

    class batching:
        capacity = 100

    def __init__(self, version, number):
        self.name = "iris"
        self.number = number
        self.config = Config(version)
        self.metrics = None
        self.accepting = False
        self.has_left = False
        self.waits = False
        self.open = []

    async def start(self):
        self.accepting = True

    async def drain(self, grace_s):
        self.accepting = False
        self.has_left = True

    def hasten(self):
        pass

    def submit(self, asked):
        assert self.accepting, "a version that has left was asked"
        self.open.append(asked)
        if not self.waits:
            self.answer()

    def answer(self):
        while self.open:
            asked = self.open.pop(0)
            asked.reply(asked, b"%s.%d " % (self.config.version.encode(), self.number) + bytes(asked.body))

    def is_full(self):
        return False

    def cancel(self, asked):
        self.open.remove(asked)

    def reject(self, error, times=1, tenant=None):
        pass


class House:
    """A door with the versions of one model behind it."""

    def __init__(self, *versions):
        self.door = Door()
        self.numbers = 0
        self.app = App([self.make(version) for version in versions])
        self.door.loop.run_until_complete(self.app.start())
        self.door.routes = routes_of(self.app, self.door.lane.config)
        self.door.lane.routes = self.door.routes
        self.app.watch(lambda _name: self.door.lane.forget())

    def make(self, version, contract=None):
        self.numbers += 1
        endpoint = cast("Any", Endpoint(version, self.numbers))
        return Served(endpoint, contract or Contract(raw_input=True, raw_output=True))

    def load(self, version, contract=None):
        self.door.loop.run_until_complete(self.app.load("iris", version, lambda: self.make(version, contract)))

    def unload(self, version):
        self.door.loop.run_until_complete(self.app.unload("iris", version))

    def asked_now(self, target="/models/iris", body=b"x"):
        """What somebody gets whose head was never seen before."""
        client = self.door.connect()
        client.send(request("iris", body, f"x-fresh: {next(FRESH)}", target=target))
        return client.answers[-1]


@pytest.fixture
def houses():
    opened = []

    def make(*versions):
        opened.append(House(*versions))
        return opened[-1]

    yield make
    for each in opened:
        each.door.close()


def test_a_version_has_a_path_of_its_own(houses):  # F51
    house = houses("1", "2")
    client = house.door.connect()
    for target, expected in [("/models/iris", b"1.1 x"), ("/models/iris/versions/2", b"2.2 x")] * 3:
        client.send(request("iris", b"x", target=target))
        assert client.answers[-1] == (200, expected)


def test_what_was_read_for_a_version_is_read_anew_for_the_next(houses, monkeypatch):
    house = houses("1")
    is_over, given = [], []
    make = Route.request

    def counting(route, head, body):
        while not is_over:
            yield
        return route

    def made(route, head, body, reply, origin, read=None):
        given.append((route, read))
        return make(route, head, body, reply, origin, read)

    monkeypatch.setattr(Route, "counting", counting)
    monkeypatch.setattr(Route, "request", made)
    client = house.door.connect()
    body = b"x" * (house.door.routes[b"/models/iris"].passes_bytes + 1)
    client.send(request("iris", body))
    house.load("1")
    is_over.append(True)
    while not client.answers:
        house.door.loop.run_until_complete(asyncio.sleep(0))
    assert client.answers == [(200, b"1.2 " + body)]
    assert given == [(house.door.routes[b"/models/iris"],) * 2]


@pytest.mark.parametrize("versions, answers", [(("1",), "1"), (("0", "1"), "0"), (("1", "0"), "0")])
def test_version_0_is_whichever_answers_if_none_is_called_so(houses, versions, answers):  # O147
    house = houses(*versions)
    route = house.door.routes[b"/v1/models/iris/versions/0:predict"]
    assert route.endpoint.config.version == answers
    assert find_version(house.app, "iris", "0") == ("0" if answers == "0" else None)


def test_a_remembered_head_goes_to_the_version_that_took_over(houses):
    house = houses("1")
    client = house.door.connect()
    for _ in range(3):
        client.send(request("iris", b"x"))
    assert house.door.lane.heads
    house.load("1")
    client.send(request("iris", b"x"))
    assert [body for _, body in client.answers] == [b"1.1 x"] * 3 + [b"1.2 x"]


def test_a_body_that_came_while_versions_changed_goes_to_the_one_that_is_there(houses):
    house = houses("1")
    client, pipelining = house.door.connect(), house.door.connect()
    data = request("iris", b"abc")
    client.send(data[:-2])
    endpoint = house.app.find("iris").endpoint
    endpoint.waits = True
    pipelining.send(request("iris", b"1") + request("iris", b"2"))
    house.load("1")
    house.load("1")
    client.send(data[-2:])
    assert client.answers == [(200, b"1.3 abc")]
    endpoint.answer()
    assert pipelining.answers == [(200, b"1.1 1"), (200, b"1.3 2")]


def test_a_head_is_read_anew_for_a_version_that_takes_something_else(houses):
    house = houses("1")
    client = house.door.connect()
    data = request("iris", b"[1]", "content-type: application/json")
    client.send(data[:-1])
    house.load("1", Contract())
    client.send(data[-1:])
    assert client.answers == [(200, b"1.2 [1]")]
    assert b"application/json" in client.transport.written
    assert b"octet-stream" not in client.transport.written


def test_a_body_for_a_model_that_is_gone_is_answered(houses):
    house = houses("1")
    client = house.door.connect()
    client.send(request("iris", b"abc")[:-1])
    house.unload("1")
    client.send(b"c")
    assert client.statuses == [404]
    with pytest.raises(NotFound):
        house.app.find("iris")


def test_a_body_that_came_while_another_model_joined_is_answered(houses):
    house = houses("1")
    named, unnamed = house.door.connect(), house.door.connect()
    named.send(request("iris", b"abc")[:-1])
    unnamed.send(request("iris", b"abc", target="/")[:-1])
    other = house.make("1")
    other.endpoint.name = "rose"
    house.door.loop.run_until_complete(house.app.load("rose", "1", lambda: other))
    named.send(b"c")
    unnamed.send(b"c")
    assert named.answers == [(200, b"1.1 abc")]
    assert unnamed.statuses == [404]  # nothing is served there any more


def test_what_was_refused_stays_refused(houses):
    house = houses("1")
    client = house.door.connect()
    client.send(request("iris", b"", "transfer-encoding: chunked", length=False))
    house.load("1")
    client.send(b"no size\r\n")
    assert client.statuses == [400]


def test_weights_hold_for_heads_that_are_the_same_again_and_again(houses):
    house = houses("1", "2")
    house.app.share("iris", {"1": 3, "2": 1})
    client = house.door.connect()
    for _ in range(40):
        client.send(request("iris", b"x"))
    answers = [body for _, body in client.answers]
    assert answers.count(b"2.2 x") == 10
    assert all(answers[start : start + 4].count(b"2.2 x") == 1 for start in range(0, 40, 4))
    house.app.share("iris", {"2": 1})
    client.send(request("iris", b"x"))
    assert client.answers[-1][1] == b"2.2 x"


@pytest.mark.parametrize("seed", range(40))
def test_the_short_cut_answers_as_the_long_way_whatever_changes(houses, seed):
    """Clients with heads that are remembered get what clients with heads never seen before get at that moment."""
    chance = random.Random(seed)
    house = houses("1", "2")
    clients = [house.door.connect() for _ in range(4)]
    half: dict[int, tuple[bytes, str]] = {}
    for _ in range(150):
        which = chance.randrange(4)
        client = clients[which]
        version = chance.choice(["1", "2", ""])
        target = f"/models/iris/versions/{version}" if version else "/models/iris"
        kind = chance.random()
        if kind < 0.12:
            house.load(chance.choice(["1", "2"]))
        elif kind < 0.2:
            house.app.share("iris", {chance.choice(["1", "2"]): 1})
        elif which in half:
            rest, target = half.pop(which)
            client.send(rest)
            assert client.answers[-1] == house.asked_now(target, b"body")
        elif kind < 0.4:
            data = request("iris", b"body", target=target)
            cut = chance.randrange(1, len(data))
            client.send(data[:cut])
            half[which] = data[cut:], target
        elif kind < 0.5:
            client.send(request("iris", b"body", target=target) * 3)
            assert client.answers[-3:] == [house.asked_now(target, b"body")] * 3
        else:
            client.send(request("iris", b"body", target=target))
            assert client.answers[-1] == house.asked_now(target, b"body")


def test_a_change_costs_the_routes_of_its_own_model(houses):  # each of 10,000 had all made anew
    house = houses("1", "2")
    lotus, rose = house.make("1"), house.make("1")
    lotus.endpoint.name, rose.endpoint.name = "lotus", "rose"
    house.door.loop.run_until_complete(house.app.load("lotus", "1", lambda: lotus))
    before = dict(house.door.routes)
    house.door.loop.run_until_complete(house.app.load("rose", "1", lambda: rose))
    house.load("2")
    house.unload("2")
    assert all(house.door.routes[target] is route for target, route in before.items() if b"lotus" in target)
    assert not any(route.is_retired for target, route in before.items() if b"lotus" in target)
    house.door.loop.run_until_complete(house.app.unload("rose", "1"))
    house.door.loop.run_until_complete(house.app.unload("lotus", "1"))
    assert {target for target in house.door.routes if b"lotus" in target or b"rose" in target} == set()
    assert b"/" in house.door.routes  # the only one again
