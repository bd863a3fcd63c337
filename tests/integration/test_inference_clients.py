# SPDX-License-Identifier: Apache-2.0
"""The clients of others speak the Open Inference Protocol with us, each in an environment of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv/environments"


@pytest.mark.parametrize(
    "environment, script",
    [("kserve-clients", "triton_http.py"), ("kserve", "kserve_http.py")],
    ids=["triton", "kserve"],
)
def test_a_client_over_http(launch, models, environment, script):
    python = ENVIRONMENTS / environment / "bin/python"
    if not python.exists():
        pytest.skip(f"make environment NAME={environment} makes what this needs")
    server = launch(models / "tensors.py", "--manage", "--worker-kind", "thread")
    address = server.url.removeprefix("http://") if environment == "kserve-clients" else server.url
    done = subprocess.run(
        [python, HERE / script, address], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stdout.endswith("served\n"), done.stdout + done.stderr
