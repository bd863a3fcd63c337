# SPDX-License-Identifier: Apache-2.0
"""Calls of a handler's threads that run together below it: a model as a serving, and what it makes of a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from forebay.arrays.array_batch import Batch
from forebay.errors import ServingCrashed
from forebay.serving.nx_serving.definition import Serving
from forebay.types.plurals import counted

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array

Arrays = Mapping[str, "Array"]
Run = Callable[[Arrays], Arrays]
"""Runs arrays whose first axis counts rows, and returns such arrays."""

NO_INPUT_AXIS: Final = "Batching session Run() input tensors must have at least one dimension."
NO_OUTPUT_AXIS: Final = "Batched output tensor has 0 dimensions."


class RowBatches:
    """Runs calls of one model together, unlike ones apart; its threads end with it."""

    def __init__(self, run: Run, max_rows: int, interval_s: float, *, threads: int, timeout_s: float) -> None:
        """Describe how.

        Args:
            max_rows: Rows that run together at most.
            interval_s: Time that the first of them waits for others.
            threads: Batches that run at a time.
        """
        self._run = run
        self._max_rows = max_rows
        self._timeout_s = timeout_s

        def run_batch(batch: Batch) -> Arrays:
            return _checked(run(batch.realize()), batch.size)

        def module(_options: Any) -> Callable[[Batch], Arrays]:
            return run_batch

        serving = Serving.new(module)
        self._serving: Any = serving.batch_size(max_rows).start(
            batch_timeout_ms=interval_s * 1000, partitions=threads, shutdown_ms=0
        )
        weakref.finalize(self, self._serving.stop)

    def run(self, arrays: Arrays) -> Arrays:
        """Run a call with others.

        Raises:
            ValueError: If an input or an output has no axis of rows.
            ForebayError: If it was late, or too many wait.
            Exception: What the model raises.
        """
        shapes = {array.shape[:1] for array in arrays.values()}
        if () in shapes:
            raise ValueError(NO_INPUT_AXIS)
        rows = next(iter(shapes))[0] if len(shapes) == 1 else 0
        if not 0 < rows < self._max_rows:
            return self._run(arrays)
        try:
            return self._serving.batched_run(Batch.concatenate([arrays]), timeout_s=self._timeout_s)
        except ServingCrashed:
            return _checked(self._run(arrays), rows)  # alone: it gets an error of its own, or none


def _checked(found: Arrays, rows: int) -> Arrays:
    for name, array in found.items():
        if not array.ndim:
            raise ValueError(NO_OUTPUT_AXIS)
        if array.shape[0] != rows:
            found_as = f"the shape {list(array.shape)} for {counted(rows, 'row')}"
            raise ValueError(f"output '{name}' has {found_as}, so its calls cannot be batched")
    return found
