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
from forebay.cluster.deployment import MAX_STATE_BYTES, ClusterState, Deployment, Unit, encode_state, read_state
from forebay.cluster.host import own_environment
from forebay.cluster.node_folder import Identity, NodeFolder, claim, folder_of, folders
from forebay.cluster.node_plan import FRONT, plan_of
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
    with pytest.raises(OSError, match="a folder is needed"):
        claim("d", "one", SECRET)
    assert NodeFolder(tmp_path).state is None
