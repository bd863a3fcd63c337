# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client against models that say they are asked so, over both lanes and two kinds of workers."""

import json
import re
from typing import Any

import pytest
from tests.compat.openai_protocol.clients import KEY, PYTHON, Client, chat
from tests.gen_ai_times import AFTER_FIRST, DURATION, TO_FIRST, added
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with OpenAI's client: make setup")


def text_of(parts, index=0):
    choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
    return "".join(choice["delta"]["content"] or "" for choice in choices)


def test_a_chat_is_answered_whole(client):
    found = client.chat("to be or")["result"]
    (choice,) = found["choices"]
    assert choice["message"] | {"role": "assistant", "content": "to be or"} == choice["message"]
    assert (choice["finish_reason"], found["model"], found["object"]) == ("stop", "words", "chat.completion")
    assert found["usage"] | {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13} == found["usage"]
    assert found["id"] == f"chatcmpl-{found['_request_id']}"


def test_a_chat_is_streamed_to_sync_and_async_clients(client):
    asked = chat("to be or", stream=True)
    alone = client.ask("chat.completions.create", **asked)["parts"]
    assert text_of(alone) == "to be or"
    assert alone[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [part["choices"][0]["finish_reason"] for part in alone] == [None] * (len(alone) - 1) + ["stop"]
    assert {part["object"] for part in alone} == {"chat.completion.chunk"}
    assert len({part["id"] for part in alone}) == 1
    together = client.ask_all(*[("chat.completions.create", asked)] * 3)
    assert [text_of(one["parts"]) for one in together] == ["to be or"] * 3


def test_the_last_event_counts_the_tokens_if_that_is_asked_for(client):
    parts = client.chat("to be", stream=True, stream_options={"include_usage": True})["parts"]
    assert parts[-1]["choices"] == []
    assert all(part["usage"] is None for part in parts[:-1])
    assert (parts[-1]["usage"]["prompt_tokens"], parts[-1]["usage"]["completion_tokens"]) == (10, 2)


def test_an_answer_ends_before_a_stop_sequence_that_begins_in_one_part_and_ends_in_another(client):
    for stop in ("e or n", ["nowhere", "e or n"]):
        found = client.chat("to be or not", stop=stop)["result"]["choices"][0]
        assert (found["message"]["content"], found["finish_reason"]) == ("to b", "stop")
        assert text_of(client.chat("to be or not", stop=stop, stream=True)["parts"]) == "to b"
    assert client.chat("to be or", stop="or not")["result"]["choices"][0]["message"]["content"] == "to be or"
    assert text_of(client.chat("to be or", stop="or not", stream=True)["parts"]) == "to be or"
    whole = client.chat("", model="whole", stop=" STOP")["result"]["choices"][0]
    assert whole["message"]["content"] == "1 talk"


def test_several_choices_of_one_question(client):
    found = client.chat("to be", n=2)["result"]
    assert [one["message"]["content"] for one in found["choices"]] == ["to be", "to be"]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (10, 4)
    parts = client.chat("to be", n=2, stream=True)["parts"]
    assert (text_of(parts, 0), text_of(parts, 1)) == ("to be", "to be")
    together = client.chat("", model="whole", n=3)["result"]["choices"]
    assert {one["message"]["content"] for one in together} == {"3 talk STOP here"}  # they shared a batch


def test_no_more_tokens_come_than_are_wanted(client, tmp_path):
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        found = client.chat("to be or not", **limit)["result"]
        assert found["choices"][0]["message"]["content"] == "to be"
        assert (found["choices"][0]["finish_reason"], found["usage"]["completion_tokens"]) == ("length", 2)
    found = client.chat(f"hold {tmp_path / 'never'}", max_tokens=3, stream=True)["parts"]
    assert text_of(found) == "0 1 2 "
    eventually((tmp_path / "never.ended").exists)


def test_what_the_client_says_reaches_the_model(client):
    said = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 9, "presence_penalty": 1.0}
    found = json.loads(
        client.chat("params", extra_body={"top_k": 3}, stop="€", **said)["result"]["choices"][0]["message"]["content"]
    )
    assert found | {**said, "top_k": 3, "limit": 9, "stop": "e282ac"} == found
    tagged = client.chat("header", extra_headers={"x-tag": "blue"})["result"]
    assert tagged["choices"][0]["message"]["content"] == "blue"
    pieces = [{"type": "text", "text": "to "}, {"type": "text", "text": "be"}]
    assert client.chat(pieces)["result"]["choices"][0]["message"]["content"] == "to be"


def test_completions_of_texts_and_tokens(client):
    found = client.ask("completions.create", model="words", prompt=["one", "three"], n=2)["result"]
    assert [one["text"] for one in found["choices"]] == ["one, and so on"] * 2 + ["three, and so on"] * 2
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (8, 16)
    tokens = client.ask("completions.create", model="words", prompt=[1, 2])["result"]
    assert tokens["choices"][0]["text"] == "[1, 2], and so on"
    several = client.ask("completions.create", model="words", prompt=[[1], [2, 3]])["result"]
    assert [one["text"][:6] for one in several["choices"]] == ["[1], a", "[2, 3]"]
    parts = client.ask("completions.create", model="words", prompt="one", stream=True)["parts"]
    assert "".join(part["choices"][0]["text"] for part in parts) == "one, and so on"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("rain", "wind")
]


def calls_of(parts):
    """The calls of tools in a stream, put together as its client has to."""
    found: list[dict[str, Any]] = []
    for part in parts:
        for piece in part["choices"][0]["delta"]["tool_calls"] or []:
            if piece["index"] == len(found):
                found.append(
                    {"id": piece["id"], "type": piece["type"], "name": piece["function"]["name"], "pieces": []}
                )
            found[piece["index"]]["pieces"].append(piece["function"]["arguments"] or "")
    return [{**one, "pieces": "".join(one["pieces"])} for one in found]


def test_calls_of_tools_are_handed_through(client):
    asked = chat("weather?", model="agent", tools=TOOLS, tool_choice="auto")
    whole = client.ask("chat.completions.create", **asked)["result"]["choices"][0]
    calls = whole["message"]["tool_calls"]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    assert [(one["type"], one["function"]) for one in calls] == [
        ("function", {"name": name, "arguments": '{"town": "Oslo"}'}) for name in ("rain", "wind")
    ]
    assert calls[0]["id"] == "first"
    assert calls[1]["id"] not in {"", None, "first"}
    (parts,) = [one["parts"] for one in client.ask_all(("chat.completions.create", {**asked, "stream": True}))]
    streamed = calls_of(parts)
    assert [(one["name"], one["pieces"]) for one in streamed] == [(one, '{"town": "Oslo"}') for one in ("rain", "wind")]
    assert (streamed[0]["id"], parts[-1]["choices"][0]["finish_reason"]) == ("first", "tool_calls")
    assert parts[0]["choices"][0]["delta"] | {"role": "assistant", "content": None} == parts[0]["choices"][0]["delta"]
    only = client.ask("chat.completions.create", **asked, parallel_tool_calls=False)["result"]["choices"][0]
    assert [one["function"]["name"] for one in only["message"]["tool_calls"]] == ["rain"]
    # What the tool said goes back with the call that it answers.
    told = {"role": "tool", "tool_call_id": "first", "content": "14 mm"}
    messages = [*asked["messages"], {"role": "assistant", "tool_calls": calls[:1]}, told]
    found = client.ask("chat.completions.create", **{**asked, "messages": messages})["result"]["choices"][0]
    assert (found["message"]["content"], found["finish_reason"]) == ("rain says 14 mm to first", "stop")


def test_how_likely_tokens_were_is_told_with_their_text(client):
    whole = client.chat("to be", model="agent", logprobs=True)["result"]["choices"][0]["logprobs"]
    assert [(one["token"], one["logprob"]) for one in whole["content"]] == [("to ", -0.25), ("be ", -0.25)]
    assert whole["content"][0]["bytes"] == list(b"to ")
    assert whole["content"][0]["top_logprobs"] == [{"token": "or", "logprob": -2.0, "bytes": list(b"or")}]
    # "be" may become the stop sequence, so it is held back; then it is cut away with what was told of it.
    parts = client.chat("to be not", model="agent", logprobs=True, stream=True, stop="be not")["parts"]
    told = [part["choices"][0] for part in parts if part["choices"][0]["delta"]["content"]]
    assert [(one["delta"]["content"], [each["token"] for each in one["logprobs"]["content"]]) for one in told] == [
        ("to ", ["to "])
    ]
    found = client.ask("completions.create", model="words", prompt="a", logprobs=1)["result"]["choices"][0]["logprobs"]
    assert found["tokens"] == ["a,", " and", " so", " on"]
    assert found["token_logprobs"] == [-0.5] * 4
    assert (found["text_offset"], found["top_logprobs"][0]) == ([0, 2, 6, 9], {"!": -9999.0})
    assert client.ask("completions.create", model="words", prompt="a")["result"]["choices"][0]["logprobs"] is None


def test_many_clients_at_once_each_get_their_own(client, tmp_path):
    words = [" ".join(f"{number}-{at}" for at in range(number % 5 + 1)) for number in range(32)]
    asked = [("chat.completions.create", chat(one, model="agent", logprobs=True, stream=True)) for one in words]
    found = client.ask_all(*asked)
    assert [text_of(one["parts"]) for one in found] == [f"{one} " for one in words]
    # Each of these ends once there is its file; they are in the same steps until then.
    (tmp_path / "go").touch()
    several = client.ask_all(*[("chat.completions.create", chat(str(tmp_path / "go"), model="paced", n=2))] * 16)
    ends = [choice["message"]["content"] for one in several for choice in one["result"]["choices"]]
    assert ends == ["end"] * 32
    finished = tmp_path / "go.finished"
    eventually(lambda: finished.read_text() == "x" * 32)


def test_a_stream_whose_client_goes_away_is_finished_at_the_next_step(client, other, tmp_path):
    stays = chat(str(tmp_path / "stays"), model="paced")
    other.asker.send(other.call("chat.completions.create", **stays))
    eventually(lambda: client.describe("paced")["in_flight"] == 1)
    for number in range(3):
        leaves = tmp_path / f"leaves{number}"
        found = client.chat(str(leaves), model="paced", n=2, stream=True, take=5)["parts"]
        assert len(found) == 5
        eventually(lambda leaves=leaves: leaves.with_suffix(".finished").exists())
        eventually(lambda leaves=leaves: leaves.with_suffix(".finished").read_text() == "xx")
    assert not (tmp_path / "stays.finished").exists()
    (tmp_path / "stays").touch()
    assert other.asker.read()["result"]["choices"][0]["message"]["content"].endswith("end")


def test_embeddings_of_texts_and_tokens_in_both_formats(client):
    asked = {"model": "vectors", "input": ["a", "tree", "of, [commas]"]}
    for given in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
        found = client.ask("embeddings.create", **asked, **given)["result"]
        assert [one["index"] for one in found["data"]] == [0, 1, 2]
        assert [one["embedding"][:2] for one in found["data"]] == [[1.0, 3.0], [4.0, 3.0], [12.0, 3.0]]
        assert abs(found["data"][0]["embedding"][2] - 0.1) < 1e-7
        assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == 17
    for given, lengths in (("word", [4]), ([1, 2], [2]), ([[1], [2, 3]], [1, 2])):
        found = client.ask("embeddings.create", model="vectors", input=given)["result"]
        assert [one["embedding"][0] for one in found["data"]] == lengths


def test_embeddings_of_several_clients_share_a_batch(client, other, tmp_path):
    until = tmp_path / "until"
    other.asker.send(other.call("embeddings.create", model="vectors", input=f"until {until}"))
    eventually(lambda: client.describe("vectors") | {"in_flight": 1, "waiting": 0} == client.describe("vectors"))
    client.asker.send([client.call("embeddings.create", model="vectors", input=["a", "b"])] * 3)
    eventually(lambda: client.describe("vectors")["waiting"] == 6)
    until.touch()
    assert [one["embedding"][1] for one in other.asker.read()["result"]["data"]] == [1.0]
    found = [one["embedding"][1] for answer in client.asker.read() for one in answer["result"]["data"]]
    assert found == [6.0] * 6


def test_models_are_listed_and_described(client):
    assert [one["id"] for one in client.ask("models.list")["result"]] == [
        "words",
        "agent",
        "paced",
        "whole",
        "vectors",
        "ranks",
        "speaker",
        "jingle",
        "listener",
    ]
    found = client.ask("models.retrieve", model="vectors")["result"]
    assert (found["id"], found["object"], found["owned_by"]) == ("vectors", "model", "forebay")
    missing = client.ask("models.retrieve", model="vektors")["error"]
    assert (missing["class"], missing["code"]) == ("NotFoundError", "model_not_found")
    assert "did you mean 'vectors'" in missing["message"]


@pytest.mark.parametrize(
    "call, wrong, param, words",
    [
        ("chat.completions", chat("a", n=0), "n", ">= 1"),
        ("chat.completions", chat("a", n=1000), "n", "<= 128"),
        ("chat.completions", chat("a", temperature=3), "temperature", "<= 2.0"),
        ("chat.completions", chat("a", stop=["a", ""]), "stop[1]", "length >= 1"),
        ("chat.completions", chat("a", extra_body={"top_q": 3}), "top_q", "did you mean `top_"),
        ("chat.completions", chat("a") | {"messages": []}, "messages", "length >= 1"),
        ("chat.completions", chat("a") | {"messages": [{"role": "usr", "content": ""}]}, "messages[0].role", "`user`"),
        ("chat.completions", chat("a", tools=TOOLS), "tools", "`messages`"),  # this model takes none
        ("chat.completions", chat("a", model="agent", tool_choice="any"), "tool_choice", "`required`"),
        ("chat.completions", chat("a", model="agent", tools=[{"type": "x"}]), "tools[0].type", "`function`"),
        ("chat.completions", chat("a", stream_options={"include_usage": True}), "stream_options", "'stream'"),
        ("chat.completions", chat("a", stream=True, stream_options={"usage": 1}), "stream_options.usage", "unknown"),
        ("chat.completions", chat("a", stop=["a"] * 17), "stop", "<= 16"),
        ("chat.completions", chat("a", max_tokens=0), "max_tokens", ">= 1"),
        ("chat.completions", chat("a", extra_body={"stream": "yes"}), "stream", "bool"),
        ("chat.completions", {"model": "words", "messages": "a"}, "messages", "array"),
        ("completions", {"model": "words", "prompt": []}, "prompt", "empty"),
        ("completions", {"model": "words", "prompt": ["a"] * 65, "n": 2}, "n", "65 prompts: expected at most 128"),
        ("completions", {"model": "words", "prompt": ["a"] * 129}, "prompt", "more than 128"),
        ("embeddings", {"model": "vectors", "input": ["a"] * 2049}, "input", "2048"),
        ("embeddings", {"model": "vectors", "input": 3}, "input", "int"),
        ("embeddings", {"model": "vectors", "input": ["a", 3]}, "input[1]", "`$.input[1]`"),
        ("completions", {"model": "words", "prompt": ["a", [1, -2]], "n": 2}, "prompt[1][1]", ">= 0"),
        ("completions", {"model": "words", "prompt": ["a", [1, -2]], "stream": True}, "prompt[1][1]", ">= 0"),
        ("completions", {"model": "words", "prompt": ["a"] * 3 + [{"x": 1}], "stream": True}, "prompt[3]", "object"),
        ("completions", {"model": "words", "prompt": ["a"] * 20 + [2.5], "stream": True}, "prompt[20]", "float"),
        ("embeddings", {"model": "vectors", "input": "a", "dimensions": 3}, "dimensions", "unknown field"),
        ("embeddings", {"model": "vectors", "input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(client, call, wrong, param, words):
    error = client.ask(f"{call}.create", **wrong)["error"]
    too_many = words in {"65 prompts: expected at most 128", "more than 128", "2048"}
    assert error["status_code"] == (413 if too_many else 400), error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


def test_a_model_that_is_not_there_or_not_asked_so(client):
    for model, meant in (("word", "did you mean 'words'?"), ("vectors", "no model 'vectors' answers at /v1/chat/")):
        error = client.chat("a", model=model)["error"]
        assert (error["class"], error["param"], error["code"]) == ("NotFoundError", "model", "model_not_found")
        assert meant in error["message"]


def test_an_error_of_the_model_before_and_in_the_middle_of_a_stream(client):
    for stream in (False, True):
        error = client.chat("fail", stream=stream)["error"]
        assert (error["class"], error["status_code"], error["type"]) == ("InternalServerError", 500, "server_error")
        assert "no such word" not in error["message"]  # that is for the log
    found = client.chat("to be fail", stream=True)
    assert text_of(found["parts"]) == "to be"
    assert (found["error"]["class"], found["error"]["type"]) == ("APIError", "server_error")
    assert client.chat("to be fail", n=2)["error"]["status_code"] == 500


def test_a_wrong_key_is_refused(client, server):
    for call in ("chat.completions.create", "models.list"):
        arguments = chat("a") if call.startswith("chat") else {}
        stranger = Client(client.asker, server, client.options["default_headers"], api_key="wrong")
        error = stranger.ask(call, **arguments)["error"]
        assert (error["class"], error["code"]) == ("AuthenticationError", "invalid_api_key")


def test_a_body_that_is_too_large_is_refused(client):
    error = client.chat("x" * 100_000)["error"]
    assert (error["status_code"], error["code"], error["type"]) == (413, "too_large", "invalid_request_error")


def test_a_client_that_goes_away_frees_the_model_at_the_next_part(client, tmp_path):
    found = client.chat(f"hold {tmp_path / 'until'}", stream=True, take=3)["parts"]
    assert text_of(found).startswith("0 ")
    eventually((tmp_path / "until.ended").exists)
    assert client.chat("to be")["result"]["choices"][0]["message"]["content"] == "to be"


def test_time_limits_of_client_and_server(client, tmp_path):
    late = client.chat(f"hold {tmp_path / 'a'}", timeout=0.2)["error"]
    assert late["class"] == "APITimeoutError"
    eventually((tmp_path / "a.ended").exists)
    late = client.chat(f"hold {tmp_path / 'b'}", extra_headers={"x-request-timeout-ms": "50"})["error"]
    assert (late["status_code"], late["code"], late["type"]) == (504, "timeout", "server_error")
    late = client.chat(f"hold {tmp_path / 'c'}", extra_headers={"x-request-timeout-ms": "200"}, stream=True)
    assert late["parts"]
    assert late["error"]["class"] == "APIError"
    eventually((tmp_path / "c.ended").exists)


def test_overload_is_told_as_a_rate_limit(client, other, tmp_path):
    until = tmp_path / "until"
    other.asker.send(other.call("chat.completions.create", **chat(f"hold {until}", n=4)))
    eventually(lambda: client.describe("words") | {"in_flight": 4, "waiting": 3} == client.describe("words"))
    for choices in (2, 4):  # there is room for one
        error = client.chat("to be", n=choices)["error"]
        assert (error["class"], error["code"]) == ("RateLimitError", "rate_limit_exceeded")
        eventually(lambda: client.describe("words") | {"in_flight": 4, "waiting": 3} == client.describe("words"))
    until.touch()
    assert len(other.asker.read()["result"]["choices"]) == 4
    assert client.describe("words")["in_flight"] == 0
    assert client.chat("to be")["result"]["choices"][0]["message"]["content"] == "to be"


def test_who_answered_stands_in_the_access_log(client, server):
    found = client.chat("to be")["result"]

    def line() -> Any:
        return next((one for one in server.records if one.get("request_id") == found["_request_id"]), None)

    eventually(lambda: line() is not None)
    expected = {"model": "words", "path": "/v1/chat/completions", "batch_size": 1, "code": "ok"}
    assert line() | expected == line()


def test_a_stream_ends_with_what_it_has_cost_which_its_clients_skip(client, server):
    body = chat("to be or not", stream=True)
    headers = {"authorization": f"Bearer {KEY}", **client.options["default_headers"]}
    raw = server.client.post("/v1/chat/completions", json=body, headers=headers).text
    assert re.fullmatch(
        r": forebay-cost worker_ms=\d+\.\d{3};rows=1;prompt_tokens=10;completion_tokens=4\n\n",
        raw.partition("data: [DONE]\n\n")[2],
    )
    assert text_of(client.chat("to be or not", stream=True)["parts"]) == "to be or not"


@pytest.mark.parametrize("stream", [False, True])
def test_opentelemetry_is_told_how_long_a_request_and_its_tokens_took(client, stream):  # Issue 48
    before = client.times("words")
    assert "parts" in client.chat("to be or not", stream=True) if stream else client.chat("to be or not")["result"]
    found = added(before, client.times("words"))
    (answers, whole_s), (firsts, first_s), (later, each_s) = (
        found.pop((what, "chat", "")) for what in (DURATION, TO_FIRST, AFTER_FIRST)
    )
    assert (answers, firsts, later, found) == (1, 1, 1, {})
    assert 0 < first_s <= whole_s
    assert each_s == pytest.approx((whole_s - first_s) / 3)  # four tokens


def test_opentelemetry_is_told_of_errors_and_not_of_tokens_that_nobody_counted(client, tmp_path):  # Issue 48
    before, vectors = client.times("words"), client.times("vectors")
    client.chat("alone")  # a token, and none after it
    client.chat("to be fail", stream=True)
    client.chat("to be fail")
    client.chat("to be", temperature=3)
    client.chat("to be", model="missing")
    client.chat(f"hold {tmp_path / 'late'}", extra_headers={"x-request-timeout-ms": "50"})
    client.chat(f"hold {tmp_path / 'left'}", stream=True, take=3)
    client.ask("completions.create", model="words", prompt="a")
    client.ask("embeddings.create", model="vectors", input=["a", "tree"])
    counts = {
        (DURATION, "chat", ""): 1,
        (TO_FIRST, "chat", ""): 1,
        (DURATION, "chat", "internal"): 2,
        (DURATION, "chat", "invalid_argument"): 1,
        (DURATION, "chat", "deadline_exceeded"): 1,
        (DURATION, "chat", "cancelled"): 1,
        (DURATION, "text_completion", ""): 1,  # it comes whole
    }

    def found(model, before):
        return {kind: count for kind, (count, _) in added(before, client.times(model)).items()}

    eventually(lambda: found("words", before) == counts)  # the server hears later that a client has left
    assert found("vectors", vectors) == {(DURATION, "embeddings", ""): 1}
