# SPDX-License-Identifier: Apache-2.0
"""The llm-stream example beside the library it is made of: tokens a second, and the time to the first token.

Three ways to answer 1, 4 and 8 clients that come at once: `loop` calls the library for one after the other; `threads`
calls it from a thread for each client, which is what the library can do where nobody serves; `forebay` is the
example over HTTP, in a process of its own. All stream the same answers of as many tokens; rounds alternate, the table
has medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "llm-stream" / "model.py"
LIBRARY = ROOT / ".venv/environments/llm/bin/python"
CLIENTS = (1, 4, 8)


def question(number: int, tokens: int) -> dict[str, Any]:
    begins = time.monotonic_ns() % 10**9  # another one each time: the library remembers prompts
    text = f"{begins} {number}: Tell me a very long story about a river."
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "seed": number,
        "stream": True,
    }


class Timed:
    """When the parts of one answer came."""

    def __init__(self, began: float):
        self.began = began
        self.parts = 0
        self.first_s = 0.0

    def take(self) -> None:
        self.first_s = self.first_s or time.monotonic() - self.began
        self.parts += 1


def told(began: float, timed: list[Timed]) -> dict[str, float]:
    whole_s = time.monotonic() - began
    return {
        "tokens_s": sum(one.parts for one in timed) / whole_s,
        "first_ms": 1000 * statistics.median(one.first_s for one in timed),
        "last_first_ms": 1000 * max(one.first_s for one in timed),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The library alone, in its environment


def alone() -> None:
    """Answer lines such as `loop 4 32` from the standard input."""
    spec = importlib.util.spec_from_file_location("llm_stream", MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    llm = module.load_model()

    def ask(number: int, tokens: int, timed: Timed) -> None:
        def take(event: dict[str, Any]) -> bool:
            if any(choice["delta"].get("content") for choice in event["choices"]):
                timed.take()
            return False

        llm.handle_chat_completions({**question(number, tokens), "top_k": 40}, take)

    for line in sys.stdin:
        how, clients, tokens = line.split()
        began = time.monotonic()
        timed = [Timed(began) for _ in range(int(clients))]
        asks = [(number, int(tokens), one) for number, one in enumerate(timed)]
        if how == "loop":
            for each in asks:
                ask(*each)
        else:
            threads = [threading.Thread(target=ask, args=each) for each in asks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        print(json.dumps(told(began, timed)), flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# forebay


async def stream(port: int, number: int, tokens: int, timed: Timed) -> None:
    body = json.dumps({"model": "smol", **question(number, tokens)}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
    async for line in reader:
        if line.startswith(b"data: {") and b'"content":"' in line and b'"content":""' not in line:
            timed.take()
    writer.close()


async def served(port: int, clients: int, tokens: int) -> dict[str, float]:
    began = time.monotonic()
    timed = [Timed(began) for _ in range(clients)]
    await asyncio.gather(*(stream(port, number, tokens, one) for number, one in enumerate(timed)))
    return told(began, timed)


@contextlib.contextmanager
def server() -> Iterator[int]:
    command = [sys.executable, "-m", "forebay", "serve", str(MODEL), "--http-port", "0"]
    command += ["--worker-kind", "process", "--python", str(LIBRARY)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stderr is not None
    try:
        yield next(int(found[1]) for line in process.stderr if (found := re.search(r"ready at http://\S+:(\d+)", line)))
    finally:
        process.terminate()
        process.communicate(timeout=30)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    library: Any = subprocess.Popen([str(LIBRARY), __file__, "alone"], env=environment(), **pipes)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with server() as port:
        for _ in range(options.rounds + 1):  # the first is to warm up
            for clients in CLIENTS:
                for how in ("loop", "threads", "forebay"):
                    if how == "forebay":
                        figures = asyncio.run(served(port, clients, options.tokens))
                    else:
                        library.stdin.write(f"{how} {clients} {options.tokens}\n")
                        library.stdin.flush()
                        figures = json.loads(library.stdout.readline())
                    found.setdefault((how, clients), []).append(figures)
    library.stdin.close()
    library.wait(30)
    print("| clients | | tokens/s | first token, median ms | first token of the last, ms |\n|--:|---|--:|--:|--:|")
    for (how, clients), rounds in sorted(found.items(), key=lambda one: one[0][1]):
        each = [
            statistics.median(one[name] for one in rounds[1:]) for name in ("tokens_s", "first_ms", "last_first_ms")
        ]
        print(f"| {clients} | {how} | {each[0]:.0f} | {each[1]:.0f} | {each[2]:.0f} |")


if __name__ == "__main__":
    if sys.argv[1:] == ["alone"]:
        alone()
    else:
        main()
