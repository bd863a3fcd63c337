# SPDX-License-Identifier: Apache-2.0
"""Requests whose model takes the body as it arrives, between an ASGI server and the queue."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.transports.http.driven import Endpoint
from tests.waiting import reached

from forebay.errors import Unavailable
from forebay.protocols.native import Contract
from forebay.server.byte_budget import ByteBudget
from forebay.server.served import StandIn
from forebay.transports.http.asgi_inference import AsgiAnswer
from forebay.transports.http.head import Head
from forebay.transports.http.route import Route, SharedRoute
from forebay.types.body_pieces import BodyPieces
from forebay.types.call import ALONE, Request

pytestmark = pytest.mark.anyio
TIMES = SimpleNamespace(timeout_s=30.0, max_timeout_s=45.0)
NEVER = float("inf")


class Asked:
    """A route whose endpoint answers when the test does."""

    contract = Contract(in_pieces=True)
    max_body_bytes = 100

    def __init__(self, **stated):
        self.byte_budget = ByteBudget()
        self.endpoint = SimpleNamespace(submit=self.submit, cancel=self.submit, config=TIMES)
        self.now = time.monotonic()
        self.stated = stated

    def request(self, head, body, reply, origin, read):
        made = Request(body, reply, arrived=self.now - 20.0, deadline=self.now + 10.0)
        for name, value in self.stated.items():
            setattr(made, name, value)
        return made

    def submit(self, request):
        self.asked = request


def answer_of(route: Any):
    async def send(message):
        raise AssertionError(message)

    return AsgiAnswer(route, Head(), send)


@pytest.mark.parametrize(
    "stated, seconds", [({}, 25.0), ({"due": 0.0}, 10.0)], ids=["until the longest time", "none of a stated one"]
)
async def test_each_piece_gives_a_request_more_time(stated, seconds):
    route, pieces = Asked(**stated), BodyPieces()
    came = asyncio.Queue()
    answer = answer_of(route)
    waiting = asyncio.ensure_future(answer.wait(b"", came.get, None, None, pieces))
    came.put_nowait({"type": "http.request", "body": b"one", "more_body": True})
    assert await anext(pieces) == b"one"
    await reached(lambda: not route.byte_budget.staged_bytes)
    assert route.asked.body is pieces
    assert route.asked.deadline - route.now == pytest.approx(seconds)
    came.put_nowait({"type": "http.request", "body": b"two", "more_body": False})
    await reached(lambda: route.byte_budget.staged_bytes == 3)
    route.asked.reply(route.asked, b"done")
    assert await waiting == b"done"
    assert not route.byte_budget.staged_bytes


async def test_a_body_that_exceeds_the_budget_is_refused():
    route, pieces = Asked(), BodyPieces()
    route.byte_budget.max_bytes = 2
    came = asyncio.Queue()
    came.put_nowait({"type": "http.request", "body": b"one", "more_body": True})
    failed = await answer_of(route).wait(b"", came.get, None, None, pieces)
    assert isinstance(failed.error, Unavailable)


def routes():
    endpoint = Endpoint("alpha")
    return [Route(StandIn(endpoint, Contract(in_pieces=in_pieces)), 100, ()) for in_pieces in (False, True)]


def test_a_request_shares_its_batch_with_nobody_and_no_whole_body_is_taken():
    _, route = routes()
    assert route.request(Head(route), b"", lambda *_: None, None).key is ALONE
    with pytest.raises(Unavailable, match="was replaced"):
        route.request(Head(route), b"whole", lambda *_: None, None)


def test_a_target_that_some_versions_take_pieces_at_is_read_in_pieces_by_all():
    whole, pieces = routes()
    assert not whole.is_staged([])
    assert pieces.is_staged([])
    both: Any = {StandIn(route.endpoint, route.contract): route for route in (whole, pieces)}
    assert SharedRoute(both, int).is_staged([])  # pyright: ignore[reportArgumentType]
