# SPDX-License-Identifier: Apache-2.0
"""Each requirement of the specification is cited by a test, so that a search for its number finds what holds it."""

import re
from pathlib import Path

LAST = 156


def test_every_requirement_has_a_test():
    tests = Path(__file__).parents[2].rglob("test_*.py")
    text = "\n".join(path.read_text() for path in tests)
    cited = {int(number) for number in re.findall(r"\bN(\d+)\b", text)}
    assert [number for number in range(1, LAST + 1) if number not in cited] == []
