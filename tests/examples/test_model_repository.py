# SPDX-License-Identifier: Apache-2.0
"""The model-repository example: real models come and go, and an answer changes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "model-repository"
NEEDED = ("magika", "rapidocr_onnxruntime", "onnxruntime")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="a package of the example is missing"
)


def test_what_it_prints_is_what_its_page_shows():
    result = subprocess.run(
        [sys.executable, str(EXAMPLE / "demo.py")], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 0, result.stderr
    page = (EXAMPLE / "README.md").read_text()
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    assert [line for line in lines if f"    {line}\n" not in page] == []
