# SPDX-License-Identifier: Apache-2.0
"""A project brings the versions it needs; the server runs on what is there."""

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from tests.compat.nucleus.conftest import Server, write_project

ROOT = Path(__file__).resolve().parents[3]
OLDEST = ROOT / ".venv/environments/oldest/bin/python"

HANDLER = """
    from importlib.metadata import version

    import numpy
    from starlette.responses import JSONResponse


    class Handler:
        def handle_post(self, payload):
            versions = {name: version(name) for name in ("starlette", "msgspec", "numpy")}
            return JSONResponse({"sum": float(numpy.sum(payload["values"])), **versions})
"""


def test_a_project_runs_with_the_oldest_versions_the_server_takes(tmp_path):  # N145
    state = tmp_path / "state"
    state.mkdir()
    folder = write_project(tmp_path / "project", HANDLER)
    out, err = tmp_path / "out", tmp_path / "err"
    command = [str(OLDEST), "-m", "forebay", "serve", str(folder), "--http-port", "0", "--state-dir", str(state)]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env)
    server = Server(folder, state, process, out, err)
    try:
        server.wait_ready()
        answer = server.request("POST", "/", json={"values": [1, 2, 3.5]}).json()
        assert answer.pop("sum") == 6.5
        lines = Path(ROOT, "tests/environments/oldest.txt").read_text().splitlines()
        pins = [Requirement(line) for line in lines if not line.startswith("#")]
        pinned = {one.name: str(one.specifier)[2:] for one in pins if one.marker is None or one.marker.evaluate()}
        for name, found in answer.items():
            assert found == pinned[name]
            assert found != version(name), "this environment should be older than the one of the tests"
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()
