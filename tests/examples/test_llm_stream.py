# SPDX-License-Identifier: Apache-2.0
"""The llm-stream example with its real model, for a few tokens, asked by OpenAI's client and by its page."""

import itertools
from pathlib import Path

import pytest
from tests.browser import PROGRAM
from tests.compat.openai_protocol.clients import PYTHON, Asker, Client, chat
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "llm-stream"
LLM = ROOT / ".venv/environments/llm/bin/python"
WITH_FOREBAY = {"PYTHONPATH": str(ROOT / "src")}

pytestmark = pytest.mark.skipif(
    not (LLM.exists() and PYTHON.exists()), reason="no environments with xllamacpp and OpenAI's client: make setup"
)

TEXTS = "[...document.querySelectorAll('article')].map(one => one.lastChild.data.length)"


@pytest.fixture(scope="module")
def server(launch):
    return launch(EXAMPLE / "model.py", "--worker-kind", "process", "--python", str(LLM), env=WITH_FOREBAY)


@pytest.fixture
def askers():
    found = [Asker(), Asker()]
    yield found
    for one in found:
        one.close()


def test_a_short_answer_does_not_wait_for_a_long_one(server, askers):
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
    other.asker.process.kill()
    eventually(lambda: server.client.get("/models/smol").json()["in_flight"] == 0)


def test_what_is_said_of_sampling_reaches_the_library(server, askers):
    client = Client(askers[0], server, {})
    asked = chat("Say a colour.", model="smol", max_tokens=3)
    found = client.ask("chat.completions.create", **asked, temperature=0, logit_bias={"1000": 100})["result"]
    text = found["choices"][0]["message"]["content"]
    assert text == text[: len(text) // 3] * 3  # of one token and no other
    found = client.ask("chat.completions.create", **{**asked, "max_tokens": 12}, temperature=2, n=2, seed=5)["result"]
    first, second = (choice["message"]["content"] for choice in found["choices"])
    assert first != second


def test_the_model_is_a_node_of_a_graph(serve, askers):
    server = serve(EXAMPLE / "graph.py", command=(str(LLM), "-m", "forebay", "serve"), env=WITH_FOREBAY)
    found = Client(askers[0], server, {}).chat("When does the ferry to Holm leave?", model="guide", max_tokens=16)
    assert "9:40" in found["result"]["choices"][0]["message"]["content"]
    assert found["result"]["usage"]["completion_tokens"] <= 16


@pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [1280, 390])
def test_tokens_of_several_clients_come_side_by_side(browser, server, width, tmp_path):
    with browser.page(width) as page:
        page.open(f"{server.url}/models/page/streams")
        page.until("document.querySelector('[name=count]')")
        page.write("[name=count]", "3")
        page.click("form button")
        # Each has some, then each has more: nobody waits for another one's end.
        page.until(f"({TEXTS}).length === 3 && ({TEXTS}).every(one => one > 0)")
        before = page.eval(TEXTS)
        page.until(f"({TEXTS}).every((one, at) => one > {before}[at])")
        assert page.eval("document.documentElement.scrollWidth") <= width
        assert all(
            "tokens/s" in one for one in page.eval("[...document.querySelectorAll('small')].map(o => o.textContent)")
        )
        bars = "[...document.querySelectorAll('#order i')].map(one => one.style.getPropertyValue('--colour'))"
        colours = page.eval(bars)
        turns = sum(one != after for one, after in itertools.pairwise(colours))
        assert len(set(colours)) == 3
        assert turns > 3  # one after the other would be two
        page.shot(tmp_path / "page.png")
        page.click("#stop")
        page.until("[...document.querySelectorAll('small')].every(one => one.textContent.includes('stopped'))")
        page.write("[name=question]", "word " * 2500)
        page.click("form button")
        page.until("document.querySelectorAll('small.failed').length === 3")
        assert "context size" in page.text("small.failed")
        assert [one for one in page.said if "status of 400" not in one] == []
    eventually(lambda: server.client.get("/models/smol").json()["in_flight"] == 0)
