# SPDX-License-Identifier: Apache-2.0
"""A real S3 server with buckets on the disk, and a proxy before it that has faults."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.waiting import PATIENCE_S

KEY, SECRET = "test", "secret-of-the-tests"
FORBIDDEN = b"<Error><Code>AccessDenied</Code><Message>You shall not pass</Message></Error>"
GONE = b"<Error><Code>NoSuchKey</Code><Message>The key is not here</Message></Error>"
BUSY = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"


class Buckets:
    """Buckets are folders below `folder`; what is put there by its name is there whole."""

    def __init__(self, folder: Path, port: int):
        self.folder = folder
        self.port = port

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What a program is told to find these buckets, or those behind a proxy."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
        }

    def make(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder

    def put(self, address: str, content: bytes, *, old: bool = True) -> None:
        """Puts an object in its place at once; written long ago, so that it counts at the first look."""
        path = self.folder / address
        path.parent.mkdir(parents=True, exist_ok=True)
        coming = self.folder.parent / f"coming-{threading.get_ident()}"
        coming.write_bytes(content)
        if old:
            written = time.time() - 2000 + zlib.crc32(content) % 1000  # this store tells no more than the second
            os.utime(coming, (written, written))
        coming.rename(path)

    def remove(self, address: str) -> None:
        (self.folder / address).unlink()


@contextlib.contextmanager
def running_buckets(folder: Path):
    """Runs the server as long as the block."""
    data = folder / "buckets"
    data.mkdir()
    port = free_port()
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", data, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--no-access-log", "--log-level", "error"]
    told = {**os.environ, "NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET}
    with subprocess.Popen(command, env=told, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            yield Buckets(data, port)
        finally:
            process.kill()


class Faults:
    """What the proxy does with requests: `fault(method, path)` returns one of these, or None for nothing.

    `(status, body)` answers, `("cut", n)` ends the connection after n bytes of the body, `("slow", n)` sends n bytes
    each tenth of a second, `("hang",)` never answers. A function is called, and then nothing.
    """

    def __init__(self, upstream: int):
        self.fault: Any = lambda _method, _path: None
        self.seen: list[tuple[str, str]] = []
        self.end = threading.Event()
        faults = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_arguments: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
                pass

            def handle(self):
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def do_GET(self):
                faults.seen.append((self.command, self.path))
                fault: Any = faults.fault(self.command, self.path)
                fault = fault() if callable(fault) else fault
                if fault == ("hang",):
                    faults.end.wait()
                    self.close_connection = True
                    return
                if fault is not None and isinstance(fault[0], int):
                    self.answer(fault[0], {"content-type": "application/xml"}, fault[1])
                    return
                length = int(self.headers.get("content-length") or 0)
                upstream_port = upstream
                connection = http.client.HTTPConnection("127.0.0.1", upstream_port, timeout=PATIENCE_S)
                with contextlib.closing(connection):
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(self.rfile.read(length) if length else None)
                    found = connection.getresponse()
                    body, status = found.read(), found.status
                dropped = {"transfer-encoding", "connection"}
                self.answer(status, {n: v for n, v in found.getheaders() if n.lower() not in dropped}, body, fault)

            do_HEAD = do_PUT = do_GET

            def answer(self, status, headers, body, fault: Any = None):
                self.send_response_only(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if fault is not None and fault[0] == "cut":
                    self.wfile.write(body[: fault[1]])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                elif fault is not None:
                    for at in range(0, len(body), fault[1]):
                        if faults.end.wait(0.1):
                            return
                        self.wfile.write(body[at : at + fault[1]])
                else:
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.end.set()
        self.server.shutdown()
        self.server.server_close()

    def asked(self, part: str) -> int:
        """How many requests had this in their path."""
        return sum(part in path for _, path in self.seen)
