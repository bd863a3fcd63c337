# SPDX-License-Identifier: Apache-2.0
"""A socket whose file was removed is made again, also when the first try to listen there fails."""

from __future__ import annotations

import asyncio
import errno

from forebay.workers.wire import kept_socket
from forebay.workers.wire.kept_socket import keep_socket


def test_it_is_tried_again_when_nobody_can_listen(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_socket, "LOOK_S", 0.01)
    path = str(tmp_path / "socket")
    tries = []

    async def main():
        listens = asyncio.Event()

        async def listen(made):
            tries.append(made)
            if len(tries) < 3:
                raise OSError(errno.ENOBUFS, "no memory for it")
            made.listen()
            listens.set()

        keeping = asyncio.create_task(keep_socket(path, listen))
        await asyncio.wait_for(listens.wait(), 30)
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        keeping.cancel()

    asyncio.run(main())
    assert [made.fileno() for made in tries[:2]] == [-1, -1]
    tries[2].close()
