# SPDX-License-Identifier: Apache-2.0
"""`forebay generate`, for every kind of project: what it writes fits the schemas of others, and what it runs runs."""

import concurrent.futures
import json
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from tests.conftest import FOREBAY, Server
from tests.generated import generate, lay
from tests.waiting import PATIENCE_S

from forebay.surfaces.container.context_files import is_ignored as ours

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv/environments"
MODEL = """
import forebay

class Shout(forebay.Model):
    max_batch_size = 8
    def predict(self, batch: list[str]) -> list[str]:
        return [text.upper() for text in batch]

class Count(forebay.Model):
    def predict(self, batch: list[str]) -> list[int]:
        return [len(text) for text in batch]
"""
GRAPH = (
    MODEL
    + """
shout, count = forebay.node(Shout), forebay.node(Count)

@forebay.compose
def both(text: str) -> int:
    return count(shout(text))
"""
)
SERVING = """
from forebay import Serving
double = Serving.jit(lambda x: x * 2)
"""
HANDLER = "class Handler:\n    def handle_get(self):\n        return 'here'\n"
PROTO = """
syntax = "proto3";
message Word { string text = 1; }
service Words { rpc Say (Word) returns (Word); }
"""
PIPELINE = """
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp
server = PipelineServer("words")
server.set_response_op(ResponseOp(input_ops=[Op(name="say", input_ops=[RequestOp()])]))
server.prepare_server("config.yml")
server.run_server()
"""
PIPELINE_CONFIG = """
rpc_port: 18090
http_port: 18080
op:
  say:
    local_service_conf: {client_type: local_predictor, model_config: say}
"""
VENTU = """
from pydantic.v1 import BaseModel
from ventu import Ventu

class Text(BaseModel):
    text: str

class Length(BaseModel):
    n: int

class Lengths(Ventu):
    def inference(self, data):
        return data.text
    def batch_inference(self, batch):
        return batch
    def postprocess(self, data):
        return {"n": len(data)}

model = Lengths(Text, Length)
"""


def onnx_model():
    onnx = pytest.importorskip("onnx")
    helper, float_ = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "negated",
        [helper.make_tensor_value_info("x", float_, ["n", 2])],
        [helper.make_tensor_value_info("y", float_, ["n", 2])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


NUCLEUS = {"nucleus.yaml": "type: python\npath: handler.py\npy_version: '3.11'\n", "handler.py": HANDLER}
KINDS = {
    "file": (["model.py:Shout", "--grpc-port", "9000", "--workers", "2"], {"model.py": MODEL}),
    "configured": (
        ["."],
        {"forebay.yaml": "models:\n  - target: model.py\n    workers: 3\nhttp:\n  port: 8181\n", "model.py": MODEL},
    ),
    "model-file": (["net.onnx"], {"net.onnx": onnx_model}),
    "graph": (["graph.py"], {"graph.py": GRAPH}),
    "serving": (["serving.py:double"], {"serving.py": SERVING}),
    "repository": (["models"], {"models/net/1/model.onnx": onnx_model}),
    "bucket": (["s3://bucket/some/models", "-o", "deploy"], {}),
    "nucleus": (["."], NUCLEUS),
    "nucleus-rpc": (
        ["nucleus.yaml"],
        {**NUCLEUS, "nucleus.yaml": NUCLEUS["nucleus.yaml"] + "protobuf_path: words.proto\n", "words.proto": PROTO},
    ),
    "pipeline": (
        ["server.py"],
        {"server.py": PIPELINE, "config.yml": PIPELINE_CONFIG, "say/model.onnx": onnx_model},
    ),
    "ventu": (["lengths.py:model"], {"lengths.py": VENTU}),
    "ovms": (["."], {one.name: one.read_bytes for one in sorted((ROOT / "examples/ovms-incrementer").iterdir())}),
}
SERVED = sorted(set(KINDS) - {"bucket", "nucleus-rpc"})


def run(*command, **more):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S, check=False, **more)


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """The folders of all kinds of projects, with what was generated in `deploy`."""
    above = tmp_path_factory.mktemp("projects")

    def make(kind):
        arguments, files = KINDS[kind]
        (above / kind).mkdir()
        done = run(*FOREBAY, "generate", *arguments, cwd=lay(above / kind, files))
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        name = "models" if kind in {"bucket", "repository"} else kind
        assert f"docker build -f deploy/Dockerfile -t {name}:1 --build-context wheels=deploy/wheels " in done.stdout
        return above / kind

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return dict(zip(KINDS, pool.map(make, KINDS), strict=True))


def documents(folder, name):
    return [*yaml.safe_load_all((folder / "deploy" / name).read_text())]


def lines_of(folder):
    """The instructions of the Dockerfile, by their first word."""
    text = (folder / "deploy/Dockerfile").read_text()
    return [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line and line[0] != "#"]


def command_of(folder):
    return json.loads(lines_of(folder)[-1][1])


@pytest.fixture
def checker():
    def find(program, environment="deploy"):
        path = ENVIRONMENTS / environment / "bin" / program
        if not path.exists():
            pytest.skip(f"no environment with schemas: make environment NAME={environment}")
        return path

    return find


def test_dockerfiles_have_no_fault_that_hadolint_knows(projects, checker):
    result = run(checker("hadolint"), *(folder / "deploy/Dockerfile" for folder in projects.values()))
    assert (result.returncode, result.stdout) == (0, "")


def test_compose_files_fit_their_schema(projects, checker):
    files = [folder / "deploy/compose.yaml" for folder in projects.values()]
    result = run(checker("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)
    assert result.returncode == 0, result.stdout + result.stderr


def test_manifests_fit_their_schemas(projects, checker):
    names = ("deployment.yaml", "service.yaml", "autoscaling.yaml")
    files = [folder / "deploy/kubernetes" / name for folder in projects.values() for name in names]
    result = run(checker("kubernetes-validate"), "--strict", *files)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (result.stderr + result.stdout).count("passed for resource") == 4 * len(projects)


FITS = """
import sys, yaml, kserve
from kubernetes.client import models

def check(data, kind, path):
    if kind.startswith("list["):
        return [check(one, kind[5:-1], f"{path}[]") for one in data]
    if kind.startswith("dict("):
        return [check(one, kind[5:-1].split(", ")[1], f"{path}.*") for one in data.values()]
    found = getattr(kserve, kind, None) or getattr(models, kind, None)
    if found is None:
        kinds = {"str": str, "int": int, "bool": bool, "float": (int, float)}
        assert kind not in kinds or isinstance(data, kinds[kind]), f"{path}: {data!r} is no {kind}"
        return
    names = {given: own for own, given in found.attribute_map.items()}
    for key, value in data.items():
        assert key in names, f"{path}: {kind} has no {key}"
        check(value, found.openapi_types[names[key]], f"{path}.{key}")
    found(**{names[key]: value for key, value in data.items()})  # says what is missing

for file in sys.argv[1:]:
    check(yaml.safe_load(open(file)), "V1beta1InferenceService", file)
"""


def test_inference_services_fit_kserves_own_models(projects, checker):
    result = run(checker("python", "kserve"), "-c", FITS, *(one / "deploy/kserve.yaml" for one in projects.values()))
    assert result.returncode == 0, result.stderr[-500:]


def test_kustomize_builds_the_base(projects):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    result = run(kubectl, "kustomize", projects["file"] / "deploy/kubernetes")
    assert result.returncode == 0, result.stderr
    kinds = {one["kind"] for one in yaml.safe_load_all(result.stdout)}
    assert kinds == {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}


def test_the_rule_of_the_adapter_is_a_query(projects, tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool (Debian: apt-get install prometheus)")
    (rule,) = documents(projects["file"], "prometheus-adapter.yaml")[0]["rules"]["custom"]
    metric = rule["name"]["as"]
    query = rule["metricsQuery"]
    for said, meant in {"<<.Series>>": metric, "<<.LabelMatchers>>": 'pod="a"', "<<.GroupBy>>": "pod"}.items():
        query = query.replace(said, meant)
    rules = {"groups": [{"name": "a", "rules": [{"record": "a", "expr": query}]}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    result = run(promtool, "check", "rules", tmp_path / "rules.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("kind", SERVED)
def test_what_the_image_runs_answers_the_probes_and_has_the_metric_it_is_scaled_by(projects, kind, tmp_path):
    folder = projects[kind]
    _, *arguments = command_of(folder)
    home = folder / "models" if kind == "repository" else folder
    more = ["--state-dir", str(tmp_path)] if kind == "nucleus" else []
    environment = {"FOREBAY_REPOSITORY_POLL_S": "0"} if kind == "repository" else {}
    ports = ["--grpc-port", "0"] if kind in {"file", "pipeline"} else []
    server = Server(None, *more, *ports, command=["env", "-C", str(home), *FOREBAY, *arguments], env=environment)
    try:
        server.wait_ready()
        (container,) = documents(folder, "kubernetes/deployment.yaml")[0]["spec"]["template"]["spec"]["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asks = container[probe]
            if "exec" in asks:
                asked = [one.replace("/run/workspace", str(tmp_path)) for one in asks["exec"]["command"]]
                assert run(*asked).returncode == 0
            else:
                assert asks["httpGet"]["port"] == "http"
                assert server.client.get(asks["httpGet"]["path"]).status_code == 200
        scaler, _ = documents(folder, "kubernetes/autoscaling.yaml")
        (scales,) = scaler["spec"]["metrics"]
        assert f"\n{scales['pods']['metric']['name']}{{" in server.client.get("/metrics").text
    finally:
        server.stop()


def test_what_only_its_kind_knows(projects):
    def pod(kind):
        spec = documents(projects[kind], "kubernetes/deployment.yaml")[0]["spec"]["template"]["spec"]
        return spec, spec["containers"][0]

    def installed(kind):
        (words,) = {rest for word, rest in lines_of(projects[kind]) if word == "RUN" and '"forebay' in rest}
        return words.rpartition('"forebay')[2].partition("=")[0]

    assert command_of(projects["file"]) == [
        "forebay",
        "serve",
        "model.py:Shout",
        "--workers",
        "2",
        "--grpc-port",
        "9000",
    ]
    assert [one["name"] for one in pod("file")[1]["ports"]] == ["http", "grpc"]
    scaler = documents(projects["file"], "kubernetes/autoscaling.yaml")[0]["spec"]
    assert scaler["metrics"][0]["pods"]["target"] == {"type": "AverageValue", "averageValue": "16"}
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 8)
    assert installed("file") == "[grpc]"
    assert command_of(projects["configured"]) == ["forebay", "serve", "."]
    assert pod("configured")[1]["ports"] == [{"name": "http", "containerPort": 8181}]
    assert pod("configured")[1]["resources"]["requests"]["cpu"] == "3"
    assert installed("model-file") == "[onnx]"
    assert command_of(projects["bucket"])[2:] == ["s3://bucket/some/models", "--repository-folder", "/models"]
    assert installed("bucket") == "[buckets,onnx,openvino]"
    assert {"name": "models", "mountPath": "/models"} in pod("bucket")[1]["volumeMounts"]
    assert [rest.split()[0] for word, rest in lines_of(projects["bucket"]) if word == "COPY"] == ["--from=wheels"]
    assert not (projects["repository"] / "models/deploy").exists()  # the server would look for a model in it
    assert (projects["ventu"] / "requirements.txt").read_text().splitlines()[1:] == [f"pydantic=={version('pydantic')}"]
    assert ["COPY", "requirements.txt /app/requirements.txt"] in lines_of(projects["ventu"])
    assert installed("pipeline") == "[grpc,onnx,pipeline]"  # its model is an ONNX file
    assert command_of(projects["pipeline"]) == ["forebay", "serve", "server.py"]
    assert [one["containerPort"] for one in pod("pipeline")[1]["ports"]] == [18080, 18090]
    assert {"name": "dev-shm", "emptyDir": {"medium": "Memory"}} in pod("pipeline")[0]["volumes"]
    assert command_of(projects["ventu"]) == ["forebay", "serve", "lengths.py:model"]
    assert installed("ovms") == "[openvino,ovms]"
    assert installed("nucleus-rpc") == "[nucleus,grpc,protos]"
    (scaled,) = documents(projects["nucleus-rpc"], "kubernetes/autoscaling.yaml")[0]["spec"]["metrics"]
    assert scaled["resource"]["name"] == "cpu"  # its one port speaks gRPC, and has no metrics
    spoken = {
        kind: [one["value"] for one in container["env"] if one["name"] == "PROTOCOL"]
        for kind in ("file", "ventu", "nucleus-rpc")
        for container in documents(projects[kind], "kserve.yaml")[0]["spec"]["predictor"]["containers"]
    }
    assert spoken == {"file": ["v2"], "ventu": [], "nucleus-rpc": []}


def test_pods_have_no_variables_of_services_and_credentials_of_buckets_are_a_secret(projects):
    for kind, folder in projects.items():
        specs = [
            documents(folder, "kubernetes/deployment.yaml")[0]["spec"]["template"]["spec"],
            documents(folder, "kserve.yaml")[0]["spec"]["predictor"],
        ]
        reference = {"secretRef": {"name": "models-bucket", "optional": True}}
        for spec in specs:
            assert spec["enableServiceLinks"] is False
            assert spec["containers"][0].get("envFrom", []) == ([reference] if kind == "bucket" else [])
        service = documents(folder, "compose.yaml")[0]["services"]["model"]
        assert service.get("env_file", []) == (
            [{"path": "./bucket.env", "required": False}] if kind == "bucket" else []
        )


def test_whoever_stops_a_server_waits_longer_than_its_drain(projects, tmp_path):
    done = generate(projects["file"], "model.py", "--drain-s", "50", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    deployment = yaml.safe_load((tmp_path / "out/kubernetes/deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    sleeps = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > sleeps + 50 + 2  # two seconds after the drain the server just ends
    service = yaml.safe_load((tmp_path / "out/compose.yaml").read_text())["services"]["model"]
    assert int(service["stop_grace_period"].rstrip("s")) > 52
    assert (tmp_path / "out" / service["build"]["context"]).resolve() == projects["file"]
    assert (projects["file"] / service["build"]["dockerfile"]).resolve() == tmp_path / "out/Dockerfile"


def test_keys_are_secrets_and_in_no_file(tmp_path):
    lay(tmp_path, {"model.py": MODEL, "keys.txt": "very-secret\n"})
    done = generate(tmp_path, "model.py", "--api-key", "@keys.txt", "--api-key", "hidden")
    assert done.returncode == 0, done.stderr
    assert "kubectl create secret generic" in done.stdout
    texts = "".join(file.read_text(errors="replace") for file in (tmp_path / "deploy").rglob("*") if file.is_file())
    assert "very-secret" not in texts
    assert "hidden" not in texts
    assert "keys.txt" in (tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    (container,) = documents(tmp_path, "kserve.yaml")[0]["spec"]["predictor"]["containers"]
    assert {"name": "FOREBAY_API_KEY", "value": "@/run/secrets/api_keys"} in container["env"]
    assert "secrets" in documents(tmp_path, "compose.yaml")[0]


@pytest.mark.parametrize("kind", ["flag", "file"])
def test_key_files_of_tenants_are_secrets_where_the_server_looks_for_them(tmp_path, kind, checker):  # F133
    files = {"model.py": MODEL, "team-a.txt": "very-secret\n", "keys/b.txt": "hidden\n"}
    lay(tmp_path, files)
    arguments = ["model.py", "--api-key-file", "team-a=team-a.txt", "--api-key-file", "team-b=keys/b.txt"]
    if kind == "file":
        keys = '{api_keys: {team-a: "@team-a.txt", team-b: ["@keys/b.txt"]}}'
        (tmp_path / "forebay.yaml").write_text(f"target: model.py\nhttp: {keys}\n")
        arguments = ["."]
    done = generate(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    sources = "--from-file=team-a-1=team-a.txt --from-file=team-b-2=keys/b.txt"
    secret = f"{tmp_path.name.replace('_', '-')}-keys"
    assert f"  kubectl create secret generic {secret} {sources}\n" in done.stdout
    assert {"team-a.txt", "keys/b.txt"} <= {*(tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines()}
    targets = {"team-a-1": "/app/team-a.txt", "team-b-2": "/app/keys/b.txt"}
    for spec in (
        documents(tmp_path, "kubernetes/deployment.yaml")[0]["spec"]["template"]["spec"],
        documents(tmp_path, "kserve.yaml")[0]["spec"]["predictor"],
    ):
        (container,) = spec["containers"]
        assert {one["subPath"]: one["mountPath"] for one in container["volumeMounts"] if "subPath" in one} == targets
        assert {"name": "keys", "secret": {"secretName": secret}} in spec["volumes"]
        assert "FOREBAY_API_KEY" not in str(container["env"])  # it would replace keys that have names
    compose = documents(tmp_path, "compose.yaml")[0]
    assert {one["source"]: one["target"] for one in compose["services"]["model"]["secrets"]} == targets
    assert {name: one["file"] for name, one in compose["secrets"].items()} == {
        "team-a-1": "../team-a.txt",
        "team-b-2": "../keys/b.txt",
    }
    result = run(checker("kubernetes-validate"), "--strict", tmp_path / "deploy/kubernetes/deployment.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_names_the_file_of_keys_or_the_output_says_to_make_one(tmp_path):
    lay(tmp_path, {"model.py": MODEL, "team.txt": "a\n", "more.txt": "b\n"})
    done = generate(tmp_path, "model.py", "--api-key", "@team.txt")
    assert documents(tmp_path, "compose.yaml")[0]["secrets"] == {"api_keys": {"file": "../team.txt"}}
    assert "--from-file=api_keys=team.txt\n" in done.stdout
    assert "write the API keys" not in done.stdout
    done = generate(tmp_path, "model.py", "--api-key", "@team.txt", "--api-key", "@more.txt", "--force")
    assert documents(tmp_path, "compose.yaml")[0]["secrets"] == {"api_keys": {"file": "keys.txt"}}
    _, _, told, compose, secret, *rest = done.stdout.splitlines()[1:]
    assert told == "  # write the API keys to deploy/keys.txt, one in each line"
    assert compose.startswith("  docker compose ")
    assert secret.endswith(" --from-file=api_keys=deploy/keys.txt")
    either = ["  kubectl apply -k deploy/kubernetes", "  # or, with KServe:", "  kubectl apply -f deploy/kserve.yaml"]
    assert rest == either


@pytest.mark.parametrize("name", ["2024", "on", "null"])
def test_names_begin_with_a_letter_and_are_texts(tmp_path, name):
    folder = lay(tmp_path / name, {"model.py": MODEL})
    assert generate(folder, "model.py", "--image", "12:30").returncode == 0
    pod, compose = documents(folder, "kubernetes/deployment.yaml")[0], documents(folder, "compose.yaml")[0]
    assert compose["name"] == pod["metadata"]["name"] == f"model-{name}"
    assert compose["services"]["model"]["image"] == "12:30"
    assert pod["spec"]["template"]["spec"]["containers"][0]["image"] == "12:30"
    assert documents(folder, "kubernetes/kustomization.yaml")[0]["images"] == [
        {"name": "12", "newName": "12", "newTag": "30"}
    ]


CREDENTIALS = (
    *(".env", ".env.production", "sub/.env", "tls.pem", "sub/tls.key", "id_rsa", "sub/id_ed25519", ".netrc", ".npmrc"),
    *(".pypirc", ".git-credentials", ".aws/credentials", ".ssh/known_hosts", ".docker/config.json", ".kube/config"),
    *("keys.txt", "conf/api-keys", "more-keys", "notes.secret", "sub/keys.txt", ".envrc", "prod.env", "hub.token"),
    *("credentials.json", "my-service-account.json", "secrets.yaml", "sub/.pgpass"),
)


def is_ignored(path, lines):
    """Whether a builder leaves a file out: the last line that matches it, or a folder above it, decides."""
    above = [Path(path), *Path(path).parents][:-1]
    found = False
    for line in lines:
        pattern = line.removeprefix("!").removeprefix("/")
        anywhere = pattern.removeprefix("**/")
        if any(fnmatch(str(one), pattern) or (anywhere != pattern and fnmatch(one.name, anywhere)) for one in above):
            found = not line.startswith("!")
    return found


def test_credentials_are_left_out_of_the_image(tmp_path):  # F133
    lay(tmp_path, {"model.py": MODEL, ".dockerignore": "*.secret\n", **dict.fromkeys(CREDENTIALS, "very-secret\n")})
    (tmp_path / "forebay.yaml").write_text('target: model.py\nhttp: {api_keys: ["@conf/api-keys"]}\n')
    done = generate(tmp_path, ".", "--api-key", "@more-keys")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in (tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines() if line[:1] != "#"]
    assert [name for name in CREDENTIALS if not is_ignored(name, lines)] == []
    kept = (
        "requirements.txt",
        "sub/model.py",
        "keyed.py",
        "environment.yml",
        "pem.py",
        "tokens.txt",
        "token.py",
        "env.py",
    )
    for name in ("model.py", *kept):
        assert not is_ignored(name, lines)


ODD_NAMES = {
    "[env]": r"\[env\]",
    "a*b?": r"a\*b\?",
    r"back\slash": r"back\\slash",
    "#env": r"\#env",
    "!env": r"\!env",
    "..env": "..env",
    " spaced env  ": "?spaced env??",
    "line\nbreak": "line?break",
    "latin\udce9": "latin?",
}


def test_virtual_environments_of_any_name_are_left_out_of_the_image(tmp_path):
    lay(tmp_path, {"model.py": MODEL, **{f"{name}/pyvenv.cfg": "" for name in ODD_NAMES}})
    done = generate(tmp_path, "model.py")
    assert (done.returncode, done.stderr) == (0, "")
    lines = (tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    assert {*ODD_NAMES.values()} <= {*lines}
    assert [name for name in ("e/x.py", "axbx/x.py", "backslash/x.py", "env/x.py") if ours(name, lines)] == []
    assert all(ours(f"{name}/x.py", lines) for name in ODD_NAMES)


def test_a_key_in_plain_text_that_the_image_would_have_is_warned_of(tmp_path):  # F133
    lay(tmp_path, {"model.py": MODEL, "forebay.yaml": "target: model.py\nhttp: {api_keys: [visible]}\n"})
    done = generate(tmp_path, ".")
    assert done.returncode == 0
    told = "forebay.yaml: api_keys is plain text in this file and would be in the image; write @FILE"
    assert done.stderr == f"forebay: warning: {told}\n"


@pytest.mark.parametrize("keyfile", ["key.pem", None])
def test_a_certificate_is_mounted_and_the_probes_speak_tls(tmp_path, checker, keyfile):
    # deliverable 5: no key in the image, and the server is told where its certificate lies
    lay(tmp_path, {"model.py": MODEL, "chain.pem": "a chain\n", "key.pem": "very-secret\n"})
    named = [] if keyfile is None else ["--keyfile", keyfile]
    done = generate(tmp_path, "model.py", "--certfile", "chain.pem", *named, "--grpc-port", "9000")
    assert done.returncode == 0, done.stderr
    key = keyfile or "chain.pem"
    secret = f"kubectl create secret tls {tmp_path.name.replace('_', '-')}-tls --cert=chain.pem --key={key}"
    assert secret in done.stdout
    assert command_of(tmp_path) == ["forebay", "serve", "model.py", "--grpc-port", "9000"]
    assert {"chain.pem", key} <= {*(tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines()}
    told = {"FOREBAY_CERTFILE": "/run/tls/tls.crt", "FOREBAY_KEYFILE": "/run/tls/tls.key"}
    specs = [
        documents(tmp_path, "kubernetes/deployment.yaml")[0]["spec"]["template"]["spec"],
        documents(tmp_path, "kserve.yaml")[0]["spec"]["predictor"],
    ]
    for spec in specs:
        (container,) = spec["containers"]
        assert told.items() <= {one["name"]: one["value"] for one in container["env"]}.items()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert {"name": "tls", "mountPath": "/run/tls", "readOnly": True} in container["volumeMounts"]
        assert {"name": "tls", "secret": {"secretName": secret.split()[4]}} in spec["volumes"]
    annotations = documents(tmp_path, "kubernetes/deployment.yaml")[0]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scheme"] == "https"
    ports = {one["name"]: one["port"] for one in documents(tmp_path, "kubernetes/service.yaml")[0]["spec"]["ports"]}
    assert ports == {"http": 443, "grpc": 9000}
    compose = documents(tmp_path, "compose.yaml")[0]
    service = compose["services"]["model"]
    assert told.items() <= service["environment"].items()
    found = {one["target"]: compose["secrets"][one["source"]]["file"] for one in service["secrets"]}
    assert found == {"/run/tls/tls.crt": "../chain.pem", "/run/tls/tls.key": f"../{key}"}
    file = tmp_path / "deploy/compose.yaml"
    result = run(checker("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", file)
    assert result.returncode == 0, result.stdout
    names = ("deployment.yaml", "service.yaml", "autoscaling.yaml")
    result = run(checker("kubernetes-validate"), "--strict", *(tmp_path / "deploy/kubernetes" / name for name in names))
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_private_index_is_honoured_by_both_builders(tmp_path, checker):
    # deliverable 5: it is told to the commands that install, and is in no layer
    lay(tmp_path, {"model.py": MODEL, "pip.conf": "[global]\nindex-url = very-secret\n", "requirements.txt": "numpy\n"})
    done = generate(tmp_path, "model.py")
    assert done.returncode == 0, done.stderr
    assert " --secret id=pip.conf,src=pip.conf ." in done.stdout
    assert "pip.conf" in (tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    compose = documents(tmp_path, "compose.yaml")[0]
    assert compose["services"]["model"]["build"]["secrets"] == ["pip.conf"]
    assert compose["secrets"] == {"pip.conf": {"file": "../pip.conf"}}
    file = tmp_path / "deploy/compose.yaml"
    result = run(checker("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", file)
    assert result.returncode == 0, result.stdout
    (tmp_path / "dependencies.sh").write_text("cp pip.conf /etc/pip.conf\n")  # as the Nucleus model server has it
    assert generate(tmp_path, "model.py", "--force").returncode == 0
    assert "pip.conf" not in (tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines()


def test_gpus_are_counted_by_the_devices(tmp_path, checker):
    lay(tmp_path, {"model.py": MODEL})
    assert generate(tmp_path, "model.py", "--devices", "cuda:0,cuda:1").returncode == 0
    (container,) = documents(tmp_path, "kserve.yaml")[0]["spec"]["predictor"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    asked = documents(tmp_path, "compose.yaml")[0]["services"]["model"]["deploy"]["resources"]["reservations"]
    assert asked["devices"] == [{"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}]
    file = tmp_path / "deploy/compose.yaml"
    result = run(checker("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", file)
    assert result.returncode == 0, result.stdout


def test_commands_name_any_folder_so_that_a_shell_finds_it(cli, tmp_path):
    lay(tmp_path, {"model.py": MODEL})
    told = cli("generate", "model.py", "-o", "it's $HOME", cwd=tmp_path).stdout
    build = next(line for line in told.splitlines() if "docker build" in line)
    assert shlex.split(build)[:4] == ["docker", "build", "-f", "it's $HOME/Dockerfile"]


def test_nothing_is_overwritten_unless_forced(tmp_path):
    lay(tmp_path, {"model.py": MODEL})
    assert generate(tmp_path, "model.py").returncode == 0
    assert generate(tmp_path, "model.py").returncode == 0  # the same again
    dockerfile = tmp_path / "deploy/Dockerfile"
    ours = dockerfile.read_text()
    dockerfile.write_text("mine\n")
    compose = (tmp_path / "deploy/compose.yaml").read_text()
    done = generate(tmp_path, "model.py", "--drain-s", "3")
    assert done.returncode == 2
    assert "deploy/Dockerfile, " in done.stderr
    assert "--force" in done.stderr
    assert dockerfile.read_text() == "mine\n"
    assert (tmp_path / "deploy/compose.yaml").read_text() == compose
    assert generate(tmp_path, "model.py", "--force").returncode == 0
    assert dockerfile.read_text() == ours


def installs(folder, *arguments):
    """The lines of the Dockerfile that copy and install, with what they have in common left away."""
    done = generate(folder, "model.py", "--force", *arguments)
    assert done.returncode == 0, done.stderr
    shown = [
        (word, re.sub(r"--mount=\S+ PIP_CONFIG_FILE=\S+ |--chown=\S+ |--no-cache-dir ", "", rest))
        for word, rest in lines_of(folder)
    ]
    kept = [
        f"{word} {rest}"
        for word, rest in shown
        if word in {"ARG", "FROM", "COPY", "RUN"}
        and rest != "$BASE"
        and "useradd" not in rest
        and "--from=" not in rest
    ]
    return [line for line in kept if "venv" not in line and "chmod" not in line]


def test_the_server_may_read_its_code_and_not_change_it(tmp_path):  # F134
    lay(tmp_path, {"model.py": MODEL})
    assert generate(tmp_path, "model.py").returncode == 0
    lines = lines_of(tmp_path)
    places = [number for number, (word, rest) in enumerate(lines) if "/app" in rest and word in {"COPY", "RUN"}]
    others = "'(' ! -perm -o=r -o -perm /go=w -o -type d ! -perm -o=x ')'"
    assert [lines[number] for number in places] == [
        ["COPY", "./ /app/"],
        ["RUN", f"find /app ! -type l {others} -exec chmod go-w,o+rX {{}} +"],
    ]
    assert ["USER", "10001"] in lines[places[-1] :]
    for name, mode in {"private": 0o600, "shared": 0o666}.items():
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(mode)
    (tmp_path / "link").symlink_to("nothing")
    opened = lines[places[-1]][1].replace("/app", shlex.quote(str(tmp_path)))
    assert run("/bin/sh", "-c", opened).returncode == 0
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("private", "shared")] == [0o604, 0o644]


def test_the_base_image_can_be_pinned_by_its_digest(tmp_path):  # F134
    lay(tmp_path, {"model.py": MODEL})
    assert generate(tmp_path, "model.py", "--python-version", "3.12").returncode == 0
    text = (tmp_path / "deploy/Dockerfile").read_text()
    assert "--build-arg BASE=python:3.12-slim@sha256:...\nARG BASE=python:3.12-slim\nFROM $BASE\n" in text


def test_the_code_is_copied_after_what_it_needs_was_installed(tmp_path):
    lay(tmp_path, {"model.py": MODEL, "requirements.txt": "numpy\n"})
    first, *rest = installs(tmp_path, "--python-version", "3.12", "--image", "registry.example/a/b:7")
    assert first == "ARG BASE=python:3.12-slim"
    forebay = rest[0]
    assert forebay.startswith('RUN pip install "forebay==')
    assert rest[1:] == [
        "COPY requirements.txt /app/requirements.txt",
        "RUN pip install -r requirements.txt",
        forebay,  # whatever the requirements did
        "COPY ./ /app/",
    ]
    text = (tmp_path / "deploy/Dockerfile").read_text()
    assert text.count("RUN --mount=type=secret,id=pip.conf PIP_CONFIG_FILE=/run/secrets/pip.conf pip ") == 3
    assert "image: registry.example/a/b:7\n" in (tmp_path / "deploy/kserve.yaml").read_text()


def test_a_release_that_the_requirements_name_is_the_one(tmp_path):
    lay(tmp_path, {"model.py": MODEL, "requirements.txt": "forebay==0.0.9\n", "wheels/a.whl": ""})
    rest = installs(tmp_path)[1:]
    assert rest == [
        "COPY wheels/ /app/wheels/",
        "COPY requirements.txt /app/requirements.txt",
        "RUN pip install -r requirements.txt",
        "COPY ./ /app/",
    ]
    assert 'PIP_FIND_LINKS="/app/wheels /opt/wheels"' in (tmp_path / "deploy/Dockerfile").read_text()


@pytest.mark.parametrize(
    "line", [".", "-e .", "./libs/a.whl", "-r more.txt", "--constraint c.txt", "a @ file:///app/a"]
)
def test_requirements_that_name_files_have_the_project(tmp_path, line):
    lay(tmp_path, {"model.py": MODEL, "requirements.txt": f"numpy\n{line}\n"})
    lines = installs(tmp_path)
    assert lines.index("COPY ./ /app/") < lines.index("RUN pip install -r requirements.txt")


def test_a_shell_comes_before_conda_and_conda_before_pip(tmp_path):
    files = {"dependencies.sh": "true\n", "conda-packages.txt": "xz\n", "requirements.txt": "git+https://localhost/a\n"}
    lay(tmp_path, {"model.py": MODEL, **files})
    lines = installs(tmp_path)
    assert lines[0].startswith("FROM condaforge/miniforge3:")
    assert any("install -y --no-install-recommends git" in line for line in lines)
    at = lines.index("COPY ./ /app/")
    assert lines[at + 1 : at + 5] == [
        "RUN bash -e dependencies.sh",
        "RUN conda config --append channels conda-forge",
        "RUN conda install -y --file conda-packages.txt",
        "RUN pip install -r requirements.txt",
    ]


def test_an_image_has_what_the_model_files_in_a_folder_need(tmp_path):
    lay(tmp_path, {"models/a/1/any.ubj": "", "models/b/1/model.txt": "", "models/b/1/notes.json": ""})
    done = generate(tmp_path, "models")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "deploy/Dockerfile").read_text()
    assert "install -y --no-install-recommends libgomp1" in text
    assert '"forebay[lightgbm,onnx,openvino,xgboost]' in text


def test_a_package_of_the_projects_own_is_installed(tmp_path):
    lay(tmp_path, {"model.py": MODEL, "setup.py": "from setuptools import setup\nsetup(name='a')\n"})
    lines = installs(tmp_path)
    assert lines.index("COPY ./ /app/") < lines.index("RUN pip install .")


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["model.py", "--http-port", "0"], "port 0 is any"),
        (["model.py", "--image", "Not An Image"], "--image: expected a name such as"),
        (["model.py", "--replicas", "0"], ">= 1"),
        (["model.py", "--python-version", "3.12; rm"], "expected a Python version >= 3.11, got '3.12; rm'"),
        (["model.py", "--python-version", "3.10"], ">= 3.11"),
        (["model.py", "--python-version", "2.7"], ">= 3.11"),
        (["nothing.py"], "nothing.py"),
        ([], "something to serve"),
        (["broken.py"], "broken.py:1"),
        (["."], "lies outside of"),
        (["server.py", "--no-extra-routes"], "/readyz"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(tmp_path, arguments, told):
    folder = lay(
        tmp_path / "here",
        {
            "model.py": MODEL,
            "broken.py": "import nothing_of_this_name\n",
            "forebay.yaml": "models: [../elsewhere.py]\n",
            "server.py": VENTU,
        },
    )
    (tmp_path / "elsewhere.py").write_text(MODEL)
    done = generate(folder, *arguments, *([] if arguments else ["--attach", "unix:sock"]))
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "deploy").exists()
