# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol: 600 KB of FP32 in and 4 KB out, and four floats in and out, beside other servers.

    .venv/bin/python -m benchmarks.kserve [--rounds 3] [--seconds 3] [--only small] [--copies] [--write]

Each server has core 0, with its processes, and the load core 1: the same for all, `bodyflood.py` for what is large and
`h2load` for what is small. All that take part in a row are up together and take turns. *bare* is
`servers/raw_tensors.py`: no more than the transport, a join of what came and the model; *copy* is its kind that only
copies from the socket and answers. Over gRPC frames are as long as a port takes them, as are those of clients made of
gRPC's C core; `--frames 16384` cuts them as short as many others do. `--copies` does not measure time: it counts the
bytes that a request has copied, with a library that is loaded before the C library (`copies.c`, which `gcc` compiles).
Peers take part once `benchmarks/kserve.sh` has made their environments.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import grpc
import numpy as np

from benchmarks.h2load import HEADERS, prefixed
from benchmarks.launch import ROOT, environment, free_port, need, pinned, stop
from benchmarks.overload import LOAD_CORES, SERVER_CORES
from benchmarks.proc import cpu_s, tree
from benchmarks.report import machine, table
from benchmarks.work import tensors
from forebay.protocols.kserve.messages import SERVICE, messages

LARGE, SMALL = "large", "small"
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Without it the bare server gives the memory of each body back and faults it in for the next one."""
PATH = f"/{SERVICE}/ModelInfer"
COUNTED = 40
"""Requests whose copies are counted, after as many that are not."""
REST_S, REST_LOOK_S = 60.0, 0.1
"""How long a server may go on after its load, and the time between two looks at it."""


class Server(NamedTuple):
    """How to start one.

    Attributes:
        doors: The transports it answers over.
        command: With `{http}` and `{grpc}` for its ports.
        variables: Of its environment.
        is_text: Whether it takes JSON alone over HTTP, and no binary tensors.
    """

    name: str
    doors: tuple[str, ...]
    command: list[str]
    variables: Mapping[str, str] = MappingProxyType({})
    is_text: bool = False

    @property
    def python(self) -> Path:
        return Path(self.command[0])


def ours(kind: str) -> Server:
    program = str(Path(sys.executable).with_name("forebay"))
    flags = f"--worker-kind {kind} --http-port {{http}} --grpc-port {{grpc}} --log-level warning"
    return Server(f"forebay {kind}", ("grpc", "http"), [program, "serve", "benchmarks/jobs/kserve.py", *flags.split()])


def bare(job: str, door: str, kind: str) -> Server:
    command = [sys.executable, "-m", "benchmarks.servers.raw_tensors", job, door, kind, "--port", f"{{{door}}}"]
    return Server(f"bare {kind}", (door,), command, KEEPS_MEMORY)


def peer(name: str, doors: tuple[str, ...], *command: str) -> Server:
    python = ROOT / f"benchmarks/.venv-{name}/bin/python"
    libraries = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return Server(name, doors, [str(python), *command], {"LD_LIBRARY_PATH": libraries}, is_text=name == "mlserver")


GRPCIO = Server(
    "grpcio asyncio", ("grpc",), [sys.executable, "-m", "benchmarks.servers.grpcio_tensors", "--port", "{grpc}"]
)


def servers(job: str, door: str) -> list[Server]:
    ports = ("--http", "{http}", "--grpc", "{grpc}")
    found = [
        *(ours(kind) for kind in ("inline", "thread", "process")),
        *(bare(job, door, kind) for kind in ("inline", "thread", "process", "copy")),
        GRPCIO,
        *(
            peer(
                name,
                ("grpc", "http"),
                f"benchmarks/servers/{name}_tensors.py",
                *ports,
            )
            for name in ("triton", "mlserver", "kserve")
        ),
    ]
    return [one for one in found if door in one.doors and one.python.exists()]


def message(job: str) -> bytes:
    """Return a request of ModelInfer."""
    values = given(job)
    made = messages().ModelInferRequest(model_name=job)
    made.inputs.add(name="input", datatype="FP32", shape=values.shape)
    made.raw_input_contents.append(values.tobytes())
    return made.SerializeToString()


def body(job: str, *, is_text: bool = False) -> tuple[bytes, int]:
    """Return the same over HTTP, and how long its JSON is; 0 if it is all."""
    values = given(job)
    tensor = {"name": "input", "datatype": "FP32", "shape": values.shape}
    if is_text:
        return json.dumps({"inputs": [{**tensor, "data": values.ravel().tolist()}]}).encode(), 0
    asked = {"inputs": [{**tensor, "parameters": {"binary_data_size": values.nbytes}}]}
    text = json.dumps({**asked, "parameters": {"binary_data_output": True}}).encode()
    return text + values.tobytes(), len(text)


def headers(size: int) -> list[tuple[str, str]]:
    """Return those of a body whose JSON is so long, or is all of it."""
    if not size:
        return [("Content-Type", "application/json")]
    return [("Content-Type", "application/octet-stream"), ("Inference-Header-Content-Length", str(size))]


def given(job: str) -> np.ndarray:
    return np.arange(tensors.ELEMENTS if job == LARGE else 4, dtype=np.float32)[np.newaxis]


def check(job: str, data: bytes) -> None:
    values = given(job)[0]
    wanted = tensors.scores(values) if job == LARGE else tensors.doubled(values)
    assert np.array_equal(np.frombuffer(data, np.float32), wanted), (job, len(data))


def ask_grpc(port: int, job: str, times: int = 1) -> bytes:
    """Ask as a client of gRPC does; returns the last answer."""
    answer = b""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        call = channel.unary_unary(PATH)
        for _ in range(times):
            answer = call(message(job), timeout=30)
    check(job, messages().ModelInferResponse.FromString(answer).raw_output_contents[0])
    return answer


def ask_http(port: int, job: str, times: int = 1, *, is_text: bool = False) -> bytes:
    """Ask as a client of HTTP does; returns the last answer."""
    found, said = b"", None
    data, size = body(job, is_text=is_text)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        for _ in range(times):
            connection.request("POST", f"/v2/models/{job}/infer", data, dict(headers(size)))
            response = connection.getresponse()
            found = response.read()
            said = response.headers["Inference-Header-Content-Length"]
            assert response.status == 200, found[:500]
    size = int(said or 0)
    (output,) = json.loads(found[:size] if size else found)["outputs"]
    check(job, np.array(output["data"], np.float32).tobytes() if "data" in output else found[size:])
    return found


def asker(server: Server, door: str) -> Callable[..., bytes]:
    return ask_grpc if door == "grpc" else partial(ask_http, is_text=server.is_text)


def load_small(port: int, job: str, answer: bytes, connections: int, seconds: int) -> tuple[float, float]:
    """Return answers a second, and the mean of their time in ms."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(prefixed(message(job)))
        file.flush()
        named = [option for header in HEADERS for option in ("-H", header)]
        url = f"http://127.0.0.1:{port}{PATH}"
        command = ["h2load", "-t1", f"-c{connections}", "-m1", f"-D{seconds}", "-d", file.name, *named, url]
        text = subprocess.run(pinned(command, LOAD_CORES), check=True, capture_output=True, text=True).stdout
    done, answered = map(int, re.findall(r"(\d+) (?:done|succeeded)", text))
    received = int(re.findall(r"\((\d+)\) data", text)[0])
    # What says that a call failed has no message; ids of answers may have other lengths.
    if answered != done or received < 0.9 * answered * len(answer):
        raise RuntimeError(text)
    mean = re.findall(r"time for request: +\S+ +\S+ +([\d.]+)(us|ms|s)", text)[0]
    return answered / seconds, float(mean[0]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[mean[1]]


def load_large(
    door: str, one: Running, connections: int, seconds: int, longest_frame: int | None
) -> tuple[float, float]:
    """Return answers a second, and the p50 of their time in ms."""
    if door == "grpc":
        asked, path, options = message(LARGE), PATH, [] if longest_frame is None else [f"--longest={longest_frame}"]
    else:
        asked, size = body(LARGE, is_text=one.is_text)
        path, options = f"/v2/models/{LARGE}/infer", [f"--header={name}: {value}" for name, value in headers(size)]
    with tempfile.NamedTemporaryFile() as file, tempfile.NamedTemporaryFile() as answer:
        file.write(asked)
        answer.write(one.answer)
        file.flush()
        answer.flush()
        command = [sys.executable, "-m", "benchmarks.bodyflood", door, str(one.ports[door]), path, file.name]
        command += [f"--connections={connections}", f"--seconds={seconds}", f"--answer={answer.name}", *options]
        done = subprocess.run(pinned(command, LOAD_CORES), check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    return found["rate"], found["p50_ms"]


class Running(NamedTuple):
    process: subprocess.Popen[bytes]
    ports: dict[str, int]
    answer: bytes
    is_text: bool = False

    def cpu_s(self) -> float:
        return cpu_s(tree(self.process.pid))

    def come_to_rest(self) -> None:
        """Wait until it has done what its clients left behind, which would take the core of whoever is next."""
        end, before = time.monotonic() + REST_S, self.cpu_s()
        while time.monotonic() < end:
            time.sleep(REST_LOOK_S)
            now = self.cpu_s()
            if now - before < REST_LOOK_S * 0.2:
                return
            before = now


@contextlib.contextmanager
def running(server: Server, job: str, door: str, variables: dict[str, str]) -> Iterator[Running]:
    """Run a server while the block runs; it has answered by then."""
    ports = {"http": free_port(), "grpc": free_port()}
    command = [part.format(**ports) for part in server.command]
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            pinned(command, SERVER_CORES),
            cwd=ROOT,
            env={**environment(), **server.variables, **variables, "TMPDIR": folder},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            end = time.monotonic() + 60
            while True:
                try:
                    answer = asker(server, door)(ports[door], job)
                    break
                except (OSError, http.client.HTTPException, grpc.RpcError, AssertionError) as error:
                    if process.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        raise RuntimeError(f"{server.name}: {error!r}\n{log.read()[-3000:].decode()}") from error
                    time.sleep(0.2)
            yield Running(process, ports, answer, is_text=server.is_text)
        finally:
            stop(process)


class Found(NamedTuple):
    rate: float
    p50_ms: float
    cpu_us: float


def measure(job: str, door: str, connections: int, options: argparse.Namespace) -> dict[str, list[Found]]:
    """Return what each round found, by server."""
    found: dict[str, list[Found]] = {}
    with contextlib.ExitStack() as stack:
        up: dict[str, Running] = {}
        for server in servers(job, door):
            if options.servers and server.name.split()[0] not in options.servers.split(","):
                continue
            try:
                up[server.name] = stack.enter_context(running(server, job, door, {}))
            except RuntimeError as error:
                print(error, file=sys.stderr)
        for round_ in range(options.rounds + 1):  # the first one warms up
            for name, one in up.items():
                before = one.cpu_s()
                try:
                    seconds = options.seconds if round_ else 1
                    if job == LARGE:
                        rate, p50_ms = load_large(door, one, connections, seconds, options.frames)
                    else:
                        rate, p50_ms = load_small(one.ports[door], job, one.answer, connections, seconds)
                except RuntimeError as error:
                    print(name, str(error)[-1500:], file=sys.stderr)
                    continue
                spent = one.cpu_s() - before
                if round_ and rate:
                    found.setdefault(name, []).append(Found(rate, p50_ms, spent / (rate * options.seconds) * 1e6))
                one.come_to_rest()
    return found


def rows(found: dict[str, list[Found]], reference: str) -> list[list[str]]:
    rates = {name: median(one.rate for one in each) for name, each in found.items()}
    ours_best = max((rate for name, rate in rates.items() if name.startswith("forebay")), default=0.0)

    def of(each: list[Found], other: str) -> str:
        pairs = zip(each, found.get(other, ()), strict=False)
        ratios = [mine.rate / theirs.rate for mine, theirs in pairs]
        return f"{median(ratios):.2f}" if ratios else ""

    made = []
    for name, each in found.items():
        is_ours = name.startswith("forebay")
        made.append(
            [
                name,
                f"{rates[name]:,.0f}",
                f"{median(one.p50_ms for one in each):.2f}",
                f"{median(one.cpu_us for one in each):,.0f}",
                of(each, reference) if is_ours else f"{ours_best / rates[name]:.1f}x",
                of(each, name.replace("forebay", "bare")) if is_ours else "",
            ]
        )
    return made


def copies(door: str, server: Server) -> tuple[float, float]:
    """Return bytes copied and bytes received for a request, by each process of the server together."""
    with tempfile.TemporaryDirectory() as folder:
        library, counters = Path(folder, "copies.so"), Path(folder, "counters")
        flags = ["-O2", "-fno-builtin", "-fno-tree-loop-distribute-patterns", "-shared", "-fPIC"]
        source = Path(__file__).with_name("copies.c")
        subprocess.run(["gcc", *flags, "-o", str(library), str(source), "-ldl"], check=True)
        counters.write_bytes(bytes(4096))
        variables = {"LD_PRELOAD": str(library), "FOREBAY_BENCH_COPIES": str(counters)}
        with running(server, LARGE, door, variables) as one, counters.open("r+b") as file:
            seen = mmap.mmap(file.fileno(), 4096)
            ask = asker(server, door)
            ask(one.ports[door], LARGE, COUNTED)
            before = struct.unpack_from("<QQ", seen)
            ask(one.ports[door], LARGE, COUNTED)
            after = struct.unpack_from("<QQ", seen)
    copied, received = ((late - early) / COUNTED for early, late in zip(before, after, strict=True))
    return copied, received


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.kserve", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--only", choices=[LARGE, SMALL], help="one of the two models")
    parser.add_argument("--doors", default="grpc,http")
    parser.add_argument("--connections", default="", help="instead of 16, and of 16 and 64 for the small one")
    parser.add_argument("--servers", default="", help="first words of those that take part")
    parser.add_argument("--frames", type=int, help="longest frame over gRPC, if that is not what a port takes")
    parser.add_argument("--copies", action="store_true", help="count copied bytes instead")
    parser.add_argument("--write", action="store_true", help="append to RESULTS-kserve.md")
    options = parser.parse_args()
    need(h2load="nghttp2-client")
    os.sched_setaffinity(0, LOAD_CORES)
    text: list[str] = []
    if options.copies:
        size = 4 * tensors.ELEMENTS
        made = [
            [server.name, door, f"{copied:,.0f}", f"{copied / size:.2f}", f"{received:,.0f}"]
            for door in options.doors.split(",")
            for server in servers(LARGE, door)
            if not options.servers or server.name.split()[0] in options.servers.split(",")
            for copied, received in [copies(door, server)]
        ]
        heads = ["server", "door", "bytes copied a request", "of its 602,112", "bytes received"]
        text.append(f"## Bytes copied for a request of 600 KB\n\n{table(heads, made)}\n")
    else:
        for job, door in ((job, door) for job in (LARGE, SMALL) for door in options.doors.split(",")):
            if options.only not in {None, job} or (job == SMALL and door == "http"):
                continue
            usual = "16" if job == LARGE else "16,64"
            for connections in map(int, (options.connections or usual).split(",")):
                found = measure(job, door, connections, options)
                reference = "bare inline"
                heads = ["server", "req/s", "p50 ms", "CPU us", "of bare, or forebay beside it", "of bare of its kind"]
                frames = f", frames of {options.frames:,}" if options.frames and door == "grpc" else ""
                title = (
                    f"## {job}, {door}{frames}, {connections} clients, {options.rounds} rounds of {options.seconds} s"
                )
                text.append(f"{title}\n\n{table(heads, rows(found, reference))}\n")
                print(text[-1], flush=True)
    if options.copies:
        print(text[-1])
    if options.write:
        page = Path(__file__).with_name("RESULTS-kserve.md")
        before = page.read_text() if page.exists() else "# The Open Inference Protocol beside other servers\n\n"
        facts = f"`{' '.join(['-m benchmarks.kserve', *sys.argv[1:]])}`, {time.strftime('%d %b %Y %H:%M')}, "
        page.write_text(before + "\n".join([facts + machine()["machine"] + "\n", *text]) + "\n")


if __name__ == "__main__":
    main()
