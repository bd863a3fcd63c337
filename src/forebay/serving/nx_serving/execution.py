# SPDX-License-Identifier: Apache-2.0
"""A module that was initialised, and how it runs one batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from forebay.arrays.ownership import taken_over
from forebay.arrays.tree_rows import copy_rows, rows, slice_rows
from forebay.arrays.value_hooks import collecting
from forebay.errors import BadOutcome, BatchMismatch, BatchResultMismatch, InvalidRequest
from forebay.observe.spans import span
from forebay.serving.nx_serving.module import Kind, instance_of, name_of
from forebay.types.plurals import counted

if TYPE_CHECKING:
    from forebay.arrays.array_batch import Batch

    Sink = Callable[[str, Any], None]


class Executed:
    """What one batch returned.

    Attributes:
        output: A tree of arrays, at least as many rows as the batch.
        metadata: Whatever the module returned along with it.
        rows: Rows of the output, padding included.
    """

    __slots__ = ("metadata", "output", "rows")

    def __init__(self, output: Any, metadata: Any, rows: int) -> None:
        self.output: Any = output
        self.metadata: Any = metadata
        self.rows: int = rows

    def own(self) -> Executed:
        """Copy what the function may still write to in a later batch; call this before the next batch runs."""
        box, self.output = [self.output], None  # a second reference to the output would look like the function's
        self.output = taken_over(box)
        return self

    def cut(self, start: int, stop: int) -> Any:
        """Return some of the rows: all as they are, a few as a copy, as a view would keep all of them in memory."""
        wanted = stop - start
        if wanted == self.rows:
            return self.output
        return (copy_rows if 2 * wanted < self.rows else slice_rows)(self.output, start, stop)


class Execution:
    """One state of one module, shared by its partitions."""

    def __init__(
        self,
        module: Any,
        kind: Kind,
        arg: Any,
        partitions: Sequence[Mapping[str, Any]],
        *,
        hooks: Sequence[str] = (),
        pad_to: int | None = None,
    ) -> None:
        """Initialise the module.

        Args:
            module: A module, a class of modules, or a `Function`.
            kind: Passed on to `init`.
            arg: Passed on to `init`.
            partitions: Passed on to `init`.
            hooks: Names of the hooks whose values are handed to the sink.
            pad_to: Rows that every batch is padded to; None leaves padding to the module.

        Raises:
            Exception: What `init` raises.
        """
        self._module = instance_of(module)
        self._name = name_of(module)
        self._hooks = tuple(hooks)
        self._pad_to = pad_to
        self._lock = threading.Lock()
        self._state = self._module.init(kind, arg, partitions)

    def run(self, batch: Batch, partition: int, sink: Sink | None = None, *, lent: bool = False) -> Executed:
        """Run one batch. What the function gets is its own, and so is what it returned until `Executed.own` is called.

        Args:
            partition: Number of the partition.
            sink: Called with the name and the value of each listed hook that is reached.
            lent: Whether the module gets the rows where they lie, read-only, because it promised to keep none of them.

        Raises:
            Exception: What the module raises.
            BadOutcome: It returned something other than its protocol says.
            BatchResultMismatch: It returned fewer rows than it was given, or gave a hook fewer.
        """
        if self._pad_to is not None and batch.size < self._pad_to:
            batch = batch.pad(self._pad_to - batch.size)
        if not lent:
            batch = batch.owned()
        with self._lock:
            run = self._handle(batch, partition)
        with span("serving.execute", module=self._name, batch_size=batch.size, batch_key=batch.batch_key) as attributes:
            if sink is None:
                returned = run()
            else:
                with collecting(self._hooks, self._held(sink, batch.size)):
                    returned = run()
            output, metadata = self._checked(returned)
            attributes["metadata"] = metadata
        return Executed(output, metadata, _count(output, batch.size, self._name, "returned"))

    def _handle(self, batch: Batch, partition: int) -> Callable[[], Any]:
        handled: Any = self._module.handle_batch(batch, partition, self._state)
        if type(handled) is not tuple or len(cast("tuple[Any, ...]", handled)) != 2 or not callable(handled[0]):
            raise BadOutcome(
                f"{self._name}.handle_batch must return (function, state), where the function takes no arguments, "
                f"got {handled!r}"
            )
        run, self._state = cast("tuple[Callable[[], Any], Any]", handled)
        return run

    def _checked(self, returned: Any) -> tuple[Any, Any]:
        if type(returned) is not tuple or len(cast("tuple[Any, ...]", returned)) != 2:
            raise BadOutcome(f"the function of {self._name} must return (output, metadata), got {returned!r}")
        return cast("tuple[Any, Any]", returned)

    def _held(self, sink: Sink, wanted: int) -> Sink:
        """Return a sink that takes only values in which each caller has its rows."""

        def take(name: str, value: Any) -> None:
            _count(value, wanted, self._name, f"gave the hook {name!r}")
            sink(name, value)

        return take


def _count(tree: Any, wanted: int, who: str, did: str) -> int:
    """Return how many rows there are.

    Raises:
        BadOutcome: It is not a tree of arrays with rows.
        BatchResultMismatch: There are fewer than `wanted`.
    """
    try:
        found = rows(tree)
    except (BatchMismatch, InvalidRequest) as error:
        msg = f"{who} {did} no tree of arrays with the batch as their first axis: {error}"
        raise BadOutcome(msg) from error
    if found < wanted:
        msg = f"{who} {did} {counted(found, 'row')} for a batch of {wanted}; expected one row for each"
        raise BatchResultMismatch(msg)
    return found
