# SPDX-License-Identifier: Apache-2.0
"""What KServe's and MLServer's Python servers answer over HTTP, for the same model."""

import pytest
from tests.originals.replay import assert_as_recorded, exchanges, sent


@pytest.fixture(scope="module")
def server(launch):
    return launch("twice.py", "--worker-kind", "thread")


@pytest.mark.parametrize("exchange", [*exchanges("kserve/twice.kserve.json"), *exchanges("kserve/twice.mlserver.json")])
def test_twice(server, exchange):
    assert_as_recorded(exchange, sent(server.client, exchange), page="docs/how-to/kserve.md")
