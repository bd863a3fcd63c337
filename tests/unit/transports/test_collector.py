# SPDX-License-Identifier: Apache-2.0
"""What the garbage collector need not walk over, where models come and go."""

import asyncio
import gc
import weakref

import pytest
from tests.waiting import reached

from forebay.transports import garbage_collection


class Model:
    def __init__(self):
        self.itself = self


@pytest.fixture
def walks(monkeypatch):
    monkeypatch.setattr(garbage_collection, "LONG_S", 0.0)
    monkeypatch.setattr(garbage_collection, "LOOK_S", 0.01)
    found = garbage_collection.LongWalks()
    found.start()
    yield found
    found.stop()
    gc.unfreeze()
    gc.freeze()  # as it was; see tests/conftest.py


def test_what_has_survived_a_long_walk_is_not_walked_over_again(walks, monkeypatch):
    monkeypatch.setattr(garbage_collection, "LONG_S", 1e9)
    gc.collect()
    before = gc.get_freeze_count()
    monkeypatch.setattr(garbage_collection, "LONG_S", 0.0)
    gc.collect(1)
    assert gc.get_freeze_count() == before  # it was short: there was little to walk over
    models = [Model() for _ in range(1000)]
    gc.collect()
    assert gc.get_freeze_count() > before + len(models)


@pytest.mark.parametrize("quiet", [1e9, -1.0], ids=["quiet", "busy"])
def test_what_has_left_after_that_is_found_in_a_quiet_moment_or_when_there_was_none(walks, monkeypatch, quiet):
    monkeypatch.setattr(garbage_collection, "QUIET", quiet)
    monkeypatch.setattr(garbage_collection, "MAX_WAIT_S", 0.2)
    model = Model()
    gc.collect()
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is not None

    async def leave():
        walks.left()
        walks.left()
        await reached(lambda: seen() is None)
        assert walks._timer is None

    asyncio.run(leave())


def test_a_server_looks_only_where_something_was_frozen(monkeypatch):
    walks = garbage_collection.LongWalks()
    walks.left()  # needs no loop, for it sets no timer
    assert walks._timer is None
