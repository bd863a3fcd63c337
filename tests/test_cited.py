# SPDX-License-Identifier: Apache-2.0
"""Each requirement of the specifications is cited by a test, so that a search for its number finds what holds it."""

import re
from pathlib import Path

import pytest

LAST = {"B": 81, "F": 135, "N": 156, "O": 147, "P": 160, "S": 74, "T": 28}
"""Last numbers: batching and ventu, findings, Nucleus, OpenVINO Model Server, pipelines, servings, traps of graphs."""
OPEN = {
    "B": {37, 38, 39},  # there are no such numbers
    "T": {21},  # a package that cannot be installed
}


@pytest.fixture(scope="module")
def comments():
    """What the comments and docstrings of all tests say, and of the scripts that they run."""
    files = Path(__file__).parent.rglob("*.py")
    return "\n".join(comment for file in files for comment in re.findall(r"(?:#|\"{3}).*", file.read_text()))


@pytest.mark.parametrize("prefix", LAST)
def test_every_requirement_has_a_test(comments, prefix):
    cited = {int(number) for number in re.findall(rf"\b{prefix}(\d+)\b", comments)}
    assert {number for number in range(1, LAST[prefix] + 1) if number not in cited} == OPEN.get(prefix, set())
