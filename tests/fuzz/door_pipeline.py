# SPDX-License-Identifier: Apache-2.0
"""Fuzz of a pipeline's values: structured nonsense as texts, tensors, JSON and bytes, over REST (both lanes) and gRPC.

The oracle: the three ways give the same answer; none is a fault of the server, and nothing is logged that is one; the
loop never works on one thing for long; whoever asks something plain in between gets what is right.

    .venv/bin/python -m tests.fuzz.door_pipeline SECONDS SEED
"""

import asyncio
import contextlib
import json
import logging
import random
import re
import sys
import threading
import time
from collections import Counter
from typing import Any, Self

import grpc
import httpx
import numpy as np
import uvloop
from google.protobuf import json_format
from tests.compat.pipeline.conftest import hosting
from tests.fuzz.patience import NEVER_S, Watch, awake

from forebay.server.app import App
from forebay.server.config import GrpcConfig, HttpConfig
from forebay.surfaces.pipeline import Op, RequestOp
from forebay.surfaces.pipeline.fronts.http import Gateway, PipelineHttp
from forebay.surfaces.pipeline.fronts.rpc import services
from forebay.surfaces.pipeline.protocol.array_texts import array_text
from forebay.surfaces.pipeline.protocol.messages import PATH, Request, Response
from forebay.surfaces.pipeline.protocol.tensors import MAX_TENSORS
from forebay.transports.grpc.listener import GrpcListener
from forebay.transports.http.listener import HttpListener
from forebay.transports.http.pages import ServerPages

PATIENCE_S = 60.0
MAX_BUSY_S = 0.15
"""How much of a processor the loop may take for one thing."""
FAST, SLOW = "/svc/inference", "/svc/inferenc%65"
DTYPES = (
    "int8",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bool",
    "<U3",
    "<U60000000",
    "str",
    "object",
    "int65",
)
PRIME = 2**61 - 1


class Describe(Op):
    """Says what its values are."""

    def preprocess(self, input_dicts: Any, data_id: int, log_id: int) -> Any:
        """Describe them."""
        (given,) = input_dicts.values()
        told = {f"{name}"[:50]: described(value) for name, value in given.items()}
        return {"told": json.dumps(told, sort_keys=True)}, False, None, ""


def described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str} {value.shape} {str(value.ravel()[:5].tolist())[:80]}"
    return f"{type(value).__name__} {value!r:.80}"


# ---------------------------------------------------------------------------------------------------------------------
# nonsense


def text(dice: random.Random, depth: int = 0) -> str:
    """A literal, or nearly one."""
    kind = dice.randrange(16 if depth < 5 else 7)
    if kind < 3:
        return dice.choice(
            ("0", "-1", "1.5", "1e999", "0x1f", "1__0", "nan", "True", "None", str(dice.getrandbits(80)))
        )
    if kind < 5:
        return repr(dice.choice(("", "a", "é", "it's", "\\", "\n", "array([1])")))
    if kind == 5:
        return dice.choice(
            ("word", "", " ", "'", "[", "b'\\xff'", "f(1)", "...", "1+1", "\\N{DASH}", "'\\x4'", "'\\U99999999'")
        )
    if kind == 6:
        return array_text(np.arange(dice.choice((0, 1, 5, 50, 2000)), dtype=dice.choice(("int8", "float32", "int64"))))
    if kind < 10:
        inner = ",".join(text(dice, depth + 1) for _ in range(dice.choice((0, 1, 2, 5))))
        opening, closing = dice.choice(("[]", "()", "{}", "[)"))
        return opening + inner + closing
    if kind == 10:
        pairs = ",".join(f"{text(dice, depth + 2)}:{text(dice, depth + 2)}" for _ in range(dice.choice((1, 3))))
        return "{" + pairs + "}"
    if kind < 14:
        inner = text(dice, depth + 1)
        shape = dice.choice(("", "", "", ", shape=(0, 3)", ", shape=(2147483647, 2)", ", shape=(-1,)"))
        return f"array({inner}, dtype='{dice.choice(DTYPES)}'{shape})"
    if kind == 14:
        return "{" + ",".join(str(index * PRIME) for index in range(dice.choice((3, 100, 1000)))) + "}"
    return dice.choice(("[", "(", "{", "[[],", "-", "'")) * dice.choice((10, 40, 1000))


def spoiled(dice: random.Random, data: bytes) -> bytes:
    """The same with something wrong."""
    found = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randint(0, len(found))
        kind = dice.randrange(3)
        if kind == 0:
            del found[at : at + dice.randint(1, 5)]
        elif kind == 1:
            found[at:at] = dice.choice((b"\0", b"\xff", b'"', b"[", b"{}", b",", b"\\", b"null", dice.randbytes(3)))
        elif found:
            found[min(at, len(found) - 1)] ^= 1 << dice.randrange(8)
    return bytes(found)


def tensor(dice: random.Random, found: Any) -> None:
    """Fill a tensor with what fits together, or does not."""
    found.name = dice.choice(("x", "", "y", "é"))
    found.elem_type = dice.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 99, -1))
    count = dice.choice((0, 1, 4, 4, 300))
    for field in dice.sample(("int64_data", "float_data", "int_data", "uint32_data", "bool_data", "float64_data"), 2):
        getattr(found, field).extend([dice.choice((0, 1, 1, 200, 70_000 if field != "bool_data" else 1))] * count)
    found.shape.extend(dice.choice(((), (count,), (2, 2), (-1,), (1 << 30, 1 << 30, 4), (0, 5), (1,) * 40)))
    if dice.random() < 0.2:
        found.lod.extend(range(dice.choice((1, 2, 4))))
    if dice.random() < 0.3:
        found.str_data.extend(["a"] * dice.choice((1, 3, 1000)))
    if found.elem_type == 13:
        head = repr(
            {"descr": dice.choice(("<f4", "|O", "<U9", "<i8", "V9")), "fortran_order": False, "shape": (count,)}
        )
        data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + bytes(4 * count)
        found.byte_data = data if dice.random() < 0.7 else spoiled(dice, data)


def request(dice: random.Random) -> Any:
    """A request whose values are nonsense."""
    found = Request(logid=dice.choice((0, 1, -1)), clientip=dice.choice(("", "::1")))
    if dice.random() < 0.8:
        for index in range(dice.choice((1, 1, 2, 5))):
            found.key.append(dice.choice((f"k{index}", "x", "", "é")))
            found.value.append(text(dice))
    if dice.random() < 0.05:
        found.value.append("1")
    if dice.random() < 0.05:
        count = dice.choice((2000, 40_000))
        found.key.extend([""] * count)
        found.value.extend([""] * count)
    if dice.random() < 0.4:
        for _ in range(dice.choice((1, 1, 3, 2000 if dice.random() < 0.1 else 1))):
            tensor(dice, found.tensors.add())
    return found


# ---------------------------------------------------------------------------------------------------------------------
# the ports


class _Faults(logging.Handler):
    """What the server says of itself that it should not have to."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(self.format(record))


class Ports:
    """A pipeline with all its ports, on a loop in a thread of its own that is watched.

    Attributes:
        busiest_s: The longest that the loop has worked without a pause; who looks at it sets it back.
    """

    def __init__(self) -> None:
        self.busiest_s = 0.0
        self.faults = _Faults()
        self._ready = threading.Event()
        self._loop = uvloop.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._loop.set_exception_handler(lambda _loop, told: self.faults.found.append(str(told)))
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        http_config = HttpConfig(
            port=0, keep_alive_s=NEVER_S, read_timeout_s=NEVER_S, write_timeout_s=NEVER_S, min_bytes_per_s=0
        )
        last = Describe(name="describe", input_ops=[RequestOp()])
        async with hosting(last, {"dag": {"request_parse": "literal"}, "max_queue": 1000}) as service:
            gateway = Gateway(service, http_config)
            http = HttpListener(
                http_config, gateway, PipelineHttp(gateway, http_config, ServerPages(App([]), http_config))
            )
            rpc = GrpcListener(
                GrpcConfig(read_timeout_s=NEVER_S, write_timeout_s=NEVER_S), services(service), lambda: True
            )
            self.host, self.http_port = await http.start()
            _, self.grpc_port = await rpc.start()
            ticking = asyncio.ensure_future(self._tick())
            self._ready.set()
            await self._end.wait()
            ticking.cancel()
            await http.stop(0.0)
            await rpc.stop(0.0)

    async def _tick(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.busiest_s = max(self.busiest_s, now - before)
            before = now

    def __enter__(self) -> Self:
        logging.getLogger("forebay").addHandler(self.faults)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(PATIENCE_S)
        logging.getLogger("forebay").removeHandler(self.faults)


class Fuzz:
    """Asks, and compares."""

    def __init__(self, ports: Ports, client: httpx.Client, channel: grpc.Channel, dice: random.Random) -> None:
        self.ports = ports
        self.client = client
        self.method = channel.unary_unary(PATH, request_serializer=None, response_deserializer=None)
        self.dice = dice
        self.counts: Counter[str] = Counter()
        self.differences: list[str] = []
        self.busiest_s = 0.0

    def differ(self, what: str, *details: object) -> None:
        self.differences.append(what)
        print(f"DIFFERENCE: {what}", *(str(one)[:1500] for one in details), sep="\n  ", flush=True)

    def rest(self, path: str, body: bytes) -> Any:
        """The answer over REST: what it holds, or the HTTP status."""
        self.counts["requests"] += 1
        answer = self.client.post(path, content=body)
        if answer.status_code >= 500:
            self.differ(f"status {answer.status_code} over REST", answer.text, body)
        return told(answer.json()) if answer.status_code == 200 else "refused"

    def rpc(self, data: bytes) -> Any:
        """The answer over gRPC, or its status."""
        self.counts["requests"] += 1
        try:
            found = Response.FromString(self.method(data))
        except grpc.RpcError as error:
            code: Any = error.code()
            if code != grpc.StatusCode.INVALID_ARGUMENT:
                self.differ(f"{code} over gRPC", error.details(), data)
            return "refused"
        return told({"err_no": found.err_no, "err_msg": found.err_msg, "value": list(found.value)})

    def round(self) -> None:
        """One request in every way, and a plain one after it."""
        dice = self.dice
        asked = request(dice)
        is_whole = dice.random() < 0.6
        if is_whole:
            body = json_format.MessageToJson(asked, ensure_ascii=dice.random() < 0.5).encode()
            data = asked.SerializeToString()
        else:
            body, data = (
                spoiled(dice, json_format.MessageToJson(asked).encode()),
                spoiled(dice, asked.SerializeToString()),
            )

        def ask() -> dict[str, Any]:
            self.ports.busiest_s = 0.0
            by_rpc = self.rpc(data)
            return {**({"gRPC": by_rpc} if is_whole else {}), **{path: self.rest(path, body) for path in (FAST, SLOW)}}

        answers = ask()
        is_many = len(asked.tensors) > MAX_TENSORS  # REST refuses them before they are a request
        if len({json.dumps(answer) for answer in answers.values()}) > 1 and not is_many:
            self.differ("answers that are not the same", *answers.items(), str(asked))
        if self.ports.busiest_s > MAX_BUSY_S:
            ask()  # garbage is collected now and then, but not for the same request again
        self.busiest_s = max(self.busiest_s, self.ports.busiest_s)
        if self.ports.busiest_s > MAX_BUSY_S:
            self.differ(f"the loop worked for {self.ports.busiest_s:.3f} s", str(asked))
        if dice.random() < 0.2:
            plain = Request(key=["n"], value=[str(dice.randrange(1000))])
            expected = [0, [json.dumps({"n": f"int {plain.value[0]}"})]]
            found = [self.rpc(plain.SerializeToString()), self.rest(FAST, json_format.MessageToJson(plain).encode())]
            if found != [expected] * 2:
                self.differ("a neighbour got something else", found, expected)


def told(answer: Any) -> Any:
    """What must be the same in all ways; an error's text names the number of its request."""
    return [answer["err_no"], answer["value"] or re.sub(r"data_id=\d+", "", answer["err_msg"])]


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    dice = random.Random(seed)
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(Ports())
        client = stack.enter_context(httpx.Client(base_url=f"http://{ports.host}:{ports.http_port}", timeout=None))
        channel = stack.enter_context(grpc.insecure_channel(f"{ports.host}:{ports.grpc_port}"))
        fuzz = Fuzz(ports, client, channel, dice)
        watch = stack.enter_context(Watch("pipeline"))
        end = awake() + seconds
        while awake() < end and len(fuzz.differences) < 20:
            watch.note()
            fuzz.round()
            if ports.faults.found:
                fuzz.differ("the server logged a fault", *ports.faults.found[:2])
                ports.faults.found.clear()
    counts = ", ".join(f"{count} {name}" for name, count in fuzz.counts.items())
    busy = f"the loop worked up to {fuzz.busiest_s * 1000:.0f} ms at a time"
    print(f"door_pipeline: seed {seed}: {counts}; {busy}; {len(fuzz.differences)} differences", flush=True)
    return len(fuzz.differences)


if __name__ == "__main__":
    sys.exit(bool(main(float(sys.argv[1]), int(sys.argv[2]))))
