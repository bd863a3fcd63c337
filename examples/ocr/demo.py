# SPDX-License-Identifier: Apache-2.0
"""Starts the OCR server, sends it the three pictures and compares what it reads with what is printed on them.

The exit status is 0 only if less than two characters in a hundred are wrong, over all pictures.
"""

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
PICTURES = HERE / "pictures"
PATIENCE_S = 120.0
"""A picture takes seconds on a busy machine; only what hangs is waited for so long."""
MOST_ERRORS = 0.02
CLIENTS = 4


@contextmanager
def running_server() -> Iterator[str]:
    """The server as its own process: yields its address once it is ready, and stops it by SIGTERM."""
    command = [sys.executable, "-m", "forebay", "serve", str(HERE / "model.py"), "--http-port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield address_of(server, log)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(PATIENCE_S)
            finally:
                server.kill()


def address_of(server: subprocess.Popen, log: IO[str]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        log.seek(0)
        said = log.read()
        if found := re.search(r"ready at (http://\S+)", said):
            return found[1]
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not become ready; it said:\n{said}")
        time.sleep(0.1)


def sent(url: str, picture: bytes) -> tuple[bytes, float]:
    """The answer's body and the milliseconds it took."""
    headers = {"content-type": "image/jpeg", "x-request-timeout-ms": f"{PATIENCE_S * 1000:.0f}"}
    request = urllib.request.Request(url, picture, headers)
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read(), (time.perf_counter() - started) * 1000


def errors_of(truth: str, read: str) -> int:
    """Characters to insert, delete or replace to make one text of the other (Levenshtein distance)."""
    before = list(range(len(read) + 1))
    for row, wanted in enumerate(truth, start=1):
        current = [row]
        for column, found in enumerate(read, start=1):
            current.append(min(before[column] + 1, current[-1] + 1, before[column - 1] + (wanted != found)))
        before = current
    return before[-1]


def show(name: str, url: str, out: Path, rounds: int) -> tuple[int, int]:
    """Sends one picture alone, a few times, and prints what came back; returns the wrong characters and all of them."""
    picture = (PICTURES / f"{name}.jpg").read_bytes()
    truth = (PICTURES / f"{name}.txt").read_text(encoding="utf-8").strip()
    answers = [sent(url, picture) for _ in range(rounds)]
    page = json.loads(answers[0][0])
    wrong = errors_of(truth, page["text"])
    drawn, _ = sent(f"{url}?draw=1", picture)
    (out / f"{name}.png").write_bytes(drawn)
    latency = statistics.median(milliseconds for _, milliseconds in answers)
    print(f"\n{name}: {len(page['lines'])} lines in {latency:.0f} ms, {wrong} of {len(truth)} characters wrong")
    for read in page["text"].splitlines():
        print(f"    {read}")
    return wrong, len(truth)


def load(url: str, rounds: int) -> None:
    """Sends all pictures from several clients at once."""
    pictures = [path.read_bytes() for path in sorted(PICTURES.glob("*.jpg"))] * rounds
    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        latencies = [milliseconds for _, milliseconds in clients.map(lambda picture: sent(url, picture), pictures)]
    rate = len(pictures) / (time.perf_counter() - started)
    print(f"\n{CLIENTS} clients at once: {rate:.1f} pictures/s, {statistics.median(latencies):.0f} ms in the median")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="folder for the pictures with their lines framed"
    )
    parser.add_argument("--rounds", type=int, default=4, help="how often each picture is sent, alone and under load")
    arguments = parser.parse_args()
    rounds = max(1, arguments.rounds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = sorted(path.stem for path in PICTURES.glob("*.jpg"))
    with running_server() as address:
        url = f"{address}/models/ocr"
        counts = [show(name, url, arguments.out, rounds) for name in names]
        load(url, rounds)
    wrong, total = (sum(column) for column in zip(*counts, strict=True))
    rates = ", ".join(f"{name} {part / whole:.1%}" for name, (part, whole) in zip(names, counts, strict=True))
    print(f"character error rate: {rates}; in all {wrong / total:.1%}")
    print(f"the lines are framed in {arguments.out}")
    return 0 if wrong / total < MOST_ERRORS else 1


if __name__ == "__main__":
    sys.exit(main())
