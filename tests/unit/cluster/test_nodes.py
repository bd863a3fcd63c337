# SPDX-License-Identifier: Apache-2.0
"""The folder of a node, what is said over its socket, and the files that a node is given."""

import contextlib
import os
import secrets
import shutil
import socket
import stat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster import control, node_folder, project_files
from forebay.cluster.control import ControlSocket, ask
from forebay.cluster.decisions import begin
from forebay.cluster.deployment import (
    MAX_STATE_BYTES,
    ClusterState,
    Deployment,
    Owning,
    PlacedWorker,
    Run,
    Unit,
    encode_state,
    read_state,
)
from forebay.cluster.host import Host, own_environment
from forebay.cluster.node_folder import Identity, NodeFolder, claim, folder_of, folders
from forebay.cluster.node_plan import FRONT, plan_of
from forebay.cluster.ray_program import open_to_readers
from forebay.errors import ConfigError, InvalidRequest, Unavailable

SECRET = b"0123456789abcdef"


@pytest.fixture
def deployment():
    name = f"unit-{secrets.token_hex(4)}"
    yield name
    shutil.rmtree(node_folder.root() / name, ignore_errors=True)


def test_each_host_on_a_machine_has_a_folder_of_its_own_that_others_cannot_enter(deployment):
    first, second = claim(deployment, "10.0.0.7", SECRET), claim(deployment, "10.0.0.7", SECRET)
    assert [first.name, second.name] == ["10.0.0.7", "10.0.0.7-2"]
    assert [one.path for one in folders(deployment)] == [first.path, second.path]
    for path in (first.path.parent.parent, first.path.parent, first.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((first.path / "secret").stat().st_mode) == 0o600
    assert first.secret == SECRET
    assert first.has_host
    assert not folder_of(deployment, "other").has_host


def test_a_node_process_is_known_by_its_start_and_the_boot_as_well(deployment):
    folder = claim(deployment, "one", SECRET)
    assert folder.identity is None
    folder.enlist()
    own = Identity.own()
    assert folder.identity == own
    for other in (Identity(own.pid, own.started + 1, own.boot), Identity(own.pid, own.started, "another")):
        folder.write("node.json", msgspec.json.encode(other))
        assert folder.identity is None
    folder.write("node.json", b"{")
    assert folder.identity is None


def test_a_folder_that_another_user_could_write_to_is_closed(deployment):
    folder = claim(deployment, "one", SECRET)
    folder.path.chmod(0o777)
    folder.prepare(SECRET)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_only_a_client_that_knows_the_secret_is_answered(tmp_path):
    def answer(question):
        if question.verb == "no":
            raise ConfigError("it cannot be")
        return {question.verb: question.data.decode()}

    door = ControlSocket(tmp_path / "control", SECRET, answer)
    assert ask(tmp_path / "control", SECRET, "echo", b"data") == {"echo": "data"}
    with pytest.raises(InvalidRequest, match="it cannot be"):
        ask(tmp_path / "control", SECRET, "no")
    with pytest.raises(Unavailable, match="does not answer: it hung up"):
        ask(tmp_path / "control", SECRET[::-1], "echo")
    assert ask(tmp_path / "control", SECRET, "echo") == {"echo": ""}
    door.close()
    with pytest.raises(Unavailable):
        ask(tmp_path / "control", SECRET, "echo", patience_s=1.0)


def test_a_node_process_that_does_not_know_the_secret_is_told_nothing(tmp_path):
    ControlSocket(tmp_path / "control", SECRET[::-1], lambda question: pytest.fail("it was asked"))
    with pytest.raises(Unavailable):
        ask(tmp_path / "control", SECRET, "apply", b"state")


def test_what_a_stranger_sends_is_bounded(tmp_path):
    ControlSocket(tmp_path / "control", SECRET, lambda question: None)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "control"))
        stranger.sendall(b"x" * 100)
        assert len(control._received(stranger, 32)) == 32
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


STATE = ClusterState(
    version=1,
    deployment=Deployment(name="d", code="c", front={}, owner={}, units=(Unit(name="u", target="t", models=("u",)),)),
)


def encrypted(folder):
    """The state with TLS files, one of them in the project."""
    attach = {"certfile": str(folder / "cert.pem"), "cafile": "project:ca.pem", "keyfile": None}
    run = Run(key="u-1", unit=msgspec.structs.replace(STATE.deployment.units[0], workers=1), code="c")
    owner = Owning(key="u-1.owner-2", run=run.key, node="one", host="127.0.0.1", port=1, http_port=2)
    return msgspec.structs.replace(
        STATE,
        deployment=msgspec.structs.replace(STATE.deployment, owner={"attach": attach}),
        runs=(run,),
        live=(run.key,),
        routes={run.key: owner.key},
        owners=(owner,),
        workers=(PlacedWorker(run=run.key, index=0, node="one"),),
    )


def test_all_processes_of_a_node_show_its_certificate_and_check_those_of_others(tmp_path):
    plan = plan_of(encrypted(tmp_path), "one", tmp_path, "python", 8080)
    own, authority = str(tmp_path / "cert.pem"), str(tmp_path / "code/c/ca.pem")
    front, owner = (msgspec.json.decode(plan.files[file])["attach"] for file in ("front.yaml", "u-1.owner-2.yaml"))
    assert (front["owner_certfile"], front["owner_cafile"]) == (own, authority)
    assert (owner["certfile"], owner["cafile"]) == (own, authority)
    (worker,) = [" ".join(one.argv) for one in plan.children if one.name.startswith("worker")]
    assert f"--cafile {authority} --certfile {own}" in worker


def test_a_host_says_which_tls_file_its_node_does_not_have(deployment, tmp_path, monkeypatch):
    host = Host(deployment, "one", "127.0.0.1")
    monkeypatch.setattr(control, "ask", lambda *_: pytest.fail("the node process was told to use them"))
    host._folder = claim(deployment, "one", SECRET)
    (host._folder.path / "code/c").mkdir()
    assert host.apply(encode_state(encrypted(tmp_path))) == -1
    assert f"{tmp_path}/cert.pem" in host._problem


def test_tls_between_nodes_cannot_change_while_a_deployment_runs(tmp_path):
    before, wanted = encrypted(tmp_path), msgspec.structs.replace(STATE.deployment, code="new")
    with pytest.raises(ConfigError, match="cannot change while it runs"):
        begin(before, wanted, 0.0)
    assert begin(before, msgspec.structs.replace(before.deployment, code="new"), 0.0).version == before.version + 1


def test_no_file_of_a_node_is_named_with_the_slash_of_a_model():
    unit = msgspec.structs.replace(STATE.deployment.units[0], name="org/model")
    wanted = msgspec.structs.replace(STATE.deployment, units=(unit,), code="new")
    assert [run.key for run in begin(None, wanted, 0.0).runs] == ["org.model-1"]


def test_machines_that_others_can_listen_to_are_warned_of(tmp_path):
    assert "what the 2 machines of this cluster" in open_to_readers(STATE.deployment, {"10.0.0.5", "10.0.0.6"})
    assert open_to_readers(STATE.deployment, {"10.0.0.5"}) == ""
    assert open_to_readers(encrypted(tmp_path).deployment, {"10.0.0.5", "10.0.0.6"}) == ""


@given(st.binary(max_size=200))
def test_bytes_that_are_no_state_are_refused(data):
    with pytest.raises(InvalidRequest):
        read_state(data)


def test_a_state_has_a_limit():
    assert read_state(encode_state(STATE)) == STATE
    with pytest.raises(InvalidRequest, match="at most"):
        read_state(b"x" * (MAX_STATE_BYTES + 1))
    large = msgspec.structs.replace(STATE, problem="x" * MAX_STATE_BYTES)
    with pytest.raises(ConfigError, match="nodes take at most"):
        encode_state(large)


def test_files_travel_whole_and_equal_files_have_one_digest(tmp_path):
    project, place = tmp_path / "project", tmp_path / "place"
    for folder in (project / "package", project / ".git", project / "venv", place):
        folder.mkdir(parents=True)
    (project / "package/model.py").write_text("text")
    (project / "run").write_text("#!/bin/sh")
    (project / "run").chmod(0o755)
    (project / ".git/config").write_text("hidden")
    (project / "venv/pyvenv.cfg").write_text("")
    digest, packed = project_files.pack(project)
    os.utime(project / "run", (1, 1))
    assert project_files.pack(project) == (digest, packed)
    project_files.unpack(packed, digest, place)
    project_files.unpack(packed, digest, place)
    copied = place / digest
    assert sorted(str(path.relative_to(copied)) for path in copied.rglob("*")) == ["package", "package/model.py", "run"]
    assert os.access(copied / "run", os.X_OK)
    assert [path.name for path in place.iterdir()] == [digest]


@pytest.mark.parametrize("path", ["../outside", "/outside", "a/../../outside"])
def test_files_stay_in_their_folder(tmp_path, path):
    digest, packed = project_files._packed([project_files.ProjectFile(path, False, b"x")])
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(InvalidRequest, match="outside of the project"):
        project_files.unpack(packed, digest, place)
    with pytest.raises(InvalidRequest, match="not those that the deployment names"):
        project_files.unpack(packed, "0" * 32, place)
    assert list(place.iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_a_project_that_is_too_large_is_refused(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text("text")
    monkeypatch.setattr(project_files, "MAX_BYTES", 3)
    with pytest.raises(ConfigError, match="is copied to each node"):
        project_files.pack(tmp_path)


def test_what_ray_and_settings_of_others_say_is_not_passed_on():
    found = own_environment({"RAY_ADDRESS": "x", "CUDA_VISIBLE_DEVICES": "", "FOREBAY_CLUSTER": "auto", "PATH": "/bin"})
    assert found == {"PATH": "/bin"}


def test_a_node_without_an_owner_anywhere_runs_nothing(tmp_path):
    assert plan_of(STATE, "one", tmp_path, "python", 8080).children == []
    assert FRONT == "front"


def test_the_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(node_folder, "root", lambda: tmp_path / "root")
    (tmp_path / "root").symlink_to(tmp_path)
    with pytest.raises(OSError, match="expected a folder"):
        claim("d", "one", SECRET)
    assert NodeFolder(tmp_path).state is None
