# SPDX-License-Identifier: Apache-2.0
"""Google Cloud Storage and Azure Blob Storage as sources, over the wire."""

import datetime as dt
import random

import pytest
from tests.buckets import BUSY, FORBIDDEN, Faults
from tests.other_stores import STORES, point_to, running_store

from forebay.repository import fetching
from forebay.repository.bucket import Bucket, tag_of
from forebay.repository.disk import DiskCache
from forebay.repository.repository import Repository
from forebay.repository.source import SourceChanged, SourceRefused
from forebay.repository.tree_rules import TreeRules

DATA = random.Random(3).randbytes(100_000)


@pytest.fixture(scope="module", params=STORES)
def store(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "store"
    folder.mkdir()
    with running_store(request.param, folder) as found:
        yield found


@pytest.fixture
def bucket(store, request, monkeypatch):
    """The address of a bucket of the test's own; requests for it go by a proxy with faults."""
    name = f"b{abs(hash(request.node.nodeid)):x}"
    store.make(name)
    faults = Faults(store.port)
    point_to(store, faults.port, monkeypatch)
    monkeypatch.setattr(fetching, "PART_BYTES", 40_000)
    yield name, faults
    faults.close()


def opened(store, name, folder, prefix="models"):
    source = Bucket(f"{store.scheme}://{name}/{prefix}")
    repository = Repository(source, TreeRules(), poll_s=0, disk=DiskCache(source, folder))
    repository.look()
    repository.look()
    return repository


def test_a_version_comes_whole_and_a_change_is_seen(store, bucket, tmp_path):  # N109, N110, N118
    name, faults = bucket
    for address in ("models/net/1/weights.bin", "models/net/2/weights.bin", "models-2/other/1/weights.bin"):
        store.put(name, address, DATA)
    repository = opened(store, name, tmp_path)
    assert {model: list(versions) for model, versions in repository.catalog.models.items()} == {"net": [1, 2]}
    with repository.fetch(repository.find("net")) as folder:
        assert (folder / "weights.bin").read_bytes() == DATA
    assert faults.asked("weights") == 3
    store.put(name, "models/net/2/weights.bin", DATA[::-1])
    repository.look()
    assert repository.look()
    with repository.fetch(repository.find("net")) as folder:
        assert (folder / "weights.bin").read_bytes() == DATA[::-1]
    repository.stop()


def test_more_than_a_page_of_objects(store, bucket):  # N116
    name, _ = bucket
    for number in range(1010):
        store.put(name, f"m{number}/1/x", b"x")
    assert len(Bucket(f"{store.scheme}://{name}").list()) == 1010


def test_what_is_another_object_by_now_is_not_read(store, bucket):
    name, _ = bucket
    store.put(name, "a", DATA)
    source = Bucket(f"{store.scheme}://{name}")
    (file,) = source.list()
    store.put(name, "a", DATA[::-1])
    with pytest.raises(SourceChanged, match="has changed since it was listed"):
        source.read("a", file, 0, 10)


@pytest.mark.parametrize("fault", [(503, BUSY), ("cut", 10)])
def test_what_passes_is_survived(store, bucket, tmp_path, fault):  # N111, N115
    name, faults = bucket
    store.put(name, "models/net/1/weights.bin", DATA)
    repository = opened(store, name, tmp_path)
    times = [fault]
    faults.fault = lambda _method, path: times.pop() if times and "weights" in path else None
    with repository.fetch(repository.find("net")) as folder:
        assert (folder / "weights.bin").read_bytes() == DATA
    assert not times
    repository.stop()


def test_who_is_not_let_in_is_told_by_whom_and_what_to_do(store, bucket):  # N116
    name, faults = bucket
    with pytest.raises(SourceRefused, match=r"cannot be listed: \w+: The specified .*; is it called so") as found:
        Bucket(f"{store.scheme}://no-such-bucket").list()
    assert "\n" not in str(found.value)
    faults.fault = lambda *_: (403, FORBIDDEN)
    with pytest.raises(SourceRefused, match=f"AccessDenied: You shall not pass; {store.refused}"):
        Bucket(f"{store.scheme}://{name}").list()


def test_a_tag_is_the_same_with_quotes_and_without():  # Azure lists it without, and reads with
    assert tag_of({"e_tag": '"0x8D"'}) == tag_of({"e_tag": "0x8D"}) == "0x8D"
    written = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    assert tag_of({"e_tag": None, "last_modified": written}) == "written 2026-01-02T00:00:00+00:00"
