# SPDX-License-Identifier: Apache-2.0
"""`--cluster` and `forebay cluster` where there is no cluster, or nothing that could be on one; workers that follow."""

import argparse
import json
import secrets
import time

import pytest
from tests.integration.test_attached import Worker, door_of
from tests.ports import free_port

from forebay.cli import serve
from forebay.errors import ConfigError
from forebay.surfaces.lookup import deployment

MODEL = """
import forebay

class It(forebay.Model):
    name = "it"

    def predict(self, batch: list[str]) -> list[str]:
        return batch
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def told(result):
    assert result.stderr.startswith("forebay: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.returncode, result.stderr.removeprefix("forebay: ").removesuffix("\n")


def test_a_cluster_that_is_not_there_is_said_within_ten_seconds(cli, project):
    pytest.importorskip("ray.cluster_utils")
    address = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    status, words = told(cli("serve", project / "model.py", "--cluster", address))
    assert time.monotonic() - began < 15  # with what it takes to start a command on a busy machine
    assert status == 2
    assert words.startswith(f"there is no Ray cluster at '{address}'")
    assert words.endswith("or let forebay start Ray here: --cluster local")


def test_models_whose_names_clash_are_refused(cli, project):
    (project / "forebay.yaml").write_text("models: [model.py, {target: model.py, name: it/more}]\ncluster: auto\n")
    status, words = told(cli("serve", project))
    assert status == 2
    assert "models 'it' and 'it/more' cannot be served together" in words


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            "ray: {runtime_env: {pip: [numpy]}}",
            "expected env_vars only, got pip; Ray removes its environments when it stops; name an interpreter",
        ),
        (
            "ray: {runtime_env: {working_dir: .}}",
            "expected env_vars only, got working_dir; forebay copies the folder of the project",
        ),
        ("ray: {num_gpu: 1}", "did you mean num_gpus?"),
        ("ray: {num_cpus: -1}", "expected a number >= 0"),
        ("devices: ['cpu:0']", "devices: on a cluster Ray says which; write ray: {num_gpus: 1} instead"),
        ("workers: 0", "workers is 0, and a cluster starts the workers itself"),
    ],
)
def test_what_cannot_be_on_a_cluster_is_one_sentence(cli, project, settings, words):
    (project / "forebay.yaml").write_text(f"models:\n  - target: model.py\n    {settings}\ncluster: auto\n")
    status, sentence = told(cli("serve", project))
    assert status == 2
    assert sentence.startswith(f"{project}/forebay.yaml:")
    assert words in sentence


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--attach", "unix:s"], "--cluster opens the doors for workers itself"),
        (["--owner", "unix:s"], "--cluster opens the doors for workers itself"),
        (["--fronts", "2"], "--fronts divides a server on one machine"),
        (["--owner-cafile", "ca.pem"], "leave out those of --owner"),
        (["--attach-cafile", "no.pem"], "--attach-cafile was given without --attach-certfile"),
        (["--attach-certfile", "no.pem", "--attach-cafile", "no.pem"], "no.pem"),
        (["--reload"], "--reload is for development on one machine"),
        (["--deployment", "No"], "lower-case letters"),
        (["--cluster", "no where"], "expected auto, local or HOST:PORT"),
    ],
)
def test_what_the_cluster_decides_is_refused(cli, project, flags, words):
    status, sentence = told(cli("serve", project / "model.py", "--cluster", "auto", *flags))
    assert status == 2
    assert words in sentence


def test_names_of_keys_tenants_and_the_folder_of_costs_go_along(project):
    (project / "b.txt").write_text("key-b\nsecond-b\n")
    file = project / "forebay.yaml"
    file.write_text(
        "models: [model.py]\ncluster: auto\ncost_log: costs\n"
        "http: {api_keys: {team-a: key-a}, api_key_files: [team-b=b.txt]}\n"
        "tenants: {team-a: {weight: 3, class: 0}}\n"
    )
    wanted, _ = deployment(None, options_of_command(["--config", str(file)]))
    assert wanted.front["http"]["api_keys"] == {"team-a": ["key-a"], "team-b": ["key-b", "second-b"]}
    assert wanted.front["tenants"] == wanted.owner["tenants"]
    weights = {name: (told["weight"], told["class"]) for name, told in wanted.owner["tenants"].items()}
    assert weights == {"team-a": (3.0, 0), "team-b": (1.0, 1)}
    assert wanted.owner["cost_log"] == f"{project}/costs", "beside the copies of the project"
    for part in (wanted.front, wanted.owner):  # a node reads what it was sent
        again = project / "again.yaml"
        again.write_text(json.dumps({**part, "models": ["model.py"]}))
        assert options_of_command(["--config", str(again)]).tenants["team-a"].weight == 3.0
    file.write_text("models: [model.py]\ncluster: auto\nhttp: {api_keys: [key-a], api_key_files: [team-b=b.txt]}\n")
    options = options_of_command(["--config", str(file)])
    with pytest.raises(ConfigError, match="all or none of them"):
        deployment(None, options)


def options_of_command(arguments):
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    parsed = parser.parse_args(arguments)
    parsed.given = arguments
    return serve.options_of(parsed, {})


def test_projects_of_other_servers_are_refused(cli, project):
    (project / "nucleus.yaml").write_text("type: python\ntask_type: custom\nhandler_path: handler.py\n")
    status, sentence = told(cli("serve", project, "--cluster", "auto"))
    assert status == 2
    assert "is a nucleus project, and --cluster divides forebay's own models" in sentence


def test_a_deployment_that_is_not_there(cli):
    name = f"none-{secrets.token_hex(4)}"
    assert told(cli("cluster", "status", "--deployment", name)) == (
        1,
        f"nothing of a deployment '{name}' runs on this machine",
    )
    assert told(cli("cluster", "down", "--deployment", name)) == (0, f"no deployment '{name}' on this machine")
    status, sentence = told(cli("cluster", "drain"))
    assert (status, sentence.partition(";")[0]) == (2, "forebay cluster drain needs the name of a node")


def test_a_worker_finds_the_server_that_a_file_names_and_follows_it(serve, project, eventually, request):
    first, second = (
        door_of(
            serve(
                project / "model.py", "--workers", "0", "--attach", f"unix:{project}/{name}", "--worker-grace-s", "60"
            )
        )
        for name in ("one", "two")
    )
    address = project / "address"
    address.write_text(f"{first.door}\n")
    worker = Worker(project / "model.py", f"@{address}").ready()
    request.addfinalizer(worker.stop)
    assert first.client.post("/models/it", json="a").json() == "a"
    address.write_text(second.door)
    assert second.client.post("/models/it", json="b").json() == "b"
    eventually(lambda: first.client.get("/readyz").status_code == 503)


def test_a_worker_ends_when_there_has_been_no_server_for_too_long(project):
    address = project / "address"
    address.write_text(f"unix:{project}/nobody")
    worker = Worker(project / "model.py", f"@{address}", "--orphan-grace-s", "0.2")
    assert worker.wait() == 1
    assert f"there has been no server at the address in {address} for 0.2 s" in worker.log
