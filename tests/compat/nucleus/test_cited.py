# SPDX-License-Identifier: Apache-2.0
"""Each requirement of the specification, N1 to N156, is cited by a test: `grep -rn '# .*N42' tests` finds it."""

import re
from pathlib import Path

TENSORFLOW = range(125, 139)
"""Not served yet."""


def test_every_requirement_has_a_test():
    text = "\n".join(path.read_text() for path in Path(__file__).parents[2].rglob("test_*.py"))
    cited = {int(number) for number in re.findall(r"\bN(\d+)\b", text)}
    assert [number for number in range(1, 157) if number not in cited and number not in TENSORFLOW] == []
