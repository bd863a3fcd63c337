# SPDX-License-Identifier: Apache-2.0
"""Copies of models on the disk: what another user has put there is not served, and nothing of theirs is removed."""

from __future__ import annotations

import os
import stat

import msgspec
import pytest

from forebay.errors import ConfigError, Unavailable
from forebay.repository import own_folder
from forebay.repository.disk import DiskCache
from forebay.repository.listing import Revision
from forebay.repository.local_source import LocalFolder
from forebay.repository.repository import Repository
from forebay.repository.tree_rules import TreeRules


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source/iris/1"
    folder.mkdir(parents=True)
    (folder / "net.onnx").write_bytes(b"right")
    (folder / "sub").mkdir()
    (folder / "sub/labels").write_bytes(b"a b")
    for path in (folder / "net.onnx", folder / "sub/labels"):
        os.utime(path, (1, 1))
    return LocalFolder(tmp_path / "source")


@pytest.fixture
def started(source, tmp_path):
    """Starts a server's repository over a cache; the place of one that has stopped is free."""
    found = []

    def start():
        while found:
            found.pop().stop()
        repository = Repository(source, TreeRules(kind="models"), poll_s=0, disk=DiskCache(source, tmp_path / "cache"))
        found.append(repository)
        repository.open()
        return repository

    yield start
    for one in found:
        one.stop()


def use(repository):
    """Returns what a model's files say, and where they lie."""
    with repository.fetch(repository.find("iris")) as folder:
        return (folder / "net.onnx").read_bytes(), folder


def kept_in(repository):
    return repository.statistics().disk.count


@pytest.fixture
def kept(started):
    """A version in the cache of a server that has stopped: the folder of the revision."""
    repository = started()
    _, folder = use(repository)
    repository.stop()
    return folder.parent.parent


def change(kept, **fields):
    """Forges the list of a revision, and calls its folder as such a revision is; returns that."""
    told = msgspec.json.decode((kept / "revision.json").read_bytes())
    told["revision"] |= fields
    (kept / "revision.json").write_bytes(msgspec.json.encode(told))
    return kept.rename(kept.with_name(f"{msgspec.convert(told['revision'], Revision).id}-forged"))


def forge_bytes(kept):
    (kept / "iris/1/net.onnx").write_bytes(b"wrong")


def forge_link(kept):
    (kept.parents[2] / "foreign.onnx").write_bytes(b"wrong")
    (kept / "iris/1/net.onnx").unlink()
    (kept / "iris/1/net.onnx").symlink_to(kept.parents[2] / "foreign.onnx")


def forge_linked_folder(kept):
    (kept / "iris/1/sub").rename(kept.parents[2] / "sub")
    (kept / "iris/1/sub").symlink_to(kept.parents[2] / "sub")


def forge_another_file(kept):
    (kept / "iris/1/another.onnx").write_bytes(b"wrong")


def forge_hashes(kept):
    told = msgspec.json.decode((kept / "revision.json").read_bytes())
    (kept / "revision.json").write_bytes(msgspec.json.encode(told | {"hashes": []}))


def forge_list_of_old(kept):
    told = msgspec.json.decode((kept / "revision.json").read_bytes())
    (kept / "revision.json").write_bytes(msgspec.json.encode(told["revision"]))


@pytest.mark.parametrize(
    "forge",
    [forge_bytes, forge_link, forge_linked_folder, forge_another_file, forge_hashes, forge_list_of_old],
)
def test_what_is_not_what_came_from_the_source_is_copied_again(started, kept, forge):
    # F121: a forged list, with any file of the right size, was served.
    forge(kept)
    assert use(started())[0] == b"right"


@pytest.mark.parametrize("model", ["../../other", "/etc", "", ".", "..", "a/b", "a\nb", ".hidden"])
@pytest.mark.parametrize("version", ["1", "..", "1/../..", ""])
def test_names_in_a_list_lead_nowhere(started, kept, tmp_path, model, version):
    # F121: an absolute `model` in a list had the server remove a folder of somebody else's.
    (tmp_path / "other/1").mkdir(parents=True)
    (tmp_path / "other/1/theirs").write_bytes(b"1")
    for name, size in (("net.onnx", 5), ("sub/labels", 3)):  # what the list says is there
        (tmp_path / "other/1" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "other/1" / name).write_bytes(bytes(size))
    forged = change(kept, model=model.replace("/etc", str(tmp_path / "other")), version=version)
    repository = started()
    assert kept_in(repository) == 0
    assert not forged.exists()
    assert use(repository)[0] == b"right"
    repository.stop()
    assert (tmp_path / "other/1/theirs").read_bytes() == b"1"


def test_paths_of_files_in_a_list_stay_in_its_folder(started, kept):
    # F121
    (kept.parent / "outside").write_bytes(b"right")
    told = msgspec.json.decode((kept / "revision.json").read_bytes())
    file = told["revision"]["files"][0]
    change(kept, files=[["../../../outside", *file[1:]], told["revision"]["files"][1]])
    assert kept_in(started()) == 0


def test_what_others_could_write_is_not_taken_over_and_is_closed(started, kept):
    # F121
    kept.parent.chmod(0o777)
    repository = started()
    assert kept_in(repository) == 0
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o755
    assert use(repository)[0] == b"right"


def test_folders_are_made_for_this_user_only(started, kept, tmp_path):
    # F121: whatever the umask allows.
    for folder in (tmp_path / "cache", kept.parent, kept):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((kept.parent / "lock").stat().st_mode) == 0o600


def test_a_place_that_belongs_to_another_user_is_passed_over(started, kept, monkeypatch, tmp_path):
    # F121: what lay in it was served.
    (tmp_path / "cache/1").mkdir()
    real = os.lstat

    def lstat(path):
        about = real(path)
        is_theirs = path == tmp_path / "cache/0"
        return os.stat_result((*about[:4], about.st_uid + 1, *about[5:10])) if is_theirs else about

    monkeypatch.setattr(own_folder.Path, "lstat", lstat)
    repository = started()
    assert kept_in(repository) == 0
    assert use(repository)[1].is_relative_to(tmp_path / "cache/1")
    assert kept.is_dir()


def test_a_folder_of_another_user_is_refused_with_what_to_do(source, tmp_path, monkeypatch):
    # F121
    monkeypatch.setattr("forebay.repository.disk.MAX_SERVERS", 2)
    for number in range(2):
        (tmp_path / f"cache/{number}").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "cache").stat().st_uid + 1)
    with pytest.raises(ConfigError) as refused:
        DiskCache(source, tmp_path / "cache")
    assert "it belongs to another user" in refused.value.message
    assert "name another folder with --repository-folder" in refused.value.message


def test_links_in_the_cache_are_not_followed(started, kept, tmp_path, source):
    # F121: the lock was written through a link, and a place could be one.
    victim = tmp_path / "victim"
    victim.write_bytes(b"theirs")
    (kept.parent / "lock").unlink()
    (kept.parent / "lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="models cannot be kept in"):
        DiskCache(source, tmp_path / "cache")
    (kept.parent / "lock").unlink()
    (kept.parent / "link").symlink_to(tmp_path / "source")
    repository = started()
    assert not (kept.parent / "link").is_symlink()
    assert (tmp_path / "source/iris").is_dir()
    repository.stop()
    kept.parent.rename(tmp_path / "moved")
    kept.parent.symlink_to(tmp_path / "moved")
    assert use(started())[1].is_relative_to(tmp_path / "cache/1")


def test_a_folder_that_takes_the_place_of_ours_is_not_used(started, kept, tmp_path):
    # F121
    repository = started()
    assert use(repository)[0] == b"right"
    kept.parent.rename(tmp_path / "moved")
    kept.parent.mkdir()
    with pytest.raises(Unavailable, match="is another folder than the one"):
        repository.fetch(repository.find("iris"))
    kept.parent.rmdir()  # whoever cleans the folder of caches is welcome
    assert use(repository)[0] == b"right"


def test_who_shares_the_folder_above_is_warned_of(started, tmp_path, caplog):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert use(started())[0] == b"right"
    assert "other users of this machine can replace the files in" in caplog.text
    caplog.clear()
    (tmp_path / "cache").chmod(0o1777)
    started()
    assert "other users" not in caplog.text
