# SPDX-License-Identifier: Apache-2.0
"""Versions under one name, managed over HTTP and from Python."""

import asyncio

import httpx
import pytest
from tests.integration.test_reload import Load, ask, states, write
from tests.waiting import eventually

import forebay
from forebay.errors import ConfigError, InvalidRequest, ModelError, NotFound
from forebay.server.app import App
from forebay.server.config import HttpConfig
from forebay.transports.http.asgi import asgi_app

KEY = {"x-api-key": "secret"}

YAML = """
models:
  - target: v1.py
    version: "1"
  - target: v2.py
    version: "2"
  - target: v1.py
    name: other
worker_kind: thread
"""


@pytest.fixture
def project(tmp_path):
    for number in "12":
        write(tmp_path, number, name=f"v{number}.py")
    (tmp_path / "forebay.yaml").write_text(YAML)
    return tmp_path


def test_a_slip_in_what_is_managed_is_told_and_leaves_nothing_behind(serve, project):
    server = serve(project, "--manage")

    def post(path):
        answer = server.client.post(path)
        assert answer.status_code == 404, answer.text
        return answer.text

    assert "a version of a model has no 'lod'; there is load, swap, unload; did you mean 'load'?" in post(
        "/models/tells/versions/2/lod"
    )
    for version in "12":  # a model that nobody named is not one that failed
        assert "no version '" + version + "' of a model 'tels'; did you mean 'tells'?" in post(
            f"/models/tels/versions/{version}/load"
        )
    assert "there is no model 'tels'" in post("/models/tels")
    assert server.client.get("/v2/models/tels").status_code == 404
    below = "/v2/repository/models/tells"
    assert "a model of the repository has no 'lod'; there is load, unload; did you mean 'load'?" in post(f"{below}/lod")
    assert "has no 'versions/2/load'" in post(f"{below}/versions/2/load")
    assert "did you mean '/v2/repository/index'?" in post("/v2/repository/indx")
    assert "a model has no 'redy'" in server.client.get("/v2/models/tells/redy").text
    assert "did you mean 'ready'?" in server.client.get("/v2/models/tells/versions/2/redy").text


def test_versions_are_managed_over_http(serve, project):  # F51
    server = serve(project, "--api-key", "secret")
    server.client.headers.update(KEY)

    def post(path, status=200, **more):
        answer = server.client.post(f"/models/tells/{path}", **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    assert "versions 1 (1), 2 (0)" in server.log
    assert ask(server) == "1"
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/models/tells/versions/1", "/models/tells/versions/2", "/models/{name}/weights"} <= set(paths)
    assert post("weights", json={"1": 3, "2": 1})["versions"] == [
        {"version": "1", "state": "ready", "weight": 3},
        {"version": "2", "state": "ready", "weight": 1},
    ]
    assert sorted(ask(server) for _ in range(8)) == ["1"] * 6 + ["2"] * 2
    post("weights", json={"2": 1})
    post("versions/1/unload")
    eventually(lambda: states(server) == [("2", "ready", 1)])
    assert server.client.post("/models/tells/versions/1", json=1).status_code == 404
    leaving = {"version": "2", "state": "leaving", "weight": 0}
    assert post("versions/2/unload")["versions"] in ([leaving], [])  # it may have left by then
    eventually(lambda: states(server) == [])
    assert server.client.post("/models/tells", json=1).status_code == 404
    assert ask(server, "/models/other") == "1"
    write(project, "anew", name="v1.py")
    post("versions/1/load")
    assert ask(server) == "anew"
    post("versions/2/load")
    assert states(server) == [("1", "ready", 1), ("2", "ready", 0)]
    post("versions/2/swap")
    assert ask(server) == "2"
    eventually(lambda: states(server) == [("2", "ready", 1)])
    write(project, "bad", name="v2.py", load="raise OSError('no weights')")
    assert "no weights" in post("versions/2/load", 503)["error"]["message"]
    assert ask(server) == "2"
    assert ("2", "failed", 0) in states(server)
    assert "names no version '3'" in post("versions/3/load", 404)["error"]["message"]
    assert "; there is '1', '2'" in post("versions/3/load", 404)["error"]["message"]
    assert "3" not in {version for version, _, _ in states(server)}
    assert "no version '3'" in post("versions/3/unload", 404)["error"]["message"]
    for body in (b"", b"[]", b'{"2": -1}', b'{"2": 0}', b'{"2": "x"}', b"\xff"):
        post("weights", 400, content=body)
    assert "foreign" in post("versions/2/unload", 403, headers={"origin": "http://evil.example"})["error"]["code"]
    assert httpx.post(f"{server.url}/models/tells/versions/2/unload").status_code == 401
    assert ask(server) == "2"


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_drain_does_not_wait_for_a_version_that_somebody_loads(serve, project, kind):
    server = serve(project, "--manage", "--worker-kind", kind)
    write(project, "3", name="v2.py", load="__import__('time').sleep(1000)")
    with server.connect() as wire, server.connect() as other:
        wire.send(wire.request("POST", "/models/tells/versions/2/load"))
        eventually(lambda: ("2", "loading", 0) in states(server))
        other.send(other.request("POST", "/v2/repository/models/tells/load"))
        server.signal()
        answers = [wire.read(), other.read()]
    assert [answer.status for answer in answers] == [503, 503]
    assert all(b"the server is draining" in answer.body for answer in answers)
    assert server.wait() == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize("path", ["/models/tells/versions/1/load", "/v2/repository/models/tells/load"])
def test_what_fails_without_words_while_a_version_is_loaded_is_in_the_log(path, caplog):
    app = App([])

    def source(name, version):
        raise KeyError("who is to know")

    app.source = source

    async def load():
        transport = httpx.ASGITransport(asgi_app(app, HttpConfig(manage=True)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path)

    answer = asyncio.run(load())
    assert answer.status_code == 500
    assert "the server's log has the details under this request id" in answer.text
    [record] = [vars(one) for one in caplog.records if "who is to know" in one.getMessage()]
    assert record["request_ids"] == [answer.headers["x-request-id"]]
    assert "in source" in record["trace"]


def test_without_a_key_versions_are_managed_only_if_somebody_says_so(serve, project):
    server = serve(project)
    answer = server.client.post("/models/tells/versions/2/unload")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_managed")
    assert "--manage" in answer.json()["error"]["message"]
    server.stop()
    server = serve(project, "--manage")
    assert server.client.post("/models/tells/versions/2/unload").status_code == 200


class Old(forebay.Model):
    name = "tells"

    def predict(self, batch):
        return ["old"] * len(batch)


class New(Old):
    def predict(self, batch):
        return ["new"] * len(batch)


class Broken(Old):
    def load(self):
        raise OSError("no weights")


def test_a_program_changes_what_its_server_serves(tmp_path):
    with forebay.start(Old, port=0) as server:

        def tell(path="/models/tells"):
            return httpx.post(server.url + path, json=1).json()

        assert tell() == "old"
        server.load(New, version="2")
        assert (tell(), tell("/models/tells/versions/2")) == ("old", "new")
        server.share("tells", {"1": 1, "2": 1})
        assert sorted(tell() for _ in range(4)) == ["new", "new", "old", "old"]
        with pytest.raises(ModelError, match="no weights"):
            server.load(Broken, version="2")
        with pytest.raises(InvalidRequest):
            server.share("tells", {})
        server.swap(New, version="3")
        assert {tell() for _ in range(4)} == {"new"}
        with pytest.raises(NotFound):
            server.unload("tells", "2")
        path = write(tmp_path, "file")
        server.swap(path, version="4", worker_kind="thread")
        assert tell() == "file"
        write(tmp_path, "file anew")
        server.load(path, version="4", worker_kind="thread")
        assert tell() == "file anew"
        with pytest.raises(ConfigError, match="no file to reload"):
            server.reload()
        with pytest.raises(ConfigError, match="did you mean version"):
            server.load(New, versoin="2")
        with pytest.raises(ConfigError, match=r"load\(version=\.\.\.\): expected .*, got 'a/b'"):
            server.load(New, version="a/b")


def test_a_program_has_its_files_read_anew(tmp_path):
    with forebay.start(write(tmp_path, "a"), port=0, worker_kind="thread") as server:
        write(tmp_path, "b")
        server.reload()
        eventually(lambda: httpx.post(f"{server.url}/models/tells", json=1).json() == "b")


def test_a_model_file_is_exchanged_when_it_changes(serve, tmp_path):  # F51
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kinds = onnx.helper, onnx.TensorProto

    def save(value, name="x"):
        one = helper.make_tensor("one", kinds.FLOAT, [1], [value])
        node = helper.make_node("Add", [name, "one"], ["y"])
        sides = [helper.make_tensor_value_info(side, kinds.FLOAT, ["n", 1]) for side in (name, "y")]
        graph = helper.make_graph([node], "g", sides[:1], sides[1:], [one])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, tmp_path / "draft.onnx")
        (tmp_path / "draft.onnx").replace(tmp_path / "net.onnx")

    save(1.0)
    server = serve(tmp_path / "net.onnx", "--worker-kind", "thread", "--reload")  # which looks more often
    with Load(server, "/models/net", b'{"x": [1]}') as load:
        load.until(b'{"y":[2.0]}')
        (tmp_path / "net.onnx").write_bytes(b"no model")
        eventually(lambda: ("1", "failed", 0) in states(server, "net"))
        save(2.0)
        load.until(b'{"y":[3.0]}')
    assert load.wrong == []
    assert set(load.answers) == {b'{"y":[2.0]}', b'{"y":[3.0]}'}
    save(2.0, "z")
    eventually(lambda: server.client.post("/models/net", json={"z": [1]}).status_code == 200)
    assert server.client.post("/models/net", json={"x": [1]}).status_code == 422
