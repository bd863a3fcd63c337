# SPDX-License-Identifier: Apache-2.0
"""Samples the counters on a timer, for histories that the dashboard shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

from forebay.observe.metrics.exposition import finish_in_turns
from forebay.server.links import Links


class Sampler(Links):
    """Takes a sample every few seconds as long as the server runs."""

    def __init__(
        self, step_s: float, look: Callable[[], Generator[None, None, None]], is_wanted: Callable[[], bool]
    ) -> None:
        """Do nothing yet.

        Args:
            step_s: Time between two samples.
            look: Takes a sample, in turns.
            is_wanted: Tells at the start whether there is anything to sample.
        """
        self._step_s, self._look, self._is_wanted = step_s, look, is_wanted
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin with the first sample."""
        if self._is_wanted():
            self._task = asyncio.create_task(self._sample())

    def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()

    async def _sample(self) -> None:
        while True:
            await finish_in_turns(self._look())
            await asyncio.sleep(self._step_s)
