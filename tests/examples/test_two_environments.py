# SPDX-License-Identifier: Apache-2.0
"""Two workers of one endpoint in two environments: the example makes them, kills one and loses nothing."""

import re
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "two-environments"


def test_both_versions_answer_and_nothing_is_lost():
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE / "demo.py")], check=False, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    both = re.search(r"numpy (\S+): \d+, numpy (\S+): \d+", ended.stdout)
    assert both, ended.stdout
    assert both[1] != both[2]
    assert both[1].startswith("1.") is (sys.version_info < (3, 13))
    assert "answered, 0 lost" in ended.stdout, ended.stdout
