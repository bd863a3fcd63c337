# SPDX-License-Identifier: Apache-2.0
"""Repositories on a real S3 server: what is there, what comes here, and what goes wrong on the way."""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.buckets import BUSY, FORBIDDEN, GONE
from tests.waiting import PATIENCE_S, eventually

from forebay.errors import ConfigError, NotFound, Unavailable
from forebay.repository import bucket as bucket_module
from forebay.repository import fetching
from forebay.repository.bucket import Bucket
from forebay.repository.disk import DiskCache
from forebay.repository.fetching import DiskFull
from forebay.repository.listing import StoredFile
from forebay.repository.local_source import LocalFolder
from forebay.repository.repository import Repository
from forebay.repository.repository_address import source_of
from forebay.repository.source import SourceChanged, SourceFailed, SourceRefused
from forebay.repository.tree_rules import TreeRules

DATA = random.Random(7).randbytes(300_000)


@pytest.fixture
def opened(tmp_path):
    """Opens repositories: `opened("s3://...")`."""
    found = []

    def start(address, folder=None, *, poll_s=0.05, in_place=False, rules=None, **limits):
        source = source_of(address, tmp_path) if isinstance(address, str) else address
        disk = None if in_place else DiskCache(source, folder or tmp_path / "cache", **limits)
        repository = Repository(source, rules or TreeRules(), poll_s=poll_s, disk=disk)
        found.append(repository)
        repository.open()
        return repository

    yield start
    for one in found:
        one.stop()


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(fetching, "PART_BYTES", 40_000)


def contents(folder: Path):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put_model(buckets, address, *, size=300_000, old=True, seed: int | str = 7):
    data = random.Random(seed).randbytes(size)
    buckets.put(f"{address}/weights.bin", data, old=old)
    buckets.put(f"{address}/sub/labels.txt", b"a\nb\n", old=old)
    buckets.put(f"{address}/empty", b"", old=old)
    return {"weights.bin": data, "sub/labels.txt": b"a\nb\n", "empty": b""}


def test_a_revision_comes_whole_in_parts_and_once(buckets, bucket, faults, opened, small_parts, at_once):  # N105, N106
    expected = put_model(buckets, f"{bucket}/models/iris/3")
    repository = opened(f"s3://{bucket}/models")
    revision = repository.find("iris")
    leases = at_once(*[lambda: repository.fetch(revision)] * 5)
    folders = {lease.value for lease in leases}
    assert len(folders) == 1
    (folder,) = folders
    assert folder.parts[-2:] == ("iris", "3")
    assert contents(folder) == expected
    assert faults.asked("weights.bin") == 8  # parts, each of them once
    assert repository.statistics().disk.count == 1


def test_more_than_a_page_of_objects(buckets, bucket, opened):  # N116
    for number in range(1100):
        (buckets.folder / bucket / f"m{number}" / "1").mkdir(parents=True)
        (buckets.folder / bucket / f"m{number}" / "1" / "a").write_bytes(b"x")
    assert len(opened(f"s3://{bucket}", poll_s=0).catalog.models) == 1100


def test_one_prefix_does_not_catch_another(buckets, bucket, opened):  # N118
    buckets.put(f"{bucket}/iris/1/a", b"1")
    buckets.put(f"{bucket}/iris-2/5/a", b"22")
    repository = opened(f"s3://{bucket}/iris/", rules=TreeRules(kind="model", name="iris"))
    assert {name: list(versions) for name, versions in repository.catalog.models.items()} == {"iris": [1]}


def test_slashes_around_a_prefix_are_none_of_it(buckets, bucket, opened):
    expected = put_model(buckets, f"{bucket}/models/iris/1")
    repository = opened(f"s3://{bucket}//models//")
    with repository.fetch(repository.find("iris")) as folder:
        assert contents(folder) == expected


def test_every_kind_of_change_is_seen(buckets, bucket, opened):  # N109, N110, N112, N113
    buckets.put(f"{bucket}/iris/1/a", b"old")
    buckets.put(f"{bucket}/plain/a", b"plain")
    repository = opened(f"s3://{bucket}")
    changes = []
    repository.watch(lambda: changes.append(repository.catalog.models))
    repository.start()

    def has(**expected):
        return {name: list(versions) for name, versions in repository.catalog.models.items()} == expected

    first = repository.find("iris", 1)
    buckets.put(f"{bucket}/iris/2/a", b"second", old=False)
    eventually(lambda: has(iris=[1, 2], plain=[1]))
    buckets.put(f"{bucket}/iris/1/a", b"new", old=False)  # the same length
    eventually(lambda: repository.find("iris", 1).id != first.id)
    buckets.put(f"{bucket}/more/1/a", b"more", old=False)
    eventually(lambda: has(iris=[1, 2], plain=[1], more=[1]))
    buckets.remove(f"{bucket}/iris/2/a")
    buckets.remove(f"{bucket}/plain/a")
    eventually(lambda: has(iris=[1], more=[1]))
    with pytest.raises(NotFound, match=r"there is no model 'plain' in s3://"):
        repository.find("plain")
    with pytest.raises(NotFound, match=r"the model 'iris' has no version 2 in s3://.*; there is 1"):
        repository.find("iris", 2)
    assert changes


def test_an_empty_place_is_filled_later(buckets, bucket, opened, tmp_path):  # N114
    for address in (f"s3://{bucket}/nothing", str(tmp_path / "nothing")):
        repository = opened(address, tmp_path / "kept")
        assert repository.catalog.models == {}
    repository.start()
    (tmp_path / "nothing" / "net").mkdir(parents=True)
    (tmp_path / "nothing" / "net" / "a").write_bytes(b"x")
    eventually(lambda: repository.catalog.models)


def test_half_of_a_version_is_no_version(buckets, bucket, opened):
    repository = opened(f"s3://{bucket}", poll_s=0)
    buckets.put(f"{bucket}/net/1/first", b"1", old=False)
    assert not repository.look()
    buckets.put(f"{bucket}/net/1/second", b"2", old=False)
    assert not repository.look()
    assert repository.look()
    assert [file.path for file in repository.find("net").files] == ["first", "second"]


def test_what_was_written_just_now_is_looked_at_twice_at_the_start(buckets, bucket, opened):
    buckets.put(f"{bucket}/net/1/a", b"1", old=False)
    repository = opened(f"s3://{bucket}", poll_s=PATIENCE_S)  # "just now" is within it
    assert list(repository.catalog.models) == ["net"]
    assert repository.statistics().looks == 2


# ---------------------------------------------------------------------------------------------------------------------
# Faults of the store


def only(part, fault, times=10**9):
    left = [times]

    def choose(_method, path):
        if part in path and left[0] > 0:
            left[0] -= 1
            return fault
        return None

    return choose


@contextlib.contextmanager
def in_a_hurry(source):
    """Within the block, this bucket waits for no answer: on a busy machine those that come are late as well."""
    hasty = Bucket(source.place, silent_s=0.2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(source, "list", hasty.list)
        patched.setattr(source, "read", hasty.read)
        yield


@pytest.mark.parametrize(
    "fault, times",
    [(("cut", 1000), 2), ((503, BUSY), 2), (("slow", 20_000), 2), (("cut", 0), 1)],
)
def test_what_passes_is_survived(buckets, bucket, faults, opened, small_parts, fault, times):  # N111, N115
    expected = put_model(buckets, f"{bucket}/iris/1")
    repository = opened(f"s3://{bucket}")
    faults.fault = only("weights", fault, times)
    with repository.fetch(repository.find("iris")) as folder:
        assert contents(folder) == expected


def test_a_part_that_comes_slowly_is_waited_for(buckets, bucket, faults, opened):  # N115
    expected = put_model(buckets, f"{bucket}/iris/1")
    repository = opened(Bucket(f"s3://{bucket}", silent_s=3))
    faults.fault = only("weights", ("slow", 7500))  # takes 4 s
    with repository.fetch(repository.find("iris")) as folder:
        assert contents(folder) == expected
    assert faults.asked("weights") == 1


@pytest.mark.parametrize(
    "fault, error, said",
    [
        ((403, FORBIDDEN), SourceRefused, "AccessDenied: You shall not pass; set AWS_ACCESS_KEY_ID"),
        ((404, GONE), SourceChanged, "weights.bin has changed since it was listed, or is gone"),
        ((503, BUSY), SourceFailed, "SlowDown: Reduce your request rate"),
        (("cut", 1000), SourceFailed, "weights.bin: .*: the connection was cut"),
        (("hang",), SourceFailed, "cannot be read at iris/1/.*: it was silent for too long"),
    ],
)
def test_what_does_not_pass_is_told_and_leaves_nothing(  # noqa: PLR0917 - fixtures
    buckets, bucket, faults, opened, small_parts, monkeypatch, tmp_path, fault, error, said
):
    monkeypatch.setattr(bucket_module, "TRIES", 2)
    put_model(buckets, f"{bucket}/iris/1")
    source = Bucket(f"s3://{bucket}")
    repository = opened(source)
    faults.fault = only("weights", fault)
    revision = repository.find("iris")
    with in_a_hurry(source) if fault == ("hang",) else contextlib.nullcontext(), pytest.raises(error, match=said):
        repository.fetch(revision)
    assert [path.name for path in (tmp_path / "cache" / "0").iterdir()] == ["lock"]
    faults.fault = lambda *_: None
    faults.end.set()
    repository.fetch(revision).release()


def test_what_changes_between_list_and_get_is_not_taken(buckets, bucket, faults, opened, small_parts):
    put_model(buckets, f"{bucket}/iris/1")
    repository = opened(f"s3://{bucket}", poll_s=0)
    revision = repository.find("iris")
    changed = {}

    def change():
        if not changed:
            changed.update(put_model(buckets, f"{bucket}/iris/1", seed=8, old=False))

    faults.fault = lambda _method, path: change if "weights" in path else None
    with pytest.raises(SourceChanged, match="has changed since it was listed"):
        repository.fetch(revision)
    repository.look()
    repository.look()
    with repository.fetch(repository.find("iris")) as folder:
        assert contents(folder) == changed


@pytest.mark.parametrize("fault", [(403, FORBIDDEN), (503, BUSY), ("cut", 10), ("hang",)])
def test_a_source_that_cannot_be_asked_changes_nothing(buckets, bucket, faults, opened, caplog, fault):  # N115
    buckets.put(f"{bucket}/iris/1/a", b"1")
    source = Bucket(f"s3://{bucket}")
    repository = opened(source)
    faults.fault = only("list-type", fault)
    with in_a_hurry(source):
        repository.start()
        eventually(lambda: repository.statistics().failures > 1)
    assert repository.problem
    assert list(repository.catalog.models) == ["iris"]
    faults.fault = lambda *_: None
    faults.end.set()
    eventually(lambda: not repository.problem)
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("key", ["iris//x", "./x", "tmp/../x"])
def test_an_object_whose_key_is_no_path_is_named_with_what_to_do(bucket, faults, opened, key):
    about = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag><Size>1</Size>"
    listed = f"<ListBucketResult><Contents><Key>{key}</Key>{about}</Contents></ListBucketResult>"
    faults.fault = only("list-type", (200, listed.encode()))
    with pytest.raises(SourceFailed, match=f'"{re.escape(key)}".*; nothing here can be listed until that object has'):
        opened(f"s3://{bucket}")


@pytest.mark.parametrize(
    "told, said",
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch: .*; set AWS_ACCESS_KEY_ID and"),
        ({"AWS_ACCESS_KEY_ID": "who"}, "InvalidAccessKeyId: .*; set AWS_ACCESS_KEY_ID and"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "; no credentials were found here; set AWS_ACCESS"),
    ],
)
def test_who_is_not_let_in_is_told_by_whom_and_what_to_do(bucket, opened, monkeypatch, tmp_path, told, said):  # N116
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"s3://{bucket} cannot be listed: .*{said}"):
        opened(f"s3://{bucket}")


def test_a_profile_is_found_as_boto3_does(buckets, bucket, opened, monkeypatch, tmp_path):  # N116
    pytest.importorskip("boto3")
    told = buckets.environment()
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id={told['AWS_ACCESS_KEY_ID']}\naws_secret_access_key={told['AWS_SECRET_ACCESS_KEY']}"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    buckets.put(f"{bucket}/iris/1/a", b"1")
    assert list(opened(f"s3://{bucket}").catalog.models) == ["iris"]


def test_no_such_bucket_and_nobody_there(bucket, opened, monkeypatch):
    with pytest.raises(ConfigError, match=r"s3://not-there cannot be listed: NoSuchBucket: .*is it called so"):
        opened("s3://not-there")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"s3://x-bucket cannot be listed: .*http://127.0.0.1:9/.*Connection refused"):
        opened("s3://x-bucket")


@pytest.mark.parametrize(
    "address, said",
    [
        ("s3://", "expected s3://BUCKET/PREFIX"),
        ("s3:///x", "expected s3://BUCKET/PREFIX"),
        ("ftp://x/y", r"expected s3://, gs://, az://, file:// or a path"),
        ("file://host/x", r"expected file:///ABSOLUTE/PATH"),
    ],
)
def test_addresses_that_are_none(tmp_path, address, said):  # N117
    with pytest.raises(ConfigError, match=said):
        source_of(address, tmp_path)


def test_names_of_clients_are_looked_up_and_no_paths(tmp_path, opened):
    (tmp_path / "m" / "net" / "1").mkdir(parents=True)
    (tmp_path / "m" / "net" / "1" / "a").write_bytes(b"x")
    repository = opened(str(tmp_path / "m"))
    for name in ("../m/net", "net/1", ".", "..", "net\0", "/etc"):
        with pytest.raises(NotFound):
            repository.find(name)


# ---------------------------------------------------------------------------------------------------------------------
# Local folders


@pytest.mark.parametrize("address", ["{}", "file://{}", "{}/../models"])
def test_a_local_folder_is_used_where_it_lies(tmp_path, opened, address):  # N117
    (tmp_path / "models" / "net" / "4").mkdir(parents=True)
    (tmp_path / "models" / "net" / "4" / "a").write_bytes(b"x")
    repository = opened(address.format(tmp_path / "models"), in_place=True)
    revision = repository.find("net")
    with repository.fetch(revision) as folder:
        assert contents(folder) == {"a": b"x"}
        assert folder.resolve() == tmp_path / "models" / "net" / "4"
    assert repository.is_current(revision)
    (tmp_path / "models" / "net" / "4" / "a").write_bytes(b"y")
    assert not repository.is_current(revision)


def test_a_local_folder_can_be_copied_as_a_bucket_is(tmp_path, opened):  # N111
    (tmp_path / "models" / "net").mkdir(parents=True)
    (tmp_path / "models" / "net" / "a").write_bytes(DATA)
    repository = opened(str(tmp_path / "models"))
    with repository.fetch(repository.find("net")) as folder:
        assert folder.parts[-2:] == ("net", "1")
        assert contents(folder) == {"a": DATA}


def test_a_version_may_have_more_files_than_may_be_open(tmp_path, opened):
    expected = {str(number): DATA[: number * 7] for number in range(200)}
    (tmp_path / "models" / "net").mkdir(parents=True)
    for name, data in expected.items():
        (tmp_path / "models" / "net" / name).write_bytes(data)
    repository = opened(str(tmp_path / "models"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(100)]
    for one in free:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, before[1]))
    try:
        with repository.fetch(repository.find("net")) as folder:
            assert contents(folder) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_links_are_followed_as_volumes_of_kubernetes_have_them(tmp_path, opened):
    for name, data in (("..old", b"1"), ("..new", b"2")):
        (tmp_path / "models" / name / "net").mkdir(parents=True)
        (tmp_path / "models" / name / "net" / "a").write_bytes(data)
    (tmp_path / "models" / "..data").symlink_to("..old")
    (tmp_path / "models" / "net").symlink_to("..data/net")
    repository = opened(str(tmp_path / "models"), in_place=True)
    before = repository.find("net").id
    (tmp_path / "models" / "coming").symlink_to("..new")
    (tmp_path / "models" / "coming").rename(tmp_path / "models" / "..data")
    repository.look()
    repository.look()
    assert repository.find("net").id != before
    assert list(repository.catalog.models) == ["net"]


def test_links_that_lead_back_to_where_they_lie_are_not_followed(tmp_path, opened):
    (tmp_path / "models" / "net" / "1").mkdir(parents=True)
    (tmp_path / "models" / "net" / "1" / "a").write_bytes(b"x")
    for name, target in (("self", "."), ("up", ".."), ("top", "../..")):
        (tmp_path / "models" / "net" / "1" / name).symlink_to(target)
    repository = opened(str(tmp_path / "models"), in_place=True)
    assert [file.path for file in repository.find("net").files] == ["a"]
    assert list(repository.catalog.problems) == []
    assert repository.is_current(repository.find("net"))


def test_a_folder_that_is_gone_has_not_lost_its_models(tmp_path, opened):
    (tmp_path / "models" / "net").mkdir(parents=True)
    (tmp_path / "models" / "net" / "a").write_bytes(b"x")
    repository = opened(str(tmp_path / "models"), in_place=True)
    (tmp_path / "models").rename(tmp_path / "away")
    with pytest.raises(SourceFailed, match="cannot be looked at: No such file"):
        repository.look()
    assert list(repository.catalog.models) == ["net"]


def test_a_second_look_that_fails_is_made_again_when_somebody_asks(tmp_path, opened):  # N115
    models, away = tmp_path / "models", tmp_path / "away"
    (models / "iris").mkdir(parents=True)
    (models / "iris" / "a").write_bytes(b"x")
    repository = opened(str(models), in_place=True, poll_s=0)
    (models / "net").mkdir()
    (models / "net" / "a").write_bytes(b"x")
    assert not repository.look()  # what is new counts from the next look on
    models.rename(away)
    repository.start()
    eventually(lambda: repository.problem)
    away.rename(models)
    repository.look_soon()
    eventually(lambda: list(repository.catalog.models) == ["iris", "net"])


def test_what_cannot_be_looked_at_hides_only_itself_and_loses_nothing_that_was_there(tmp_path, opened):
    for name in ("iris", "net"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "1" / "a").write_bytes(DATA)
    (tmp_path / "models" / "loop").symlink_to("loop")
    repository = opened(str(tmp_path / "models"), in_place=True)
    assert list(repository.catalog.models) == ["iris", "net"]
    assert list(repository.catalog.problems) == ["loop cannot be looked at: Too many levels of symbolic links"]
    before = repository.find("net")
    (tmp_path / "models" / "net").rename(tmp_path / "away")
    (tmp_path / "models" / "net").symlink_to("net")
    (tmp_path / "models" / "iris" / "1" / "a").write_bytes(b"another")
    for _ in range(3):
        repository.look()
    assert repository.find("net") == before
    assert repository.find("iris").size == len(b"another")
    assert len(repository.catalog.problems) == 2
    (tmp_path / "models" / "net").unlink()
    for _ in range(3):
        repository.look()
    assert list(repository.catalog.models) == ["iris"]


# ---------------------------------------------------------------------------------------------------------------------
# The disk


def test_what_is_on_the_disk_is_not_asked_for_again(buckets, bucket, faults, opened):  # N120, N124
    expected = put_model(buckets, f"{bucket}/iris/1")
    first = opened(f"s3://{bucket}")
    first.fetch(first.find("iris")).release()
    first.stop()
    asked = faults.asked("weights")
    again = opened(f"s3://{bucket}")
    with again.fetch(again.find("iris")) as folder:
        assert contents(folder) == expected
    assert faults.asked("weights") == asked


@pytest.mark.parametrize("gone", ["0/*/iris/1/weights.bin", "0/*/iris", "0", ""])
def test_what_somebody_has_removed_from_the_disk_is_copied_again(buckets, bucket, opened, tmp_path, gone):
    expected = put_model(buckets, f"{bucket}/iris/1")
    repository = opened(f"s3://{bucket}")
    repository.fetch(repository.find("iris")).release()
    (found,) = tmp_path.glob(f"cache/{gone}")
    shutil.rmtree(found) if found.is_dir() else found.unlink()
    with repository.fetch(repository.find("iris")) as folder:
        assert contents(folder) == expected
        (folder / "empty").unlink()
        with repository.fetch(repository.find("iris")) as same:  # never taken from who uses it
            assert same == folder
    with repository.fetch(repository.find("iris")) as folder:
        assert contents(folder) == expected
    assert repository.statistics().disk.count == 1
    assert len([one for one in (tmp_path / "cache" / "0").iterdir() if one.is_dir()]) == 1


def test_two_servers_have_a_place_each(buckets, bucket, opened, tmp_path):
    put_model(buckets, f"{bucket}/iris/1")
    folders = []
    for _ in range(2):
        repository = opened(f"s3://{bucket}")
        with repository.fetch(repository.find("iris")) as folder:
            folders.append(folder.relative_to(tmp_path / "cache").parts[0])
    assert folders == ["0", "1"]


def test_the_least_recently_used_leaves_the_disk(buckets, bucket, faults, opened, tmp_path):  # N120, N121
    for name in "abc":
        put_model(buckets, f"{bucket}/{name}/1", size=1000)
    repository = opened(f"s3://{bucket}", max_count=2)
    for name in "abac":
        repository.fetch(repository.find(name)).release()
        assert len(list((tmp_path / "cache" / "0").glob("*/revision.json"))) <= 2
    asked = faults.asked("weights")
    repository.fetch(repository.find("a")).release()
    assert faults.asked("weights") == asked
    lease = repository.fetch(repository.find("b"))
    other = repository.fetch(repository.find("a"))
    with pytest.raises(Unavailable, match="there is no room, all 2 that are kept are in use"):
        repository.fetch(repository.find("c"))
    assert lease.value.is_dir()
    assert other.value.is_dir()


def test_what_is_replaced_stays_for_those_who_use_it(buckets, bucket, opened, tmp_path):  # N111, N112
    old = put_model(buckets, f"{bucket}/iris/1", size=1000)
    repository = opened(f"s3://{bucket}", poll_s=0)
    lease = repository.fetch(repository.find("iris"))
    new = put_model(buckets, f"{bucket}/iris/1", size=1001, old=False)
    repository.look()
    repository.look()
    with repository.fetch(repository.find("iris")) as folder:
        assert contents(folder) == new
    assert contents(lease.value) == old
    lease.release()
    assert len(list((tmp_path / "cache" / "0").glob("*/revision.json"))) == 1


@pytest.mark.parametrize("harm", ["cut", "gone", "list", "name", "torn"])
def test_what_is_not_whole_is_not_taken_over(buckets, bucket, opened, tmp_path, harm):  # N124
    expected = put_model(buckets, f"{bucket}/iris/1", size=1000)
    first = opened(f"s3://{bucket}")
    with first.fetch(first.find("iris")) as folder:
        kept = folder.parent.parent
    first.stop()
    if harm == "cut":
        os.truncate(folder / "weights.bin", 999)
    elif harm == "gone":
        (folder / "empty").unlink()
    elif harm == "list":
        (kept / "revision.json").unlink()
    elif harm == "name":
        kept.rename(kept.with_name("coming-x"))
    else:
        (kept / "revision.json").write_bytes(b'{"model":')
    again = opened(f"s3://{bucket}")
    assert again.statistics().disk.count == 0
    with again.fetch(again.find("iris")) as folder:
        assert contents(folder) == expected


def test_a_full_disk_is_told_and_what_is_there_stays(buckets, bucket, opened, small_disk):
    small = put_model(buckets, f"{bucket}/small/1", size=1000)
    put_model(buckets, f"{bucket}/large/1", size=300_000)
    put_model(buckets, f"{bucket}/middle/1", size=200_000)
    repository = opened(f"s3://{bucket}", small_disk.folder)
    with repository.fetch(repository.find("small")) as folder:
        with pytest.raises(
            DiskFull, match=r"version '1' of 'large' has 300004 bytes, and .* has room for \d+; make room"
        ):
            repository.fetch(repository.find("large"))
        small_disk.fill()
        with pytest.raises(DiskFull, match="make room there"):
            repository.fetch(repository.find("middle"))
        assert (folder / "weights.bin").read_bytes().startswith(small["weights.bin"])  # a disk is filled to its pages
    small_disk.empty()
    repository.fetch(repository.find("middle")).release()


class Liar:
    """A source that claims any size of a file that it does not have."""

    place = "liar://"
    problems = ()

    def __init__(self, size):
        self.files = [StoredFile("net/1/weights.bin", size, "t", 0.0)]

    def list(self):
        return self.files

    def read(self, path, file, start, end):
        raise SourceFailed("there is nothing")

    def folder(self):
        return None


@pytest.mark.parametrize("free, size, is_full", [(2000, 1000, False), (2000, 1501, True), (400, 1, True)])
def test_a_store_that_claims_much_leaves_something_of_the_disk_to_others(
    tmp_path, opened, monkeypatch, free, size, is_full
):
    # F132: a file was given the size that a listing claimed, up to the last byte of the disk.
    usage = shutil.disk_usage(tmp_path)._replace(total=10_000, free=free)  # of which a twentieth is kept
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    repository = opened(Liar(size))
    with pytest.raises(DiskFull if is_full else SourceFailed) as refused:
        repository.fetch(repository.find("net"))
    if is_full:
        assert f"has room for {max(free - 500, 0)}" in refused.value.message


def test_room_is_looked_for_before_each_file(tmp_path, opened, monkeypatch):
    # F132: several versions that are copied at a time find the same room.
    rooms = iter([2000, 2000, 600, 600])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(total=10_000, free=next(rooms)))
    source = Liar(200)
    source.files.append(StoredFile("net/1/more.bin", 200, "t", 0.0))
    repository = opened(source)
    with pytest.raises(DiskFull, match="has room for 100"):
        repository.fetch(repository.find("net"))


CHILD = """
import sys
from pathlib import Path
from forebay.repository import fetching
from forebay.repository.bucket import Bucket
from forebay.repository.disk import DiskCache
from forebay.repository.tree_rules import TreeRules
from forebay.repository.repository import Repository
fetching.PART_BYTES = 40_000
source = Bucket(sys.argv[1])
repository = Repository(source, TreeRules(), poll_s=0, disk=DiskCache(source, Path(sys.argv[2]), max_count=2))
repository.open()
print("go", flush=True)
for name in sys.argv[3:]:
    repository.fetch(repository.find(name)).release()
print("done", flush=True)
"""
KILLS = int(os.environ.get("FOREBAY_TEST_KILLS", "10"))


def test_killed_at_any_moment_the_disk_is_whole_or_ignored(buckets, bucket, opened, tmp_path, record_property):
    """FOREBAY_TEST_KILLS=200 makes it longer."""
    expected = {name: put_model(buckets, f"{bucket}/{name}/1", size=400_000, seed=name) for name in "abcd"}
    rng = random.Random(os.environ.get("FOREBAY_TEST_SEED", "1"))
    folder, whole, torn = tmp_path / "cache", 0, 0
    longest_s = 0.05
    for _ in range(KILLS):
        command = [sys.executable, "-c", CHILD, f"s3://{bucket}", folder, *rng.sample("abcd", 4)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            started = time.monotonic()
            ended = threading.Timer(rng.uniform(0, longest_s), process.send_signal, (signal.SIGKILL,))
            ended.start()
            if process.stdout.readline() == b"done\n":  # so long it takes
                longest_s = min(longest_s, time.monotonic() - started) * 0.95
            process.wait()
            ended.cancel()
        torn += len(list((folder / "0").glob("coming-*"))) + len(list((folder / "0").glob("leaving-*")))
        kept = DiskCache(LocalFolder(tmp_path), folder)
        whole += kept.statistics().count
        kept.close()
        for entry in (folder / "0").iterdir():
            if entry.is_dir():
                (name,) = [one.name for one in entry.iterdir() if one.is_dir()]
                assert contents(entry / name / "1") == expected[name]
    record_property("killed", KILLS)
    print(f"{KILLS} kills: {whole} whole revisions taken over, {torn} torn ones ignored")
    shutil.rmtree(folder)


def test_a_file_that_is_written_anew_with_the_same_size_and_time_is_another_one(tmp_path, opened):  # F104
    path = tmp_path / "models" / "net" / "1" / "a"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"old")
    os.utime(path, (1, 1))
    repository = opened(str(tmp_path / "models"), in_place=True, poll_s=0)
    before = repository.find("net")
    path.write_bytes(b"new")
    os.utime(path, (1, 1))
    assert not repository.is_current(before)
    repository.look()
    repository.look()
    assert repository.find("net") != before
