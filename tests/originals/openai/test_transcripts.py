# SPDX-License-Identifier: Apache-2.0
"""What OpenAI's service and vLLM answer at `/v1/audio/transcriptions`."""

import pytest
from tests.originals.replay import assert_as_recorded, exchanges, read_json, sent

FILES = ("transcripts", "vllm_transcripts")


@pytest.mark.parametrize("exchange", [one for name in FILES for one in exchanges(f"openai/{name}.json")])
def test_a_transcript(launch, exchange):
    server = launch("recorded_transcripts.py", "--worker-kind", "thread")
    if exchange.name == "events":
        request = exchange.request
        answer = server.client.post(request["path"], headers=request["headers"], content=request["text"])
        told = [read_json(one.removeprefix("data: ")) for one in answer.text.split("\n\n")[:-1]]
        found = {"status": answer.status_code, "json": told}
    else:
        found = sent(server.client, exchange)
    assert_as_recorded(exchange, found, page="docs/how-to/openai.md")
