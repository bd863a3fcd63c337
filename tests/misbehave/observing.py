# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
"""What a way to misbehave did: asked together with another request, and followed by two more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.misbehave import catalogue
from tests.misbehave.rigs import PATIENCE_S, eventually
from tests.processes import kill_if_noted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.misbehave.rigs import Rig

HELD_S = 0.1
"""How long a request is watched that is said to be held up by another one."""

_numbers = itertools.count(1)


async def observe(rig: Rig, number: int, folder: Path, declared: str) -> str:
    """Have a rig do a way and say who was hurt, in the letters of the table; `declared` only says how long to wait."""
    one = catalogue.WAYS[number]
    catalogue.again()
    rig.be_patient(is_patient="w" not in declared)
    before = rig.replaced
    for name in ("began", "children", "answered"):
        (folder / name).unlink(missing_ok=True)
    first, second = next(_numbers), next(_numbers)
    own = asyncio.create_task(rig.ask(first, number))
    mate = asyncio.create_task(rig.ask(second, catalogue.FINE))
    relief = None
    if one.hangs and rig.needs_relief and "w" in declared:
        relief = asyncio.create_task(_relieve(rig, before))
    if one.hangs:
        await _cut_short(own, mate, folder / "began", is_hurt="B" in declared)
    _, late = await asyncio.wait([own, mate], timeout=PATIENCE_S)
    assert not late, f"{one.name}: no answer within {PATIENCE_S} s"
    (folder / "answered").touch()
    found = "R" if not _is_fine(rig, own, None) else "-"
    if not _is_fine(rig, mate, second):
        found = "B" if found == "R" else "M"
    if one.hangs and "t" in declared:
        assert not rig.is_whole
        found += "t"
        if rig.slots > 1:
            await _ask_two(rig)  # the others go on beside it
    if one.hangs and "w" in declared:
        await eventually(lambda: rig.replaced > before, "a worker's end")
    if relief is not None:
        await relief
    if "t" in declared:
        catalogue.release()
        rig.relieve()
    await _ask_two(rig)
    catalogue.release()
    await eventually(lambda: rig.is_whole, "full strength")
    _end_children(folder / "children")
    has_ended = rig.ends and not one.hangs
    rig.ends.clear()
    if has_ended:
        return "S"
    return found + "w" if rig.replaced > before and "t" not in found else found


async def _relieve(rig: Rig, before: int) -> None:
    """End a worker by hand once the server has given it up."""
    await eventually(lambda: rig.replaced > before, "a worker's end")
    rig.relieve()


async def _cut_short(own: Any, mate: Any, began: Path, *, is_hurt: bool) -> None:
    """The client of what hangs goes away once it hangs; the other one too, if it is held up."""
    await eventually(lambda: began.exists() or own.done(), "the call")
    own.cancel()
    await asyncio.wait([mate], timeout=HELD_S if is_hurt else PATIENCE_S)
    mate.cancel()
    await asyncio.wait([own, mate], timeout=PATIENCE_S)


async def _ask_two(rig: Rig) -> None:
    """Two requests after it, which share a batch where there are batches, are answered as they should be."""
    numbers = next(_numbers), next(_numbers)
    answers = await asyncio.wait_for(
        asyncio.gather(*(rig.ask(number, catalogue.FINE) for number in numbers)), PATIENCE_S
    )
    for number, answer in zip(numbers, answers, strict=True):
        assert rig.is_right(number, answer), answer


def _is_fine(rig: Rig, task: Any, number: int | None) -> bool:
    if task.cancelled() or task.exception() is not None:
        return False
    return number is None or rig.is_right(number, task.result())


def _end_children(noted: Path) -> None:
    if not noted.exists():
        return
    for pid in noted.read_text().split():
        kill_if_noted(int(pid), noted.stat().st_mtime)
        with contextlib.suppress(OSError):
            os.waitpid(int(pid), 0)


@contextlib.contextmanager
def sheltered() -> Iterator[None]:
    """Undo what user code does to the process of the test."""
    folder, environ, path, modules = Path.cwd(), dict(os.environ), list(sys.path), dict(sys.modules)
    streams, hooks = (sys.stdout, sys.stderr), (sys.excepthook, threading.excepthook, sys.unraisablehook)
    state, interval, limit = random.getstate(), sys.getswitchinterval(), sys.getrecursionlimit()
    umask = os.umask(0o22)
    os.umask(umask)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.umask(umask)
        sys.setrecursionlimit(limit)
        sys.setswitchinterval(interval)
        sys.setprofile(None)
        random.setstate(state)
        sys.stdout, sys.stderr = streams
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
        sys.path[:] = path
        sys.modules.update(modules)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        gc.enable()
        for thing in catalogue.kept:
            if isinstance(thing, asyncio.AbstractEventLoop):
                thing.close()
        catalogue.kept.clear()
        catalogue.release()
