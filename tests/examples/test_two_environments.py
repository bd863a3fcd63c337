# SPDX-License-Identifier: Apache-2.0
"""Two workers of one endpoint in two environments: the example makes them, kills one and loses nothing."""

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
    assert f"numpy {'1.26.4' if sys.version_info < (3, 13) else '2.1.0'}" in ended.stdout
    assert "numpy 2.2.6" in ended.stdout
    assert "answered, 0 lost" in ended.stdout, ended.stdout
