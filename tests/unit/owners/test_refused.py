# SPDX-License-Identifier: Apache-2.0
"""An owner that refuses a front is dialled ever less often, and is found once it lets the front in."""

import asyncio
from typing import Any

from tests.waiting import reached

from forebay.owners import shard as module
from forebay.owners.owner import Owner
from forebay.owners.shard import LinkOptions
from forebay.workers.wire import frames
from forebay.workers.wire.address import UnixAddress
from forebay.workers.wire.redialling import MAX_PAUSE_S, REFUSED_PAUSE_S, Pauses

REFUSAL = frames.encode(["refused", "its secret is not this server's"])
WELCOME = frames.encode(["open", {"max_frame": 4096}]) + frames.encode(["models", []])


def test_a_front_that_is_refused_dials_ever_less_often(tmp_path, monkeypatch, caplog):
    longest, said = [], [REFUSAL]

    class Counted(Pauses):
        def next_s(self, most_s=MAX_PAUSE_S):
            longest.append(super().next_s(most_s))
            return 0.0

    monkeypatch.setattr(module, "Pauses", Counted)

    class Greeting(asyncio.Protocol):
        def connection_made(self, transport: Any):
            transport.write(said[0])

    async def live():
        server = await asyncio.get_running_loop().create_unix_server(Greeting, f"{tmp_path}/s")
        owner = Owner(UnixAddress(f"{tmp_path}/s"), LinkOptions("x" * 16, None, None), lambda *_: None)
        owner.start()
        await reached(lambda: len(longest) > 12)
        said[0] = WELCOME
        await reached(lambda: owner.is_here)
        owner.stop()
        server.close()
        await asyncio.sleep(0)

    asyncio.run(live())
    assert REFUSED_PAUSE_S / 2 <= longest[11] <= REFUSED_PAUSE_S
    assert len([one for one in caplog.records if "is unreachable" in one.message]) == 1


def test_pauses_for_one_that_is_only_away_stay_short():
    pauses = Pauses()
    assert max(pauses.next_s(REFUSED_PAUSE_S) for _ in range(20)) > MAX_PAUSE_S
    assert all(pauses.next_s() <= MAX_PAUSE_S for _ in range(5))
