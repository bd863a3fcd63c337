# SPDX-License-Identifier: Apache-2.0
"""Starts the file-type server, sends it files of many types at once and prints what it says about them.

Needs nothing but the standard library besides what the model itself needs; with rich installed the tables are nicer.
The exit status is 0 only if every answer of every round was one that a person would accept.
"""

import argparse
import gzip
import io
import json
import py_compile
import re
import signal
import socket
import sqlite3
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import wave
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
START_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0


@dataclass
class Sample:
    """A file to ask about, the labels that would be right for it, and what came back."""

    name: str
    content: bytes
    expected: frozenset[str]
    answers: list[dict] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)

    @property
    def shown_answer(self) -> dict:
        """A wrong answer if there was one, else the last."""
        return next((answer for answer in self.answers if answer["label"] not in self.expected), self.answers[-1])

    @property
    def is_right(self) -> bool:
        return self.shown_answer["label"] in self.expected


def found_samples() -> Iterator[Sample]:
    """Files that lie around: those of this repository that exist, and two of any Python installation."""
    repository_files = {
        "README.md": {"markdown", "txt"},
        "LICENSE": {"txt"},
        "pyproject.toml": {"toml"},
        "Makefile": {"makefile"},
        "examples/file-type/model.py": {"python"},
        "examples/nucleus-iris/nucleus.yaml": {"yaml"},
    }
    for name, expected in repository_files.items():
        path = REPOSITORY / name
        if path.is_file():
            yield Sample(name, path.read_bytes(), frozenset(expected))
    interpreter = Path(sys.executable).resolve()
    yield Sample(interpreter.name, interpreter.read_bytes(), frozenset({"elf", "macho", "pebin"}))
    yield Sample("argparse.pyc", compiled_module(), frozenset({"pythonbytecode"}))


def made_samples() -> Iterator[Sample]:
    """Files made on the spot, so that the demo carries no binary files with it."""
    text = Path(__file__).read_text(encoding="utf-8")
    yield Sample("chart.png", png_image(64, 64), frozenset({"png"}))
    yield Sample("beep.wav", wave_sound(), frozenset({"wav"}))
    yield Sample("page.pdf", pdf_page("A page of the demo"), frozenset({"pdf"}))
    yield Sample("orders.sqlite", sqlite_database(), frozenset({"sqlite"}))
    yield Sample("demo.zip", zip_archive(text), frozenset({"zip"}))
    yield Sample("demo.tar", tar_archive(text), frozenset({"tar"}))
    yield Sample("demo.py.gz", gzip.compress(text.encode(), mtime=0), frozenset({"gzip"}))
    yield Sample("orders.json", json_orders(), frozenset({"json"}))
    yield Sample("orders.xml", xml_orders(), frozenset({"xml"}))
    yield Sample("orders.csv", csv_orders(), frozenset({"csv"}))
    yield Sample("nothing", b"", frozenset({"empty"}))


def compiled_module() -> bytes:
    """The byte code of a module of the standard library."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "argparse.pyc"
        py_compile.compile(argparse.__file__, cfile=str(target), doraise=True)
        return target.read_bytes()


def png_image(width: int, height: int) -> bytes:
    """A grey gradient, written chunk by chunk."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = b"".join(b"\0" + bytes((x * y) % 256 for x in range(width)) for y in range(height))
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def wave_sound() -> bytes:
    """A tenth of a second of a saw tooth."""
    target = io.BytesIO()
    with wave.open(target, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"".join(struct.pack("<h", (i * 700) % 20000 - 10000) for i in range(800)))
    return target.getvalue()


def pdf_page(text: str) -> bytes:
    """One page with one line of text."""
    drawing = f"BT /F 24 Tf 72 720 Td ({text}) Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F 5 0 R >> >> >>",
        f"<< /Length {len(drawing)} >>\nstream\n{drawing}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    document = "%PDF-1.4\n"
    table = "0000000000 65535 f \n"
    for number, body in enumerate(objects, start=1):
        table += f"{len(document):010d} 00000 n \n"
        document += f"{number} 0 obj\n{body}\nendobj\n"
    size = len(objects) + 1
    trailer = f"trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(document)}\n%%EOF\n"
    return f"{document}xref\n0 {size}\n{table}{trailer}".encode("ascii")


def sqlite_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "orders.sqlite"
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("create table orders (id integer primary key, item text, price real)")
            connection.executemany("insert into orders values (?, ?, ?)", orders())
        connection.close()
        return path.read_bytes()


def zip_archive(text: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo.py", text)
        archive.writestr("copy/demo.txt", text)
    return target.getvalue()


def tar_archive(text: str) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        entry = tarfile.TarInfo("demo.py")
        entry.size = len(text.encode())
        archive.addfile(entry, io.BytesIO(text.encode()))
    return target.getvalue()


def orders() -> list[tuple[int, str, float]]:
    items = ("lamp", "chair", "table", "shelf", "rug")
    return [(number, items[number % len(items)], 9.5 + 3 * number) for number in range(1, 41)]


def json_orders() -> bytes:
    rows = [{"id": number, "item": item, "price": price} for number, item, price in orders()]
    return json.dumps({"orders": rows}, indent=2).encode()


def xml_orders() -> bytes:
    rows = "\n".join(f'  <order id="{number}"><item>{item}</item></order>' for number, item, _ in orders())
    return f'<?xml version="1.0" encoding="utf-8"?>\n<orders>\n{rows}\n</orders>\n'.encode()


def csv_orders() -> bytes:
    rows = "\n".join(f"{number},{item},{price}" for number, item, price in orders())
    return f"id,item,price\n{rows}\n".encode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server_command(port: int) -> list[str]:
    options = ["--http-port", str(port), "--worker-kind", "process", "--workers", "1"]
    return [sys.executable, "-m", "forebay.cli.main", "serve", str(HERE / "model.py"), *options]


@contextmanager
def running_server(port: int) -> Iterator[None]:
    """The server as its own process, ready inside the block and stopped by SIGTERM after it.

    Its own output is kept out of the tables and shown only when it does not become ready.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(server_command(port), stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, port, log)
            yield
        finally:
            stop(process)


def wait_until_ready(process: subprocess.Popen, port: int, log: IO[bytes]) -> None:
    """Waits with a running clock at a terminal, and silently where the output goes to a file."""
    started = time.monotonic()
    while not answers_ready(port):
        waited = time.monotonic() - started
        if process.poll() is not None or waited > START_LIMIT_S:
            log.seek(0)
            raise SystemExit(f"the server did not become ready; it said:\n{log.read().decode(errors='replace')}")
        if sys.stdout.isatty():
            print(f"waiting for the server on port {port}: {waited:.1f} s", end="\r", flush=True)
        time.sleep(0.1)
    print(f"server ready on port {port} after {time.monotonic() - started:.1f} s".ljust(60))


def answers_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


def stop(process: subprocess.Popen) -> None:
    """Asks the server to finish, and insists when it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ask_about_all(samples: list[Sample], port: int, rounds: int) -> None:
    """All files at the same moment, several times over, so that requests meet in the server and share a batch."""
    with ThreadPoolExecutor(max_workers=len(samples)) as pool:
        for _ in range(rounds):
            list(pool.map(lambda sample: ask_about(sample, port), samples))


def ask_about(sample: Sample, port: int) -> None:
    url = f"http://127.0.0.1:{port}/models/file-type"
    headers = {"content-type": "application/octet-stream"}
    request = urllib.request.Request(url, data=sample.content, headers=headers, method="POST")
    started = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        answer = {"label": f"error {error.code}: {error.read().decode(errors='replace')}", "score": 0.0}
    sample.latencies_ms.append((time.perf_counter() - started) * 1000)
    sample.answers.append(answer)


def batch_sizes(port: int) -> list[tuple[str, int]]:
    """How many batches of which size ran, from the cumulative buckets of the server's histogram."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text = response.read().decode()
    return list(readable_buckets(cumulative_buckets(text)))


def cumulative_buckets(metrics: str) -> list[tuple[float, int]]:
    """Upper edge and count of each bucket, summed over all series of the endpoint."""
    counts: Counter[float] = Counter()
    for labels, value in re.findall(r"^forebay_batch_size_bucket\{([^}]*)\} (\S+)", metrics, flags=re.MULTILINE):
        edge = re.search(r'le="([^"]+)"', labels)
        if edge and 'endpoint="file-type"' in labels:
            counts[float(edge[1])] += int(float(value))
    return sorted(counts.items())


def readable_buckets(buckets: Iterable[tuple[float, int]]) -> Iterator[tuple[str, int]]:
    """The buckets that something fell into, each named by the sizes it covers."""
    lower, seen = 0, 0
    for edge, count in buckets:
        if count > seen:
            yield size_range(lower, edge), count - seen
        lower, seen = edge, count


def size_range(above: float, up_to: float) -> str:
    smallest = int(above) + 1
    if up_to == float("inf"):
        return f"{smallest} and more"
    return str(smallest) if smallest == int(up_to) else f"{smallest} to {int(up_to)}"


def result_rows(samples: Iterable[Sample]) -> list[tuple[str, ...]]:
    """One line for each file, with the latency in the middle of all rounds."""
    rows = []
    for sample in samples:
        answer = sample.shown_answer
        latency = statistics.median(sample.latencies_ms)
        mark = "" if sample.is_right else f"expected {' or '.join(sorted(sample.expected))}"
        rows.append((sample.name, answer["label"], f"{answer['score']:.3f}", f"{latency:.1f}", mark))
    return rows


def print_table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print_plain_table(title, header, rows)
        return
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_plain_table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}")
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="how often each file is asked about")
    rounds = max(1, parser.parse_args().rounds)
    samples = [*found_samples(), *made_samples()]
    port = free_port()
    with running_server(port):
        ask_about_all(samples, port, rounds)
        sizes = batch_sizes(port)
    rows = result_rows(samples)
    print_table(f"{len(samples)} files, asked {rounds} times", ("file", "type", "score", "latency ms", ""), rows)
    print_table("batches", ("size", "how many"), [(size, str(count)) for size, count in sizes])
    wrong = [sample.name for sample in samples if not sample.is_right]
    print(f"not as expected: {', '.join(wrong)}" if wrong else "all answers as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
