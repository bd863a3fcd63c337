# SPDX-License-Identifier: Apache-2.0
"""The site can be made: pages and the docstrings they show can be read, and every link between them leads somewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_sphinx_has_nothing_to_complain_of(tmp_path):
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    # As `make docs`, but for writing what it has made.
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "dummy", "-c", "docs"]
    made = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), ".", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert made.returncode == 0, made.stderr
