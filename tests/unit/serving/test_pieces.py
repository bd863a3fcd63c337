# SPDX-License-Identifier: Apache-2.0
"""Bodies in pieces between the server's loop and the model, and which models may take them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.waiting import reached

from forebay import ConfigError, Model, endpoint
from forebay.errors import Cancelled
from forebay.graph.composition.node_signature import signature_of_model
from forebay.server.config import Overrides
from forebay.serving.stream_delivery import Windows
from forebay.surfaces.native.describe import describe
from forebay.surfaces.native.model_endpoint import serve_model
from forebay.types.batch import EntryBatch
from forebay.types.body_pieces import ROOM_BYTES, BodyPieces
from forebay.types.call import Request

FULL = b"a" * ROOM_BYTES


pytestmark = pytest.mark.anyio


async def settled(task):
    """Let a task do all that it can do for now."""
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


async def test_the_next_piece_waits_until_the_model_has_taken_enough():
    pieces, taken = BodyPieces(), []
    pieces.took = taken.append
    await pieces.put(b"one", is_last=False)
    putting = asyncio.ensure_future(pieces.put(FULL, is_last=False))
    assert not await settled(putting)
    assert await anext(pieces) == b"one"
    assert not await settled(putting)
    assert await anext(pieces) == FULL
    assert await settled(putting)
    assert taken == [3, ROOM_BYTES]
    await pieces.put(FULL, is_last=True)  # nothing follows that would have to wait
    assert [piece async for piece in pieces] == [FULL]


async def test_a_wait_that_is_cancelled_loses_no_piece():
    pieces = BodyPieces()
    waiting = asyncio.ensure_future(anext(pieces))
    assert not await settled(waiting)
    assert pieces.is_awaited()
    waiting.cancel()
    assert await settled(waiting)
    await pieces.put(b"one", is_last=True)
    assert not pieces.is_awaited()
    assert [piece async for piece in pieces] == [b"one"]


async def test_whoever_reads_on_is_told_why_nothing_follows():
    pieces, taken = BodyPieces(), []
    pieces.took = taken.append
    waiting = asyncio.ensure_future(anext(pieces))
    assert not await settled(waiting)
    pieces.close("the client went away")
    with pytest.raises(Cancelled, match="went away"):
        await waiting
    await pieces.put(b"one", is_last=True)
    pieces.close("the request is over")  # the first reason stays
    with pytest.raises(Cancelled, match="went away"):
        await anext(pieces)
    assert taken == [0]  # and nobody is told any more


async def test_what_nobody_takes_is_let_go_of_once():
    pieces, taken = BodyPieces(), []
    pieces.took = taken.append
    await pieces.put(b"one", is_last=False)
    await pieces.put(b"three", is_last=True)
    assert await anext(pieces) == b"one"  # counted in the next turn of the loop
    pieces.close("over")
    await asyncio.sleep(0)
    assert sum(taken) == 8


@pytest.mark.parametrize("reads", ["for", "async for"])
def test_a_thread_reads_what_the_loop_puts(reads):
    found = []

    async def read_async(pieces):
        found.extend([piece async for piece in pieces])

    def read(pieces):
        if reads == "for":
            found.extend(pieces)
        else:
            asyncio.run(read_async(pieces))

    async def feed():
        pieces = BodyPieces()
        thread = threading.Thread(target=read, args=[pieces])
        thread.start()
        for at in range(20):
            await pieces.put(b"%d" % at + FULL, is_last=at == 19)
        await reached(lambda: not thread.is_alive())

    asyncio.run(feed())
    assert found == [b"%d" % at + FULL for at in range(20)]


async def test_a_model_that_waits_for_its_client_is_not_silent():
    given_up = []
    windows = Windows(asyncio.get_running_loop(), bool, lambda request, error: given_up.append(str(error)), 0.01)

    def on_part(part, release):
        release()

    asked = Request(BodyPieces(), lambda *_: None, on_part=on_part)
    windows.hand_out(EntryBatch([asked], None, 1), [(asked, ["a"])], lambda: None)
    looks = windows._silence
    await reached(lambda: windows._silence is not looks)
    assert not given_up
    await asked.body.put(b"one", is_last=False)  # now it is the model's turn
    await reached(lambda: given_up)
    windows.close()


class Reading:
    async def predict(self, body: AsyncIterator[bytes]) -> int:
        return len(await anext(body))


def model(**attributes):
    return type("Upload", (Reading, Model), attributes)


def of(annotation):
    def predict(self, body):
        return body

    predict.__annotations__["body"] = annotation
    return model(predict=predict)


class Got(Model):
    def predict(self, batch: list[int]) -> list[int]:
        return batch

    @endpoint("/got", methods=["GET"])
    def got(self, body: Iterator[bytes]) -> int:
        return sum(map(len, body))


REFUSED = {
    "texts": (of(AsyncIterator[str]), "annotated `collections.abc.AsyncIterator[str]`; a body as it arrives is an"),
    "nothing": (of(Iterator), "a body as it arrives is an `AsyncIterator[bytes]` for `async def`"),
    "def": (of(AsyncIterator[bytes]), "and an `Iterator[bytes]` for `def`, a batch is a `list[...]`"),
    "array": (model(batchable=True), "Upload.predict takes a body as it arrives; leave out batchable"),
    "key": (model(batch_key=staticmethod(len)), "leave out batch_key"),
    "got": (Got, "Got.got takes a body as it arrives; leave out GET"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_at_load(case):
    upload, said = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        serve_model(upload, Overrides(worker_kind="thread"))
    assert said in refused.value.message


class Blocking(Model):
    def predict(self, body: Iterator[bytes]) -> int:
        return sum(map(len, body))


@pytest.mark.parametrize(
    "upload, kind, instead",
    [(Blocking, "inline", "thread"), (Blocking, "process", "thread"), (model(), "process", "thread or inline")],
)
def test_workers_that_cannot_be_given_pieces_are_refused_with_those_that_can(upload, kind, instead):
    with pytest.raises(ConfigError) as refused:
        serve_model(upload, Overrides(worker_kind=kind))
    assert refused.value.message == (
        f"{upload.__qualname__} takes bodies as they arrive, which workers of kind {kind} cannot; use worker_kind "
        f"{instead} (--worker-kind thread)"
    )


def test_workers_of_another_interpreter_are_refused():
    with pytest.raises(ConfigError, match="only workers in the server's process"):
        describe(Blocking)


class Parts(Model):
    def predict(self, body: Iterator[bytes]) -> Iterator[bytes]:
        yield from body


@pytest.mark.parametrize("upload", [Blocking, Parts])
def test_a_node_of_a_graph_is_refused(upload):
    with pytest.raises(ConfigError, match=r"expected a list as annotation|a node is given whole values"):
        signature_of_model(upload)
