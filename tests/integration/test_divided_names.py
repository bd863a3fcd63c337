# SPDX-License-Identifier: Apache-2.0
"""Models called `org/model`: in bodies and over gRPC as it is, in paths with `/` or `%2F`."""  # F117

import json
import signal
import subprocess

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.browser import PROGRAM
from tests.compat.openai_protocol.clients import PYTHON, Asker, Client
from tests.conftest import MODELS
from tests.integration.kserve.test_clients import PYTHON as TRITON
from tests.integration.kserve.test_clients import address_of
from tests.waiting import PATIENCE_S, eventually
from websockets.sync.client import connect

import forebay
from forebay.errors import ConfigError
from forebay.protocols.kserve.messages import messages
from forebay.server.app import App
from forebay.server.config import Overrides
from forebay.surfaces.native.target_models import serve_model
from forebay.types.names import endpoint_name

NAMES = ("org/twice", "org%2Ftwice", "org%2ftwice")
TENSORS = {"inputs": [{"name": "input", "shape": [2], "datatype": "INT64", "data": [4, 6]}]}
OPTIONS = ("--grpc-port", "0", "--manage")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    file = tmp_path_factory.mktemp("divided") / "all.yaml"
    targets = [f"{MODELS}/divided_names.py:{name}" for name in ("Twice", "Third", "Talk", "both")]
    file.write_text(json.dumps({"models": targets, "worker_kind": "thread"}))
    return file


@pytest.fixture(scope="module", params=[[], ["--fronts", "2"]], ids=["alone", "behind fronts"])
def server(launch, project, request):
    return launch(None, "--config", str(project), *OPTIONS, *request.param)


@pytest.fixture(scope="module")
def alone(launch, project):
    return launch(None, "--config", str(project), *OPTIONS)


def asked(server, path, body=None, method=None):
    """Status and JSON of what a path answers, which is sent as it stands."""
    with server.connect() as wire:
        answer = wire.ask(
            method or ("GET" if body is None else "POST"), path, b"" if body is None else json.dumps(body).encode()
        )
    return answer.status, answer.json()


@pytest.mark.parametrize("name", NAMES)
def test_a_path_has_the_slash_plainly_or_encoded(server, name):
    def answer(path, body=None):
        status, found = asked(server, path, body)
        assert status == 200, (path, found)
        return found

    for below in ("", "/versions/1"):
        assert answer(f"/models/{name}{below}", 21) == 42
        assert answer(f"/models/{name}{below}/half", 42) == 21
        (output,) = answer(f"/v2/models/{name}{below}/infer", TENSORS)["outputs"]
        assert output["data"] == [8, 12]
        assert answer(f"/v1/models/{name}{below}:predict", {"instances": [1, 2]}) == {"predictions": [2, 4]}
        assert answer(f"/v2/models/{name}{below}")["inputs"][0]["datatype"] == "INT64"
        assert answer(f"/v2/models/{name}{below}/ready") == {"name": "org/twice", "ready": True}
        assert answer(f"/v2/models/{name}{below}/config")["name"] == "org/twice"
        assert answer(f"/v2/models/{name}{below}/stats")["model_stats"][0]["name"] == "org/twice"
        assert answer(f"/v1/models/{name}{below}")["model_version_status"][0]["state"] == "AVAILABLE"
        assert answer(f"/v1/models/{name}{below}/metadata")["model_spec"]["name"] == "org/twice"
        assert answer(f"/models/{name}{below}")["name"] == "org/twice"
    assert answer(f"/models/{name}/")["version"] == "1"


@pytest.mark.parametrize("name", NAMES)
def test_a_websocket_is_opened_at_it(server, name):
    address = f"{server.url.replace('http', 'ws', 1)}/models/{name}"
    with connect(address, open_timeout=PATIENCE_S, close_timeout=PATIENCE_S) as socket:
        for number in (1, 2):
            socket.send(str(number))
            assert socket.recv(PATIENCE_S) == str(2 * number)


def test_a_name_that_looks_like_a_path_is_a_name_where_it_is_served(server):
    for name in ("org/versions", "org%2Fversions"):
        assert asked(server, f"/models/{name}", 6) == (200, 2)
        assert asked(server, f"/models/{name}/versions/1", 6) == (200, 2)
        assert asked(server, f"/models/{name}/versions/1")[1]["name"] == "org/versions"
        assert asked(server, f"/v2/models/{name}/versions/1")[1]["name"] == "org/versions"
        assert asked(server, f"/v1/models/{name}/versions/1")[1]["model_version_status"]


@pytest.mark.parametrize("name", ["org/ghost", "org%2Fghost", "%2E%2E/twice", "org//twice", "org%252Ftwice", "org"])
@pytest.mark.parametrize("path", ["/models/{}", "/v2/models/{}/infer", "/v1/models/{}:predict"])
def test_other_names_are_none(server, name, path):
    status, found = asked(server, path.format(name), 1)
    assert status == 404, found
    assert asked(server, "/models/org/twice", 2) == (200, 4)
    if "ghost" in name:
        error = found["error"] if isinstance(found["error"], str) else found["error"]["message"]
        assert "there is no model 'org/ghost'" in error


@pytest.mark.parametrize(
    "name", ["/twice", "org/", "../twice", "org/..", "org/.twice", "a/b/c", "org\\twice", "a//b", "a/b\n", "a" * 129]
)
def test_a_name_has_one_slash_and_a_name_at_each_side(name):
    with pytest.raises(ValueError, match=r"at most 128 in all, or two such names joined by '/'"):
        endpoint_name(name)
    with pytest.raises(ConfigError, match=r"Odd\.name: expected letters"):
        serve_model(type("Odd", (forebay.Model,), {"name": name, "predict": lambda self, batch: batch}), Overrides())


def test_versions_are_managed_under_the_name(alone):
    def post(path, body=None, status=200):
        found = asked(alone, path, body, "POST")
        assert found[0] == status, found
        return found[1]

    for name in NAMES[:2]:
        assert post(f"/models/{name}/weights", {"1": 3})["versions"] == [
            {"version": "1", "state": "ready", "weight": 3}
        ]
        assert post(f"/models/{name}/versions/1/load")["name"] == "org/twice"
        post(f"/v2/repository/models/{name}/unload")
        post("/models/org/twice", 1, 404)
        post(f"/v2/repository/models/{name}/load")
        assert post("/models/org/twice", 1) == 2
    assert "'lod'" in json.dumps(post("/models/org/twice/versions/1/lod", status=404))
    assert "'org/ghost'" in json.dumps(post("/models/org/ghost/versions/1/load", status=404))


def test_grpc_has_the_name_as_it_is(server):
    m = messages()
    with grpc.insecure_channel(address_of(server)) as channel:

        def call(method, request, service="inference.GRPCInferenceService"):
            return channel.unary_unary(f"/{service}/{method}", type(request).SerializeToString, bytes)(
                request, timeout=PATIENCE_S
            )

        told = m.ModelMetadataResponse.FromString(call("ModelMetadata", m.ModelMetadataRequest(name="org/twice")))
        assert told.name == "org/twice"
        request = m.ModelInferRequest(model_name="org/twice")
        request.inputs.add(name="input", datatype="INT64", shape=[1]).contents.int64_contents.append(4)
        assert m.ModelInferResponse.FromString(call("ModelInfer", request)).model_name == "org/twice"
        asked = health_pb2.HealthCheckRequest(service="org/twice")
        assert health_pb2.HealthCheckResponse.FromString(call("Check", asked, "grpc.health.v1.Health")).status == 1


@pytest.mark.skipif(not TRITON.exists(), reason="no environment with Triton's client: make setup")
def test_tritons_client_asks_for_it(alone):
    script = (
        "import sys, numpy, tritonclient.http as http\n"
        "client = http.InferenceServerClient(sys.argv[1])\n"
        "given = http.InferInput('input', [2], 'INT64')\n"
        "given.set_data_from_numpy(numpy.array([4, 6]))\n"
        "assert client.is_model_ready('org/twice') and client.get_model_metadata('org/twice')['name'] == 'org/twice'\n"
        "assert list(client.infer('org/twice', [given], '1').as_numpy('output')) == [8, 12]\n"
    )
    command = [TRITON, "-c", script, alone.url.removeprefix("http://")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment with OpenAI's client: make setup")
def test_openais_client_asks_for_it(server):
    asker = Asker()
    try:
        client = Client(asker, server, {})
        assert [one["id"] for one in client.ask("models.list")["result"]] == ["org/talk"]
        assert client.ask("models.retrieve", model="org/talk")["result"]["id"] == "org/talk"
        missing = client.ask("models.retrieve", model="org/tolk")["error"]
        assert (missing["class"], missing["code"]) == ("NotFoundError", "model_not_found")
        assert "did you mean 'org/talk'" in missing["message"]
        found = client.chat("aloud", model="org/talk")["result"]
        assert (found["model"], found["choices"][0]["message"]["content"]) == ("org/talk", "ALOUD")
        assert "did you mean 'org/talk'" in client.chat("aloud", model="org/tolk")["error"]["message"]
    finally:
        asker.close()


def test_numbers_and_pages_tell_the_name(alone):
    before = alone.metric("forebay_requests_total", endpoint="org/twice", code="ok")
    assert asked(alone, "/models/org%2Ftwice", 1) == (200, 2)
    eventually(lambda: alone.metric("forebay_requests_total", endpoint="org/twice", code="ok") == before + 1)
    assert {"/models/org/twice", "/models/org/twice/half"} <= alone.client.get("/openapi.json").json()["paths"].keys()
    for name in ("org/both", "org%2Fboth"):
        drawn = alone.client.get(f"/ui/graph/{name}", headers={"x-forebay-page": "ui"})
        assert drawn.status_code == 200, drawn.text
    assert alone.metric("forebay_requests_total", endpoint="org/both/more") == 0
    assert asked(alone, "/models/org/both", 1) == (200, 3)
    assert alone.metric("forebay_requests_total", endpoint="org/both/more") == 2
    assert "POST /models/org/twice " in alone.log


@pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")
def test_the_dashboard_shows_and_calls_it(browser, alone):
    with browser.page() as page:
        page.open(f"{alone.url}/ui#model/org%2Ftwice")
        page.until("document.querySelector('#detail h2').textContent === 'org/twice'")
        page.until("document.querySelector('#asked-path').textContent.includes('/models/org/twice/half')")
        assert page.eval("document.querySelector('#asked-path').options.length") == 2


def test_names_that_paths_could_not_tell_apart_are_not_served_together():
    class Whole(forebay.Model):
        name = "org"

        def predict(self, batch: list[int]) -> list[int]:
            return batch

    class Part(Whole):
        name = "org/model"

    def served(model):
        return serve_model(model, Overrides(worker_kind="thread"))

    words = r"'org' and 'org/model' cannot be served together.*give one of them another `name`"
    for two in ((Whole, Part), (Part, Whole)):
        with pytest.raises(ConfigError, match=words):
            App([served(one) for one in two])
    app = App([served(Part)])
    with pytest.raises(ConfigError, match=words):
        app.put(served(Whole))
    assert list(app.served) == ["org/model"]
    app.put(served(Part))  # it takes its own place
    app.put(served(type("Other", (Part,), {"name": "org/other"})))


def test_a_worker_is_told_that_its_name_clashes(serve, cli, tmp_path):
    address = f"unix:{tmp_path}/door"
    server = serve("divided_names.py:Twice", "--worker-kind", "thread", "--attach", address)
    command = ["worker", f"{MODELS}/divided_names.py:Talk", "--connect", address]
    for name, words in (
        ("org", "models 'org' and 'org/twice' cannot be served together"),
        ("org/twice/x", "two such names joined by '/'"),
    ):
        ran = cli(*command, "--name", name)
        assert ran.returncode != 0
        assert words in ran.stderr, ran.stderr
    assert asked(server, "/models/org/twice", 1) == (200, 2)


def test_a_model_stays_that_the_new_configuration_clashes_with(serve, tmp_path):
    (tmp_path / "iris.py").write_text(
        "import forebay\nclass Iris(forebay.Model):\n    def predict(self, batch):\n        return batch\n"
    )
    file = tmp_path / "forebay.yaml"
    file.write_text("models: [{target: iris.py, name: org}]\nworker_kind: thread\n")
    server = serve(tmp_path)
    file.write_text("models: [{target: iris.py, name: org/model}]\nworker_kind: thread\n")
    server.signal(signal.SIGHUP)
    eventually(lambda: "cannot be served together" in asked(server, "/models")[1].get("problem", ""))
    assert asked(server, "/models/org", 1) == (200, 1)
    assert asked(server, "/models/org/model", 1)[0] == 404
    file.write_text("models: [{target: iris.py, name: org}]\nworker_kind: thread\n")
    server.signal(signal.SIGHUP)
    eventually(lambda: "problem" not in asked(server, "/models")[1])
    assert asked(server, "/models/org", 1) == (200, 1)


def test_folders_and_nodes_have_no_slash(cli, tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"no model")
    ran = cli("serve", str(tmp_path), "--name", "org/model", "--port", "0")
    assert ran.returncode != 0
    assert "'org/model' cannot be the name of a folder with a model" in ran.stderr
    with pytest.raises(ConfigError, match=r"node 'org/step' has a '/'.*name='step'"):
        forebay.node(type("Step", (forebay.Model,), {"name": "org/step", "predict": lambda self, batch: batch}))
