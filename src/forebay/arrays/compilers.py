# SPDX-License-Identifier: Apache-2.0
"""Turning a function of arrays into one that runs fast: as it is, by jax or by torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

from forebay.arrays.array_batch import Batch
from forebay.errors import ConfigError
from forebay.types.did_you_mean import nearest
from forebay.types.settings import MAX_WORKERS

Function = Callable[[Any], Any]
"""Takes one tree of arrays, the rows of a batch, and returns one."""

Options = Mapping[str, Any]
"""Compile options by name. `device`, `batch_keys` and `max_concurrency` mean the same to every compiler."""


class Compiler(Protocol):
    """What `compiler=` takes beside the names of the built-in ones."""

    def compile(self, fn: Function, options: Options) -> Function:
        """Return a function that does the same, quicker; it is called from one thread per partition."""
        ...

    def partitions(self, options: Options) -> list[dict[str, Any]]:
        """Return the options of each batch that can run at the same time, with the `device` it is bound to.

        Only asked for by `partitions=True`; a compiler may do without.
        """
        ...


class Python:
    """Calls the function as it is."""

    def compile(self, fn: Function, options: Options) -> Function:
        """Return `fn` itself; raises a `ConfigError` if an option is unknown."""
        check_options("python", options, ())
        return fn

    def partitions(self, options: Options) -> list[dict[str, Any]]:
        """Return `max_concurrency` partitions (1 if not given) on the CPU.

        Raises:
            ConfigError: `max_concurrency` is not a positive whole number.
        """
        return concurrent(options)


_BUILT_IN = {
    "python": (__name__, "Python"),
    "jax": ("forebay.arrays.compile_jax", "Jax"),
    "torch": ("forebay.arrays.compile_torch", "Torch"),
}


def find_compiler(compiler: str | Compiler) -> Compiler:
    """Return the compiler of this name; an object that is one is returned as it is.

    Raises:
        ConfigError: There is no such compiler, its package is not installed, or the object has no `compile`.
    """
    if not isinstance(compiler, str):
        if callable(getattr(compiler, "compile", None)):
            return compiler
        raise ConfigError(
            f"a compiler is one of {_names(_BUILT_IN)} or an object with a method compile(fn, options), "
            f"got {compiler!r}"
        )
    home = _BUILT_IN.get(compiler)
    if home is None:
        raise ConfigError(
            f"there is no compiler {compiler!r} (expected one of {_names(_BUILT_IN)}){_hint(compiler, _BUILT_IN)}"
        )
    try:
        module = importlib.import_module(home[0])
    except ModuleNotFoundError as error:
        if error.name != compiler:
            raise
        raise ConfigError(
            f"compiler {compiler!r} needs {compiler}, which is not installed: pip install forebay[{compiler}]"
        ) from error
    return cast("Compiler", getattr(module, home[1])())


def jit(fn: Function, *, compiler: str | Compiler = "python", **options: Any) -> Callable[[Batch], Any]:
    """Return a function that takes a `Batch`, realises it and calls the compiled `fn` with its arrays.

    Args:
        fn: Takes one tree of arrays and returns one.
        compiler: `python` calls `fn` as it is, `jax` and `torch` compile it; or an object with a method
            `compile(fn, options)`.
        options: For the compiler.

    Raises:
        ConfigError: The compiler or one of the options is unknown, or its package is not installed.
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"jit compiles a function of one argument, got {fn!r}")
    compiled = find_compiler(compiler).compile(fn, options)

    def run(batch: Batch) -> Any:
        if not isinstance(batch, Batch):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a function made by jit takes a Batch, got {batch!r}; Batch.concatenate([x]) makes one")
        return compiled(batch.realize())

    run.__name__ = run.__qualname__ = f"jit({getattr(fn, '__name__', repr(fn))})"
    return run


def check_options(compiler: str, options: Options, known: Iterable[str]) -> None:
    """Refuse options that a compiler does not have.

    Raises:
        ConfigError: Names the option and the nearest one that exists.
    """
    allowed = sorted({*known, "batch_keys", "device", "max_concurrency"})
    for name in options:
        if name not in allowed:
            hint = _hint(name, [*allowed, "compiler"])
            raise ConfigError(f"compiler {compiler!r} has no option {name!r} (it has {_names(allowed)}){hint}")


def concurrent(options: Options) -> list[dict[str, Any]]:
    """Return as many partitions on the CPU as `max_concurrency` says.

    Raises:
        ConfigError: It is not a whole number from 1 to `MAX_WORKERS`.
    """
    count = options.get("max_concurrency", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_WORKERS:
        raise ConfigError(f"max_concurrency is a whole number of batches from 1 to {MAX_WORKERS}, got {count!r}")
    return [{"device": "cpu", **options} for _ in range(count)]


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _hint(word: str, known: Iterable[str]) -> str:
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""
