# SPDX-License-Identifier: Apache-2.0
"""The started servings of this program by name, and how they are called by it."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from forebay.errors import ConfigError
from forebay.serving.servings.partitions import missing

if TYPE_CHECKING:
    from collections.abc import Generator

    from forebay.serving.servings.started import ServingProcess

    Where = Literal["any", "local", "distributed"]

_lock = threading.Lock()
_running: dict[str, ServingProcess[Any, Any]] = {}
_starting: set[str] = set()


def _renew() -> None:
    global _lock  # noqa: PLW0603 - a thread that is not in a forked child may have held it
    _lock = threading.Lock()
    _starting.clear()  # by threads that are not here


os.register_at_fork(after_in_child=_renew)


@contextmanager
def taking(name: str) -> Generator[None]:
    """Keep a name from others while a process starts, which is known under it once it has registered.

    Raises:
        ConfigError: The name is taken.
    """
    with _lock:
        taken = _running.get(name)
        if name in _starting or (taken is not None and not taken.is_forked):
            raise ConfigError(
                f"a serving named {name!r} is running already; stop it first, or start this one as another name"
            )
        _starting.add(name)
    try:
        yield
    finally:
        with _lock:
            _starting.discard(name)


def register(process: ServingProcess[Any, Any]) -> None:
    """Make a process that has started known under its name."""
    with _lock:
        _running[process.name] = process


def forget(process: ServingProcess[Any, Any]) -> None:
    """Free the name of a process."""
    with _lock:
        if _running.get(process.name) is process:
            del _running[process.name]


def find(name: str) -> ServingProcess[Any, Any] | None:
    """Return the process of this name."""
    return _running.get(name)


def running() -> list[ServingProcess[Any, Any]]:
    """Return all processes that have a name."""
    with _lock:
        return list(_running.values())


def batched_run(name: str, given: Any, *, timeout_s: float | None = None, where: Where = "any") -> Any:
    """Execute an input on the serving that was started under this name, in batches with what other callers hand in.

    Args:
        name: What it was started as.
        given: What the client preprocessing of that serving takes.
        timeout_s: Time after which the answer is of no use; None waits for it.
        where: `local` for a serving of this program; `any` for one of the cluster if there is none here.

    Raises:
        ServingNotFound: No serving runs under this name.
        ForebayError: See `ServingProcess.batched_run`.
    """
    return _find(name, where).batched_run(given, timeout_s=timeout_s)


async def batched_run_async(name: str, given: Any, *, timeout_s: float | None = None, where: Where = "any") -> Any:
    """Execute an input on the serving that was started under this name; see `batched_run`."""
    return await _find(name, where).batched_run_async(given, timeout_s=timeout_s)


def _find(name: str, where: Where) -> ServingProcess[Any, Any]:
    if where not in {"any", "local", "distributed"}:
        raise ConfigError(f"where is {where!r}; 'any', 'local' and 'distributed' are possible")
    process = find(name)
    # Servings of other nodes are not looked for yet: this program is a cluster of its own.
    if process is None or where == "distributed":
        raise missing(name)
    return process
