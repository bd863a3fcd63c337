# SPDX-License-Identifier: Apache-2.0
"""Calls of several threads that run together: whoever comes first waits for others, and runs what has come.

A batch is run by the thread that opened it, when it is full or its time is over, so there is no thread beside those of
the handler. Batches of unlike rows are apart. One that fails is run again call by call: each gets its own error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.workers.user_code import caught

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array

Arrays = Mapping[str, "Array"]
Run = Callable[[Arrays], Arrays]
"""Runs arrays whose first axis counts rows, and returns such arrays."""

NO_INPUT_AXIS: Final = "Batching session Run() input tensors must have at least one dimension."
NO_OUTPUT_AXIS: Final = "Batched output tensor has 0 dimensions."


class _Batch:
    def __init__(self) -> None:
        self.parts: list[Arrays] = []
        self.rows = 0
        self.is_full = threading.Event()
        self.is_done = threading.Event()
        self.outcomes: list[tuple[Any, BaseException | None]] = []


class RowBatches:
    """Puts calls together."""

    def __init__(self, max_rows: int, interval_s: float) -> None:
        """Run up to so many rows together, so long after the first of them came at the latest."""
        self._max_rows = max_rows
        self._interval_s = interval_s
        self._open: dict[Hashable, _Batch] = {}
        self._lock = threading.Lock()

    def run(self, model: Hashable, arrays: Arrays, run: Run) -> Arrays:
        """Run a call with others of the same model.

        Raises:
            ValueError: If an input or an output has no axis of rows.
            BaseException: What `run` raises.
        """
        rows = _rows(arrays.values(), NO_INPUT_AXIS)
        if rows is None or rows >= self._max_rows:
            return run(arrays)
        key = (model, tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(arrays.items())))
        with self._lock:
            batch = self._open.get(key)
            if batch is not None and batch.rows + rows > self._max_rows:
                batch.is_full.set()
                batch = None
            is_first = batch is None
            if batch is None:
                batch = self._open[key] = _Batch()
            place = len(batch.parts)
            batch.parts.append(arrays)
            batch.rows += rows
            if batch.rows >= self._max_rows:
                del self._open[key]
                batch.is_full.set()
        if is_first:
            batch.is_full.wait(self._interval_s)
            with self._lock:
                if self._open.get(key) is batch:
                    del self._open[key]
            try:
                batch.outcomes = _outcomes(batch.parts, run)
            finally:
                batch.is_done.set()
        batch.is_done.wait()
        found, error = batch.outcomes[place]
        if error is not None:
            raise error
        return found


def _outcomes(parts: Sequence[Arrays], run: Run) -> list[tuple[Any, BaseException | None]]:
    """Return what each part gets: its rows, or its error."""
    if len(parts) > 1:
        found, error = caught(_together, parts, run)
        if error is None:
            return [(one, None) for one in found]
    return [_alone(part, run) for part in parts]


def _alone(part: Arrays, run: Run) -> tuple[Any, BaseException | None]:
    found, error = caught(_together, [part], run)
    return (None if error is not None else found[0]), error


def _together(parts: Sequence[Arrays], run: Run) -> list[Arrays]:
    import numpy as np

    sizes = [next(iter(part.values())).shape[0] for part in parts]
    joined = (
        parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    )
    found = run(joined)
    total = sum(sizes)
    for name, array in found.items():
        if not array.ndim:
            raise ValueError(NO_OUTPUT_AXIS)
        if array.shape[0] != total:
            msg = f"output '{name}' has the shape {list(array.shape)} for {total} rows, so its calls cannot be batched"
            raise ValueError(msg)
    ends = np.cumsum(sizes)
    return [
        {name: array[end - size : end] for name, array in found.items()}
        for size, end in zip(sizes, ends.tolist(), strict=True)
    ]


def _rows(arrays: Any, problem: str) -> int | None:
    """Return how many rows all arrays have; None if they have unlike numbers of them.

    Raises:
        ValueError: If one has no axis of rows.
    """
    found = {array.shape[:1] for array in arrays}
    if () in found:
        raise ValueError(problem)
    return next(iter(found))[0] if len(found) == 1 else None
