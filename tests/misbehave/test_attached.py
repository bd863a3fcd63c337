# SPDX-License-Identifier: Apache-2.0
"""Misbehaving models in workers that somebody else starts: whoever the table does not name is unhurt."""

from __future__ import annotations

import pytest
from tests.misbehave.who import MODELS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("place", [*MODELS, "hooks"])
def test_attached(place, differences):
    assert differences("attached", place) == {}
