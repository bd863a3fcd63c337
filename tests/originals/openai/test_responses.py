# SPDX-License-Identifier: Apache-2.0
"""What OpenAI's service answers at `/v1/responses`."""

import pytest
from tests.originals.replay import assert_as_recorded, exchanges, sent


@pytest.mark.parametrize("exchange", exchanges("openai/responses.json"))
def test_a_response(launch, exchange):
    server = launch("recorded_chats.py", "--worker-kind", "thread")
    assert_as_recorded(exchange, sent(server.client, exchange), page="docs/how-to/openai.md")
