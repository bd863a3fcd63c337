# SPDX-License-Identifier: Apache-2.0
"""Values that leave a function while it runs.

`hook` names a value; whoever executes the function chooses with `collecting` which names to receive. A compiler whose
programs run out of reach of a context collects while it traces and brings the values back itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec

from forebay.arrays.tree_structure import flatten
from forebay.errors import ConfigError, InvalidRequest

T = TypeVar("T")

Sink = Callable[[str, Any], object]
"""Receives the name and the value of each hook that was reached, in their order; may be called on any thread."""


class Collector(msgspec.Struct, frozen=True, eq=False):
    """Receives the hooks of one execution.

    Attributes:
        names: Hooks to receive; all others do nothing.
        sink: Where they go.
        tracing: Whether `sink` takes values that are traced and not yet computed.
    """

    names: frozenset[str]
    sink: Sink
    tracing: bool = False


_current: ContextVar[Collector | None] = ContextVar("forebay_hooks", default=None)


@contextmanager
def collecting(names: Iterable[str], sink: Sink, *, tracing: bool = False) -> Generator[None]:
    """Receive the hooks with these names that are reached within the block, and no others.

    What `sink` raises is raised by the function that reached the hook, or at its end where the function was compiled.
    """
    token = _current.set(Collector(frozenset(names), sink, tracing))
    try:
        yield
    finally:
        _current.reset(token)


def collector() -> Collector | None:
    """Return who receives the hooks that are reached here; None if nobody does."""
    return _current.get()


def hook(name: str, x: T) -> T:
    """Hand a value to the reader of the stream of the hook `name`, and return it unchanged.

    Does nothing where nobody asked for the name. In a function for jax, hooks work if it was compiled by
    `forebay.jit(..., compiler="jax")`; functions called by it may use `jax.jit` themselves.

    Args:
        name: The name given to `streaming(hooks=[...])`.
        x: A tree of arrays whose first axis is the batch.

    Raises:
        ConfigError: The name is not a string; or the hook is asked for, but jax traces the function on behalf of
            somebody else.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - the two are easily swapped
        msg = f"hook(name, x) is called with {name!r:.60}; its name is a text, got {type(name).__name__}"
        raise ConfigError(msg + (f": write hook({x!r}, ...)" if isinstance(x, str) else ""))
    current = _current.get()
    if current is not None and name in current.names:
        if not current.tracing and _is_traced(x):
            raise ConfigError(
                f"hook {name!r} was reached while jax traces the function, so that its value would be lost; "
                'compile the outermost function with forebay.jit(fn, compiler="jax") instead of jax.jit'
            )
        current.sink(name, x)
    return x


def print_value(x: T, label: str | None = None) -> T:
    """Print a value to standard output when it is computed, and return it unchanged.

    Args:
        x: A tree of arrays; in a function compiled by jax, what is printed are the values of each run.
        label: Printed before the value.
    """
    if _is_traced(x):
        leaves, structure = flatten(x)

        def show(*values: Any) -> None:
            _print(label, structure.unflatten(values))

        sys.modules["jax"].debug.callback(show, *leaves)
    else:
        _print(label, x)
    return x


def _print(label: str | None, x: object) -> None:
    sys.stdout.write(f"{x!r}\n" if label is None else f"{label}: {x!r}\n")


def _is_traced(x: Any) -> bool:
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    try:
        leaves, _ = flatten(x)
    except InvalidRequest:  # no tree of arrays: jax does not trace it either
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
