# SPDX-License-Identifier: Apache-2.0
"""A child's side of its node process: it ends with it, and says when it is ready."""

from __future__ import annotations

import os
from typing import Final

from forebay.workers.parent_death import end_with, end_with_reader

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
        """Say that this process is of use.

        Args:
            text: What the node process is told with it, as one line; cut to `MAX_BYTES`.
        """
        said = text.replace("\n", " ").encode()[: MAX_BYTES - 1] + b"\n"
        while said:
            said = said[os.write(self._pipe, said) :]


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
