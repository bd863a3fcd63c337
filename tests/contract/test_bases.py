# SPDX-License-Identifier: Apache-2.0
"""Whatever does the work of a runner or of a pool derives from the one base there is, and has its defaults."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import forebay
from forebay.testing import ManualPool
from forebay.workers.pool import Pool
from forebay.workers.runner import Runner, WorkerContext

ROOT = Path(forebay.__file__).parent


def classes_with(text, *methods):
    """All classes of modules in which this text stands that define these methods themselves."""
    for path in ROOT.rglob("*.py"):
        if text not in path.read_text(encoding="utf-8"):
            continue
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for found in vars(importlib.import_module(name)).values():
            if inspect.isclass(found) and found.__module__ == name and set(methods) <= vars(found).keys():
                yield found


@pytest.mark.parametrize(
    "base, text, methods",
    [
        (Runner, "def run(self, items: Sequence[Item])", ["run"]),
        (Pool, "def submit(self, batch: EntryBatch, done: Done)", ["submit", "statistics"]),
    ],
)
def test_whatever_works_as_one_derives_from_the_base(base, text, methods):
    found = list(classes_with(text, *methods))
    assert len(found) > 4
    assert [one for one in found if not issubclass(one, base)] == []


class Plain(Runner):
    def run(self, items):
        return [item.body for item in items]


@pytest.mark.anyio
async def test_a_runner_needs_no_more_than_run():
    runner = Plain()
    await runner.open_async(WorkerContext())
    assert runner.run_async([]) == []
    await runner.close_async()
    assert (runner.borrows_input, list(runner.phases)) == (False, [])


def test_a_pool_has_no_seats_does_not_rest_and_lands_nothing_unless_it_says_so():
    pool = ManualPool()
    assert (pool.room, pool.standing, pool.places, pool.can_rest) == (None, 0, None, False)
    with pytest.raises(NotImplementedError):
        pool.rest(0.001)
