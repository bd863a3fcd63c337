# SPDX-License-Identifier: Apache-2.0
"""Python objects on their way to worker processes and back.

Theory of operation. Values travel as a flat list of buffers, `[index, *parts]`: the index says how many parts each
value has, the first part of a value is its pickle (protocol 5) and the others are the large buffers that it refers to,
which therefore lie in the shared arena and not inside the pickle. Code that only passes a value on keeps it as
`Packed`: between two worker processes the server copies buffers and never unpickles anything.

A value is loaded into memory of its own. The arena behind it is read-only and is written over by the next batch, while
user code may change what it gets, or keep it.

Unpickling runs code, so it happens between forebay's own processes only: workers that a process pool started itself,
over the socket in its private folder. Nothing here may be used for what came from a network or from a worker that
somebody else started.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeGuard, cast

import msgspec

from forebay.errors import BadOutcome, RunnerFailed
from forebay.types.call import After, Failure, Item, Outcome
from forebay.types.failures import text_of, trace_of, words_of
from forebay.types.first_use import known
from forebay.workers.memory.shm import THRESHOLD_BYTES
from forebay.workers.runner import Runner, RunnerSpec, WorkerContext
from forebay.workers.user_calls.user_code import attempt, caught, checked

Buffer: TypeAlias = bytes | memoryview


class Outputs(msgspec.Struct, eq=False):
    """An outcome that is several values, or none: what each output port carries.

    Attributes:
        by_port: Values by port; a port that is absent carries nothing.
    """

    by_port: Mapping[str, Any]


class Packed(msgspec.Struct, eq=False):
    """A value that is still packed. If it is part of another value that travels on, it arrives loaded.

    Attributes:
        parts: Its pickle, then the buffers that the pickle refers to.
    """

    parts: Sequence[Buffer]

    def load(self) -> Any:
        """Make the value; each call makes another one, with memory of its own.

        Raises:
            RunnerFailed: If that is not possible here, for instance because its class cannot be imported.
        """
        value, error = caught(_load_copy, *self.parts)
        if error is None:
            return value
        msg = f"a value of another process cannot be loaded here: {text_of(error)}"
        raise RunnerFailed(msg, trace=trace_of(error)) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_copy, (bytes(self.parts[0]), *map(pickle.PickleBuffer, self.parts[1:]))


class _Index(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How many of the parts that follow belong to each value; None if all belong to one value without a name."""

    counts: dict[str, int] | None


_decode_index = msgspec.msgpack.Decoder(known(_Index)).decode
_ONE: Final = msgspec.msgpack.encode(_Index(None))


def pack(values: Mapping[str, Any]) -> list[Buffer]:
    """Pack named values; those that are `Packed` go on as they are.

    Large buffers are referred to and not copied, so they must not change until the packed parts have been sent.

    Raises:
        BadOutcome: If one of them cannot be pickled, with its name and type.
    """
    parts: list[Buffer] = [b""]
    counts: dict[str, int] = {}
    for name, value in values.items():
        found = dump(value, f"the value of '{name}'")
        counts[name] = len(found)
        parts += found
    parts[0] = msgspec.msgpack.encode(_Index(counts))
    return parts


def unpack(parts: Sequence[Buffer]) -> dict[str, Any]:
    """Load everything that `pack` has packed; raises a `RunnerFailed` if a value cannot be loaded here."""
    return {name: value.load() for name, value in _split(_decode_index(parts[0]).counts or {}, parts).items()}


def is_packed(body: object) -> TypeGuard[list[Buffer]]:
    """Whether a body or an outcome is in the form that `pack` gives it."""
    if type(body) is not list:
        return False
    found = cast("list[Any]", body)
    return bool(found) and type(found[0]) in {bytes, memoryview}


def pack_outcome(outcome: Outcome) -> Outcome:
    """Pack what a runner returned: its only value, or `Outputs`. What cannot travel becomes a failure."""
    if type(outcome) is Failure:
        return outcome
    if type(outcome) is After:
        return After(pack_outcome(outcome.outcome), outcome.work)
    try:
        return pack(outcome.by_port) if isinstance(outcome, Outputs) else [_ONE, *dump(outcome)]
    except BadOutcome as error:
        return Failure(error)


def open_outcome(outcome: Any) -> Packed | Outputs:
    """Return what `PackedRunner` answered as a graph passes it on: the values in it stay packed.

    Args:
        outcome: The outcome of one item. If the item has several samples, the list of their outcomes, which becomes one
            value, a list.

    Raises:
        BadOutcome: If it is not packed.
    """
    if not is_packed(outcome):
        if type(outcome) is not list:
            msg = f"a worker answered with {type(outcome).__name__} and not with packed values; is its runner `packed`?"
            raise BadOutcome(msg)
        return Packed(dump([open_outcome(one) for one in cast("list[Any]", outcome)]))
    try:
        counts = _decode_index(outcome[0]).counts
    except msgspec.DecodeError as error:
        msg = f"expected packed values from a worker, got other bytes ({error}); is its runner `packed`?"
        raise BadOutcome(msg) from error
    return Packed(outcome[1:]) if counts is None else Outputs(_split(counts, outcome))


def _split(counts: Mapping[str, int], parts: Sequence[Buffer]) -> dict[str, Packed]:
    """Separate what `pack` has packed, without loading any of it."""
    values: dict[str, Packed] = {}
    start = 1
    for name, count in counts.items():
        values[name] = Packed(parts[start : start + count])
        start += count
    return values


def dump(value: Any, what: str = "the result") -> Sequence[Buffer]:
    """Return the parts of a value: its pickle, then the large buffers that it refers to, which are not copied.

    Args:
        value: What is packed; something `Packed` is taken as it is.
        what: What messages call it.

    Raises:
        BadOutcome: If it cannot be pickled, with its type.
    """
    if type(value) is Packed:
        return value.parts
    buffers: list[Buffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < THRESHOLD_BYTES:
            return True
        buffers.append(view)
        return False

    pickled, error = caught(lambda: pickle.dumps(value, protocol=5, buffer_callback=keep_inside))
    if error is None:
        return [pickled, *buffers]
    msg = f"{what}, of type {type(value).__name__}, cannot be sent to another process: {words_of(error)}"
    raise BadOutcome(msg, trace=trace_of(error)) from error


def load(pickled: Buffer | bytearray, *buffers: Buffer | bytearray) -> Any:
    """Make a value of its parts; the buffers are its memory from then on.

    Raises:
        Exception: Anything, for classes of the user's take part in it.
    """
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 - made by one of our own processes: see the top


def _load_copy(pickled: Buffer, *buffers: Buffer) -> Any:
    return load(pickled, *map(bytearray, buffers))


class UnpackedItem(msgspec.Struct):
    """What a runner behind `PackedRunner` sees of an item."""

    body: Any
    params: Mapping[str, Any]
    size: int


class PackedRunner(Runner):
    """Runs another runner in a worker process: bodies come packed and outcomes leave packed.

    A body that is a list of packed bodies, one a sample, is loaded into a list of dicts; its outcome, a list as well,
    is packed one by one.
    """

    borrows_input = True  # values are loaded into memory of their own

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def open(self, ctx: WorkerContext) -> None:
        """Load what the runner needs."""
        self._runner.open(ctx)

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Load the bodies, run those that could be loaded, pack what comes of it."""
        loaded: list[UnpackedItem] = []
        failures: dict[int, Failure] = {}
        for index, item in enumerate(items):
            body = attempt(_unpacked, item.body)
            if type(body) is Failure:
                failures[index] = body
            else:
                loaded.append(UnpackedItem(body, item.params, item.size))
        if not loaded:
            return list(failures.values())
        sizes = [item.size if type(item.body) is list else None for item in loaded]
        try:
            outcomes = checked(self._runner.run(loaded), len(loaded))
        finally:
            self.phases = self._runner.phases
        return _merged([_packed(*pair) for pair in zip(outcomes, sizes, strict=True)], failures)

    def close(self) -> None:
        """Release what the runner took."""
        self._runner.close()


def packed(spec: RunnerSpec) -> RunnerSpec:
    """Return the same runner as one whose bodies and outcomes are packed.

    Raises:
        ConfigError: If another process could not build it.
    """
    spec.require_portable()
    kwargs = {"factory": spec.factory, "kwargs": dict(spec.kwargs)}
    return RunnerSpec(factory=f"{__name__}:build_packed", kwargs=kwargs)


def build_packed(factory: str, kwargs: Mapping[str, Any]) -> PackedRunner:
    """Build the runner that `packed` describes."""
    return PackedRunner(RunnerSpec(factory=factory, kwargs=kwargs).build())


def _unpacked(body: Any) -> Any:
    return unpack(body) if is_packed(body) else [unpack(sample) for sample in body]


def _packed(outcome: Outcome, size: int | None) -> Outcome:
    """Pack the outcome of an item: the only one, or one for each of its `size` samples."""
    if size is None or type(outcome) is Failure:
        return pack_outcome(outcome)
    if type(outcome) is After:
        return After(_packed(outcome.outcome, size), outcome.work)
    try:
        outcomes = [pack_outcome(one) for one in checked(outcome, size)]
    except BadOutcome as error:
        return Failure(error)
    return next((one for one in outcomes if type(one) is Failure), outcomes)  # an item has one answer


def _merged(outcomes: list[Outcome], failures: Mapping[int, Failure]) -> list[Outcome]:
    """Insert the outcomes of the items that were not run in their places."""
    for index, failure in failures.items():  # by rising index
        outcomes.insert(index, failure)
    return outcomes
