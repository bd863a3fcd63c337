# SPDX-License-Identifier: Apache-2.0
"""Further doors to the same models: responses, Anthropic's and Cohere's clients, bodies as Jina and vLLM have them."""

import pytest
from tests.compat.openai_protocol.clients import KEY, PYTHON, Client
from tests.gen_ai_times import AFTER_FIRST, DURATION, TO_FIRST, added
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with OpenAI's client: make setup")
DOCUMENTS = ["nothing", "rain in Oslo", "rain"]


def post(client, path, **body):
    answer = client.server.client.post(
        path, json={"model": "ranks", **body}, headers={**client.headers, "x-api-key": KEY}
    )
    return answer.status_code, answer.json()


def test_coheres_client_has_documents_ranked(client):
    cohere = Client(client.asker, client.server, {}, library="cohere")
    asked = {"model": "ranks", "query": "rain Oslo", "documents": DOCUMENTS}
    asked["request_options"] = {"additional_headers": client.headers}
    found = cohere.ask("rerank", **asked, top_n=2)["result"]
    assert [(one["index"], one["relevance_score"]) for one in found["results"]] == [(1, 1.0), (2, 0.5)]
    (alone,) = cohere.ask_all(("rerank", asked))
    assert [one["index"] for one in alone["result"]["results"]] == [1, 2, 0]
    wrong = cohere.ask("rerank", **{**asked, "model": "words"})["error"]
    assert (wrong["class"], wrong["body"]["error"]["param"]) == ("NotFoundError", "model")
    wrong = cohere.ask("rerank", **asked, max_tokens_per_doc=5)["error"]
    assert (wrong["class"], wrong["body"]["error"]["param"]) == ("BadRequestError", "max_tokens_per_doc")
    stranger = Client(client.asker, client.server, {}, library="cohere", api_key="wrong")
    assert stranger.ask("rerank", **asked)["error"]["class"] == "UnauthorizedError"


def test_documents_come_back_unless_they_are_not_wanted(client):
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        status, found = post(client, path, query="rain", documents=DOCUMENTS)
        assert (status, [one["index"] for one in found["results"]]) == (200, [1, 2, 0])
        assert found["results"][0] == {"index": 1, "relevance_score": 1.0, "document": {"text": DOCUMENTS[1]}}
        assert found["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
        status, found = post(client, path, query="rain", documents=DOCUMENTS, return_documents=False, top_n=1)
        assert (status, found["results"]) == (200, [{"index": 1, "relevance_score": 1.0}])


def test_texts_are_scored_one_with_each_or_pair_by_pair(client):
    for path in ("/v1/score", "/score"):
        for body, scores in (
            ({"text_1": "rain", "text_2": DOCUMENTS}, [0.0, 1.0, 1.0]),
            ({"text_1": ["rain", "sun"], "text_2": ["rain", "rain"]}, [1.0, 0.0]),
            ({"queries": "rain Oslo", "documents": "rain"}, [0.5]),
        ):
            status, found = post(client, path, **body)
            assert (status, found["object"], [one["score"] for one in found["data"]]) == (200, "list", scores)
            assert {(one["object"], one["index"]) for one in found["data"]} == {
                ("score", index) for index in range(len(scores))
            }


TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("rain", "wind")]
TEXT = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta"]
TEXT += ["output_text.done", "content_part.done", "output_item.done", "completed"]


def respond(client, said, **more):
    return client.ask("responses.create", **{"model": "words", "input": said, **more})


def told(response):
    (item,) = response["output"]
    (part,) = item["content"]
    return part["text"]


def test_a_response_is_answered_whole(client):
    found = respond(client, "to be or")["result"]
    assert (told(found), found["status"], found["object"], found["store"]) == (
        "to be or",
        "completed",
        "response",
        False,
    )
    usage = found["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, 3, 13)
    said = [{"role": "user", "content": "not"}, {"role": "assistant", "content": "to be"}]
    said += [{"role": "user", "content": [{"type": "input_text", "text": "to "}, {"type": "input_text", "text": "be"}]}]
    found = respond(client, said, instructions="talk", include=[], tools=[], truncation="disabled", max_output_tokens=1)
    found = found["result"]
    assert (told(found), found["status"], found["incomplete_details"]["reason"]) == (
        *("to", "incomplete", "max_output_tokens"),
    )
    assert (found["instructions"], found["max_output_tokens"]) == ("talk", 1)


def test_a_response_is_streamed_to_sync_and_async_clients(client):
    asked = {"model": "words", "input": "to be", "stream": True}
    alone = client.ask("responses.create", **asked)["parts"]
    assert [one["type"].removeprefix("response.") for one in alone] == TEXT
    assert [one["sequence_number"] for one in alone] == [*range(len(TEXT))]
    assert "".join(one["delta"] for one in alone if one["type"].endswith(".delta")) == "to be"
    assert told(alone[-1]["response"]) == "to be"
    assert alone[-1]["response"]["usage"]["output_tokens"] == 2
    together = client.ask_all(*[("responses.create", asked)] * 3)
    assert [told(one["parts"][-1]["response"]) for one in together] == ["to be"] * 3


def test_a_response_calls_tools_and_is_told_what_they_said(client):
    asked = {"model": "agent", "input": [{"role": "user", "content": "weather?"}], "tools": TOOLS}
    found = client.ask("responses.create", **asked, tool_choice="auto")["result"]
    calls = [(one["type"], one["name"], one["arguments"]) for one in found["output"]]
    assert calls == [("function_call", name, '{"town": "Oslo"}') for name in ("rain", "wind")]
    parts = client.ask("responses.create", **asked, stream=True)["parts"]
    assert [one["arguments"] for one in parts[-1]["response"]["output"]] == ['{"town": "Oslo"}'] * 2
    assert [one["name"] for one in parts if one["type"].endswith("arguments.done")] == ["rain", "wind"]
    output = {"type": "function_call_output", "call_id": "first", "output": "14 mm"}
    answer = client.ask("responses.create", **{**asked, "input": [*asked["input"], found["output"][0], output]})
    assert told(answer["result"]) == "rain says 14 mm to first"


@pytest.mark.parametrize(
    "said, param, words",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "responses are not stored; send the whole"),
        ({"conversation": "conv_1"}, "conversation", "responses are not stored"),
        ({"background": True}, "background", "responses are not stored"),
        ({"extra_body": {"n": 2}}, "n", "/v1/chat/completions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": TOOLS}, "tools", "unknown field"),  # this model takes none
        ({"input": []}, "input", "length >= 1"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "item_reference"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort", "unknown field"),
    ],
)
def test_what_is_wrong_with_a_response_is_refused_by_its_name(client, said, param, words):
    error = respond(client, "a", **said)["error"]
    assert (error["status_code"], error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


def test_a_response_that_fails_and_one_that_nobody_reads(client, tmp_path):
    found = respond(client, "to be fail", stream=True)
    assert "".join(one.get("delta", "") for one in found["parts"]) == "to be"
    assert (found["error"]["class"], found["error"]["type"]) == ("APIError", "server_error")
    assert respond(client, "fail")["error"]["status_code"] == 500
    assert len(respond(client, f"hold {tmp_path / 'until'}", stream=True, take=6)["parts"]) == 6
    eventually((tmp_path / "until.ended").exists)


@pytest.fixture
def anthropic(client):
    return Client(client.asker, client.server, client.headers, library="anthropic")


def message(text, **more):
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return {"model": "words", "max_tokens": 9, "messages": messages, **more}


def test_anthropics_client_is_answered_whole(anthropic):
    found = anthropic.ask("messages.create", **message("to be or"))["result"]
    assert ([one["text"] for one in found["content"]], found["stop_reason"]) == (["to be or"], "end_turn")
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (10, 3)
    pieces = [{"type": "text", "text": "to be or not", "cache_control": {"type": "ephemeral"}}]
    asked = message([{"role": "user", "content": pieces}], system=pieces, stop_sequences=["x", "e or"])
    found = anthropic.ask("messages.create", **asked)["result"]
    assert (found["content"][0]["text"], found["stop_reason"], found["stop_sequence"]) == (
        "to b",
        "stop_sequence",
        "e or",
    )
    found = anthropic.ask("messages.create", **message("to be or", max_tokens=2))["result"]
    assert (found["content"][0]["text"], found["stop_reason"]) == ("to be", "max_tokens")


def test_a_message_is_streamed_to_sync_and_async_clients(anthropic):
    asked = message("to be", stream=True)
    alone = anthropic.ask("messages.create", **asked)["parts"]
    assert [one["type"] for one in alone] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert (alone[0]["message"]["usage"]["input_tokens"], alone[-2]["usage"]["output_tokens"]) == (10, 2)
    assert alone[-2]["delta"]["stop_reason"] == "end_turn"
    together = anthropic.ask_all(*[("messages.create", asked)] * 3)
    texts = ["".join(one["delta"]["text"] for one in found["parts"][2:4]) for found in together]
    assert texts == ["to be"] * 3


def test_a_message_calls_tools_and_is_told_what_they_said(anthropic):
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("rain", "wind")]
    asked = message("weather?", model="agent", tools=tools)
    found = anthropic.ask("messages.create", **asked, tool_choice={"type": "any"})["result"]
    assert [(one["type"], one["name"], one["input"]) for one in found["content"]] == [
        ("tool_use", name, {"town": "Oslo"}) for name in ("rain", "wind")
    ]
    assert found["stop_reason"] == "tool_use"
    parts = anthropic.ask("messages.create", **asked, stream=True)["parts"]
    pieces = [one["delta"]["partial_json"] for one in parts if one["type"] == "content_block_delta"]
    assert pieces == ['{"town": ', '"Oslo"}'] * 2
    only = anthropic.ask("messages.create", **asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [one["name"] for one in only["result"]["content"]] == ["rain"]
    result = {"type": "tool_result", "tool_use_id": "first", "content": "14 mm"}
    turns = [*asked["messages"], {"role": "assistant", "content": found["content"][:1]}]
    answer = anthropic.ask("messages.create", **{**asked, "messages": [*turns, {"role": "user", "content": [result]}]})
    assert answer["result"]["content"][0]["text"] == "rain says 14 mm to first"


def test_anthropics_client_reads_errors(anthropic, tmp_path):
    for asked, status, kind, words in (
        (message("a", model="word"), 404, "not_found_error", "did you mean 'words'?"),
        (message("a", max_tokens=0), 400, "invalid_request_error", "$.max_tokens"),
        (message("a", extra_body={"n": 2}), 400, "invalid_request_error", "/v1/chat/completions"),
        (message("a", stop_sequences=["a"] * 17), 400, "invalid_request_error", "$.stop_sequences"),
        (message("a", extra_body={"top_q": 3}), 400, "invalid_request_error", "`top_q`"),
        (message("a", thinking={"type": "enabled", "budget_tokens": 1024}), 400, "invalid_request_error", "thinking"),
        (message("x" * 100_000), 413, "request_too_large", "at most 100000 bytes"),
        (message("fail"), 500, "api_error", "the model failed"),
    ):
        error = anthropic.ask("messages.create", **asked)["error"]
        assert (error["status_code"], error["body"]["type"], error["body"]["error"]["type"]) == (status, "error", kind)
        assert words in error["body"]["error"]["message"]
        assert error["body"]["request_id"]
    counted = message("a")
    del counted["max_tokens"]
    missing = anthropic.ask("messages.count_tokens", **counted)["error"]
    assert (missing["class"], missing["body"]["error"]["type"]) == ("NotFoundError", "not_found_error")
    assert "did you mean /v1/messages?" in missing["body"]["error"]["message"]
    stranger = Client(anthropic.asker, anthropic.server, anthropic.headers, library="anthropic", api_key="wrong")
    assert stranger.ask("messages.create", **message("a"))["error"]["class"] == "AuthenticationError"
    found = anthropic.ask("messages.create", **message("to be fail", stream=True))
    assert "".join(one["delta"]["text"] for one in found["parts"][2:]) == "to be"
    assert found["error"]["body"]["error"]["type"] == "api_error"
    held = message(f"hold {tmp_path / 'until'}", max_tokens=10**6, stream=True)
    assert len(anthropic.ask("messages.create", **held, take=4)["parts"]) == 4
    eventually((tmp_path / "until.ended").exists)


def test_opentelemetry_is_told_of_them_as_of_chats(client, anthropic):  # Issue 48
    before, ranks = client.times("words"), client.times("ranks")
    respond(client, "to be or")
    respond(client, "to be or", stream=True)
    anthropic.ask("messages.create", **message("to be or"))
    anthropic.ask("messages.create", **message("to be or", stream=True))
    anthropic.ask("messages.create", **message("to be or", extra_body={"temperature": 3}))
    found = {kind: count for kind, (count, _) in added(before, client.times("words")).items()}
    assert found == {
        **{(what, "chat", ""): 4 for what in (DURATION, TO_FIRST, AFTER_FIRST)},
        (DURATION, "chat", "invalid_argument"): 1,
    }
    post(client, "/v1/rerank", query="rain", documents=DOCUMENTS)
    post(client, "/v1/score", text_1="rain", text_2=DOCUMENTS)
    found = {kind: count for kind, (count, _) in added(ranks, client.times("ranks")).items()}
    assert found == {(DURATION, "rerank", ""): 2}
