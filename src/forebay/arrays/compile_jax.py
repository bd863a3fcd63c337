# SPDX-License-Identifier: Apache-2.0
"""The compiler `jax`; it and jax are loaded on first use.

jax compiles a function once and executes it many times, on several devices at once, so nothing of one run may be in
the program. Where hooks are collected, every run gets a number. It goes into the program as an argument, from there
to the callback of each hook, and the callback finds the receiver of this run by it, on whatever thread it is called.
Which hooks are collected is part of the program: without any, it has no callbacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import io_callback
from jax.experimental.xla_metadata import set_xla_metadata  # pyright: ignore[reportUnknownVariableType]

from forebay.arrays.compilers import Function, Options, check_options
from forebay.arrays.tree_structure import Structure, flatten
from forebay.arrays.value_hooks import Collector, collecting, collector
from forebay.errors import ConfigError

# jax's own annotations are partial: to a strict checker these are unknown.
_jax = cast("Any", jax)
_io_callback = cast("Any", io_callback)
_set_xla_metadata = cast("Any", set_xla_metadata)

_OPTIONS = ("compiler_options", "donate_argnums", "inline", "keep_unused", "platform")


class _Tree:
    """One of our trees as an argument or result of a jitted function; jax does not know all of our containers."""

    def __init__(self, structure: Structure, leaves: list[Any]) -> None:
        self.structure = structure
        self.leaves = leaves

    def open(self) -> tuple[list[Any], Structure]:
        """Return the leaves, and what jax compares to know whether two trees are alike."""
        return self.leaves, self.structure


_jax.tree_util.register_pytree_node(_Tree, _Tree.open, _Tree)


class Jax:
    """Compiles with `jax.jit`, once for every shape and dtype of arguments."""

    def compile(self, fn: Function, options: Options) -> Function:
        """Return the compiled function; it returns when its results are computed.

        Args:
            fn: A function that jax can trace.
            options: `device` is where it runs (a `jax.Device`, or text such as `cpu:1`), by default the
                first one of `platform`; arguments are moved there. With neither, jax decides.
                `compiler_options`, `donate_argnums`, `inline` and `keep_unused` go to `jax.jit`.

        Raises:
            ConfigError: An option is unknown, or there is no such device.
        """
        check_options("jax", options, _OPTIONS)
        device = _find_device(options)

        def traced(tree: _Tree, run: Any, names: frozenset[str]) -> _Tree:
            with _emitting(names, run):
                leaves, structure = flatten(fn(tree.structure.unflatten(tree.leaves)))
            return _Tree(structure, leaves)

        passed = {name: options[name] for name in _OPTIONS if name in options and name != "platform"}
        jitted = _jax.jit(traced, static_argnums=2, **passed)

        def call(tree: Any) -> Any:
            leaves, structure = flatten(tree)
            if device is not None:
                leaves = _jax.device_put(leaves, device)
            with _receiving(collector()) as (run, names):
                result = _jax.block_until_ready(jitted(_Tree(structure, leaves), run, names))
            return result.structure.unflatten(result.leaves)

        return call

    def partitions(self, options: Options) -> list[dict[str, Any]]:
        """Return one partition for each device of `platform` (jax's default one if not given).

        Raises:
            ConfigError: There is no such platform here.
        """
        return [{**options, "device": device} for device in _devices(options.get("platform"))]


_runs: dict[int, Callable[[str, Any], None]] = {}
_numbers = itertools.count()


@contextmanager
def _receiving(current: Collector | None) -> Generator[tuple[Any, frozenset[str]]]:
    """Give the number of a run and the hooks to collect in it; at the end, all of them have been received."""
    if current is None or not current.names:
        yield np.uint32(0), frozenset()
        return
    failures: list[BaseException] = []

    def receive(name: str, value: Any) -> None:
        try:
            if not failures:
                current.sink(name, value)
        except BaseException as error:  # noqa: BLE001  # it must not fail inside of the program: the device may be shared
            failures.append(error)

    run = next(_numbers) % 2**32
    _runs[run] = receive
    try:
        try:
            yield np.uint32(run), current.names
        finally:
            _jax.effects_barrier()  # of this thread only: jax orders callbacks for each thread
    finally:
        del _runs[run]
    if failures:
        raise failures[0]


@contextmanager
def _emitting(names: frozenset[str], run: Any) -> Generator[None]:
    """Make each listed hook that is reached while tracing a callback of the program."""

    def emit(name: str, x: Any) -> None:
        leaves, structure = flatten(x)

        def receive(run: Any, *values: Any) -> None:
            # Copied: the program may use the memory for something else when the callback is over.
            _runs[int(run)](name, structure.unflatten(np.array(value) for value in values))

        _io_callback(receive, None, run, *leaves, ordered=True)

    with collecting(names, emit, tracing=True):
        if not names:
            yield
            return
        # jax remembers the traces of nested jitted functions. One with a callback refers to `run` of this trace, so it
        # must not be found by others; metadata is part of what it is remembered by.
        with _set_xla_metadata(forebay_trace=next(_numbers)):
            yield


def _find_device(options: Options) -> Any:
    device = options.get("device", options.get("platform"))
    if not isinstance(device, str):
        return device
    platform, _, index = device.partition(":")
    devices = _devices(platform)
    if index and not (index.isdecimal() and int(index) < len(devices)):
        raise ConfigError(f"unknown device {device!r}; {platform} has {', '.join(map(str, devices))}")
    return devices[int(index or 0)]


def _devices(platform: Any) -> list[Any]:
    try:
        return list(_jax.local_devices(backend=platform))
    except RuntimeError as error:
        raise ConfigError(f"jax has no platform {platform!r} here: {error}") from error
