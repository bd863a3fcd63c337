# SPDX-License-Identifier: Apache-2.0
"""Makes a Unix socket again whose file was removed: what listens there goes on, and nobody could connect any more.

Services that clean up temporary files and shared memory remove such files, also of servers that run.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from forebay.errors import ConfigError
from forebay.workers.wire.address import UnixAddress, bind_unix

if TYPE_CHECKING:
    import socket

log = logging.getLogger("forebay")

LOOK_S: Final = 1.0
"""Time between two looks."""


async def keep_socket(path: str, listen: Callable[[socket.socket], Awaitable[object]]) -> NoReturn:
    """Look whether a socket in a private folder is there, and make it again, with its folder, if it is not.

    Args:
        path: The socket.
        listen: Given the new one, which does not listen yet, has it take the place of the one before; if it raises
            an `OSError`, another one is made.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        if os.path.lexists(path):  # noqa: ASYNC240 - one quick call
            continue
        try:
            Path(path).parent.mkdir(mode=0o700, exist_ok=True)
            made = bind_unix(UnixAddress(path))
        except (OSError, ConfigError) as error:
            log.debug("the socket %s cannot be made again: %s", path, error)
            continue
        try:
            await listen(made)
        except OSError as error:
            log.debug("cannot listen at the socket %s: %s", path, error)
            made.close()
            # What nobody listens at would pass for one that is kept.
            Path(path).unlink(missing_ok=True)  # noqa: ASYNC240 - one quick call
            continue
        log.warning("restored the socket %s, which was removed", path)
