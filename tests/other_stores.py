# SPDX-License-Identifier: Apache-2.0
"""Servers of Google Cloud Storage and Azure Blob Storage, and how objects are put there.

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
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.waiting import PATIENCE_S

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # known to everybody
AZURITE = Path(__file__).parents[1] / ".venv/environments/azurite/node_modules/.bin"
STORES = ["gs", "az"]


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


@contextlib.contextmanager
def running_store(kind, folder):
    """Runs a server of such a kind as long as the block; the test is skipped where there is none."""
    port = free_port()
    if kind == "gs":
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


def point_to(store, port, monkeypatch):
    """Has this process ask the store by a port, which may be that of a proxy."""
    for one in [one for one in os.environ if one.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(one)
    for variable, value in store.environment(port).items():
        monkeypatch.setenv(variable, value)
