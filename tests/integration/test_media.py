# SPDX-License-Identifier: Apache-2.0
"""`forebay.Media` as the answer of a model, whatever runs it: F29."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

from forebay import ConfigError, Media, Model
from forebay.serving.models.model import load_module
from forebay.serving.models.model_runner import ModelRunner
from forebay.types.call import Request
from forebay.workers.runner import WorkerContext

ORIGIN = "http://page.example"
RUN = "import sys; from forebay.cli.main import main; sys.exit(main())"
PICTURE = (200, "image/png", b"\x89PNG")
WORDS = (200, "application/json", b'{"text":"a"}')


@pytest.fixture(scope="module", params=["inline", "thread", "process", "attached"])
def pictures(request, launch, models, tmp_path_factory):
    file = models / "pictures.py"
    if request.param != "attached":
        yield launch(file, "--worker-kind", request.param, "--cors-origin", ORIGIN)
        return
    address = f"unix:{tmp_path_factory.mktemp('door')}/socket"
    server = launch(models / "single.py", "--attach", address, "--cors-origin", ORIGIN)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, "worker", f"{file}:{name}", "--connect", address], stderr=subprocess.DEVNULL
        )
        for name in ("Painter", "Anything", "Rows", "Film")
    ]
    try:
        yield server
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(PATIENCE_S)


@pytest.fixture
def ask(pictures, eventually):
    """Asks a model once it is there."""

    def ask(model, sample, **headers):
        eventually(lambda: pictures.client.get(f"/models/{model}").status_code == 200, model)
        return pictures.call(model, sample, **headers)

    return ask


def seen(answer):
    return answer.status_code, answer.headers["content-type"], answer.content


@pytest.mark.parametrize("lane", [{}, {"origin": ORIGIN}], ids=["fast lane", "Starlette"])
@pytest.mark.parametrize("model", ["painter", "anything"])
def test_a_model_answers_with_media_or_with_other_results(ask, model, lane):  # F29
    for _ in range(2):  # the second time the head is known
        assert seen(ask(model, "picture", **lane)) == PICTURE
        assert seen(ask(model, "a", **lane)) == WORDS


def test_a_client_may_ask_for_the_media_alone_where_they_are_declared(ask):  # F29
    assert seen(ask("painter", "picture", accept="image/png")) == PICTURE
    assert ask("anything", "picture", accept="image/png").status_code == 406


def test_large_media_arrive_whole(ask):  # F29
    for size in (100_000, 5, 3_000_000):
        assert seen(ask("painter", size)) == (200, "image/x-raw", bytes(size))


def test_media_where_none_can_be_fail_their_request(ask):  # F29
    assert ask("anything", "inside").status_code == 500
    assert ask("rows", ["a", "picture"]).status_code == 500
    assert ask("rows", ["a"]).json() == [{"text": "a"}]
    parts = ask("film", "picture").text.split("\n\n")
    assert parts[0] == "data: 1"
    assert parts[1].startswith("event: error")
    assert ask("film", "a").text == 'data: 1\n\ndata: {"text":"a"}\n\n'


def test_the_document_tells_of_media(ask, pictures):  # F29
    for name in ("painter", "rows"):
        ask(name, "a")  # it is there, whichever test comes first  # F110
    paths = pictures.client.get("/openapi.json").json()["paths"]
    found = {name: set(paths[f"/models/{name}"]["post"]["responses"]["200"]["content"]) for name in ("painter", "rows")}
    assert found["painter"] - found["rows"] == {"*/*"}


def run(model, *samples) -> list[Any]:
    runner: Any = ModelRunner(model)
    runner.open(WorkerContext())
    return list(
        runner.run([Request(body=sample, reply=print, params={"in": "json", "out": "json"}) for sample in samples])
    )


@pytest.mark.parametrize("model, words", [
    ("Anything", "only a whole result"), ("Rows", "array of samples"), ("Film", "part of a stream"),
])  # fmt: skip
def test_the_error_says_why(models, model, words):  # F29
    sample = b'"picture"' if model != "Anything" else b'"inside"'
    *_, last = run(getattr(load_module(models / "pictures.py"), model), [sample] if model == "Rows" else sample)
    (failure,) = last if model == "Film" else [last]
    assert words in failure.error.message
    assert model in failure.error.message


@pytest.mark.parametrize("annotation, words", [(int, "annotate"), (bytes, "annotate"), (Media, "annotated forebay")])
def test_what_is_declared_is_what_may_come(annotation, words):  # F29
    def predict(self, batch):
        return [1 if annotation is Media else Media(b"", "image/png") for _ in batch]

    predict.__annotations__ = {"return": list[annotation]}
    (failure,) = run(type("Made", (Model,), {"predict": predict}), b"1")
    assert words in failure.error.message
    if annotation is not Media:
        unchecked = type("Made", (Model,), {"predict": predict, "check_outputs": False})
        assert run(unchecked, b"1") == [Media(b"", "image/png")]


def test_arrays_and_streams_that_declare_media_are_refused_at_once():  # F29
    class Arrays(Model):
        batchable = True

        def predict(self, batch: list[int]) -> list[Media]:
            return []

    class Streams(Model):
        def predict(self, batch: list[int]) -> Iterator[list[Media]]:
            yield []

    with pytest.raises(ConfigError, match="array of samples"):
        ModelRunner(Arrays)
    with pytest.raises(ConfigError, match="part of a stream"):
        ModelRunner(Streams)


def test_media_are_values_of_bytes():
    assert Media(bytearray(b"a"), "image/png") == Media(b"a", "image/png")
    assert Media(b"a", "image/png") != Media(b"a", "image/gif")
    with pytest.raises(TypeError):
        Media("a", "image/png")  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError):
        Media(b"a", "image/png").type = "a\r\nb"  # pyright: ignore[reportAttributeAccessIssue]
