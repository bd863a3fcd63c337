# SPDX-License-Identifier: Apache-2.0
"""Which calls of a Nucleus project's gRPC face count as in flight, with workers and clients that take their time."""

import asyncio
from typing import Any

from tests.waiting import PATIENCE_S

from forebay.surfaces.nucleus.in_flight import TOO_MANY
from forebay.surfaces.nucleus.proto import Rpc, UserService
from forebay.surfaces.nucleus.rpc import NucleusRpc
from forebay.transports.grpc.statuses import Status

STREAM = Rpc("Again", "Ask", "Answer", is_asked_in_parts=False, answers_in_parts=True)
END = ("end", 0, "", (), None, ())


class Endpoint:
    """Takes requests, and answers none by itself."""

    def __init__(self):
        self.asked = asyncio.Queue()

    def submit(self, request):
        self.asked.put_nowait(request)

    async def next(self):
        return await asyncio.wait_for(self.asked.get(), PATIENCE_S)

    def cancel(self, request): ...


class Call:
    """Keeps how it ended."""

    peer = "127.0.0.1:1"
    metadata = ()
    tenant = None
    deadline = float("inf")

    def __init__(self):
        self.ended = []

    def begin_answer(self, metadata): ...

    def answered_by(self, endpoint, request): ...

    def end(self, status, text="", message=None, metadata=()):
        self.ended.append((status, text))


def test_a_call_whose_client_was_told_its_end_counts_no_longer_although_its_worker_is_busy_with_it():
    # N95
    async def run():
        endpoint = Endpoint()
        asked: Any = endpoint
        inflows: Any = None
        face = NucleusRpc(asked, UserService("Small", "small.proto", (STREAM,), ()), inflows, max_concurrency=1)
        again = face.service().streams["Again"]

        async def ask(call):
            async def messages():
                yield b""

            return [part async for part in again(messages(), call)]

        first, second, third = Call(), Call(), Call()
        one = asyncio.create_task(ask(first))
        slow = await endpoint.next()
        assert await ask(second) == []
        assert second.ended == [(Status.UNAVAILABLE, TOO_MANY)]
        told = asyncio.Event()
        slow.on_part(END, told.set)
        await told.wait()
        assert first.ended == [(Status.OK, "")]
        assert not one.done()
        other = asyncio.create_task(ask(third))
        (await endpoint.next()).reply(None, None)
        assert await other == []
        slow.reply(None, None)
        assert await one == []

    asyncio.run(run())
