# SPDX-License-Identifier: Apache-2.0
"""Models that say they are asked in OpenAI's protocol: by the type of their samples, wherever they run."""

import gc
import json
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema_rs
import msgspec
import pytest
import schemathesis
from tests.gen_ai_times import DURATION, times_on
from tests.waiting import PATIENCE_S, eventually

import forebay
from forebay.openai import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    Score,
    SpeechRequest,
    TextPart,
    Tool,
    TranscriptionRequest,
)
from forebay.testing import client
from forebay.transports.http import asgi_inference, openai
from forebay.types.call import Media


class Text(EmbeddingRequest, frozen=True):
    input: str


def ask(served, path, **body):
    answer = served.request("POST", f"/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    return answer.status, answer.json()


def test_a_composition_of_a_chat_is_a_chat_model():
    @forebay.node
    def shout(request: ChatRequest) -> str:
        return request.messages[-1].text.upper()

    @forebay.compose
    def loud(request: ChatRequest) -> str:
        return shout(request)

    with client(loud) as served:
        messages = [{"role": "user", "content": "hello"}]
        status, found = ask(served, "chat/completions", model="loud", messages=messages, n=2)
        assert (status, [one["message"]["content"] for one in found["choices"]]) == (200, ["HELLO", "HELLO"])
        status, found = ask(served, "chat/completions", model="loud", messages="hello")
        assert (status, found["error"]["param"]) == (400, "messages")


def test_a_composition_says_texts_and_writes_recordings_down():
    @forebay.node
    def shout(request: SpeechRequest) -> bytes:
        return request.input.upper().encode()

    @forebay.compose
    def loud(request: SpeechRequest) -> bytes:
        return shout(request)

    class Heard(forebay.Model):
        batchable = True

        def predict(self, batch: list[TranscriptionRequest]) -> list[str]:
            return [one.file.read().decode() for one in batch]

    with client(loud, Heard) as served:
        body = json.dumps({"model": "loud", "input": "hello", "voice": "a", "response_format": "flac"}).encode()
        answer = served.request("POST", "/v1/audio/speech", body, {"content-type": "application/json"})
        assert (answer.status, answer.headers["content-type"], answer.body) == (200, "audio/flac", b"HELLO")
        parts = (b'name="model"\r\n\r\nheard', b'name="file"; filename="a.txt"\r\n\r\nhello')
        form = b"".join(b"--b\r\ncontent-disposition: form-data; %b\r\n" % part for part in parts) + b"--b--\r\n"
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = served.request("POST", "/v1/audio/transcriptions", form, kind)
        assert (answer.status, answer.json()["text"]) == (200, "hello")
        assert served.request("GET", "/v1/audio/transcriptions").status == 405
        document = served.request("GET", "/openapi.json").json()
        schemathesis.openapi.from_dict(document).validate()
        (sent,) = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"].items()
        assert (sent[0], sent[1]["schema"]["properties"]["file"]["format"]) == ("multipart/form-data", "binary")
        assert document["paths"]["/v1/audio/speech"]["post"]["responses"]["200"]["content"].keys() == {"audio/*"}


def test_where_no_model_speaks_the_protocol_its_clients_are_told_what_would():
    class Echo(forebay.Model):
        def predict(self, batch: list[str]) -> list[str]:
            return batch

    with client(Echo) as served:
        for path, kind in (
            ("chat/completions", "ChatRequest"),
            ("completions", "CompletionRequest"),
            ("embeddings", "EmbeddingRequest"),
            ("rerank", "RerankRequest"),
            ("score", "RerankRequest"),
            ("responses", "ChatRequest"),
            ("audio/speech", "SpeechRequest"),
            ("audio/transcriptions", "TranscriptionRequest"),
        ):
            status, found = ask(served, path, model="any")
            assert status == 404
            told = (
                f"no model here answers at /v1/{path}; models whose samples are of the type `forebay.openai.{kind}` do"
            )
            assert found["error"]["message"] == told
            assert found["error"]["type"] == "invalid_request_error"
        status, found = ask(served, "messages", model="any")
        assert (status, found["type"], found["error"]["type"]) == (404, "error", "not_found_error")


def test_a_model_in_another_interpreter_says_so_as_well(launch):
    server = launch("talkers.py", "--worker-kind", "process", "--python", sys.executable)
    messages = [{"role": "user", "content": "to be"}]
    found = server.client.post("/v1/chat/completions", json={"model": "words", "messages": messages}).json()
    assert found["choices"][0]["message"]["content"] == "to be"
    found = server.client.post("/v1/embeddings", json={"model": "vectors", "input": "four"}).json()
    assert found["data"][0]["embedding"][0] == 4.0


def test_an_array_of_samples_is_for_the_native_protocol_only():
    class Lengths(forebay.Model):
        batchable = True

        def predict(self, batch: list[Text]) -> list[list[float]]:
            return [[len(one.input)] for one in batch]

    with client(Lengths) as served:
        assert served.call([{"input": "a"}, {"input": "bb"}]) == [[1.0], [2.0]]
        status, found = ask(served, "embeddings", model="lengths", input=["a", "bb"])
        assert (status, [one["embedding"] for one in found["data"]]) == (200, [[1.0], [2.0]])
        status, found = ask(served, "embeddings", model="lengths", input=[1, 2])
        assert (status, found["error"]["param"]) == (400, "input")


def test_tokens_for_a_model_of_texts_are_called_so():
    class Lengths(forebay.Model):
        def predict(self, batch: list[Text]) -> list[list[float]]:
            return [[len(one.input)] for one in batch]

    with client(Lengths) as served:
        for given, param in (([[5, 6], [7]], "input[0]"), (["a", [7]], "input[1]"), ([5, 6], "input")):
            # LangChain's `OpenAIEmbeddings` sends the first of these unless it is told otherwise.
            status, found = ask(served, "embeddings", model="lengths", input=given, encoding_format="base64")
            assert (status, found["error"]["param"]) == (400, param)
            assert found["error"]["message"].endswith("is the tokens of a text, and this model takes texts only")
        status, found = ask(served, "embeddings", model="lengths", input=["a", 3])
        assert (status, "tokens" in found["error"]["message"]) == (400, False)


CLIENTS_SAY = [
    # LangChain's `OpenAI` sends this with every request.
    ("completions", {"prompt": ["once"], "temperature": 0.7, "max_tokens": 256, "logprobs": None}),
    ("completions", {"prompt": "once", "best_of": 1, "echo": False, "suffix": None}),
    ("chat/completions", {"response_format": {"type": "text"}}),
    ("chat/completions", {"response_format": {"type": "text"}, "stream": True}),
    # OpenAI's Agents SDK sends a choice of tools also where there are none.
    ("chat/completions", {"tool_choice": "auto", "store": False, "metadata": {"a": "b"}}),
    ("chat/completions", {"tools": None, "tool_choice": None, "parallel_tool_calls": True, "logprobs": False}),
    ("chat/completions", {"modalities": ["text"], "reasoning_effort": None}),
    ("embeddings", {"input": ["a"], "dimensions": None, "encoding_format": None, "user": None}),
    ("rerank", {"query": "a", "documents": ["right"], "top_n": None, "max_tokens_per_doc": None}),
]


class Several(forebay.Model):
    name = "several"

    def predict(self, batch: list[ChatRequest]) -> list[str]:
        return ["hello"] * len(batch)

    @forebay.endpoint("/complete")
    def complete(self, batch: list[CompletionRequest]) -> list[str]:
        return ["upon a time"] * len(batch)

    @forebay.endpoint("/embed")
    def embed(self, batch: list[Text]) -> list[list[float]]:
        return [[1.0]] * len(batch)

    @forebay.endpoint("/fit")
    def fit(self, batch: list[RerankRequest]) -> list[float]:
        return [1.0 if one.document == "right" else float("nan") for one in batch]


@pytest.mark.parametrize("path, said", CLIENTS_SAY)
def test_undeclared_fields_that_say_nothing_are_no_error(path, said):
    messages = {"messages": [{"role": "user", "content": "a"}]} if path == "chat/completions" else {}
    with client(Several) as served:
        body = json.dumps({"model": "several", **messages, **said}).encode()
        answer = served.request("POST", f"/v1/{path}", body, {"content-type": "application/json"})
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    "path, said, param",
    [
        ("chat/completions", {"response_format": {"type": "json_object"}, "logprobs": None}, "response_format"),
        ("chat/completions", {"logprobs": 0}, "logprobs"),
        ("chat/completions", {"logprobs": True}, "logprobs"),
        ("chat/completions", {"parallel_tool_calls": False}, "parallel_tool_calls"),
        ("chat/completions", {"tool_choice": "none", "response_format": {"type": "text"}}, "tool_choice"),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools"),
        ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("completions", {"prompt": "a", "logprobs": 0}, "logprobs"),  # zero asks for those of the text itself
        ("completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("completions", {"prompt": "a", "response_format": {"type": "text"}}, "response_format"),
        ("completions", {"prompt": "a", "stop": None, "top_q": [[]] * 40}, "top_q"),
        ("chat/completions", {"stream": True, "stream_options": {"usage": None}}, "stream_options.usage"),
        ("completions", {"prompt": "a", **{f"f{number}": None for number in range(300)}}, "f0"),
    ],
)
def test_undeclared_fields_that_say_something_are_refused(path, said, param):
    messages = {"messages": [{"role": "user", "content": "a"}]} if path == "chat/completions" else {}
    with client(Several) as served:
        status, found = ask(served, path, model="several", **messages, **said)
        assert (status, found["error"]["param"]) == (400, param)


def test_declared_fields_reach_the_model_as_they_were_sent():
    class Odd(ChatRequest, frozen=True, rename={"how": "response_format"}):
        how: dict[str, str] | None = None
        logprobs: bool | None = True

    class Told(forebay.Model):
        def predict(self, batch: list[Odd]) -> list[str]:
            return [f"{one.how} {one.logprobs}" for one in batch]

    with client(Told) as served:
        messages = [{"role": "user", "content": "a"}]
        for said, told in (
            ({"response_format": {"type": "text"}, "logprobs": False}, "{'type': 'text'} False"),
            ({"response_format": None, "logprobs": None, "tool_choice": "auto"}, "None None"),
            ({"tool_choice": "auto"}, "None True"),
        ):
            status, found = ask(served, "chat/completions", model="told", messages=messages, **said)
            assert (status, found["choices"][0]["message"]["content"]) == (200, told)
        packed = msgspec.msgpack.encode({"messages": messages, "tool_choice": "auto", "logprobs": None})
        answer = served.request("POST", "/models/told", packed, {"content-type": "application/msgpack"})
        assert (answer.status, b"None None" in answer.body) == (200, True)


def test_a_null_of_a_declared_field_without_place_for_it_is_its_default():
    class Calling(ChatRequest, frozen=True, kw_only=True):
        tools: list[Tool] = msgspec.field(default_factory=list)
        logprobs: bool = False
        must: int

    class Fitted(EmbeddingRequest, frozen=True):
        dimensions: int = 2

    class Both(forebay.Model):
        name = "both"

        def predict(self, batch: list[Calling]) -> list[str]:
            return [f"{one.tools} {one.logprobs} {one.must}" for one in batch]

        @forebay.endpoint("/embed")
        def embed(self, batch: list[Fitted]) -> list[list[float]]:
            return [[0.5] * one.dimensions for one in batch]

    with client(Both) as served:
        asked = {"model": "both", "messages": [{"role": "user", "content": "a"}], "must": 3}
        status, found = ask(served, "chat/completions", **asked, tools=None, logprobs=None, tool_choice="auto")
        assert (status, found["choices"][0]["message"]["content"]) == (200, "[] False 3")
        status, found = ask(served, "embeddings", model="both", input=["a"], dimensions=None)
        assert (status, found["data"][0]["embedding"]) == (200, [0.5, 0.5])
        for wrong in ({"must": None}, {"messages": None}, {"tools": [None]}):
            status, found = ask(served, "chat/completions", **{**asked, "logprobs": None, **wrong})
            (field,) = wrong
            assert (status, found["error"]["param"].removesuffix("[0]")) == (400, field)


def test_the_same_model_is_asked_in_forebays_own_protocol():
    class Echo(forebay.Model):
        def predict(self, batch: list[ChatRequest]) -> list[TextPart]:
            return [TextPart(one.messages[-1].text, prompt_tokens=1) for one in batch]

    with client(Echo) as served:
        assert served.call({"messages": [{"role": "user", "content": "a"}]}) == {"text": "a", "prompt_tokens": 1}


def test_versions_share_what_is_asked_of_their_name():
    class One(forebay.Model):
        name = "talk"

        def predict(self, batch: list[ChatRequest]) -> list[str]:
            return [self.version] * len(batch)

    class Two(One):
        version = "2"

    with client(One, Two) as served:
        body = {"model": "talk", "messages": [{"role": "user", "content": "a"}]}
        assert ask(served, "chat/completions", **body)[1]["choices"][0]["message"]["content"] == "1"
        assert msgspec.json.decode(served.request("GET", "/v1/models").body)["models"] == ["talk"]


def test_kserves_first_protocol_lies_beside_it():
    class Talk(forebay.Model):
        def predict(self, batch: list[ChatRequest]) -> list[str]:
            return ["hello"] * len(batch)

    class Doubled(forebay.Model):
        def predict(self, batch: list[float]) -> list[float]:
            return [2 * one for one in batch]

    with client(Talk, Doubled) as served:
        assert served.request("POST", "/v1/models/doubled:predict", b'{"instances": [1, 2]}').json() == {
            "predictions": [2.0, 4.0]
        }
        # F85: a model that does not speak OpenAI's protocol is described as TensorFlow Serving does, and nothing more.
        assert served.request("GET", "/v1/models/talk").json().keys() == {"id", "object", "created", "owned_by"}
        assert served.request("GET", "/v1/models/doubled").json().keys() == {"model_version_status"}
        assert served.request("GET", "/v1/models/nope").json()["error"]["code"] == "model_not_found"
        listed = served.request("GET", "/v1/models").json()
        assert ([one["id"] for one in listed["data"]], listed["models"]) == (["talk"], ["talk", "doubled"])


def test_nothing_of_a_request_stays_behind(monkeypatch):
    """The collector does not look at requests, so that whoever refers to one has to let go of it."""
    alive = weakref.WeakSet()
    for kind in (asgi_inference.AsgiAnswer, openai._Call):

        def noted(self, *given, init=kind.__init__):
            alive.add(self)
            init(self, *given)

        monkeypatch.setattr(kind, "__init__", noted)
    opened, held = threading.Event(), threading.Event()

    class Talk(forebay.Model):
        max_queue = 2
        max_batch_size = 1

        def predict(self, batch: list[ChatRequest]) -> Iterator[list[str]]:
            if batch[0].messages[0].text == "fail":
                raise RuntimeError
            if batch[0].messages[0].text == "hold":
                opened.set()
                held.wait(PATIENCE_S)
            yield [str(number) for number, _ in enumerate(batch)]

    def body(text, **more):
        return {"model": "talk", "messages": [{"role": "user", "content": text}], **more}

    with client(Talk) as served, ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, served, "chat/completions", **body("hold"))
        assert opened.wait(PATIENCE_S)
        second = threads.submit(ask, served, "chat/completions", **body("a"))
        eventually(lambda: served.request("GET", "/models/talk").json()["waiting"] == 1)
        for stream in (False, True):  # the first of two is taken, and then the second one is refused
            assert ask(served, "chat/completions", **body("a", n=2), stream=stream)[0] == 429
        held.set()
        assert [first.result()[0], second.result()[0]] == [200, 200]
        for asked, status in ((body("a", n=2), 200), (body("a", n=4), 413), (body("fail"), 500), (body(3), 400)):
            for stream in (False, True):
                answer = served.request(
                    "POST", "/v1/chat/completions", json.dumps({**asked, "stream": stream}).encode()
                )
                assert answer.status == status
        assert (
            served.request("POST", "/models/talk", json.dumps({"messages": asked["messages"]}).encode()).status == 422
        )
        eventually(lambda: gc.collect() >= 0 and not alive)


def test_the_document_of_the_server_has_these_paths():
    class Talk(forebay.Model):
        def predict(self, batch: list[ChatRequest]) -> Iterator[list[str]]:
            yield ["a"] * len(batch)

        @forebay.endpoint("/complete")
        def complete(self, batch: list[CompletionRequest]) -> list[str]:
            return ["a"] * len(batch)

    class Again(Talk):
        @forebay.endpoint("/embed")
        def embed(self, batch: list[Text]) -> list[list[float]]:
            return [[1.0]] * len(batch)

        @forebay.endpoint("/fit")
        def fit(self, batch: list[RerankRequest]) -> list[Score]:
            return [Score(0.5, 2)] * len(batch)

    with client(Talk, Again) as served:
        document = served.request("GET", "/openapi.json").json()
        schemathesis.openapi.from_dict(document).validate()
        paths = document["paths"]
        assert {path for path in paths if path.startswith("/v1/")} == {
            *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/models/{name}"),
            *("/v1/rerank", "/v1/score", "/v1/responses", "/v1/messages"),
        }

        def check(path, status, **body):
            described = paths[f"/v1/{path}"]["post"]
            content = described["requestBody"]["content"]["application/json"]["schema"]
            is_right = jsonschema_rs.is_valid({**content, "components": document["components"]}, body)
            assert is_right == (status == 200)
            found = ask(served, path, **body)
            assert found[0] == status
            answered = described["responses"][str(status)]["content"]["application/json"]["schema"]
            jsonschema_rs.validate({**answered, "components": document["components"]}, found[1])

        messages = [{"role": "user", "content": "a"}]
        for model in ("talk", "again"):
            check("chat/completions", 200, model=model, messages=messages, n=2)
            check("completions", 200, model=model, prompt=["a", "b"])
            check("responses", 200, model=model, input="a", instructions="b")
            check("messages", 200, model=model, messages=messages, max_tokens=3, stop_sequences=["b"])
        check("embeddings", 200, model="again", input=["a", "b"], encoding_format="base64")
        check("embeddings", 404, model="talk", input="a")
        check("rerank", 200, model="again", query="a", documents=["a", "b"], top_n=1, return_documents=False)
        check("rerank", 400, model="again", query="a", documents=["a"], top_n=-1)
        check("score", 200, model="again", text_1="a", text_2=["a", "b"])
        check("score", 400, model="again", text_1="a")
        check("chat/completions", 404, model="other", messages=messages)
        check("chat/completions", 400, model="talk", messages=[])
        check("chat/completions", 400, model="talk", messages=messages, tools=[])
        check("completions", 400, model="talk", prompt=[])
        check("responses", 400, model="talk", input=[])
        check("messages", 400, model="talk", messages=messages)


def test_what_leads_nowhere_is_told_in_the_same_form():
    class Talk(forebay.Model):
        def predict(self, batch: list[ChatRequest]) -> list[str]:
            return ["a"] * len(batch)

    with client(Talk) as served:
        for method, path, status, code, told in (
            ("GET", "/v1/chat/completions", 405, "method_not_allowed", "POST"),
            ("PUT", "/v1/models", 405, "method_not_allowed", "GET"),
            ("POST", "/v1/chat/completion", 404, "not_found", "did you mean /v1/chat/completions?"),
            ("POST", "/v1/images/edits", 404, "not_found", "models here are asked at /v1/chat/completions"),
        ):
            answer = served.request(method, path, b"{}")
            error = answer.json()["error"]
            assert (answer.status, error["type"], error["param"]) == (status, "invalid_request_error", None)
            assert (error["code"], told in error["message"]) == (code, True)
        form = "application/x-www-form-urlencoded"
        for kind in ("text/csv", "application/msgpack", "multipart/form-data; boundary=a", form):
            answer = served.request("POST", "/v1/chat/completions", b"{}", {"content-type": kind})
            hint = " (with curl, add -H 'content-type: application/json')" if kind == form else ""
            told = f"Content-Type: expected application/json, got '{kind.split(';')[0]}'{hint}"
            assert (answer.status, answer.json()["error"]["message"]) == (415, told)


def test_a_full_queue_refuses_before_anything_is_made_of_a_body(monkeypatch):
    opened, held = threading.Event(), threading.Event()

    class Talk(forebay.Model):
        max_batch_size = 1
        max_queue = 1

        def predict(self, batch: list[ChatRequest]) -> list[str]:
            opened.set()
            held.wait()
            return ["a"] * len(batch)

    class Other(Talk):
        def predict(self, batch: list[ChatRequest]) -> list[str]:
            return ["b"] * len(batch)

    body = {"model": "talk", "messages": [{"role": "user", "content": "a"}]}
    with client(Talk, Other) as served, ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, served, "chat/completions", **body)
        assert opened.wait(PATIENCE_S)
        second = threads.submit(ask, served, "chat/completions", **body)
        eventually(lambda: served.request("GET", "/models/talk").json()["waiting"] == 1)
        made = []
        monkeypatch.setattr(openai.request_reading, "samples_of", lambda *given: made.append(given) or [given[2]])
        status, found = ask(served, "chat/completions", **body, n=2)
        assert (status, found["error"]["code"], made) == (429, "rate_limit_exceeded", [])
        assert "'talk'" in found["error"]["message"]
        assert ask(served, "chat/completions", **{**body, "model": "other"})[0] == 200
        assert len(made) == 1
        held.set()
        assert [first.result()[0], second.result()[0]] == [200, 200]
        told = served.request("GET", "/metrics").body.decode()
        lines = told.splitlines()
        refused = [one for one in lines if one.startswith("forebay_requests_total{") and "resource_exhausted" in one]
        assert [one.rpartition(" ")[2] for one in refused if 'endpoint="talk"' in one] == ["1.0"]
        assert times_on(told, "talk")[DURATION, "chat", "resource_exhausted"] == [1.0, 0.0]


def test_more_samples_than_may_ever_wait_are_not_refused_as_if_they_might_be_taken_later():
    class Short(Several):
        name = "short"
        max_queue = 3

    with client(Short) as served:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, field, body in (
            ("chat/completions", "n", {**chat, "n": 4}),
            ("chat/completions", "n", {**chat, "n": 4, "stream": True}),
            ("completions", "n", {"prompt": ["a", "b"], "n": 2}),
            ("completions", "prompt", {"prompt": ["a"] * 4}),
            ("embeddings", "input", {"input": ["a"] * 4}),
            ("rerank", "documents", {"query": "a", "documents": ["a"] * 4}),
            ("score", "text_2", {"text_1": "a", "text_2": ["a"] * 4}),
        ):
            status, found = ask(served, path, model="short", **body)
            error = found["error"]
            assert (status, error["param"], error["code"]) == (413, field, "too_large")
            assert "takes 3 (max_queue)" in error["message"]
        assert len(ask(served, "chat/completions", model="short", **chat, n=3)[1]["choices"]) == 3


def test_a_server_without_such_models_has_no_such_paths():
    class Plain(forebay.Model):
        def predict(self, batch: list[str]) -> list[str]:
            return batch

    with client(Plain) as served:
        assert served.request("POST", "/v1/chat/completions", b"{}").status == 404
        assert served.request("GET", "/v1/models").json()["data"] == []
        # F89: an unknown model is told in OpenAI's form only where some model speaks it.
        assert type(served.request("GET", "/v1/models/nope").json()["error"]) is str


@pytest.mark.parametrize(
    "path, said, status, param",
    [
        ("rerank", {"query": "a", "documents": ["right", 3]}, 400, "documents[1]"),
        ("rerank", {"query": "a", "documents": ["right", {"text": "a"}]}, 400, "documents[1]"),
        ("rerank", {"query": "a", "documents": [3, "right"]}, 400, "documents[0]"),
        ("rerank", {"query": "a", "documents": ["right"], "document": "b"}, 400, "document"),
        ("rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("rerank", {"query": "a"}, 400, "documents"),
        ("rerank", {"query": 3, "documents": ["right"]}, 400, "query"),
        ("rerank", {"query": "a", "documents": ["right"] * 2049}, 413, "documents"),
        ("rerank", {"query": "a", "documents": ["right"], "top_n": -1}, 400, "top_n"),
        ("rerank", {"query": "a", "documents": ["right"], "priority": 1}, 400, "priority"),
        ("rerank", {"query": "a" * 20_000, "documents": ["right"] * 2000}, 413, None),
        ("rerank", {"query": "a", "documents": ["wrong"]}, 500, None),
        ("score", {"text_1": ["a", "b"], "text_2": ["right"] * 3}, 400, "text_1"),
        ("score", {"text_1": ["a", 3], "text_2": ["right"] * 2}, 400, "text_1[1]"),
        ("score", {"text_1": "a", "text_2": ["right", None]}, 400, "text_2[1]"),
        ("score", {"text_1": ["a", "b"], "text_2": [3, "right"]}, 400, "text_2[0]"),
        ("score", {"text_1": "a", "text_2": ["right"], "query": "b"}, 400, "query"),
        ("score", {"text_1": "a", "text_2": ["right", 3], "query": None, "document": None}, 400, "text_2[1]"),
        ("score", {"queries": "a", "documents": 3}, 400, "documents"),
        ("score", {"text_1": "a"}, 400, "text_2"),
        ("score", {"text_1": "a" * 20_000, "text_2": ["right"] * 2000}, 413, None),
    ],
)
def test_ranks_and_scores_are_refused_by_the_name_of_what_is_wrong(path, said, status, param):
    with client(Several) as served:
        found = ask(served, path, model="several", **said)
        assert (found[0], found[1]["error"]["param"]) == (status, param), found


def test_what_a_model_calls_score_itself_stays_that():
    class Own(forebay.Model):
        def predict(self, batch: list[RerankRequest]) -> list[float]:
            return [1.0] * len(batch)

        @forebay.endpoint("/score")
        def score(self, batch: list[str]) -> list[str]:
            return batch

    def answers(served, path, body):
        return served.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"}).json()

    asked = {"model": "own", "text_1": "a", "text_2": "b"}
    with client(Own) as served:
        assert answers(served, "/score", "a") == "a"
        assert answers(served, "/v1/score", asked)["data"][0]["score"] == 1.0
    with client(Own, Several) as served:  # one of several is asked at /models/own/score
        assert answers(served, "/score", asked)["data"][0]["score"] == 1.0
        assert answers(served, "/models/own/score", "a") == "a"


def test_what_a_response_repeats_of_its_request_breaks_no_event():
    class Talk(forebay.Model):
        def predict(self, batch: list[ChatRequest]) -> list[str]:
            return [one.messages[-1].text for one in batch]

    said = {"model": "talk", "input": "a", "stream": True, "metadata": {"a": "b"}, "top_p": None}
    with client(Talk) as served:
        answer = served.request("POST", "/v1/responses", json.dumps(said, indent=2).encode())
    events = [one.split(b"\n") for one in answer.body.removesuffix(b"\n\n").split(b"\n\n")]
    assert {len(lines) for lines in events} == {2}
    told = json.loads(events[-1][1].removeprefix(b"data: "))["response"]
    assert (told["metadata"], told["top_p"], told["output"][0]["content"][0]["text"]) == ({"a": "b"}, None, "a")


@pytest.mark.parametrize(
    "said, status",
    [
        ('"input": [{"content": [{"type": {}}]}]', 200),
        ('"input": [{"type": "function_call_output", "output": [{"type": []}]}]', 200),
        ('"input": "hi", "include": 1e400', 400),
        ('"input": "hi", "include": [ ]', 200),
        ('"input": "hi", "tools": [{"type": "function", "name": "look", "more": 1e400}]', 200),
    ],
)
def test_odd_fields_of_a_response_are_answered(said, status):
    class Asked(ChatRequest, frozen=True):
        tools: list[Tool] | None = None

    class Chat(forebay.Model):
        def predict(self, batch: list[Asked]) -> list[str]:
            return [request.messages[-1].role for request in batch]

    with client(Chat) as served:
        answer = served.request("POST", "/v1/responses", b'{"model": "chat", %b}' % said.encode())
        assert answer.status == status, answer.body


def chat_of_bytes(self, batch: list[ChatRequest]) -> list[bytes]: ...
def chat_of_media(self, batch: list[ChatRequest]) -> list[str | Media]: ...
def completion_of_bytes(self, batch: list[CompletionRequest]) -> Iterator[list[bytes]]: ...


def streamed_vectors(self, batch: list[EmbeddingRequest]) -> Iterator[list[list[float]]]:
    yield []


def speech_of_texts(self, batch: list[SpeechRequest]) -> list[str]: ...
def speech_of_media(self, batch: list[SpeechRequest]) -> list[Media]: ...
def transcript_of_bytes(self, batch: list[TranscriptionRequest]) -> list[bytes]: ...


def streamed_scores(self, batch: list[RerankRequest]) -> Iterator[list[float]]:
    yield []


@pytest.mark.parametrize(
    "predict, needs",
    [
        (chat_of_bytes, "texts"),
        (chat_of_media, "texts"),
        (completion_of_bytes, "texts"),
        (streamed_vectors, "a vector each"),
        (streamed_scores, "a score each"),
        (speech_of_texts, "audio each"),
        (speech_of_media, "audio each"),
        (transcript_of_bytes, "texts: .*, or a forebay.openai.Transcript"),
    ],
)
def test_results_that_cannot_be_told_are_found_when_the_server_starts(predict, needs):
    model = type("Odd", (forebay.Model,), {"predict": predict})
    with pytest.raises(forebay.ConfigError, match=f"its samples are .*; it needs {needs}"), client(model):
        pass
