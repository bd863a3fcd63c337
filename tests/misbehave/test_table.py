# SPDX-License-Identifier: Apache-2.0
"""The table of misbehaving models is whole, and the page is made of it."""

from __future__ import annotations

import pytest
from tests.misbehave.catalogue import WAYS
from tests.misbehave.page import PAGE, SECTIONS, page
from tests.misbehave.who import HOOKS, KINDS, LETTERS, PLACES, cells, is_tried, who


def test_the_page_is_what_the_table_says():
    assert PAGE.read_text() == page(), "write it again: python -m tests.misbehave.page"


def test_there_are_ways_of_every_sort():
    assert len(WAYS) >= 100
    assert {way.kind for way in WAYS} == set(SECTIONS)
    assert len({way.name for way in WAYS}) == len({way.text for way in WAYS}) == len(WAYS)
    assert {letter for way in WAYS for kind in KINDS for place in PLACES for letter in who(way, kind, place)} <= {
        *LETTERS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_run_tries_every_way_that_can_be_tried(kind):
    places = (*PLACES, *HOOKS)
    tried = {number for place in places for number in cells(kind, place, is_full=False)}
    assert tried == {number for number, way in enumerate(WAYS) if any(is_tried(way, kind, place) for place in places)}
