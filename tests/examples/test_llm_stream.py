# SPDX-License-Identifier: Apache-2.0
"""The llm-stream example with its real model, for a few tokens, asked by OpenAI's client."""

from pathlib import Path

import pytest
from tests.compat.openai_protocol.clients import PYTHON, Asker, Client, chat
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "llm-stream"
LLM = ROOT / ".venv/environments/llm/bin/python"
WITH_FOREBAY = {"PYTHONPATH": str(ROOT / "src")}

pytestmark = pytest.mark.skipif(
    not (LLM.exists() and PYTHON.exists()), reason="no environments with xllamacpp and OpenAI's client: make setup"
)


@pytest.fixture
def askers():
    found = [Asker(), Asker()]
    yield found
    for one in found:
        one.close()


def test_a_short_answer_does_not_wait_for_a_long_one(serve, askers):
    options = ["--worker-kind", "process", "--python", str(LLM)]
    server = serve(EXAMPLE / "model.py", *options, env=WITH_FOREBAY)
    client, other = (Client(asker, server, {}) for asker in askers)
    story = chat("Tell me a very long story about a river.", model="smol", temperature=0, stream=True)
    # The client of the long one takes its first parts and then waits, until it goes away at the end of the test.
    other.asker.send(other.call("chat.completions.create", **story, max_tokens=1900))
    eventually(lambda: server.metric("forebay_stream_parts_total", endpoint="smol") > 2)
    more = {"max_tokens": 3, "stream_options": {"include_usage": True}, "extra_body": {"top_k": 1}}
    for one in client.ask_all(*[("chat.completions.create", story | more)] * 2):
        said = [choice for part in one["parts"] for choice in part["choices"]]
        assert len([choice for choice in said if choice["delta"]["content"]]) >= 2
        assert said[-1]["finish_reason"] == "length"
        used = one["parts"][-1]["usage"]
        assert (used["prompt_tokens"] > 10, used["completion_tokens"]) == (True, 3)
    assert server.client.get("/models/smol").json()["in_flight"] == 1  # the long one goes on
    error = client.chat("word " * 2500, model="smol", stream=True)["error"]
    assert (error["status_code"], "context size" in error["message"]) == (400, True)
    assert "Streams side by side" in server.client.get("/models/page/streams").text
    other.asker.process.kill()
    eventually(lambda: server.client.get("/models/smol").json()["in_flight"] == 0)


def test_the_model_is_a_node_of_a_graph(serve, askers):
    server = serve(EXAMPLE / "graph.py", command=(str(LLM), "-m", "forebay", "serve"), env=WITH_FOREBAY)
    found = Client(askers[0], server, {}).chat("When does the ferry to Holm leave?", model="guide", max_tokens=16)
    assert "9:40" in found["result"]["choices"][0]["message"]["content"]
    assert found["result"]["usage"]["completion_tokens"] <= 16
