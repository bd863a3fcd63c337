# SPDX-License-Identifier: Apache-2.0
"""Importing the files of a project once more, in a process in which the code of before still runs.

What a project has imported from its own folders is taken out of `sys.modules`, so that it is read again. The code of
before keeps its modules, classes and globals; only an `import` inside one of its functions finds the new ones.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import os
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_FOREIGN: Final = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})
"""Folders within a project's own that are not its own."""


class _Turns:
    """Has threads read projects one after the other, since they share `sys.modules`; who hangs is not waited for."""

    def __init__(self) -> None:
        self._over = threading.Condition()
        self._reader: int | None = None
        self._until = 0.0

    @contextlib.contextmanager
    def take(self, limit_s: float) -> Generator[None]:
        """Wait for the turn of this thread; others wait for its end for so long at most."""
        me = threading.get_ident()
        if self._reader == me:  # what is imported reads a project itself
            yield
            return
        with self._over:
            while self._reader is not None and (left_s := self._until - time.monotonic()) > 0:
                self._over.wait(left_s)
            self._reader, self._until = me, time.monotonic() + limit_s
        try:
            yield
        finally:
            with self._over:
                if self._reader == me:
                    self._reader = None
                    self._over.notify()


_turns: Final = _Turns()


@contextlib.contextmanager
def fresh_modules(folders: Collection[Path], limit_s: float) -> Generator[None]:
    """Import what lies in these folders anew; where that fails, what was not imported again is there as before.

    Args:
        limit_s: How long that takes at most, if it does not hang; others that import anew wait meanwhile.
    """
    with _turns.take(limit_s), _taken_out(folders):
        yield


@contextlib.contextmanager
def _taken_out(folders: Collection[Path]) -> Generator[None]:
    before = {name: module for name, module in list(sys.modules.items()) if _is_in(name, module, folders)}
    collectors = [one for module in before.values() for one in _collectors(module)]
    for name, module in before.items():
        del sys.modules[name]
        _forget_bytecode(module)
    for one in collectors:
        _register(one, is_wanted=False)
    importlib.invalidate_caches()
    linecache.checkcache()
    try:
        yield
    except BaseException:
        for name, module in before.items():
            sys.modules.setdefault(name, module)
        for one in collectors:
            _register(one, is_wanted=True)
        raise


def python_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Return the Python files of a project; not those of environments and of what begins with a dot in it."""
    try:
        entries = list(os.scandir(folder))
    except OSError:  # it is gone
        return
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _FOREIGN:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from python_files(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield entry


def _is_in(name: str, module: ModuleType, folders: Collection[Path]) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or name == "__main__" or name.partition(".")[0] == "forebay":
        return False
    path = Path(file)
    for folder in folders:
        if path.is_relative_to(folder):
            return _FOREIGN.isdisjoint(path.relative_to(folder).parts)
    return False


def _forget_bytecode(module: ModuleType) -> None:
    """Have the file compiled again: an edit within a second that keeps its length looks like no edit."""
    with contextlib.suppress(OSError, NotImplementedError, TypeError):
        Path(importlib.util.cache_from_source(str(module.__file__))).unlink()


def _collectors(module: ModuleType) -> Iterator[Any]:
    """Return the metrics that a module has made: they cannot be registered twice."""
    client = sys.modules.get("prometheus_client.metrics")
    if client is None:
        return
    for value in list(vars(module).values()):
        inner = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else ()
        yield from (one for one in (value, *inner) if isinstance(one, client.MetricWrapperBase))


def _register(collector: Any, *, is_wanted: bool) -> None:
    from prometheus_client.registry import REGISTRY

    with contextlib.suppress(KeyError, ValueError):  # it is in another registry, or its place is taken by now
        (REGISTRY.register if is_wanted else REGISTRY.unregister)(collector)
