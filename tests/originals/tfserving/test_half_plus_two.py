# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow Serving's own tests expect of its REST API, for the model that they serve."""

import shutil

import pytest
from tests.models.saved_models import PYTHON, QUIET, SOURCE, saved_models
from tests.originals.replay import assert_as_recorded, exchanges, sent


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    shutil.copytree(saved_models() / "half_plus_two", repository / "half_plus_two")
    command = [str(PYTHON), "-m", "forebay", "serve"]
    return launch(repository, "--worker-kind", "thread", command=command, env={**QUIET, "PYTHONPATH": str(SOURCE)})


@pytest.mark.parametrize("exchange", exchanges("tfserving/half_plus_two.json"))
def test_half_plus_two(server, exchange):  # F81, F85
    assert_as_recorded(exchange, sent(server.client, exchange), page="docs/how-to/tensorflow-serving.md")
