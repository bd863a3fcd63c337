# SPDX-License-Identifier: Apache-2.0
"""The contract of what runs the batches of a partition, in its thread or in a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.arrays.batch import Batch
    from forebay.errors import ForebayError
    from forebay.serving.servings.execution import Executed, Sink


class BatchExecutor(Protocol):
    """What a partition runs batches with; used by one thread."""

    @property
    def is_ready(self) -> bool:
        """Whether a batch could be run now."""
        ...

    @property
    def problem(self) -> ForebayError | None:
        """Why that will not change soon; None if it may."""
        ...

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call this, from another thread, whenever one of these two may have changed."""
        ...

    def ready(self) -> bool:
        """Wait until a batch can be run, however long that takes; False if the runner was closed meanwhile."""
        ...

    def run(self, batch: Batch, sink: Sink | None) -> Executed:
        """Run a batch."""
        ...

    def end_run(self) -> bool:
        """Have what runs end now, from another thread; returns whether it will."""
        ...

    def close(self) -> None:
        """Release everything, from any thread; what runs may fail."""
        ...
