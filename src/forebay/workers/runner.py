# SPDX-License-Identifier: Apache-2.0
"""The back waist: what runs batches, and how a worker is told to build one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.errors import ConfigError
from forebay.types.call import Item, Outcome

if TYPE_CHECKING:
    from forebay.types.batch import Phase
    from forebay.workers.user_calls.joint_streams import JointStreams


class WorkerContext(msgspec.Struct, frozen=True):
    """What a runner may want to know about the worker it lives in.

    Attributes:
        index: Number of the worker in its pool, from 0; the same after a restart.
        threads: How many threads of the worker call the same runner.
        device: What libraries call the device of the worker.
    """

    index: int = 0
    threads: int = 1
    device: str = "cpu"


class Runner:
    """Runs batches. One runner lives in one worker; its threads, if it has several, share it.

    Attributes:
        borrows_input: What a runner is given is its own. True promises that nothing refers to a body any more once
            `run` has returned (or its iterator has ended): in a worker process large bodies are then views of shared
            memory, written over by the next batch, and not copied out of it first.
        shares_loop: Whether a process may run several batches at a time by `run_async`, on the loop of `run_on_loop`.
        phases: What the time of its last run went into, if it does not tell
            `forebay.workers.user_calls.phases.lap`; read right after `run`, in the same thread.
    """

    borrows_input: bool = False
    shares_loop: bool = False
    phases: Sequence[Phase] = ()

    def open(self, ctx: WorkerContext) -> None:
        """Load what is needed; raising stops the worker with that reason."""

    async def open_async(self, ctx: WorkerContext) -> None:
        """Load what is needed for a worker that is a loop."""
        self.open(ctx)

    def run(self, items: Sequence[Item]) -> Sequence[Outcome] | Iterator[Sequence[Any]] | JointStreams:
        """Run a batch.

        Returns:
            One outcome for each item, in order: a result, or a `Failure` for that item only. Or an iterator of
            steps of a streamed answer: in each step one part for each item, None where it has nothing. Or, where the
            worker has seats, a stream that is stepped together with others. Threads and loops stream in seats only.

        Raises:
            Exception: Fails the whole batch.
        """
        raise NotImplementedError

    def run_async(self, items: Sequence[Item]) -> Any:
        """Run a batch on a loop: return the same as `run`, or what has to be awaited for it."""
        return self.run(items)

    def run_on_loop(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop on which `open` has loaded what is needed."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what `open` took."""

    async def close_async(self) -> None:
        """Release what `open_async` took."""
        self.close()


class RunnerSpec(msgspec.Struct, frozen=True):
    """A runner by reference, so that any process can build it; never a pickled object.

    Attributes:
        factory: `"package.module:function"`; the function returns a `Runner`.
        kwargs: Its arguments, plain data only.
        local: The factory itself, for pools in this process when the function cannot be imported by name.
    """

    factory: str
    kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    local: Callable[[], Runner] | None = None

    def build(self) -> Runner:
        """Import the factory and call it."""
        if self.local is not None:
            return self.local()
        module, _, name = self.factory.partition(":")
        factory: Callable[..., Runner] = getattr(importlib.import_module(module), name)
        return factory(**self.kwargs)

    def require_portable(self) -> None:
        """Check that another process can build this runner.

        Raises:
            ConfigError: If it exists in this process only.
        """
        if self.local is not None:
            raise ConfigError(
                "process workers need a model they can import by name: put the class into a module or file of its own, "
                "or use worker_kind='thread'"
            )
