# SPDX-License-Identifier: Apache-2.0
"""Models that say they are asked in OpenAI's protocol: by the type of their samples, wherever they run."""

import gc
import json
import sys
import weakref
from collections.abc import Iterator

import msgspec
import pytest
from tests.waiting import eventually

import forebay
from forebay.openai import ChatRequest, CompletionRequest, EmbeddingRequest, TextPart
from forebay.testing import client
from forebay.transports.http import asgi, openai
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
        assert served.request("GET", "/v1/models/doubled").json()["ready"] is True  # for KServe's clients
        listed = served.request("GET", "/v1/models").json()
        assert ([one["id"] for one in listed["data"]], listed["models"]) == (["talk"], ["talk", "doubled"])


def test_nothing_of_a_request_stays_behind(monkeypatch):
    """The collector does not look at requests, so that whoever refers to one has to let go of it."""
    alive = weakref.WeakSet()
    for kind in (asgi.AsgiAnswer, openai._Call):

        def noted(self, *given, init=kind.__init__):
            alive.add(self)
            init(self, *given)

        monkeypatch.setattr(kind, "__init__", noted)

    class Talk(forebay.Model):
        max_queue = 2

        def predict(self, batch: list[ChatRequest]) -> Iterator[list[str]]:
            if batch[0].messages[0].text == "fail":
                raise RuntimeError
            yield [str(number) for number, _ in enumerate(batch)]

    def body(text, **more):
        return {"model": "talk", "messages": [{"role": "user", "content": text}], **more}

    with client(Talk) as served:
        for asked, status in ((body("a", n=2), 200), (body("a", n=4), 429), (body("fail"), 500), (body(3), 400)):
            for stream in (False, True):
                answer = served.request(
                    "POST", "/v1/chat/completions", json.dumps({**asked, "stream": stream}).encode()
                )
                assert answer.status == status
        assert (
            served.request("POST", "/models/talk", json.dumps({"messages": asked["messages"]}).encode()).status == 422
        )
        eventually(lambda: gc.collect() >= 0 and not alive)


def test_a_server_without_such_models_has_no_such_paths():
    class Plain(forebay.Model):
        def predict(self, batch: list[str]) -> list[str]:
            return batch

    with client(Plain) as served:
        assert served.request("POST", "/v1/chat/completions", b"{}").status == 404
        assert served.request("GET", "/v1/models").json()["data"] == []


def chat_of_bytes(self, batch: list[ChatRequest]) -> list[bytes]: ...
def chat_of_media(self, batch: list[ChatRequest]) -> list[str | Media]: ...
def completion_of_bytes(self, batch: list[CompletionRequest]) -> Iterator[list[bytes]]: ...


def streamed_vectors(self, batch: list[EmbeddingRequest]) -> Iterator[list[list[float]]]:
    yield []


@pytest.mark.parametrize(
    "predict, needs",
    [
        (chat_of_bytes, "texts"),
        (chat_of_media, "texts"),
        (completion_of_bytes, "texts"),
        (streamed_vectors, "a vector each"),
    ],
)
def test_results_that_cannot_be_told_are_found_when_the_server_starts(predict, needs):
    model = type("Odd", (forebay.Model,), {"predict": predict})
    with pytest.raises(forebay.ConfigError, match=f"its samples are .*; it needs {needs}"), client(model):
        pass
