# SPDX-License-Identifier: Apache-2.0
"""A child's side of its node process: it ends with it, says when it is ready, and that it still goes on.

A child that has beaten once must go on with it, or it is replaced (`children.py`). A server beats from its event loop,
so a loop that hangs is noticed; a child without a loop of its own never begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Final

from forebay.workers.processes.parent_death import end_with, end_with_reader
from forebay.workers.wire.heartbeat import BEAT_S

VARIABLE: Final = "FOREBAY_NODE"
"""The variable that tells a child the id of its node process and the pipe to it: `PID:DESCRIPTOR`."""
MAX_BYTES: Final = 1 << 20
"""Longest text that a child says when it is ready: a line for each of thousands of models."""
BETWEEN_LINES: Final = "\t"
"""What separates the lines of such a text, which may end anywhere."""


class Lifeline:
    """The pipe to the node process that started this process."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def ready(self, text: str = "") -> None:
        """Say that this process is of use, and tell the node process one line, cut to `MAX_BYTES`."""
        said = text.replace("\n", " ").encode()[: MAX_BYTES - 1] + b"\n"
        while said:
            said = said[os.write(self._pipe, said) :]

    def beat(self) -> None:
        """Say once a second, from now on, that the running event loop turns; called after `ready`."""
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(BlockingIOError):  # the node process has not read the last ones: it is stopped
            os.write(self._pipe, b".")
        asyncio.get_running_loop().call_later(BEAT_S, self.beat)


def take_lifeline() -> Lifeline | None:
    """Tie this process to its node process; returns None if there is none.

    Call it before user code runs: the processes that this one starts are not children of the node process, so the
    variable is removed and the pipe is not passed on.
    """
    told = os.environ.pop(VARIABLE, "")
    if not told:
        return None
    parent, _, descriptor = told.partition(":")
    pipe = int(descriptor)
    os.set_inheritable(pipe, False)
    if not end_with(int(parent)):
        end_with_reader(pipe)
    return Lifeline(pipe)
