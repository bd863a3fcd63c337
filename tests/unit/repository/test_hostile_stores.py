# SPDX-License-Identifier: Apache-2.0
"""Stores that say anything, of any length: what was there stays, and nothing but their own models is harmed."""

import logging
import threading
import time

import pytest
from tests.hostile_store import HostileStore, endless, listed, whole
from tests.waiting import PATIENCE_S, eventually

from forebay.errors import ConfigError
from forebay.repository.bucket import Bucket
from forebay.repository.bucket_listing import ListingLimits
from forebay.repository.disk import DiskCache
from forebay.repository.listing import StoredFile, as_one_line
from forebay.repository.local_source import LocalFolder
from forebay.repository.look_thread import pause_after
from forebay.repository.repository import Repository
from forebay.repository.source import SourceChanged, SourceFailed, SourceRefused
from forebay.repository.tree_rules import TreeRules

HTML = b"<html><head><title>Welcome</title></head><body><p>It works</p></body></html>"
CONTENT = {"content-type": "application/xml"}
NEXT = "<NextContinuationToken>x</NextContinuationToken>"


@pytest.fixture
def store(monkeypatch):
    found = HostileStore()
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


@pytest.fixture
def opened(tmp_path):
    found = []

    def start(address="s3://bucket/models", source=None, **more):
        source = source or Bucket(address)
        repository = Repository(source, TreeRules(), poll_s=0.05, disk=DiskCache(source, tmp_path / "cache"), **more)
        found.append(repository)
        repository.open()
        return repository

    yield start
    for one in found:
        one.stop()


def models(repository):
    return {name: list(versions) for name, versions in repository.catalog.models.items()}


def refused(store, body, status=403):
    store.answer = lambda _path, _query: whole(status, body)
    with pytest.raises((SourceRefused, SourceFailed)) as found:
        Bucket("s3://bucket/models").list()
    return found.value.message


# ---------------------------------------------------------------------------------------------------------------------
# What is served stays served


@pytest.mark.parametrize("page", [HTML, listed([]), b"<Other/>"])
def test_a_listing_that_is_none_unloads_nothing(store, opened, page):  # F99
    store.objects["models/net/1/a"] = b"123"
    repository = opened()
    store.answer = lambda _path, query: whole(200, page) if "list-type" in query else None
    for _ in range(3):
        with pytest.raises(SourceFailed, match="is listed as empty, and had 1 object; unload its models by hand"):
            repository.look()
    assert models(repository) == {"net": [1]}
    store.answer = lambda *_: None
    repository.look()
    repository.look()
    assert models(repository) == {"net": [1]}


def test_a_listing_whose_second_page_is_none_unloads_nothing(store, opened):  # F99
    for number in range(1500):
        store.objects[f"models/m{number:04}/1/a"] = b"123"
    repository = opened()
    store.answer = lambda _path, query: whole(200, HTML) if "continuation-token" in query else None
    for _ in range(3):
        with pytest.raises(
            SourceFailed, match="was listed without m1000/1/a, which is there: the listing is not whole"
        ):
            repository.look()
    assert len(models(repository)) == 1500


def test_what_is_removed_from_a_bucket_leaves(store, opened):  # F99
    for key in ("models/net/1/a", "models/net/2/a", "models/net/2/b", "models/other/1/a"):
        store.objects[key] = b"123"
    repository = opened()
    del store.objects["models/other/1/a"], store.objects["models/net/2/b"]
    repository.look()
    repository.look()
    assert models(repository) == {"net": [1, 2]}
    assert [file.path for file in repository.find("net", 2).files] == ["a"]


def test_a_source_that_does_not_answer_is_a_problem_and_asked_once(opened, tmp_path):  # F101, F125
    class Silent:
        place, problems = "here", ()
        lists = 0

        def list(self):
            self.lists += 1
            if self.lists > 1:
                answer.wait()
            return [StoredFile(f"net/{number}/a", 1, "x", 0.0) for number in range(1, self.lists + 1)]

        def has(self, _path):
            return False

    answer = threading.Event()
    source = Silent()
    repository = opened(source=source, timeout_s=0.2)
    for _ in range(3):
        with pytest.raises(SourceFailed, match=r"here was not listed within 0.2 s \(--repository-timeout-s\)"):
            repository.look()
    assert source.lists == 2
    assert models(repository) == {"net": [1]}
    answer.set()
    eventually(lambda: repository.look() and models(repository) == {"net": [1, 2]})


@pytest.mark.parametrize(
    "took_s, poll_s, pause_s", [(30, 10, 60), (1, 10, 10), (4, 10, 20), (30, 90, 90), (30, 0, None)]
)
def test_the_pause_after_a_long_look_is_bounded(took_s, poll_s, pause_s):  # F101
    assert pause_after(took_s, poll_s, max_pause_s=60) == pause_s


# ---------------------------------------------------------------------------------------------------------------------
# Keys


@pytest.mark.parametrize(
    "key",
    ["/x", "../x", "./x", "net//x", "net/1//x", "net/1/../../x", "\x01", "net/1/.\x7f", "//", "..//../x", ".hidden//x"],
)
def test_one_odd_key_costs_no_more_than_itself(store, opened, key):  # F127
    for name in ("a", "net", "z"):
        store.objects[f"models/{name}/1/a"] = store.objects[f"models/{name}/2/b/c"] = b"123"
    store.objects[f"models/{key}"] = b"x"
    repository = opened()
    assert models(repository) == {"a": [1, 2], "net": [1, 2], "z": [1, 2]}
    (problem,) = repository.catalog.problems
    assert "an object is ignored: " in problem
    with repository.fetch(repository.find("net")) as folder:
        assert [path.name for path in folder.rglob("*")] == ["b", "c"]


def test_a_folder_that_cannot_be_listed_stays_as_it_was(store, opened):  # F127
    for name in ("a", "net"):
        store.objects[f"models/{name}/1/a"] = b"123"
    repository = opened()
    store.objects["models/net/1/b\x01"] = store.objects["models/a/2/a"] = store.objects["models/net/1/c"] = b"123"
    repository.look()
    repository.look()
    assert models(repository) == {"a": [1, 2], "net": [1]}
    assert [file.path for file in repository.find("net").files] == ["a"]
    (problem,) = repository.catalog.problems
    assert problem.startswith("net/1/ stays as it was listed last: ")


@pytest.mark.parametrize("key", ["other/net/1/a", "models-2/net/1/a", f"models/net/1/{'x' * 1100}"])
def test_keys_of_another_place_and_long_ones_are_ignored(store, opened, key):  # F127
    store.objects["models/net/1/a"] = b"123"
    page = listed(["models/net/1/a", key], {"models/net/1/a": 3})
    store.answer = lambda _path, query: whole(200, page) if "list-type" in query else None
    repository = opened()
    assert [file.path for file in repository.find("net").files] == ["a"]
    (problem,) = repository.catalog.problems
    assert problem.endswith(" is ignored: expected a key below 'models' of at most 1024 bytes")


def test_entities_are_not_expanded(store):  # F127
    bomb = b'<!DOCTYPE x [<!ENTITY a "' + b"b" * 1000 + b'"><!ENTITY c "' + b"&a;" * 1000 + b'">]>'
    page = bomb + listed(["models/net/1/a"]).replace(b"net", b"&c;")
    store.answer = lambda *_: whole(200, page)
    with pytest.raises(SourceFailed, match="unrecognized entity"):
        Bucket("s3://bucket/models").list()


# ---------------------------------------------------------------------------------------------------------------------
# Bounds


def test_pages_without_end_have_a_number(store):  # F125
    def page(_path, query):
        number = int(query.get("continuation-token", 0)) + 1
        keys = [f"models/net/{number}/{one}" for one in range(1000)]
        return whole(200, listed(keys, more=f"<NextContinuationToken>{number}</NextContinuationToken>"))

    store.answer = page
    with pytest.raises(
        SourceFailed, match=r"expected at most 5000 files \(--repository-max-files\), and there are more"
    ):
        Bucket("s3://bucket/models", limits=ListingLimits(files=5000)).list()
    assert len(store.seen) < 10


@pytest.mark.parametrize("kind", ["empty pages", "one page", "folders", "slow"])
def test_a_listing_without_end_has_a_time(store, opened, kind):  # F125
    def page(_path, query):
        if kind == "one page":
            return 200, CONTENT, endless(b"<ListBucketResult>".ljust(1000), 0.001)
        if kind == "slow":
            return 200, CONTENT, endless(b" ", 0.05)
        if kind == "folders" and "delimiter" not in query:
            return whole(200, listed(["models//x"]))
        return (503, {}, []) if store.end.is_set() else whole(200, listed([], more=NEXT))

    store.objects["models/net/1/a"] = b"123"
    repository = opened(source=Bucket("s3://bucket/models", limits=ListingLimits(time_s=0.5)), timeout_s=1)
    store.answer = page
    said = (
        r"was not listed within 1 s|the listing took longer than 0.5 s|cannot be listed: .*: it was silent for too long"
    )
    with pytest.raises(SourceFailed, match=said):
        repository.look()
    assert models(repository) == {"net": [1]}
    store.end.set()  # what goes on in a thread ends
    store.answer = lambda _path, _query: (503, {}, [])


def test_an_object_that_is_longer_than_it_says_is_not_kept(store):  # F125
    store.objects["models/net/1/a"] = b"123"
    source = Bucket("s3://bucket/models")
    (file,) = source.list()
    told = {"etag": '"x"', "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT", "content-range": "bytes 0-2/3"}
    told["content-length"] = "1000000000"
    store.answer = lambda *_: (206, told, endless(b"x" * 65536))
    with pytest.raises(SourceFailed, match=r"net/1/a came with more than the 3 bytes that were asked for"):
        source.read("net/1/a", file, 0, 3)


def test_an_object_that_is_larger_than_it_was_listed_is_another_one(store):
    store.objects["models/net/1/a"] = b"123"
    source = Bucket("s3://bucket/models")
    (file,) = source.list()
    store.objects["models/net/1/a"] = b"1234"
    with pytest.raises(SourceChanged, match="has changed since it was listed"):
        source.read("net/1/a", file, 0, 3)


def test_a_folder_with_more_files_than_are_allowed_is_a_problem(tmp_path):  # F125
    from forebay.repository.local_source import LocalFolder

    for number in range(4):
        (tmp_path / f"{number}").write_bytes(b"")
    assert len(LocalFolder(tmp_path, max_files=4).list()) == 4
    with pytest.raises(SourceFailed, match=r"expected at most 3 files \(--repository-max-files\)"):
        LocalFolder(tmp_path, max_files=3).list()


# ---------------------------------------------------------------------------------------------------------------------
# Texts


@pytest.mark.parametrize(
    "body", [b"<Code>" * 200_000, b"<Code></Code> <Message>" * 50_000, b" in 1" + b"1" * 1_000_000]
)
def test_what_a_store_says_is_read_in_no_time(store, body):  # F124
    started = time.thread_time()
    assert len(refused(store, body)) < 1200
    assert time.thread_time() - started < 30  # it took minutes


def test_what_a_store_says_stands_on_one_line(store):  # F128
    body = b"<Code>Denied\nforged: line</Code><Message>Red \x1b[31m and\x00\xe2\x80\xa8 more\r\nRequestId: 1</Message>"
    assert ": Denied forged: line: Red \\x1b[31m and\\x00 more; set AWS_" in refused(store, body)
    assert refused(store, b"<Code>A</Code><Message>" + b"x" * 10_000_000 + b"</Message>").isprintable()


def test_what_a_store_names_stands_on_one_line_of_the_log(store, opened, caplog):  # F128
    store.objects["models/net/1/a"] = store.objects["models/net/\x85\u2028forged/a"] = b"123"
    store.objects["models/net/" + "x" * 1000] = b"123"
    with caplog.at_level(logging.WARNING, "forebay.repository"):
        opened()
    assert len(caplog.records) > 1
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert len(record.getMessage()) < 600


def test_a_text_becomes_one_short_line():  # F128
    assert as_one_line("a\n b\t\x1bc\u202e") == "a b \\x1bc\\u202e"
    assert len(as_one_line("\x00" * 10_000)) == 503


@pytest.mark.parametrize("tag", ['"a\nb"', '"\x01"', '"é"', f'"{"x" * 2000}"', ""])
def test_a_tag_that_cannot_stand_in_a_header_is_none(store, tag):  # F129
    store.objects["models/net/1/a"] = b"123"
    page = listed(["models/net/1/a"], {"models/net/1/a": 3}, {"models/net/1/a": tag})
    store.answer = lambda _path, query: whole(200, page) if "list-type" in query else None
    source = Bucket("s3://bucket/models")
    (file,) = source.list()
    assert file.tag == "written 2026-01-01T00:00:00+00:00"
    with pytest.raises(SourceChanged):
        source.read("net/1/a", file, 0, 3)


@pytest.mark.parametrize(
    "value",
    [
        "http://127.0.0.1\n:80",
        "not a url",
        "http://",
        "ftp://x",
        "http://[::1",
        "//x",
        "127.0.0.1:9000",
        "http://x:99999",
    ],
)
@pytest.mark.parametrize(
    "name, address",
    [("AWS_ENDPOINT_URL", "s3://b/m"), ("AWS_ENDPOINT_URL_S3", "s3://b/m"), ("AZURE_STORAGE_ENDPOINT", "az://b/m")],
)
def test_an_endpoint_that_is_none_is_named(monkeypatch, capfd, name, address, value):  # F104, F129
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"expected http://HOST:PORT or https://HOST:PORT, got .* \({name}\)"):
        Bucket(address).list()
    assert "panicked" not in capfd.readouterr().err


def test_a_panic_of_the_library_is_a_problem_of_the_store(store, monkeypatch):  # F129
    source = Bucket("s3://bucket/models")

    class PanicException(BaseException):
        """As that of Rust is."""

    def panic(*_arguments, **_options):
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr("obstore.list", panic)
    monkeypatch.setattr("obstore.get", panic)
    with pytest.raises(SourceFailed, match=r"s3://bucket/models cannot be listed: called `Result::unwrap\(\)`"):
        source.list()
    with pytest.raises(SourceFailed, match=r"cannot be read at models/a: called `Result::unwrap\(\)`"):
        source.read("a", StoredFile("a", 1, "x", 0.0), 0, 1)


def test_the_first_look_is_waited_for_a_while_and_goes_on(opened, store):  # F125
    store.objects["models/net/1/a"] = b"123"
    answer = threading.Event()
    source = Bucket("s3://bucket/models")
    repository = Repository(source, TreeRules(), disk=opened(source=source)._disk)
    store.answer = lambda _path, _query: answer.wait() and None
    with pytest.raises(SourceFailed, match=r"was not listed within 0\.1 s"):
        repository.open(0.1)
    asked = len(store.seen)
    answer.set()
    repository.open()
    assert models(repository) == {"net": [1]}
    assert len(store.seen) == asked


def test_a_place_whose_first_listing_was_slow_is_waited_for_though_it_is_looked_at_once(tmp_path):
    # A server whose first listing took more than five seconds never had the models, with --repository-poll-s 0.
    may_answer = threading.Event()

    class Slow(LocalFolder):
        def list(self):
            may_answer.wait(PATIENCE_S)
            return super().list()

    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "file").write_text("1")
    repository = Repository(Slow(tmp_path), TreeRules(kind="models"), poll_s=0)
    with pytest.raises(SourceFailed, match=r"was not listed within 0\.05 s"):
        repository.open(0.05)
    repository.start()
    try:
        may_answer.set()
        eventually(lambda: list(repository.catalog.models) == ["m"])
    finally:
        repository.stop()
