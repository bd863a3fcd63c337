# SPDX-License-Identifier: Apache-2.0
"""Damaged files of models are refused with a sentence; `make fuzz` damages more of them, and of other kinds."""

import random

from tests.fuzz.door_model_files import STEADY, outcome, save

EACH = 12


def test_damaged_files_are_refused_or_served(tmp_path):
    save(tmp_path, boosters=False)
    for one in STEADY:
        dice = random.Random(f"{one.model} {one.file}")
        found = [outcome(tmp_path, one, tmp_path / "damaged", dice) for _ in range(EACH)]
        assert {*found} <= {"refused", "loaded"}, (one, found)
        assert "refused" in found, one
