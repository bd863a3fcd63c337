# SPDX-License-Identifier: Apache-2.0
"""Google Cloud Storage and Azure Blob Storage as sources, over the wire.

LocalBucket stands for the first: it speaks the same XML as the original, and nobody signs in. Azurite stands for the
second; `make azurite` installs what of it the tests need.
"""

import base64
import contextlib
import datetime as dt
import hashlib
import hmac
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tests.buckets import BUSY, FORBIDDEN, Faults
from tests.ports import free_port
from tests.waiting import PATIENCE_S

from forebay.repository import fetching
from forebay.repository.bucket import Bucket, tag_of
from forebay.repository.disk import DiskCache
from forebay.repository.repository import Repository
from forebay.repository.source import SourceChanged, SourceRefused
from forebay.repository.tree_rules import TreeRules

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # known to everybody
AZURITE = Path(__file__).parents[3] / ".venv/environments/azurite/node_modules/.bin"
DATA = random.Random(3).randbytes(100_000)


@contextlib.contextmanager
def running(command, port):
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield
        finally:
            process.kill()


class Google:
    """A folder is a bucket."""

    scheme, refused = "gs", "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account"

    def __init__(self, folder, port):
        self.folder, self.port = folder, port

    def environment(self, port):
        rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
        serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        account = {"type": "service_account", "client_email": "a@b", "private_key_id": "1", "private_key": key.decode()}
        told = self.folder.parent / f"account-{port}.json"
        told.write_text(json.dumps({**account, "gcs_base_url": f"http://127.0.0.1:{port}", "disable_oauth": True}))
        return {"GOOGLE_SERVICE_ACCOUNT": str(told)}

    def make(self, bucket):
        (self.folder / bucket).mkdir()

    def put(self, bucket, name, content):
        path = self.folder / bucket / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


class Azure:
    """Asked as its clients do: a container is made, and objects are put, in requests that are signed."""

    scheme, refused = "az", "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
    account = "devstoreaccount1"

    def __init__(self, folder, port):
        self.port = port

    def environment(self, port):
        told = {"AZURE_STORAGE_ACCOUNT_NAME": self.account, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
        return {**told, "AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}"}

    def make(self, bucket):
        self.send(f"{bucket}?restype=container", b"", {}, "\nrestype:container")

    def put(self, bucket, name, content):
        self.send(f"{bucket}/{name}", content, {"x-ms-blob-type": "BlockBlob"}, "")

    def send(self, target, body, headers, query):
        now = dt.datetime.now(dt.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {**headers, "x-ms-date": now, "x-ms-version": "2021-08-06"}
        canonical = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        path = target.partition("?")[0]
        told = (
            f"PUT\n\n\n{len(body) or ''}\n\napplication/x\n\n\n\n\n\n\n{canonical}/{self.account}/{self.account}/{path}"
        )
        signed = hmac.new(base64.b64decode(KEY), (told + query).encode(), hashlib.sha256).digest()
        headers["authorization"] = f"SharedKey {self.account}:{base64.b64encode(signed).decode()}"
        url = f"http://127.0.0.1:{self.port}/{self.account}/{target}"
        request = urllib.request.Request(url, body, {**headers, "content-type": "application/x"}, method="PUT")
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()


@pytest.fixture(scope="module", params=["gs", "az"])
def store(request, tmp_path_factory):
    port = free_port()
    folder = tmp_path_factory.mktemp(request.param) / "store"
    folder.mkdir()
    if request.param == "gs":
        pytest.importorskip("localbucket")
        command = [Path(sys.executable).with_name("localbucket"), "--port", str(port), folder]
        with running(command, port):
            yield Google(folder, port)
        return
    azurite = shutil.which("azurite-blob", path=f"{AZURITE}:{os.environ['PATH']}")
    if azurite is None:
        pytest.skip("no Azurite: make azurite, which needs npm (Debian: apt-get install npm)")
    command = [azurite, "--disableTelemetry", "--skipApiVersionCheck", "--silent", "--inMemoryPersistence"]
    with running([*command, "--blobPort", str(port)], port):
        yield Azure(folder, port)


@pytest.fixture
def bucket(store, request, monkeypatch):
    """The address of a bucket of the test's own; requests for it go by a proxy with faults."""
    name = f"b{abs(hash(request.node.nodeid)):x}"
    store.make(name)
    faults = Faults(store.port)
    for one in [one for one in os.environ if one.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(one)
    for variable, value in store.environment(faults.port).items():
        monkeypatch.setenv(variable, value)
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
