# SPDX-License-Identifier: Apache-2.0
"""Graphs over gRPC, with the client that the original's documentation uses."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.compat.ovms.conftest import config, one_node, write

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv/environments/kserve-clients/bin/python"

ECHO = """
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            (one,) = inputs
            if bytes(one) == b"bad":
                raise ValueError("bad pixel")
            return [Tensor("output", one, shape=one.shape, datatype=one.datatype)]
    """
COUNT = """
    from pathlib import Path
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            count = int(bytes(inputs[0]))
            try:
                for step in range(count):
                    yield [Tensor("output", b"%d" % step)]
            except GeneratorExit:
                Path(__file__).with_name("closed").touch()
                raise
    """


def test_graphs_over_grpc(serve, tmp_path):
    if not PYTHON.exists():
        pytest.skip("make environment NAME=kserve-clients makes what this needs")
    files = {"config.json": config(echo={}, count={}), "echo/graph.pbtxt": one_node(), "echo/model.py": ECHO}
    write(tmp_path, files | {"count/graph.pbtxt": one_node(loops=True), "count/model.py": COUNT})
    server = serve(tmp_path, "--grpc-port", "0")
    found = re.search(r"gRPC at ([\d.:]+)", server.log)
    assert found is not None
    command = [PYTHON, HERE / "triton_grpc.py", found[1], tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert ran.stdout.endswith("served\n"), ran.stderr[-3000:]
