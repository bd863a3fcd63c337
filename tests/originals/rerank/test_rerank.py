# SPDX-License-Identifier: Apache-2.0
"""What Cohere's and Jina's services and vLLM answer to requests for ranks and scores."""

import pytest
from tests.originals.replay import assert_as_recorded, exchanges, sent

PAGE = "docs/how-to/openai.md"


@pytest.mark.parametrize(
    "exchange", [one for name in ("cohere", "jina", "vllm") for one in exchanges(f"rerank/{name}.json")]
)
def test_ranks_and_scores(launch, exchange):
    server = launch("rankers.py", "--worker-kind", "thread")
    assert_as_recorded(exchange, sent(server.client, exchange), page=PAGE)
