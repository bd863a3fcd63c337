# SPDX-License-Identifier: Apache-2.0
"""Misbehaving models on the event loop and in threads: whoever the table does not name is unhurt."""

from __future__ import annotations

import pytest
from tests.misbehave.catalogue import WAYS
from tests.misbehave.who import PLACES, cells, who

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("place", [*PLACES[:8], "hooks", "key"])
def test_inline(place, differences):
    assert differences("inline", place) == {}


@pytest.mark.parametrize("place", [*PLACES[:8], "pipeline", "hooks", "key"])
def test_thread(place, differences):
    assert differences("thread", place) == {}


@pytest.mark.parametrize("kind", ["inline", "thread"])
def test_where_models_are_loaded_and_unloaded(kind, lives):
    for number in cells(kind, "load", is_full=True):
        assert lives(kind, number) == who(WAYS[number], kind, "load"), WAYS[number].name
