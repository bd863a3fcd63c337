# SPDX-License-Identifier: Apache-2.0
"""The same script behind ours: each answer over HTTP is the original's, field by field."""

import shutil

import pytest
import yaml
from tests.compat.pipeline.test_original import EITHER
from tests.originals.replay import assert_as_recorded, exchanges, sent
from tests.ports import free_port


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    shutil.copy(EITHER, folder / "server.py")
    config = {"rpc_port": free_port(), "http_port": 18081, "worker_num": 8}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    return launch(folder / "server.py", env={"XDG_STATE_HOME": str(folder / "state")})


@pytest.mark.parametrize("exchange", exchanges("pipeline/http.json"))
def test_http(server, exchange):  # F105, F106, F109
    found = sent(server.client, exchange)
    assert_as_recorded(exchange, found, page="src/forebay/surfaces/pipeline/README.md")
