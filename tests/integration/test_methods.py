# SPDX-License-Identifier: Apache-2.0
"""Models that answer at several paths, in workers of every kind."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.conftest import MODELS
from tests.integration.test_attached import Worker, door_of
from tests.integration.test_reload import Load, write
from tests.waiting import eventually

import forebay
from forebay.testing import client


@pytest.fixture(scope="module", params=["inline", "thread", "process", "python", "attached"])
def server(request, launch, tmp_path_factory):
    if request.param == "python":
        yield launch("methods.py", "--worker-kind", "process", "--python", sys.executable)
    elif request.param != "attached":
        yield launch("methods.py", "--worker-kind", request.param)
    else:
        found = door_of(launch(None, "--attach", f"unix:{tmp_path_factory.mktemp('methods')}/s"))
        worker = Worker(MODELS / "methods.py", found.door)
        try:
            worker.ready()
            eventually(lambda: found.client.get("/readyz").status_code == 200, "ready")
            yield found
        finally:
            worker.stop()


def test_each_method_is_typed_by_itself_and_shares_the_model(server):
    client = server.client
    text, made = client.post("/models/words", json=" it ").json().split(": ")
    assert text == "it"  # `preprocess` belongs to `predict`
    assert client.post("/models/words/made", json=1, headers={"x-tag": "a"}).json() == [made, "a"]
    assert client.post("/models/words/embed", json=" it ").json()[0] == 4.0
    assert client.post("/models/words/bytes", content=b"ab\x00").content == b"\x00ba"
    assert client.post("/models/words/embed", json=3).status_code == 422
    assert client.post("/models/words/made", json="x").json()["error"]["message"] == "Expected `int`, got `str`"


def test_paths_are_also_those_of_the_version_and_of_the_only_model(server):
    for path in ("/embed", "/embed/", "/models/words/versions/1/embed", "/models/words/embed/"):
        assert server.client.post(path, json="it").json()[0] == 2.0, path
    answer = server.client.post("/models/words/embd", json="it")
    assert (answer.status_code, server.client.post("/embd", json="it").status_code) == (404, 404)
    assert "/embed" in server.client.post("/embd", json="it").json()["error"]["message"]


def test_the_query_of_a_get_has_the_fields(server):
    client = server.client
    assert client.get("/models/words/vocabulary", params={"prefix": "ax"}).json() == ["ax", "axe"]
    assert client.get("/vocabulary?prefix=a&longest=2").json() == ["ax"]
    assert client.get("/vocabulary").json() == ["ax", "axe", "bee"]
    assert client.get("/vocabulary?longest=long").status_code == 422
    assert client.get("/by/either?prefix=p").json() == client.post("/by/either", json={"prefix": "p"}).json() == "p"
    refused = client.post("/models/words/vocabulary", json={})
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    refused = client.get("/models/words/embed")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST, OPTIONS")
    with server.connect() as wire:
        assert wire.ask("HEAD", "/vocabulary").status == 200
        assert wire.ask("POST", "/embed", b'"it"').json()[0] == 2.0


def test_arrays_and_streams_of_further_methods(server):
    client = server.client
    assert client.post("/rows", json=[*range(300)]).json() == [*range(1, 301)]  # more than a batch
    assert client.post("/rows", json=3).status_code == 422
    spelt = client.post("/spell", json={"prefix": "abc"})
    assert spelt.headers["content-type"].startswith("text/event-stream")
    assert spelt.text == client.get("/spell?prefix=abc").text == 'data: "a"\n\ndata: "b"\n\ndata: "c"\n\n'


def test_what_a_method_raises_is_its_own(server):
    def ask(path):
        return server.client.post(path, json="raise")

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, ["/models/words", "/models/words/embed"] * 8))
    assert [one.status_code for one in answers] == [200, 500] * 8
    assert answers[1].json()["error"]["code"] == "internal"


def test_methods_meet_in_batches_of_their_own(server):
    with ThreadPoolExecutor(12) as threads:
        paths = ["/models/words/embed", "/models/words"] * 6
        answers = list(threads.map(lambda path: server.client.post(path, json="it").json(), paths * 5))
    assert max(one[1] for one in answers[::2]) > 1.0
    assert all(one.startswith("it: ") for one in answers[1::2])


def test_they_are_listed_and_documented(server):
    listed = {one["path"]: one for one in server.client.get("/models/words").json()["endpoints"]}
    assert sorted(listed) == ["/by/either", "/bytes", "/embed", "/made", "/rows", "/spell", "/vocabulary"]
    assert listed["/embed"]["description"] == "Counts letters."
    assert (listed["/vocabulary"]["methods"], listed["/rows"]["batchable"], listed["/spell"]["streams"]) == (
        ["GET"],
        True,
        True,
    )
    paths = server.client.get("/openapi.json").json()["paths"]
    assert list(paths["/models/words/embed"]) == list(paths["/embed"]) == ["post"]
    got = paths["/models/words/vocabulary"]
    assert list(got) == ["get"]
    (sample,) = [one for one in got["get"]["parameters"] if one.get("in") == "query"]
    assert (sample["name"], sample["explode"]) == ("sample", True)
    assert "requestBody" not in got["get"]
    assert sorted(paths["/by/either"]) == ["get", "post"]
    ids = [one["operationId"] for path in paths.values() for one in path.values()]
    assert len(ids) == len(set(ids))


SWAPPED = """
import forebay

class Tells(forebay.Model):
    def predict(self, batch):
        return batch

    @forebay.endpoint("/twice")
    def twice(self, batch):
        return ["{answer}"] * len(batch)
{more}
"""


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_swap_keeps_them_and_brings_new_ones(serve, tmp_path, kind):
    def put(answer, more=""):
        draft = tmp_path / "draft"
        draft.write_text(SWAPPED.format(answer=answer, more=more))
        draft.replace(tmp_path / "model.py")

    put("old")
    server = serve(tmp_path / "model.py", "--worker-kind", kind, "--reload")
    with Load(server, "/models/tells/twice") as load:
        load.until("old")
        put(
            "new",
            '    @forebay.endpoint("/more", methods=["GET"])\n    def more(self, batch): return ["more"] * len(batch)',
        )
        load.until("new")
        eventually(lambda: server.client.get("/models/tells/more").status_code == 200, "the new path")
    assert load.wrong == []
    write(tmp_path, "gone")
    eventually(lambda: server.call("tells", 1).json() == "gone", "the model without")
    answer = server.client.post("/models/tells/twice", json=1)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "the model 'tells' does not answer at /twice, but at its own path"


THIRD = """
    version = "3"

    @forebay.endpoint("/third")
    def third(self, batch):
        return batch
"""


def test_versions_share_a_path_only_if_they_have_it(serve, tmp_path):
    (tmp_path / "v1.py").write_text(SWAPPED.format(answer="one", more=""))
    write(tmp_path, "two", name="v2.py", version="2")
    (tmp_path / "v3.py").write_text(SWAPPED.format(answer="three", more=THIRD))
    weights = "".join(f"  - {{target: v{number}.py, weight: 1}}\n" for number in (1, 2, 3))
    (tmp_path / "forebay.yaml").write_text("worker_kind: thread\nmodels:\n" + weights)
    server = serve(tmp_path)
    answers = [server.client.post("/models/tells/twice", json=1).json() for _ in range(8)]
    assert (answers.count("one"), answers.count("three")) == (4, 4)
    assert server.client.post("/models/tells/versions/3/twice", json=1).json() == "three"
    assert server.client.post("/models/tells/versions/2/twice", json=1).status_code == 404
    answer = server.client.post("/models/tells/twixe", json=1)
    assert (
        answer.json()["error"]["message"]
        == "the model 'tells' does not answer at /twixe, but at its own path and at /twice"
    )
    # What only a later version has is documented where all are asked, too.
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/third", "/models/tells/third", "/models/tells/versions/3/third", "/models/tells/twice"} <= set(paths)
    assert server.client.post("/models/tells/third", json=1).json() == 1


def test_what_is_wrong_is_told_by_check(cli, tmp_path):
    path = tmp_path / "words.py"
    path.write_text(
        "import forebay\n\nclass Words(forebay.Model):\n    def predict(self, batch): return batch\n\n"
        "    @forebay.endpoint('embed')\n    def embed(self, batch): return batch\n"
    )
    done = cli("check", path)
    assert done.returncode == 2
    assert "Words.embed: the path 'embed' has no '/' at its beginning; write '/embed'" in done.stderr
    path.write_text(path.read_text().replace("'embed'", "'/embed'"))
    assert "POST /embed" in cli("check", path).stdout


def test_the_client_for_tests_reaches_them(tmp_path):
    class Words(forebay.Model):
        def predict(self, batch: list[str]) -> list[str]:
            return batch

        @forebay.endpoint("/embed")
        def embed(self, batch: list[str]) -> list[int]:
            return [len(one) for one in batch]

        @forebay.endpoint("/raw")
        def raw(self, batch: list[bytes]) -> list[int]:
            return [len(one) for one in batch]

        @forebay.endpoint("/spell")
        def spell(self, batch: list[str]):
            yield batch

    with client(Words) as words:
        assert words.call("it", path="/embed") == 2
        assert words.call_all(["a", "bc"], path="/embed") == [1, 2]
        assert words.call(b"abc", path="/raw") == 3
        assert list(words.stream("it", path="/spell")) == ["it"]
        assert words.ask(3, path="/embed").status == 422
        assert words.ask("it", path="/nothing").status == 404
