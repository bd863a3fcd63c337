# SPDX-License-Identifier: Apache-2.0
"""What a serving executes: the protocol that modules follow, and the module that plain functions become."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast, runtime_checkable

from forebay.errors import ConfigError
from forebay.types.call_signature import signature_of

if TYPE_CHECKING:
    from forebay.arrays.array_batch import Batch

Kind = Literal["inline", "process"]

TO_JIT: Final = "a function of arrays itself goes to Serving.jit"

Executable = Callable[[], "tuple[Any, Any]"]
"""Runs one batch: returns the output, a tree of arrays with the rows on their first axis, and metadata."""


@runtime_checkable
class ServingModule(Protocol):
    """A serving that keeps a state.

    `init` and `handle_batch` are never called by two threads at a time; the functions that `handle_batch` returns are,
    with several partitions.

    Rows may be kept: they belong to the module. One with a class attribute `borrows_input = True` promises that nothing
    refers to them any more once the function has returned; it saves a copy of large batches in processes.
    """

    def init(self, kind: Kind, arg: Any, partitions: Sequence[Mapping[str, Any]]) -> Any:
        """Return the state.

        Args:
            kind: `inline` for `Serving.run`, `process` for a started serving.
            arg: What `Serving.new` was given.
            partitions: The compile options of each partition, with its `batch_keys` and, if it has one, its `device`.
        """
        ...

    def handle_batch(self, batch: Batch, partition: int, state: Any) -> tuple[Executable, Any]:
        """Return a function that runs the batch, and the state for the next one.

        Args:
            batch: Rows of one key, not joined yet.
            partition: Number of the partition that will call the function, from 0.
            state: What `init` or the last `handle_batch` returned.
        """
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Function:
    """The module of `Serving.new(fn)`: compiled once for each partition, and for each key if it asks for keys."""

    fn: Callable[..., Any]

    @property
    def name(self) -> str:
        """What the function is called in messages."""
        return getattr(self.fn, "__qualname__", None) or repr(self.fn)

    def init(self, kind: Kind, arg: Any, partitions: Sequence[Mapping[str, Any]]) -> list[_Compiled]:
        """Call the function with the options of each partition."""
        takes_key = arity(self.fn) == 2
        return [_Compiled(self, options, takes_key=takes_key) for options in partitions]

    def handle_batch(self, batch: Batch, partition: int, state: list[_Compiled]) -> tuple[Executable, list[_Compiled]]:
        """Return a call of what was compiled for this partition and key."""
        run = state[partition].for_key(batch.batch_key)
        return lambda: (run(batch), "server_info"), state

    def __repr__(self) -> str:
        return self.name


class _Compiled:
    """What a function returned for one partition."""

    def __init__(self, function: Function, options: Mapping[str, Any], *, takes_key: bool) -> None:
        self._function = function
        self._takes_key = takes_key
        self._options = MappingProxyType({name: value for name, value in options.items() if name != "batch_keys"})
        keys: Sequence[Hashable] = options["batch_keys"] if takes_key else (None,)
        self._by_key: dict[Hashable, Callable[[Batch], Any]] = {key: self._compile(key) for key in keys}

    def for_key(self, key: Hashable) -> Callable[[Batch], Any]:
        wanted = key if self._takes_key else None
        found = self._by_key.get(wanted)
        if found is None:  # inline, where the keys are not known beforehand
            found = self._by_key[wanted] = self._compile(wanted)
        return found

    def _compile(self, key: Hashable) -> Callable[[Batch], Any]:
        function = self._function
        made = function.fn(key, self._options) if self._takes_key else function.fn(self._options)
        if not callable(made) or arity(made) != 1:
            raise ConfigError(
                f"{function.name} should return, when it is called with the "
                f"{'batch key and the ' if self._takes_key else ''}compile options, a function that expects one "
                f"argument. Got: {made!r}; {TO_JIT}"
            )
        return made


@dataclass(frozen=True, slots=True, repr=False)
class Jitted:
    """What `Serving.jit(fn)` gives to `Serving.new`: compiles a function of arrays."""

    fn: Callable[..., Any]

    def __call__(self, options: Mapping[str, Any]) -> Callable[[Batch], Any]:
        """Compile it for one partition."""
        from forebay.arrays.compilers import jit

        return jit(self.fn, **options)

    def __repr__(self) -> str:
        return f"jit({getattr(self.fn, '__qualname__', None) or repr(self.fn)})"


def arity(fn: Callable[..., Any]) -> int:
    """Return with how many arguments a function is to be called: 2 only if it needs two."""
    try:
        parameters = signature_of(fn).parameters.values()
    except (TypeError, ValueError):
        return 1  # written in C: found out when it is called
    positional = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    needed = sum(p.default is p.empty for p in positional)
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return -1
    if needed <= 1 and (positional or any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        return 1
    return needed


def module_of(given: Any) -> Any:
    """Return what `Serving.new` was given as a module: a class or an instance as it is, a function as `Function`.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(given, ServingModule):  # a class has the methods as well
        return given
    if inspect.isclass(given) or not callable(given):
        missing = [name for name in ("init", "handle_batch") if not hasattr(given, name)]
        msg = f"Serving.new takes a function or a module with the methods init and handle_batch, got {given!r}" + (
            f", which has no {' and no '.join(missing)}" if inspect.isclass(given) else ""
        )
        raise ConfigError(msg)
    fn = cast("Callable[..., Any]", given)
    if arity(fn) not in {1, 2}:
        raise ConfigError(
            f"{getattr(fn, '__qualname__', fn)} takes {arity(fn)} arguments; write `def fn(options):`, "
            "or `def fn(batch_key, options):` to be called for each batch key"
        )
    return Function(fn)


def instance_of(module: Any) -> ServingModule:
    """Return the module itself: a class is made, without arguments."""
    return cast("ServingModule", module() if inspect.isclass(module) else module)


def name_of(module: Any) -> str:
    """Return what a module is called in messages."""
    if isinstance(module, Function):
        return module.name
    return module.__qualname__ if inspect.isclass(module) else type(module).__qualname__
