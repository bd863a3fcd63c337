# SPDX-License-Identifier: Apache-2.0
"""Misbehaving models in worker processes: whoever the table does not name is unhurt, and workers are replaced."""

from __future__ import annotations

import pytest
from tests.misbehave.catalogue import WAYS
from tests.misbehave.who import PLACES, cells, who

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("place", [*PLACES, "hooks", "key"])
def test_process(place, differences):
    assert differences("process", place) == {}


@pytest.mark.parametrize("kind", ["process"])
def test_where_models_are_loaded_and_unloaded(kind, lives):
    for number in cells(kind, "load", is_full=True):
        assert lives(kind, number) == who(WAYS[number], kind, "load"), WAYS[number].name
