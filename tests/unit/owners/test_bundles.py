# SPDX-License-Identifier: Apache-2.0
"""Requests that a front hands on together: each is answered, cancelled, refused and sent once more by itself."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.batching.queue import BatchConfig
from forebay.errors import QueueFull
from forebay.owners.owner_pool import OwnerPool, OwnerSlot
from forebay.owners.wire import MAX_CHARGED, ModelAnswers
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.types.call import Failure, Request

ROOM = 8


class Link:
    """Keeps what is handed on by it."""

    def __init__(self):
        self.bundles = []
        self.ended = SimpleNamespace(done=lambda: False)

    def hand_on(self, slot, first, requests):
        self.bundles.append({name: request.body for name, request in enumerate(requests, first)})

    def speak(self, slot):
        pass

    def forget(self, slot):
        pass

    def close_if_done(self):
        pass

    def give_up(self, reason):
        pass

    def names(self, bodies):
        """Return what the last requests with these bodies are called."""
        found = {body: name for bundle in self.bundles for name, body in bundle.items()}
        return [found[body] for body in bodies]


class Front:
    """An endpoint whose owner a test plays."""

    def __init__(self):
        self.pool = OwnerPool("clip", "unix:/owner", 2, ROOM, 60.0)
        queue = BatchConfig(max_size=ROOM, capacity=ROOM, idle="go")
        self.endpoint = Endpoint(EndpointConfig(name="clip", split=False), queue, self.pool)
        self.answers = {}
        self.requests = {}

    def dial(self):
        link: Any = Link()
        slot = OwnerSlot(link, 1, self.pool, ROOM)
        self.pool.ask("unix:/owner", [slot])
        return link, slot

    async def ask(self, bodies):
        for body in bodies:
            self.requests[body] = Request(body, self.told)
            self.endpoint.submit(self.requests[body])
        await turn()

    def told(self, request, outcome):
        assert request.body not in self.answers
        self.answers[request.body] = outcome


async def turn():
    for _ in range(3):
        await asyncio.sleep(0)


def answer(slot, ended, returned=(), outcomes=None):
    told = ModelAnswers(1, 0, ROOM, [], ended, [*returned])
    slot.hear(told, [], outcomes or [f"of {name}" for name in ended])


def played(story):
    async def main():
        front = Front()
        await front.endpoint.start()
        await story(front)
        await front.endpoint.drain(0.0)
        assert set(front.answers) == set(front.requests)

    asyncio.run(main())


def test_what_comes_in_a_turn_leaves_together_and_each_is_answered_as_it_ends():
    async def story(front):
        link, slot = front.dial()
        await front.ask("abcd")
        assert [[*bundle.values()] for bundle in link.bundles] == [["a", "b", "c", "d"]]
        names = link.names("abcd")
        answer(slot, [names[2], names[0]])
        assert front.answers == {"c": f"of {names[2]}", "a": f"of {names[0]}"}
        answer(slot, [names[1], names[3]])
        assert front.answers["b"] == f"of {names[1]}"
        assert front.endpoint.metrics.codes["ok"] == 4
        assert (slot.under_way, slot.seating.open) == (0, {})

    played(story)


@pytest.mark.parametrize("seed", range(30))
def test_those_of_bundles_are_answered_in_any_order_and_in_any_groups(seed):
    async def story(front):
        chance = random.Random(seed)
        link, slot = front.dial()
        await front.ask("abc")
        await front.ask("defg")
        names = link.names("abcdefg")
        left = chance.choice([names[:], names[3:] + names[:3], chance.sample(names, 7)])
        while left:
            count = chance.choice([1, 3, 4, 7])
            answer(slot, left[:count])
            left = left[count:]
            assert slot.under_way == len(slot.seating.open) == len(left)
        assert front.answers == {body: f"of {name}" for body, name in zip("abcdefg", names, strict=True)}
        assert not any(map(slot.seating.abandon, front.requests.values()))

    played(story)


def test_one_of_a_bundle_is_cancelled_by_itself():
    async def story(front):
        link, slot = front.dial()
        await front.ask("abc")
        front.endpoint.cancel(front.requests["b"])
        assert slot.leaves == link.names("b")
        assert [*front.answers] == ["b"]
        answer(slot, link.names("abc"))
        assert slot.under_way == 0

    played(story)


def test_those_of_a_bundle_for_whom_there_is_no_room_are_refused():
    async def story(front):
        link, slot = front.dial()
        answer_room = ModelAnswers(1, 0, 3, [], [], [], 0.25)
        slot.hear(answer_room, [], [])
        await front.ask("abcde")
        assert [[*bundle.values()] for bundle in link.bundles] == [["a", "b", "c"]]
        errors = [front.answers[body].error for body in "de"]
        assert {*map(type, errors)} == {QueueFull}
        assert errors[1].retry_at - errors[0].retry_at == pytest.approx(0.25, abs=0.05)  # as the owner's pace is
        answer(slot, link.names("abc"))

    played(story)


def test_a_front_that_has_no_room_hands_on_as_many_as_a_batch_takes():
    async def story(front):
        link, slot = front.dial()
        slot.hear(ModelAnswers(1, 0, 0, [], [], []), [], [])
        await front.ask("abc")
        assert [[*bundle.values()] for bundle in link.bundles] == [["a", "b"]]
        assert isinstance(front.answers["c"], Failure)
        answer(slot, link.names("ab"))

    played(story)


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_is_left_of_a_bundle_goes_to_the_next_link(is_lost):
    async def story(front):
        link, slot = front.dial()
        await front.ask("abcd")
        answer(slot, link.names("c"))
        if is_lost:
            front.pool.gone(slot)
        else:
            front.pool.retire(slot)
            answer(slot, [], link.names("abd"))
        second, other = front.dial()
        await turn()
        assert sorted(body for bundle in second.bundles for body in bundle.values()) == ["a", "b", "d"]
        answer(other, second.names("abd"))

    played(story)


def test_the_tokens_of_very_many_tenants_in_one_turn_are_charged_and_fit_into_a_bundle():
    link: Any = SimpleNamespace(speak=lambda slot: None)
    slot = OwnerSlot(link, 1, link, 8)
    for number in range(3000):
        slot.hand_on_tokens(f"t{number % 2000}", 1, 2)
    assert len(slot.tokens) == MAX_CHARGED
    assert slot.tokens["t7"] == (2, 4)
    assert sum(prompt for prompt, _ in slot.tokens.values()) == 3000
