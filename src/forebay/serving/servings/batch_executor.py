# SPDX-License-Identifier: Apache-2.0
"""What runs the batches of a partition: here, in its thread; `process_partition.py` has one in a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.arrays.batch import Batch
    from forebay.errors import ForebayError
    from forebay.serving.servings.execution import Executed, Execution, Sink


class BatchExecutor:
    """What a partition runs batches with; used by one thread. Unless told otherwise it is ready for ever."""

    @property
    def is_ready(self) -> bool:
        """Whether a batch could be run now."""
        return True

    @property
    def problem(self) -> ForebayError | None:
        """Why that will not change soon; None if it may."""
        return None

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call this, from another thread, whenever one of these two may have changed."""

    def ready(self) -> bool:
        """Wait until a batch can be run, however long that takes; False if the runner was closed meanwhile."""
        return True

    def run(self, batch: Batch, sink: Sink | None) -> Executed:
        """Run a batch."""
        raise NotImplementedError

    def end_run(self) -> bool:
        """Have what runs end now, from another thread; returns whether it will."""
        return False

    def close(self) -> None:
        """Release everything, from any thread; what runs may fail."""


class InThread(BatchExecutor):
    """A partition in the thread that calls it."""

    def __init__(self, execution: Execution, index: int) -> None:
        self._execution = execution
        self._index = index

    def run(self, batch: Batch, sink: Sink | None) -> Executed:
        """Run a batch."""
        return self._execution.run(batch, self._index, sink).own()
