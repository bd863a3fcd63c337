# SPDX-License-Identifier: Apache-2.0
"""`forebay generate --ray`: a cluster of KubeRay, and the job that deploys on it."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from tests import crds
from tests.waiting import PATIENCE_S, eventually

from forebay.cluster.node_folder import root
from forebay.surfaces.container.ray_cluster import RAY

ROOT = Path(__file__).parents[2]
VALIDATE = ROOT / ".venv/environments/deploy/bin/kubernetes-validate"
MODEL = """
import forebay

class Shout(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        return [text.upper() for text in batch]
"""
POD = object()
"""A template of a pod, which Kubernetes' own schemas are for."""
FIELDS = {
    "RayCluster": {
        "rayVersion": str,
        "authOptions": {"mode": str},
        "headGroupSpec": {"rayStartParams": {str: str}, "template": POD},
        "workerGroupSpecs": [
            {
                "groupName": str,
                "replicas": int,
                "minReplicas": int,
                "maxReplicas": int,
                "rayStartParams": {str: str},
                "template": POD,
            }
        ],
    },
    "RayJob": {"clusterSelector": {str: str}, "submissionMode": str, "entrypoint": str},
}
"""What is used of KubeRay's kinds (1.7), and of which type it is there; `tests.crds` has all of them."""
OPTIONS = [
    (),
    ("--grpc-port", "9000", "--workers", "5"),
    ("--api-key", "hidden", "--replicas", "3"),
    ("--certfile", "chain.pem", "--keyfile", "key.pem", "--drain-s", "50"),
]


def generate(cli, tmp_path, *options, files=()):
    folder = tmp_path / "words"
    folder.mkdir(exist_ok=True)
    for name, text in {"model.py": MODEL, "chain.pem": "chain\n", "key.pem": "key\n", **dict(files)}.items():
        (folder / name).write_text(text)
    return cli("generate", "model.py", "--ray", "--force", *options, cwd=folder)


@pytest.fixture
def found(cli, tmp_path):
    """Generates; gives the objects by (kind, name)."""

    def run(*options):
        done = generate(cli, tmp_path, *options)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "words/deploy/kubernetes"
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert {*kustomization["resources"], "kustomization.yaml"} == {file.name for file in folder.iterdir()}
        texts = [(folder / name).read_text() for name in kustomization["resources"]]
        return {(one["kind"], one["metadata"]["name"]): one for text in texts for one in yaml.safe_load_all(text)}

    return run


def templates(objects):
    spec = objects["RayCluster", "words"]["spec"]
    (group,) = spec["workerGroupSpecs"]
    return {"head": spec["headGroupSpec"]["template"], "node": group["template"]}


def container(objects, name):
    (found,) = templates(objects)[name]["spec"]["containers"]
    return found


def require(value, shape, place):
    """Holds a value to a shape of `FIELDS`."""
    if shape is POD:
        assert set(value) <= {"metadata", "spec"}, place
    elif isinstance(shape, list):
        for one in value:
            require(one, shape[0], place)
    elif not isinstance(shape, dict):
        assert type(value) is shape, place
    elif str in shape:
        assert all(type(key) is str and type(one) is shape[str] for key, one in value.items()), place
    else:
        for name, one in value.items():
            require(one, shape[name], f"{place}.{name}")


@pytest.mark.parametrize("options", OPTIONS)
def test_objects_have_the_fields_of_their_kinds(found, options):
    objects = found(*options)
    for (kind, _), one in objects.items():
        if kind in FIELDS:
            assert one["apiVersion"] == "ray.io/v1"
            require(one["spec"], FIELDS[kind], kind)
    if crds.FOLDER is None:
        return
    assert [fault for (kind, _), one in objects.items() if kind in FIELDS for fault in crds.faults(one)] == []


def test_objects_fit_the_definitions_of_their_kinds(found):
    crds.require_crds()
    cluster = found()["RayCluster", "words"]
    assert crds.faults(cluster) == []
    cluster["spec"]["rayVersoin"] = cluster["spec"].pop("rayVersion")
    assert crds.faults(cluster) == ["RayCluster.spec has rayVersoin, which is not known"]


def test_pods_and_what_is_beside_them_fit_the_schemas_of_kubernetes(found, tmp_path):
    if not VALIDATE.exists():
        pytest.skip("no environment with schemas: make environment NAME=deploy")
    documents = []
    for options in OPTIONS:
        objects = found(*options)
        documents += [one for (kind, _), one in objects.items() if kind not in FIELDS]
        documents += [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **one.get("metadata", {})}, **one}
            for name, one in ((name, {"spec": one["spec"]}) for name, one in templates(objects).items())
        ]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(documents))
    command = [VALIDATE, "--strict", tmp_path / "all.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (result.stderr + result.stdout).count("passed for resource") == len(documents)


def test_one_image_which_is_rays_own_with_forebay_in_it(found, tmp_path):
    objects = found("--image", "registry.example/words:7")
    assert {container(objects, name)["image"] for name in ("head", "node")} == {"registry.example/words:7"}
    spec = objects["RayCluster", "words"]["spec"]
    assert (spec["rayVersion"], spec["authOptions"]) == (RAY, {"mode": "token"})  # Ray wants one, and each pod the same
    dockerfile = (tmp_path / "words/deploy/Dockerfile").read_text()
    assert re.search(rf"^ARG BASE=rayproject/ray:{RAY}-py3\d+$", dockerfile, re.MULTILINE)
    assert '"forebay[ray]' in dockerfile
    assert re.findall("^USER .*", dockerfile, re.MULTILINE) == ["USER root", "USER 1000"]
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is None or pinned[1] == RAY
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return
    file = tmp_path / "words/deploy/kubernetes/kustomization.yaml"
    file.write_text(file.read_text().replace('newTag: "7"', 'newTag: "8"'))
    command = [kubectl, "kustomize", file.parent]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    assert text.count("image: registry.example/words:8\n") == 2


def test_the_job_deploys_what_was_generated_for(found):
    objects = found("--timeout-ms", "700", "--http-port", "8181")
    spec = objects["RayJob", "words"]["spec"]
    assert spec["clusterSelector"] == {"ray.io/cluster": "words"}
    deploys = "cd /app && exec forebay serve model.py --cluster auto --http-port 8181 --timeout-ms 700"
    assert spec["entrypoint"] == deploys
    assert {"name": "FOREBAY_HOST", "value": "0.0.0.0"} in container(objects, "head")["env"]
    assert [one["containerPort"] for one in container(objects, "node")["ports"]] == [8181]
    nodes = {"ray.io/cluster": "words", "ray.io/node-type": "worker"}
    assert objects["Service", "words"]["spec"]["selector"] == nodes
    assert objects["PodDisruptionBudget", "words"]["spec"]["selector"]["matchLabels"] == nodes


def test_keys_are_a_secret(found, tmp_path):
    objects = found("--api-key", "hidden")
    assert {"name": "FOREBAY_API_KEY", "value": "@/run/secrets/api_keys"} in container(objects, "head")["env"]
    texts = [file.read_text(errors="replace") for file in (tmp_path / "words/deploy").rglob("*") if file.is_file()]
    assert "hidden" not in "".join(texts)


def test_clients_reach_the_nodes_and_nothing_else(found):
    objects = found("--grpc-port", "9000")
    inside = objects["NetworkPolicy", "words"]["spec"]
    assert inside["podSelector"]["matchLabels"] == {"ray.io/cluster": "words"}
    others, operator = inside["ingress"]
    assert others["from"] == [{"podSelector": inside["podSelector"]}]
    assert operator["ports"] == [{"port": 8265}]
    clients = objects["NetworkPolicy", "words-clients"]["spec"]
    assert clients["podSelector"] == {"matchLabels": objects["Service", "words"]["spec"]["selector"]}
    assert clients["ingress"] == [{"ports": [{"port": "http"}, {"port": "grpc"}]}]


def test_a_container_outlives_its_ray_and_begins_it_again(found, tmp_path):
    node = container(found(), "node")
    (script,) = node["args"]
    begins = tmp_path / "begin"
    begins.write_text(f"#!/bin/sh\necho begun >>{tmp_path}/begun\n")
    begins.chmod(0o755)
    command = [*node["command"], script.replace("sleep 5", "sleep 0.05")]
    environment = {**os.environ, "KUBERAY_GEN_RAY_START_CMD": str(begins)}
    with subprocess.Popen(command, env=environment) as process:
        eventually(lambda: (tmp_path / "begun").exists() and len((tmp_path / "begun").read_text().split()) > 2)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def test_a_pod_is_ready_until_something_is_deployed_and_then_when_that_is(found, tmp_path):
    words = container(found(), "node")["readinessProbe"]["exec"]["command"]
    assert str(root()).replace(str(os.geteuid()), "1000") == "/tmp/forebay-cluster-1000"
    folder = str(tmp_path / "forebay-cluster-1000")
    command = [word.replace("/tmp/forebay-cluster-1000", folder).replace(":8080/", ":1/") for word in words]
    assert command != words
    assert subprocess.run(command, check=False, timeout=PATIENCE_S).returncode == 0
    Path(folder).mkdir()
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode != 0
    assert "refused" in result.stderr


def test_a_pod_that_goes_has_time_to_move_what_it_runs(found):
    objects = found("--drain-s", "50")
    spec = templates(objects)["node"]["spec"]
    (word,) = [one for one in container(objects, "node")["lifecycle"]["preStop"]["exec"]["command"] if "drain" in one]
    found_s = re.fullmatch(r'sleep (\d+); timeout (\d+) forebay cluster drain "\$POD_IP"', word)
    assert found_s is not None
    before_s, moving_s = map(int, found_s.groups())
    assert before_s > 0  # until every node has heard
    assert spec["terminationGracePeriodSeconds"] > before_s + moving_s + 50


def test_nodes_have_what_all_workers_reserve(cli, tmp_path):
    models = [
        {"target": "model.py", "workers": 3, "ray": {"num_cpus": 2, "num_gpus": 0.5}},
        {"target": "model.py", "name": "loud", "workers": 1},
    ]
    files = {"forebay.yaml": yaml.safe_dump({"models": models})}
    for name, text in {"model.py": MODEL, **files}.items():
        (tmp_path / name).write_text(text)
    done = cli("generate", ".", "--ray", "--replicas", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "deploy/kubernetes/raycluster.yaml").read_text()
    cluster = {("RayCluster", "words"): next(yaml.safe_load_all(text))}
    resources = container(cluster, "node")["resources"]
    assert resources["requests"]["cpu"] == str(4 + 1)  # of seven half, and what serves
    assert resources["limits"]["nvidia.com/gpu"] == 1
    assert "-gpu" in (tmp_path / "deploy/Dockerfile").read_text()


@pytest.mark.parametrize(
    "options, told",
    [
        (("--split",), "--ray, --split: Ray decides where owners and workers run, so give one of the two"),
        (("--devices", "cuda:0"), "devices: on a cluster Ray says which; write ray: {num_gpus: 1} instead"),
        (("--fronts", "2"), "--cluster has one front on each node; leave out --fronts"),
    ],
    ids=["split", "devices", "fronts"],
)
def test_what_cannot_be_is_refused(cli, tmp_path, options, told):
    done = generate(cli, tmp_path, *options)
    assert done.returncode == 2
    assert told in done.stderr
    assert not (tmp_path / "words/deploy").exists()
