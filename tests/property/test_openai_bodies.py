# SPDX-License-Identifier: Apache-2.0
"""Whatever a body says, it is answered in the protocol: with what was asked for, or with an error that is not ours."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay.openai import ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest
from forebay.testing import client


class Fuzzed(forebay.Model):
    """All three at once; streams a text of many pieces."""

    max_batch_size = 1

    def predict(self, batch: list[ChatRequest]):
        for piece in batch[0].messages[-1].text[:20]:
            yield [piece]

    @forebay.endpoint("/complete")
    def complete(self, batch: list[CompletionRequest]) -> list[str]:
        return [str(one.prompt)[:20] for one in batch]

    @forebay.endpoint("/embed")
    def embed(self, batch: list[EmbeddingRequest]) -> list[list[float]]:
        return [[float(len(one.input))] for one in batch]

    @forebay.endpoint("/fit")
    def fit(self, batch: list[RerankRequest]) -> list[float]:
        return [float(len(one.document)) for one in batch]


odd = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=6) | st.just(10**30),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=6), inside, max_size=2),
    max_leaves=4,
)
kinds = st.sampled_from(["text", "input_text", "output_text", "tool_use", "tool_result", "image"])
piece = st.fixed_dictionaries({"type": kinds | odd}, optional={"text": st.text(max_size=5) | odd, "content": odd})
items = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output"]) | odd},
    optional={
        "content": st.text(max_size=5) | st.lists(piece, max_size=2),
        "call_id": odd,
        "name": st.text(),
        "output": odd,
    },
)
said = st.text(max_size=9) | st.lists(piece, max_size=2)
messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": said}), max_size=2)
told = {
    "messages": messages | odd,
    "prompt": st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3) | st.lists(st.integers(0, 9)) | odd,
    "input": st.lists(items, max_size=3)
    | st.text(max_size=5)
    | st.lists(st.text(max_size=3), max_size=3)
    | st.lists(st.integers(0, 9))
    | odd,
    "query": st.text(max_size=5) | odd,
    "documents": st.lists(st.text(max_size=3), max_size=3) | odd,
    "text_1": st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3) | odd,
    "text_2": st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3) | odd,
    "top_n": st.integers(0, 3) | odd,
    "n": st.integers(1, 3) | odd,
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=3) | odd,
    "stream": st.booleans() | odd,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | odd,
    "max_tokens": st.integers(1, 5) | odd,
    "encoding_format": st.sampled_from(["float", "base64"]) | odd,
    "system": st.text(max_size=3) | st.lists(piece | odd, max_size=2) | odd,
    "instructions": st.text(max_size=3) | odd,
    "tools": st.lists(odd, max_size=2) | odd,
    "stop_sequences": st.lists(st.text(max_size=2), max_size=3) | odd,
    "previous_response_id": odd,
    "surprise": odd,
}
needed = {
    "chat/completions": ["messages"],
    "completions": ["prompt"],
    "embeddings": ["input"],
    "rerank": ["query", "documents"],
    "score": ["text_1", "text_2"],
    "responses": ["input"],
    "messages": ["messages", "max_tokens"],
}


@pytest.fixture(scope="module")
def served():
    with client(Fuzzed) as found:
        yield found


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_body_is_answered_in_the_protocol(served, data):
    path = data.draw(st.sampled_from(sorted(needed)))
    names = needed[path] + data.draw(st.lists(st.sampled_from(sorted(told)), max_size=3))
    model = data.draw(st.sampled_from(["fuzzed"] * 9 + ["other"]) | odd)
    body = json.dumps({"model": model, **{name: data.draw(told[name]) for name in names}}).encode()
    if not data.draw(st.integers(0, 9)):
        body = body[: data.draw(st.integers(0, len(body)))]
    answer = served.request("POST", f"/v1/{path}", body, {"content-type": "application/json"})
    assert answer.status in {200, 400, 404, 413, 429}, (body, answer.body)
    if answer.status != 200:
        keys = {"message", "type"} if path == "messages" else {"message", "type", "param", "code"}
        assert answer.json()["error"].keys() == keys
    elif answer.headers["content-type"] == "application/json":
        kinds = {"chat.completion", "text_completion", "list", "response", "message"}
        assert (answer.json().get("object") or answer.json()["type"]) in kinds
    elif path in {"responses", "messages"}:
        *events, rest = answer.body.split(b"\n\n")
        named = [one.split(b"\n") for one in events]
        assert all(name == b"event: " + json.loads(data[6:])["type"].encode() for name, data in named)
        assert (named[-1][0].partition(b".")[0], rest) in {(b"event: message_stop", b""), (b"event: response", b"")}
    else:
        *events, last, rest = answer.body.split(b"\n\n")
        assert (last, rest) == (b"data: [DONE]", b"")
        found = [json.loads(event.removeprefix(b"data: ")) for event in events]
        choices = [choice for event in found for choice in event["choices"]]
        ended = [choice["index"] for choice in choices if choice["finish_reason"]]
        assert sorted(ended) == [*range(max(choice["index"] for choice in choices) + 1)]
