# SPDX-License-Identifier: Apache-2.0
"""A partition of a started serving inside a worker process, and how that process finds the serving."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, cast

from forebay.arrays.array_batch import Batch
from forebay.arrays.tree_rows import slice_rows
from forebay.errors import ConfigError
from forebay.serving.models.model import load_module
from forebay.serving.nx_serving.definition import Serving
from forebay.serving.nx_serving.packed_trees import pack, unpack
from forebay.serving.nx_serving.serving_options import options_of, partitions_of
from forebay.types.served_file import TARGET_PREFIX
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.serving.nx_serving.execution import Executed, Execution, Sink
    from forebay.types.call import Item

MAX_EVENTS = 16
"""Values of hooks that a running function is ahead of what was sent."""


class PartitionRunner(Runner):
    """Runs packed batches on one partition."""

    def __init__(self, serving: Serving[Any, Any], options: Mapping[str, Any]) -> None:
        self._serving = serving
        self._options = options_of(serving.settings, options)
        self._index = 0
        self._execution: Execution | None = None
        self.borrows_input = getattr(serving.settings.module, "borrows_input", False) is True

    def open(self, ctx: WorkerContext) -> None:
        """Initialise the module; raises as `Serving.initialise` does."""
        self._index = ctx.index
        options = self._options
        partitions = partitions_of(self._serving.settings, options)
        pad_to = options.batch_size if options.pad_to_batch_size else None
        self._execution = self._serving.initialise("process", partitions, pad_to)

    def run(self, items: Sequence[Item]) -> Sequence[bytearray] | Iterator[Sequence[bytearray]]:
        """Run the one packed batch; with hooks, the parts of the stream are their values and then the output."""
        (item,) = items
        tree, (key, rows, padding) = unpack(item.body)
        batch = Batch.concatenate([tree]).key(self._options.batch_keys[key]).pad(padding)
        assert self._execution is not None
        execution, index = self._execution, self._index
        if not self._serving.settings.streaming:
            return [_packed(execution.run(batch, index, lent=self.borrows_input), rows)]
        lent = self.borrows_input
        return ([packed] for packed in _while_running(lambda sink: execution.run(batch, index, sink, lent=lent), rows))


def _packed(executed: Executed, rows: int) -> bytearray:
    """Return what the callers get: the rows that are not padding, and the metadata."""
    return pack(slice_rows(executed.output, 0, rows), ["batch", executed.metadata])


def _while_running(run: Callable[[Sink], Executed], rows: int) -> Iterator[bytearray]:
    """Run a function in a thread of its own and yield the values of its hooks as they come, then its output."""
    events: Queue[Any] = Queue(MAX_EVENTS)

    def work() -> None:
        packed, error = caught(lambda: _packed(run(lambda name, value: events.put(pack(value, ["hook", name]))), rows))
        if error is None:
            events.put(packed)
        events.put(error)  # raised again by the thread that waits

    threading.Thread(target=work, daemon=True).start()
    while (event := events.get()) is not None:
        if isinstance(event, BaseException):
            raise event
        yield event


def from_module(module: str, name: str, options: dict[str, Any]) -> PartitionRunner:
    """Build the runner of a serving in a module that can be imported."""
    with _importing():
        return PartitionRunner(getattr(importlib.import_module(module), name), options)


def from_file(path: str, name: str, options: dict[str, Any]) -> PartitionRunner:
    """Build the runner of a serving in a file."""
    with _importing():
        return PartitionRunner(getattr(load_module(Path(path)), name), options)


def place_of(serving: Serving[Any, Any]) -> tuple[str, dict[str, str]]:
    """Return the function here, and its arguments, by which another process finds this very serving.

    Raises:
        ConfigError: It is not at the top of a module; or this process is just finding one itself.
    """
    if _is_importing:
        raise ConfigError(
            "a file that starts a serving when it is imported cannot be imported by the processes of that serving; "
            'put the start under `if __name__ == "__main__":`'
        )
    script: tuple[str, dict[str, str]] | None = None
    for module_name, module in list(sys.modules.items()):
        for name, value in list(cast("dict[str, Any]", getattr(module, "__dict__", {})).items()):
            if value is not serving:
                continue
            if module_name not in {"__main__", "__mp_main__"} and TARGET_PREFIX not in module_name:
                return f"{__name__}:from_module", {"module": module_name, "name": name}
            file = getattr(module, "__file__", None)
            if file is not None:
                script = f"{__name__}:from_file", {"path": str(Path(file).resolve()), "name": name}
    if script is not None:
        return script
    raise ConfigError(
        f"worker_kind='process' needs a serving that other processes can import, and {serving!r} is not at the top of "
        "a module; write `serving = Serving.new(...)` there, without indentation, and start that one"
    )


_is_importing = False


@contextmanager
def _importing() -> Generator[None]:
    """Keep the file of a serving from starting it again while it is imported: each process would start another."""
    global _is_importing  # noqa: PLW0603 - imports happen once for the whole process
    _is_importing = True
    try:
        yield
    finally:
        _is_importing = False
