# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Streams that share their steps, with clients that come, go, read slowly, and workers that die; no loop, no clock."""

from __future__ import annotations

import random
from collections import Counter
from itertools import takewhile

import pytest

from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.errors import RunnerFailed
from forebay.serving.models.stream_steps import Stream
from forebay.types.call import Failure, Last, Request
from forebay.workers.pool import CREDIT
from forebay.workers.pools.seating import Seating
from forebay.workers.pools.seats import STEADY, Seats, at_once, follow

RUNS = 40


class State:
    def __init__(self, request):
        self.request = request
        self.made = 0
        self.finished = 0


class Model:
    """What a runner of `start`, `step` and `finish` does; a body says how long the stream is and what goes wrong."""

    awaits = False
    model_name = "Model"
    is_written_at_once = True

    def __init__(self, dice):
        self.dice = dice
        self.states = []
        self.sizes = Counter()
        self.silent = {}

    def run(self, items):
        (item,) = items
        if item.body[1] == "no start":
            return [Failure(RunnerFailed("no"))]
        if item.body[1] == "generator":
            return self.generate(item)
        self.states.append(State(item))
        return Stream(self, self.states[-1], {}, None)

    def generate(self, item):
        state = State(item)
        self.states.append(state)
        try:
            for number in range(item.body[0]):
                yield [number]
        finally:
            state.finished += 1

    def step(self, states):
        assert len({state.request.key for state in states}) == 1  # keys hold
        assert all(state.finished == 0 for state in states)
        assert sum(state.finished == 0 for state in self.states) <= self.seats
        self.sizes[len(states)] += 1
        if any(state.request.body[1] == "raises" and state.made == 3 for state in states):
            raise ValueError("no")
        if any(state.request.body[1] == "short" and state.made == 2 for state in states):
            return []
        parts = [self.part(state) for state in states]
        if self.dice.random() < 0.2:
            states.clear()  # the list is its own
        return parts

    def part(self, state):
        length, how = state.request.body
        number, state.made = state.made, state.made + 1
        if how == "error" and number == 2:
            return ValueError("mine")
        if number == length:
            return Last()
        return Last(number) if how == "last" and number == length - 1 else number

    def finish(self, state):
        state.finished += 1

    def postprocess(self, part, stream):
        return part

    def write(self, part, params):
        return part

    def writer(self, asked):
        return (lambda parts: parts if {*map(type, parts)} == {int} else None) if self.is_written_at_once else None


class World:
    """A queue, one slot with seats, its worker, and their clients."""

    def __init__(self, seed, hows):
        self.dice = random.Random(seed)
        self.hows = hows
        self.now = 0.0
        self.seats = self.dice.choice([1, 3, 8])
        self.ahead = self.dice.choice([0, 1, 2])
        self.queue = BatchQueue(BatchConfig(max_size=1, idle="go"))
        self.parts, self.ends, self.untaken, self.slow = {}, {}, {}, set()
        self.began, self.rounds_waited = {}, {}
        self.models = []
        self.hire()

    def hire(self):
        self.model = Model(self.dice)
        self.models.append(self.model)
        self.model.seats = self.seats
        self.worker = Seats(self.model.run, lambda: self.now, seats=self.seats, ahead=self.ahead)
        self.said = []
        self.seating = Seating(
            self.seats + self.ahead,
            lambda sitting, steps: self.said.append(("allow", sitting.name, steps)),
            lambda sitting: self.said.append(("leave", sitting.name)),
        )

    def arrive(self):
        body = (self.dice.randint(0, 40), self.dice.choice(self.hows))
        request = Request(body=body, reply=print, key=self.dice.choice("aab"))
        if self.dice.random() < 0.1:
            request.deadline = self.now + self.dice.uniform(0, 0.5)
        self.parts[request], self.ends[request], self.untaken[request] = [], [], []
        self.queue.offer(request, self.now)
        if self.dice.random() < 0.1:
            self.slow.add(request)

    def seat(self):
        while self.seating.free and (batch := self.queue.take(self.now)) is not None:
            (request,) = batch.entries
            batch.on_steps = lambda steps, release, request=request: self.hand(request, steps, release)
            self.sit(batch)

    def sit(self, batch):
        sitting = self.seating.join(batch, self.done)
        self.said.append(("join", sitting.name, batch.entries, batch.key))

    def hand(self, request, steps, release):
        assert not self.ends[request]  # nothing comes after the end
        self.parts[request] += [part for (part,) in steps]
        if request in self.slow:
            self.untaken[request].append(release)
        else:
            release()

    def done(self, batch, outcomes):
        (request,) = batch.entries
        self.ends[request].append(outcomes[0])
        request.done = True

    def disturb(self):
        dice = self.dice
        running = [sitting.batch for sitting in self.seating.open.values()]
        if running and dice.random() < 0.1:
            batch = dice.choice(running)
            batch.cancelled = batch.entries[0].done = True
            if batch.on_cancel is not None:
                batch.on_cancel()
        if dice.random() < 0.3:
            for request in list(self.slow):
                self.slow.discard(request)
                for release in self.untaken[request]:
                    release()
                self.untaken[request] = []
        if dice.random() < 0.02:
            self.die()

    def die(self):
        sat = self.seating.clear()
        self.hire()
        for sitting in sat:
            batch = sitting.batch
            if batch.has_streamed or batch.cancelled or batch.attempts > 1:
                self.done(batch, [Failure(RunnerFailed("died"))])
            else:
                self.sit(batch)

    def turn(self):
        self.now += 0.01
        said, self.said = self.said, []
        for kind, *what in said:
            if kind == "join":
                self.worker.join(*what)
            elif kind == "leave":
                at_once(self.worker.leave(*what))
            else:
                self.worker.allow(*what)
        if self.worker.can_step:
            told = at_once(self.worker.step())
            self.seating.hear(told.parts, told.ended, lambda rows: None, self.seat)
        self.seat()
        assert self.seating.free == self.seats + self.ahead - len(self.seating.open) >= 0

    def run(self, turns, *, disturbs):
        for _ in range(turns):
            for _ in range(self.dice.choice([0, 0, 1, 2])):
                self.arrive()
            if disturbs:
                self.disturb()
            self.turn()
        self.slow.clear()
        for releases in self.untaken.values():
            for release in releases:
                release()
        for _ in range(20_000):
            if not (self.queue.waiting or self.seating.open):
                break
            self.turn()
        assert not self.seating.open
        assert not len(self.worker)


@pytest.mark.parametrize("disturbs", [False, True])
def test_every_stream_ends_once_and_its_parts_are_in_order(disturbs):
    """G2, G3."""
    hows = ["plain", "plain", "last", "generator"]
    if disturbs:
        hows += ["raises", "short", "error", "no start"]
    for seed in range(RUNS):
        world = World(seed, hows)
        world.run(60, disturbs=disturbs)
        for request, ends in world.ends.items():
            length, how = request.body
            if not ends:
                assert request.deadline < float("inf")  # it was late before anybody had a seat for it
                assert world.parts[request] == []
                continue
            assert len(ends) == 1, seed
            assert world.parts[request] == list(range(len(world.parts[request]))), seed
            if not disturbs:
                assert ends == [None]
                assert len(world.parts[request]) == length
            elif how in {"raises", "error"} and type(ends[0]) is not Failure and not request.done:
                pytest.fail(f"seed {seed}: {how} has ended well")
        for model in world.models[-1:]:  # those of the worker that lives
            assert all(state.finished == 1 for state in model.states), seed
        for model in world.models[:-1]:  # the others took theirs along
            assert all(state.finished <= 1 for state in model.states), seed


def test_streams_make_their_steps_together_and_nobody_starves():  # F50
    world = World(3, ["plain"])
    world.seats = 8
    world.hire()
    for _ in range(40):
        request = Request(body=(30, "plain"), reply=print)
        world.parts[request], world.ends[request] = [], []
        world.queue.offer(request, 0.0)
    world.seat()
    while world.seating.open:
        world.turn()
        lengths = [len(world.parts[one.batch.entries[0]]) for one in world.seating.open.values()]
        assert not lengths or max(lengths) - min(lengths) <= 30
    assert world.model.sizes[8] >= 0.9 * sum(world.model.sizes.values())
    assert all(ends == [None] for ends in world.ends.values())


class OneByOne(Model):
    """The same, each of whose parts goes its own way."""

    is_written_at_once = False


def flat(told):
    """Return what a round tells, part by part, and who has ended."""
    parts = []
    for name, made in told.parts:
        parts += zip(name, ([one] for one in made), strict=True) if isinstance(name, list) else [(name, made)]
    ended = [(name, [type(one).__name__ for one in outcomes]) for name, outcomes, _ in told.ended]
    return sorted(parts, key=lambda part: part[0]), sorted(ended)


def test_a_step_that_is_counted_once_for_all_is_the_step_that_is_counted_for_each():
    shared = 0
    for seed in range(150):
        dice = random.Random(seed)
        keys = dice.choice(["a", "a", "ab"])
        hows = dice.choice([["fine", "last"], ["fine", "last", "error", "short", "raises"]])
        models = Model(random.Random(seed)), OneByOne(random.Random(seed))
        both = [Seats(model.run, lambda: 0.0, seats=6) for model in models]
        for model in models:
            model.seats = 6
        names = 0
        for _ in range(120):
            act = dice.random()
            if act < 0.15:
                names += 1
                request = Request(body=(dice.randint(0, 30), dice.choice(hows)), reply=print, key=dice.choice(keys))
                for seats in both:
                    seats.join(names, [request], request.key)
            elif act < 0.2 and names:
                name = dice.randint(1, names)
                for seats in both:
                    at_once(seats.leave(name))
            elif act < 0.5 and names:
                name, steps = dice.randint(1, names), dice.choice([1, 3, 8])
                for seats in both:
                    seats.allow(name, steps)
            else:
                rounds = [at_once(seats.step()) for seats in both]
                shared += any(isinstance(name, list) for name, _ in rounds[0].parts)
                assert flat(rounds[0]) == flat(rounds[1]), seed
            assert [seats.can_step for seats in both] == [both[0].can_step] * 2, seed
            assert [seats.has_turns for seats in both] == [both[0].has_turns] * 2, seed
            assert len(both[0]) == len(both[1]), seed
        for seats in both:
            at_once(seats.close())
        assert [state.made for state in models[0].states] == [state.made for state in models[1].states]
        assert all(state.finished == 1 for model in models for state in model.states)
    assert shared > 1000


def test_an_error_of_one_stream_does_not_end_the_others():
    world = World(0, ["plain"])
    world.seats = 4
    world.hire()
    requests = [Request(body=(5, how), reply=print) for how in ("plain", "error", "last")]
    for request in requests:
        world.parts[request], world.ends[request] = [], []
        world.queue.offer(request, 0.0)
    world.seat()
    while world.seating.open:
        world.turn()
    assert [len(world.parts[request]) for request in requests] == [5, 2, 5]
    assert [type(world.ends[request][0]) for request in requests] == [type(None), Failure, type(None)]


def test_a_slow_client_is_passed_over_and_costs_the_others_nothing():
    world = World(0, ["plain"])
    world.seats = 2
    world.hire()
    slow, quick = (Request(body=(100, "plain"), reply=print) for _ in range(2))
    world.slow.add(slow)
    for request in (slow, quick):
        world.parts[request], world.ends[request], world.untaken[request] = [], [], []
        world.queue.offer(request, 0.0)
    world.seat()
    for _ in range(200):
        world.turn()
    assert world.ends[quick] == [None]
    assert not world.ends[slow]
    assert len(world.parts[slow]) == CREDIT
    world.run(0, disturbs=False)
    assert world.ends[slow] == [None]
    assert world.parts[slow] == list(range(100))


class Turns:
    """Items whose iterators note whose turn it is, and need time."""

    def __init__(self, world):
        self.world, self.order = world, []

    def run(self, items):
        return self.steps(items[0].body)

    def steps(self, body):
        name, seconds = body
        while True:
            self.order.append(name)
            self.world["now"] += seconds
            yield [name]


def test_generators_have_their_turns_one_after_the_other_however_slow_some_are():
    world = {"now": 0.0}
    turns = Turns(world)
    seats = Seats(turns.run, lambda: world["now"])
    for name, seconds in (("slow", 0.01), ("quick", 0.0), ("other", 0.0)):
        seats.join(name, [Request(body=(name, seconds), reply=print)])
    told = [name for _ in range(9) for name, _ in at_once(seats.step()).parts]
    assert turns.order[:12] == ["slow", "quick", "other"] * 4
    assert told == turns.order[: len(told)]
    first = Seats(Turns(world).run, lambda: world["now"])
    first.join("slow", [Request(body=("slow", 0.01), reply=print)])
    first.join("quick", [Request(body=("quick", 0.0), reply=print)])
    assert [name for name, _ in at_once(first.step()).parts] == ["slow"]  # it is sent before others have their turn


class Prefill(Turns):
    """Streams whose beginning needs time."""

    def run(self, items):
        self.world["now"] += 0.05
        return super().run(items)


def test_many_who_come_at_once_do_not_keep_those_who_are_open_waiting():
    """A step of theirs follows each that begins, or as many as need no more time than a step."""
    world = {"now": 0.0}
    seats = Seats(Prefill(world).run, lambda: world["now"])
    seats.join("first", [Request(body=("first", 0.01), reply=print)])
    assert [name for name, _ in at_once(seats.step()).parts] == ["first"]
    for number in range(8):
        seats.join(number, [Request(body=(number, 0.0), reply=print)])
    since, longest = world["now"], 0.0
    for _ in range(30):
        if any(name == "first" for name, _ in at_once(seats.step()).parts):
            longest, since = max(longest, world["now"] - since), world["now"]
    assert longest < 0.08
    assert len(seats) == 9
    assert not seats._coming
    quick = Seats(Turns(world).run, lambda: world["now"])
    for number in range(8):
        quick.join(number, [Request(body=(number, 0.0), reply=print)])
    assert {name for name, _ in at_once(quick.step()).parts} == set(range(8))


@pytest.mark.parametrize("quick", [1, 3, STEADY // 2])
def test_a_part_does_not_wait_for_a_step_that_is_slow_again_and_again(quick):
    world = {"now": 0.0}

    def bursts(_items):
        while True:
            yield from [[world["now"]]] * quick
            world["now"] += 10
            yield [world["now"]]

    seats = Seats(bursts, lambda: world["now"])
    seats.join("one", [Request(body=None, reply=print)])
    at_once(seats.step())
    seats.allow("one", 500)
    told = [(part, world["now"]) for _ in range(500) for _, part in at_once(seats.step()).parts]
    assert len(told) == 500
    assert all(made == [now] for made, now in told)


def test_of_steady_streams_several_parts_are_told_together():
    seats = Seats(lambda _items: iter([[number] for number in range(200)]), lambda: 0.0)
    seats.join("one", [Request(body=None, reply=print)])
    at_once(seats.step())
    seats.allow("one", 200)
    told = list(takewhile(bool, (parts_in(at_once(seats.step())) for _ in range(200))))
    assert set(told[: STEADY - 2]) == {1}
    assert set(told[STEADY - 1 : -1]) == {8}


def parts_in(told):
    return sum(len(name) if type(name) is list else 1 for name, _ in told.parts)


def test_who_was_sent_ahead_takes_a_seat_without_a_word_of_the_server():
    world = World(0, ["plain"])
    world.seats, world.ahead = 2, 1
    world.hire()
    requests = [Request(body=(length, "last"), reply=print) for length in (3, 9, 4)]
    for request in requests:
        world.parts[request], world.ends[request] = [], []
        world.queue.offer(request, 0.0)
    world.seat()
    for sitting in world.said:
        world.worker.join(*sitting[1:])
    world.said = []
    world.worker._quick = STEADY
    told = [at_once(world.worker.step()) for _ in range(2)]
    assert [parts_in(one) for one in told] == [2, 4]  # the second bundle of rounds ends with the first stream
    assert len(told[-1].ended) == 1
    assert not world.worker.asks  # somebody is here for the seat
    assert parts_in(at_once(world.worker.step())) == 2
    at_once(world.worker.leave(requests[2]))  # no name of a batch
    names = list(world.seating.open)
    at_once(world.worker.leave(names[2]))
    assert world.worker.asks  # somebody who had waited is gone, and the server may know another one
    world.worker.join("new", [requests[0]])
    world.worker.join("newer", [requests[0]])
    at_once(world.worker.leave("newer"))  # it has not begun, and ends without a state
    assert [name for name, *_ in at_once(world.worker.step()).ended][-1] == "newer"


def test_a_worker_asks_who_wants_a_free_seat_only_if_the_server_had_no_room_for_all():
    def sent(lengths, ahead, seats=2, rows=1):
        model = Model(random.Random(0))
        model.seats = seats
        worker = Seats(model.run, lambda: 0.0, seats=seats, ahead=ahead)
        for name, length in enumerate(lengths):
            worker.join(name, [Request(body=(length, "last"), reply=print, size=rows if name else 1)])
        return worker

    def asks(worker):
        assert at_once(worker.step()).ended
        return worker.asks

    assert asks(sent([1, 1], 0))  # all it has is given away
    assert not asks(sent([1], 0))
    assert not asks(sent([1, 1], 1))  # a third one would be here
    assert asks(sent([1, 1, 1], 1))
    worker = sent([1, 2, 9], 1)
    assert not asks(worker)  # the third one takes the seat
    assert asks(worker)  # that the seat of the first one is free is not known yet
    assert asks(sent([1, 9], 0, seats=4, rows=2))  # there was room, but not for two rows
    worker = sent([1, 9, 9], 1)
    at_once(worker.leave(2))
    assert asks(worker)  # nor that the place of one who has left is
    assert not asks(sent([1, 9], 0, seats=4))


def test_the_worker_goes_on_once_all_that_it_made_is_handed_out():
    world = World(0, ["plain"])
    world.seats, world.ahead = 3, 0
    world.hire()
    events = []
    requests = [Request(body=(length, "last"), reply=print) for length in (1, 2, 2)]
    for request in requests:
        world.parts[request], world.ends[request] = [], []
        world.queue.offer(request, 0.0)
    world.done = lambda batch, outcomes: events.append("answer")
    world.hand = lambda request, steps, release: events.append("part")
    world.seat()
    for _, *what in world.said:
        world.worker.join(*what)
    for _ in range(2):
        told = at_once(world.worker.step())
        world.seating.hear(told.parts, told.ended, lambda rows: events.append("freed"), lambda: events.append("go"))
    assert events[:6] == ["freed", "part", "answer", "part", "part", "go"]
    assert events[6:] == ["freed", "part", "part", "answer", "answer", "go"]


class Server:
    """The other end of a `Link`, who hears as late as it may."""

    def __init__(self, lengths):
        self.said = [("join", n, [Request(body=(n, "plain"), reply=print)], None) for n in lengths]
        self.said.append(("stop",))
        self.sent = self.heard = 0
        self.ended = []

    def receive(self, *, wait):
        said, self.said = self.said, []
        if wait and not said:
            assert self.heard < self.sent, "nobody will ever say anything"
            self.heard += 1
            said.append(("heard", self.heard))
        return said

    def tell(self, number, told):
        assert number <= self.heard + 2  # one round ahead
        self.sent = number
        self.ended += [name for name, *_ in told.ended]


@pytest.mark.parametrize("lengths", [[], [0], [1, 2], [3, 5, 9]])
def test_a_worker_that_is_told_to_stop_stays_until_its_last_round_was_heard(lengths):
    model = Model(random.Random(0))
    model.seats = 4
    server = Server(lengths)
    follow(Seats(model.run, lambda: 0.0, seats=4), server)
    assert server.ended == lengths
    assert server.heard == server.sent
