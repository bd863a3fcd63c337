# SPDX-License-Identifier: Apache-2.0
"""Fuzz of long bodies: in pieces, of lengths told or not, cut off in the middle, too long, read by workers that end.

The oracle is the body in one piece: a model tells its digest, and once more after a while, for the memory it lies in is
used again. Several models get bodies at the same time, in processes and in threads, over HTTP and gRPC. In the end the
server keeps no more memory than it may, and nobody waits.

    .venv/bin/python -m tests.fuzz.door_landing SECONDS SEED
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
from tests.fuzz.serving import Findings, running
from tests.models.digests import digest

from forebay.protocols.kserve.messages import SERVICE, messages
from forebay.workers.memory.landing import KEPT_BYTES, LANDING_BYTES, UNKNOWN_BYTES

if TYPE_CHECKING:
    from tests.fuzz.serving import Running

M = messages()
TARGET = Path(__file__).parents[1] / "models" / "digests.yaml"
MAX_BYTES = 5 << 20
SIZES = (100, LANDING_BYTES, LANDING_BYTES, 2 * LANDING_BYTES, 600_000, UNKNOWN_BYTES, UNKNOWN_BYTES, 3 << 20)
MODELS = ("digest", "digest", "threaded", "mortal")
CLIENTS = 6


class Broken(Exception):
    """The connection ended before there was an answer."""


class Client:
    """Asks, and compares."""

    def __init__(self, findings: Findings, ports: dict[str, int], dice: random.Random) -> None:
        self._findings, self._ports, self._dice = findings, ports, dice
        self._pool = dice.randbytes(6 << 20)
        self._socket: socket.socket | None = None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}", [("grpc.use_local_subchannel_pool", 1)])
        self._infer = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")
        self._workers: list[int] = []

    def close(self) -> None:
        """Close the connections."""
        self._leave()
        self._channel.close()

    def round(self) -> None:
        """One body."""
        dice = self._dice
        model = dice.choice(MODELS)
        body = self._body(model)
        if model == "mortal" and self._workers and dice.random() < 0.05:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers.pop(), signal.SIGKILL)
            self._workers.clear()
            self._findings.counts["kills"] += 1
        status, told = self._over_http(model, body) if dice.random() < 0.6 else self._over_grpc(model, body)
        self._findings.counts[status] += 1
        if status == "answered":
            *found, worker = told.split()
            if " ".join(found) != digest(body):
                self._findings.differ(f"another body, {len(body)} bytes for {model}", told)
            elif model == "mortal":
                self._workers = [*self._workers, int(worker)][-4:]
        elif status == "failed" and model != "mortal":
            self._findings.differ(f"{model} failed", told)

    def _body(self, model: str) -> bytes:
        dice = self._dice
        how: dict[str, Any] = {"seconds": dice.choice((0, 0, 0, 0.001, 0.02))}
        if model == "mortal" and dice.random() < 0.03:
            how["exits"] = True
        size = max(dice.choice(SIZES) + dice.randint(-300, 300), 0)
        start = dice.randrange(len(self._pool) - size)
        return json.dumps(how).encode() + b"\n" + self._pool[start : start + size]

    def _leave(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _over_http(self, model: str, body: bytes) -> tuple[str, str]:
        dice = self._dice
        is_chunked = dice.random() < 0.25
        is_too_long = dice.random() < 0.05
        if is_too_long:
            body += bytes(MAX_BYTES)
        stops_at = dice.randrange(len(body)) if dice.random() < 0.1 else None
        length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
        head = f"POST /models/{model} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._ports["http"]))
        try:
            self._socket.sendall(f"{head}{length}\r\n\r\n".encode())
            self._send(body[:stops_at], is_chunked=is_chunked)
            if stops_at is not None:
                self._leave()
                return "cut off", ""
            if is_chunked:
                self._socket.sendall(b"0\r\n\r\n")
            status, content, stays = self._answer()
        except (ConnectionError, Broken) as error:
            self._leave()
            return ("refused" if is_too_long else "failed"), repr(error)
        if not stays:
            self._leave()
        if is_too_long:
            if status != 413:
                self._findings.differ(f"status {status} for {len(body)} bytes", content)
            return "refused", ""
        return ("answered", json.loads(content)) if status == 200 else ("failed", f"{status} {content!r}")

    def _send(self, body: bytes, *, is_chunked: bool) -> None:
        dice, view = self._dice, memoryview(body)
        assert self._socket is not None
        while view:
            size = dice.choice((len(view), len(view), 100, 8192, 20_000, 300_000))
            piece, view = view[:size], view[size:]
            self._socket.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
            if dice.random() < 0.1:
                time.sleep(dice.choice((0, 0.001, 0.01)))

    def _answer(self) -> tuple[int, bytes, bool]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._read()
        head, _, content = data.lower().partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        while len(content) < length:
            content += self._read()
        return int(head[9:12]), content, b"connection: close" not in head

    def _read(self) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(1 << 16)
        if not data:
            raise Broken
        return data

    def _over_grpc(self, model: str, body: bytes) -> tuple[str, str]:
        made = M.ModelInferRequest(model_name=model)
        made.inputs.add(name="input", datatype="BYTES", shape=[1])
        made.raw_input_contents.append(len(body).to_bytes(4, "little") + body)
        call = self._infer.future(made.SerializeToString())
        if self._dice.random() < 0.1:
            time.sleep(self._dice.choice((0, 0.001, 0.01)))
            call.cancel()
            return "called off", ""
        try:
            (found,) = M.ModelInferResponse.FromString(call.result()).raw_output_contents
        except grpc.RpcError as error:
            return "failed", str(error)
        return "answered", found[4:].decode()


def kept_bytes(server: Running) -> int:
    """What the files have of memory in which bodies lie."""
    found = 0
    for link in [*Path(f"/proc/{server.process.pid}/fd").iterdir()]:
        with contextlib.suppress(FileNotFoundError):
            if "forebay-body" in str(link.readlink()):
                found += link.stat().st_blocks * 512 // 2  # one descriptor is the map's
    return found


def left_in(server: Running, client: httpx.Client) -> dict[str, int]:
    """Who is left in models, and memory that should be given back."""
    models = client.get("/models").json()["models"]
    found = {one["name"]: one["in_flight"] + one["waiting"] for one in models}
    found["bytes"] = max(kept_bytes(server) - KEPT_BYTES, 0)
    return {name: count for name, count in found.items() if count}


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    findings = Findings("landing")
    with running(options=("--config", str(TARGET), "--grpc-port", "0", "--max-body-bytes", str(MAX_BYTES))) as server:
        findings.run(seconds, seed, lambda dice: Client(findings, server.ports, dice), CLIENTS)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.ports['http']}", timeout=None) as client:
            findings.wait_for(lambda: left_in(server, client))
    return findings.end(server)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
