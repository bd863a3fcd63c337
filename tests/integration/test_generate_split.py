# SPDX-License-Identifier: Apache-2.0
"""`forebay generate --split`: fronts, owners and workers are pods of their own, which fit together and run."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from tests import crds
from tests.conftest import FOREBAY, Server
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

SCHEMAS = Path(__file__).parents[2] / ".venv/environments/deploy/bin"
MODEL = """
import forebay

class Shout(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        return [text.upper() for text in batch]

class Count(forebay.Model):
    def predict(self, batch: list[str]) -> list[int]:
        return [len(text) for text in batch]
"""
GRAPH = MODEL + "\n@forebay.compose\ndef both(text: str) -> int:\n    return forebay.node(Count)(text)\n"
SECRET = "/run/wire/secret"
OWN_FLAGS = {"words-front": "--owner-", "words-shout-owner": "--attach-", "words-shout-worker": "--"}


def tls_flags(prefix):
    kinds = {"cafile": "ca.crt", "certfile": "tls.crt", "keyfile": "tls.key"}
    return [word for kind, file in kinds.items() for word in (f"{prefix}{kind}", f"/run/wire-tls/{file}")]


@pytest.fixture
def split(cli, tmp_path):
    """Generates for a model file; gives the manifests by (kind, name)."""

    def run(*arguments, target="model.py", text=MODEL):
        (tmp_path / "words").mkdir(exist_ok=True)
        (tmp_path / "words/model.py").write_text(text)
        done = cli("generate", target, "--kubernetes", "--split", "--force", *arguments, cwd=tmp_path / "words")
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "words/deploy/kubernetes"
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert {*kustomization["resources"], "kustomization.yaml"} == {file.name for file in folder.iterdir()}
        texts = [(folder / name).read_text() for name in kustomization["resources"]]
        found = [one for text in texts for one in yaml.safe_load_all(text)]
        named = {(one["kind"], one["metadata"]["name"]): one for one in found}
        assert len(named) == len(found)
        return named

    return run


def container(workload):
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return found


def labels(workload):
    return workload["spec"]["template"]["metadata"]["labels"]


def workloads(found):
    return {name: one for (kind, name), one in found.items() if kind in {"Deployment", "StatefulSet"}}


def test_fronts_owners_and_workers_are_objects_of_their_own(split):
    found = split("--replicas", "3", "--timeout-ms", "700", "--http-port", "8181", "--threads", "2")
    assert set(workloads(found)) == {
        "words-front",
        *(f"words-{model}-{role}" for model in ("shout", "count") for role in ("owner", "worker")),
    }
    front = container(found["Deployment", "words-front"])
    owners = ["--owner", "tcp:words-shout-owner:9100", "--owner", "tcp:words-count-owner:9100"]
    assert front["command"] == [
        "forebay",
        "serve",
        *owners,
        "--attach-secret",
        f"@{SECRET}",
        *tls_flags("--owner-"),
        "--http-port",
        "8181",
    ]
    owner = found["StatefulSet", "words-shout-owner"]
    assert owner["spec"]["replicas"] == 1
    asks = ["--workers", "0", "--attach", "tcp:0.0.0.0:9100", "--attach-secret", f"@{SECRET}"]
    settings = ["--http-port", "8181", "--timeout-ms", "700"]
    asks += tls_flags("--attach-")
    assert container(owner)["command"] == ["forebay", "serve", "model.py:Shout", *asks, *settings]
    worker = container(found["Deployment", "words-shout-worker"])
    dials = ["--connect", "tcp:words-shout-owner:9100", "--secret", f"@{SECRET}"]
    more = [*tls_flags("--"), "--health-file", "/tmp/health", "--threads", "2"]
    assert worker["command"] == ["forebay", "worker", "model.py:Shout", *dials, *more]
    service = found["Service", "words-shout-owner"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert [one["port"] for one in service["ports"]] == [9100]
    assert found["Service", "words"]["spec"]["selector"] == {"app": "words-front"}
    for name in ("words-front", "words-count-worker"):
        scaler = found["HorizontalPodAutoscaler", name]["spec"]
        assert scaler["scaleTargetRef"]["name"] == name
        assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 12)
        assert found["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"] == {"app": name}
    (metric,) = found["HorizontalPodAutoscaler", "words-count-worker"]["spec"]["metrics"]
    assert metric["object"]["describedObject"] == {"apiVersion": "v1", "kind": "Pod", "name": "words-count-owner-0"}
    assert ("PodDisruptionBudget", "words-count-owner") not in found  # it would keep its node from being drained


@pytest.mark.parametrize("tls", ["secret", "cert-manager", "none"])
def test_manifests_fit_their_schemas(split, tmp_path, tls):
    if not (SCHEMAS / "kubernetes-validate").exists():
        pytest.skip("no environment with schemas: make environment NAME=deploy")
    for name in ("chain.pem", "key.pem"):
        (tmp_path / name).write_text("not read\n")
    secure = ("--certfile", str(tmp_path / "chain.pem"), "--keyfile", str(tmp_path / "key.pem"))
    gpus = ("--devices", "cuda:0", "--grpc-port", "9000")
    count, files = 0, []
    for more in ((), gpus, ("--api-key", "a"), secure, (*gpus, "--api-key", "a", *secure)):
        count += sum(kind not in {"Certificate", "Issuer"} for kind, _ in split("--wire-tls", tls, *more))
        folder = (tmp_path / "words/deploy/kubernetes").rename(tmp_path / f"{len(files)}")
        files += [file for file in folder.iterdir() if file.name not in {"kustomization.yaml", "certificates.yaml"}]
    command = [SCHEMAS / "kubernetes-validate", "--strict", *files]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (result.stderr + result.stdout).count("passed for resource") == count


def test_only_fronts_and_workers_reach_an_owner_and_nothing_reaches_a_worker(split):
    found = split()
    for name, workload in workloads(found).items():
        assert labels(workload) == {"app": name}
        policy = found["NetworkPolicy", name]["spec"]
        assert policy["podSelector"]["matchLabels"] == labels(workload)
        assert policy["policyTypes"] == ["Ingress"]
    assert "ingress" not in found["NetworkPolicy", "words-shout-worker"]["spec"]
    wire, metrics = found["NetworkPolicy", "words-shout-owner"]["spec"]["ingress"]
    (clients,) = wire["from"][0]["podSelector"]["matchExpressions"]
    assert clients["values"] == ["words-front", "words-shout-worker"]
    assert [one["port"] for one in wire["ports"]] == [9100]
    assert [one["port"] for one in metrics["ports"]] == ["http"]


def test_all_pods_share_a_secret_that_no_file_has(split, cli, tmp_path):
    found = split("--api-key", "hidden")
    for workload in workloads(found).values():
        spec = workload["spec"]["template"]["spec"]
        assert {"name": "wire", "secret": {"secretName": "words-wire"}} in spec["volumes"]
        assert {"name": "wire", "mountPath": str(Path(SECRET).parent), "readOnly": True} in container(workload)[
            "volumeMounts"
        ]
    has_keys = {name: "FOREBAY_API_KEY" in str(container(one)["env"]) for name, one in workloads(found).items()}
    assert has_keys["words-front"]
    assert has_keys["words-shout-owner"]  # it has the port as well
    assert not has_keys["words-shout-worker"]
    texts = [file.read_text(errors="replace") for file in (tmp_path / "words/deploy").rglob("*") if file.is_file()]
    assert "hidden" not in "".join(texts)
    told = cli("generate", "model.py", "--kubernetes", "--split", "--force", cwd=tmp_path / "words").stdout
    assert 'create secret generic words-wire --from-literal=secret="$(openssl rand -hex 32)"' in told
    assert "compose" not in told
    assert "kserve" not in told


def test_pods_drain_before_they_are_killed(split):
    for name, workload in workloads(split("--drain-s", "50")).items():
        spec = workload["spec"]["template"]["spec"]
        before = container(workload).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert (before > 0) == (name == "words-front")  # only there new connections come until all nodes have heard
        assert spec["terminationGracePeriodSeconds"] > before + 50 + 2


def test_an_owner_without_workers_is_unready_and_not_restarted(split):
    owner = container(split()["StatefulSet", "words-shout-owner"])
    asked = {probe: owner[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}


def test_only_workers_have_gpus(split):
    found = workloads(split("--devices", "cuda:0,cuda:1"))
    gpus = {name: container(one)["resources"]["limits"].get("nvidia.com/gpu") for name, one in found.items()}
    assert {name for name, count in gpus.items() if count == 1} == {"words-shout-worker", "words-count-worker"}
    assert {*gpus.values()} == {1, None}
    worker = container(found["words-count-worker"])["command"]
    assert worker[worker.index("--device") + 1] == "cuda:0"
    assert "--devices" not in container(found["words-count-owner"])["command"]


def test_one_class_of_a_file_under_a_name_of_its_own(split):
    found = split("--name", "loud", target="model.py:Shout")
    assert set(workloads(found)) == {"words-front", "words-loud-owner", "words-loud-worker"}
    for name in ("words-loud-owner", "words-loud-worker"):
        command = container(workloads(found)[name])["command"]
        assert command[2] == "model.py:Shout"
        assert command[command.index("--name") + 1] == "loud"


@pytest.mark.parametrize(
    "files, arguments, told",
    [
        ({"model.py": GRAPH}, ["model.py"], "only forebay.Model classes have workers that dial in"),
        (
            {"model.py": MODEL, "forebay.yaml": "target: model.py\n"},
            ["."],
            "settings as flags instead of a forebay.yaml",
        ),
        (
            {"model.py": MODEL},
            ["model.py", "--workers", "2"],
            "--workers: with --split each worker is a pod of its own",
        ),
        (
            {"model.py": MODEL.replace("Shout(forebay.Model):", "Shout(forebay.Model):\n    name = 'count_'\n")},
            ["model.py"],
            "'count_' and 'count' would both be called words-count",
        ),
    ],
    ids=["graph", "configured", "workers", "names"],
)
def test_what_cannot_be_split_is_refused(cli, tmp_path, files, arguments, told):
    folder = tmp_path / "words"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    done = cli("generate", *arguments, "--split", cwd=folder)
    assert done.returncode == 2
    assert told in done.stderr
    assert not (folder / "deploy").exists()


def test_the_rule_of_the_adapter_is_a_query(split, tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool (Debian: apt-get install prometheus)")
    found = split()
    adapter = yaml.safe_load((tmp_path / "words/deploy/prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    (metric,) = found["HorizontalPodAutoscaler", "words-count-worker"]["spec"]["metrics"]
    assert metric["object"]["metric"]["name"] == rule["name"]["as"]
    query = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'pod="a"').replace("<<.GroupBy>>", "pod")
    rules = {"groups": [{"name": "a", "rules": [{"record": "a", "expr": query}]}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    command = [promtool, "check", "rules", tmp_path / "rules.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


KUBECTL = """#!/bin/sh
# Has the files of a secret in a folder of its name.
case "$1 $2 $3" in
"create secret generic")
    mkdir -p "$SECRETS/$4"
    for word; do
        case "$word" in --from-file=*) word="${word#--from-file=}"; cp "${word#*=}" "$SECRETS/$4/${word%%=*}"; esac
    done ;;
"apply -f -") cat ;;
*) exit 1 ;;
esac
"""


def make_certificates(folder, tmp_path, names):
    """Runs the program that makes certificates; gives the folder that has its secrets."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin/kubectl").write_text(KUBECTL)
    (tmp_path / "bin/kubectl").chmod(0o755)
    text = (folder / "wire-certificates.sh").read_text()
    assert "subjectAltName=DNS:words-shout-owner" in text
    (folder / "wire-certificates.sh").write_text(text.replace("DNS:words-shout-owner", names))
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SECRETS": str(tmp_path / "s")}
    command = ["sh", folder / "wire-certificates.sh", tmp_path / "authority"]
    subprocess.run(command, check=True, env=environment, timeout=PATIENCE_S, capture_output=True)
    return tmp_path / "s"


def probe(workload, kind, health):
    """Runs a probe; tells whether it succeeds."""
    words = container(workload)[f"{kind}Probe"]["exec"]["command"]
    return subprocess.run([word.replace("/tmp/health", str(health)) for word in words], check=False).returncode == 0


def test_what_the_pods_run_answers_through_a_front(split, tmp_path):
    found = workloads(split(target="model.py:Shout"))
    (tmp_path / "secret").write_text("a secret of sixteen bytes and more\n")
    secrets = make_certificates(tmp_path / "words/deploy", tmp_path, "DNS:localhost")
    port, health = free_port(), tmp_path / "health"
    here = {
        f"@{SECRET}": f"@{tmp_path / 'secret'}",
        "tcp:0.0.0.0:9100": f"tcp:localhost:{port}",
        "tcp:words-shout-owner:9100": f"tcp:localhost:{port}",
        "/tmp/health": str(health),
    }

    def command(name):
        spec = found[name]["spec"]["template"]["spec"]
        (tls,) = [one["secret"]["secretName"] for one in spec["volumes"] if one["name"] == "wire-tls"]
        _, *arguments = [here.get(word, word) for word in container(found[name])["command"]]
        arguments = [str(word).replace("/run/wire-tls", str(secrets / tls)) for word in arguments]
        return ["env", "-C", str(tmp_path / "words"), *FOREBAY, *arguments]

    with contextlib.ExitStack() as stack:
        owner = Server(None, command=command("words-shout-owner"))
        stack.callback(owner.stop)
        owner.wait_ready()
        assert owner.client.get("/healthz").status_code == 200
        assert owner.client.get("/readyz").status_code == 503  # nothing has dialled in yet
        as_worker = found["words-shout-worker"]
        assert not probe(as_worker, "readiness", health)
        assert probe(as_worker, "liveness", health)
        worker = subprocess.Popen(command("words-shout-worker"))
        stack.callback(worker.wait)
        stack.callback(worker.terminate)
        eventually(lambda: owner.client.get("/readyz").status_code == 200)
        eventually(lambda: probe(as_worker, "readiness", health))
        assert probe(as_worker, "liveness", health)
        worker.send_signal(signal.SIGSTOP)
        os.utime(health, (0, 0))
        assert not probe(as_worker, "liveness", health)
        worker.send_signal(signal.SIGCONT)
        eventually(lambda: probe(as_worker, "liveness", health))
        front = Server(None, command=command("words-front"))
        stack.callback(front.stop)
        front.wait_ready()
        eventually(lambda: front.client.get("/readyz").status_code == 200)
        answer = front.call("shout", "hello")
        assert (answer.status_code, answer.json()) == (200, "HELLO")
        assert owner.metric("forebay_queue_seconds_count") == 1  # what its workers are scaled by


def test_a_certificate_is_renewed_by_the_authority_that_pods_believe(split, tmp_path):
    split(target="model.py:Shout")

    def made():
        folder = make_certificates(tmp_path / "words/deploy", tmp_path, "DNS:words-shout-owner")
        return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    first = made()
    same = {file.name for file, text in made().items() if text == first[file]}
    assert same == {"ca.crt"}
    assert {file.name for file in first} == {"ca.crt", "tls.crt", "tls.key"}


@pytest.mark.parametrize("tls", ["secret", "cert-manager", "none"])
def test_only_owners_have_the_key_of_owners(split, tls):
    found = split("--wire-tls", tls, target="model.py:Shout")
    mounted = {
        name: [one["secret"]["secretName"] for one in volumes if one["name"] == "wire-tls"]
        for name, workload in workloads(found).items()
        for volumes in [workload["spec"]["template"]["spec"]["volumes"]]
    }
    client, owner = [], []
    if tls != "none":
        client, owner = ["words-wire-client"], ["words-wire-owner"]
    assert mounted == {"words-front": client, "words-shout-worker": client, "words-shout-owner": owner}
    for name, prefix in OWN_FLAGS.items():
        words = container(workloads(found)[name])["command"]
        assert (f"{prefix}cafile" in words) == (tls != "none")
    made = {name: one["spec"] for (kind, name), one in found.items() if kind == "Certificate"}
    if tls != "cert-manager":
        assert not made
        return
    assert made["words-wire-owner"]["dnsNames"] == ["words-shout-owner"]
    assert made["words-wire-owner"]["secretName"] == owner[0]
    assert made["words-wire-client"]["secretName"] == client[0]
    assert {one["issuerRef"]["name"] for one in made.values()} <= {name for kind, name in found if kind == "Issuer"}


def test_certificates_fit_the_definitions_of_cert_manager(split):
    crds.require_crds()
    kinds = [one for (kind, _), one in split("--wire-tls", "cert-manager").items() if kind in {"Certificate", "Issuer"}]
    assert len(kinds) == 5
    assert [fault for one in kinds for fault in crds.faults(one)] == []
