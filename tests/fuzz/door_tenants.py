# SPDX-License-Identifier: Apache-2.0
"""Fuzz of tenants, limits, deadlines, single flight and the bill, over all doors of one server at once.

Clients show keys that are known, unknown, repeated or long, name children, classes and deadlines that are right, odd or
absurd, ask for the same at the same time, and sometimes leave. A key alone decides who gets 401. What is wrong in a
header is refused, nothing is a fault of the server, and each answer is the caller's own. At the end nothing is left
inside, the bill of all tenants is what the workers were busy, what answers said of their cost is in it, the files of
costs say the same, no child has become a tenant, and the server's memory has not grown with the names it was told.

    .venv/bin/python -m tests.fuzz.door_tenants SECONDS SEED
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np
from tests.fuzz.patience import HANG_S, awake
from tests.fuzz.serving import Findings, Running, pick, running
from tests.integration.kserve.served import M
from tests.integration.kserve.served import request as infer_request
from tests.processes import peak_bytes, start_peak

from forebay.arrays.numpy_tensors import from_array, to_array
from forebay.protocols.kserve.messages import SERVICE
from forebay.protocols.tfserving.messages import SERVING
from forebay.types.tensor_proto import put, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable

T = SERVING.classes()
KEYS = {"a": "key-a", "b": "key-b", "c": "key-c"}
CHILD = "x-child"
STREAMS = {"parts", "bytes", "words"}
CLIENTS = 8
ROWS = 9
GROWTH_BYTES = 96 << 20
"""Memory that the server may take beyond what it has after the first calls."""
COST = re.compile(r"worker_ms=(\d+\.\d{3});rows=(\d+)(?:;prompt_tokens=\d+;completion_tokens=\d+)?")
NO_ROOM = {413, 429, 503, 504}
GRPC_NO_ROOM = {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
ENDS = {"resource_exhausted", "unavailable", "deadline_exceeded"}
TENANTS = {
    "a": {"weight": 2},
    "b": {
        "limits": {
            "requests_per_s": {"rate": 30},
            "rows_per_s": {"rate": 60},
            "worker_seconds_per_min": {"rate": 20},
            "waiting_rows": 8,
            "open_streams": 2,
        }
    },
    "c": {"class": 2, "deadline_ms": 400},
}


def settings(folder: Path, kind: str) -> Path:
    """Write the configuration of a server with workers of some kind; returns where it is."""
    file = Path(__file__).parents[1] / "models" / "costly.py"
    one = {"workers": 1, "worker_kind": kind}
    models = [
        {"target": f"{file}:Costly", "single_flight": "all", "max_queue": 12, **one},
        {"target": f"{file}:CostlyVectors", "single_flight": "tenant", "deadline_ms": 1000, **one},
        *(
            {"target": f"{file}:{name}", "max_queue": 4, **one}
            for name in ("CostlyParts", "CostlyBytes", "CostlyWords")
        ),
    ]
    models.append({"target": f"{file.parent / 'paired.py'}", "worker_kind": kind, "max_queue": 8})
    told = {"models": models, "http": {"api_keys": KEYS, "tenant_header": CHILD}, "tenants": TENANTS}
    path = folder / "forebay.yaml"
    path.write_text(json.dumps(told))
    return path


class Said(NamedTuple):
    """What a call says beside its body.

    Attributes:
        headers: Names and values; some twice.
        tenant: Whose key is shown; empty if none is known.
        is_sure: Whether that is clear: only one key is shown.
        is_wrong: Whether a header has to be refused; None where it may be.
    """

    headers: list[tuple[str, bytes]]
    tenant: str
    is_sure: bool
    is_wrong: bool | None


def said(dice: random.Random) -> Said:
    """Make headers, right or not."""
    tenant = dice.choice("abc")
    keys = pick(dice, [KEYS[tenant]], [], ["key-"], ["key-a" * 500], ["key-a", "key-b"], ["\xff"], ["Key-A"])
    is_known = keys == [KEYS[tenant]]
    headers = [("X-API-Key", key.encode("latin-1")) for key in keys]
    is_wrong: bool | None = False
    if dice.random() < 0.4:
        wrong = (
            b"0",
            b"-1",
            b"NaN",
            b"inf",
            b"",
            b"1.5",
            b"x",
            b"1,2",
            b"-99999999999",
            "٣".encode(),
            b"9" * 200 + b"x",
        )
        value = pick(dice, dice.choice((b"5", b"40", b"300", b"60000", b"9" * 20)), *wrong)
        headers += [("X-Request-Timeout-Ms", value)]
        is_wrong = value in wrong
    if dice.random() < 0.2:
        wrong = (b"0", b"-1", b"nan", b"-inf", b"", b"x", b"1;2", b"0.0")
        value = pick(dice, dice.choice((b"0.004", b"0.2", b"60", b"31536000")), *wrong)
        headers += [("Request-Timeout", value)] * pick(dice, 1, 2)
        is_wrong = is_wrong or value in wrong
    if dice.random() < 0.6:
        wrong = (b"u" * 129, b"\xff\xfe", "ü".encode(), b"a\tb")
        value = pick(dice, dice.choice((b"u", b"u%d" % dice.randrange(10**9))), *wrong, b"")
        count = pick(dice, 1, 2)
        headers += [(CHILD, value)] * count
        is_wrong = is_wrong or count > 1 or value in wrong
    dice.shuffle(headers)
    return Said(headers, tenant if is_known else "", is_known or len(keys) < 2, is_wrong)


class Bill:
    """What answers said of their cost, by tenant."""

    def __init__(self) -> None:
        self.told_s: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, tenant: str, text: str) -> int:
        """Take note of a cost; returns the rows, 0 if it cannot be read."""
        found = COST.fullmatch(text)
        if found is None:
            return 0
        with self._lock:
            self.told_s[tenant] += float(found[1]) / 1000
        return int(found[2])


class Client:
    """Asks over one door after the other."""

    def __init__(self, findings: Findings, bill: Bill, server: Running, dice: random.Random) -> None:
        self._findings, self._bill, self._dice = findings, bill, dice
        self._port = server.ports["http"]
        self._connection = http.client.HTTPConnection("127.0.0.1", self._port)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.ports['grpc']}")
        serialize = M.ModelInferRequest.SerializeToString
        self._infer = self._channel.unary_unary(f"/{SERVICE}/ModelInfer", serialize, M.ModelInferResponse.FromString)
        self._predict = self._channel.unary_unary(
            "/tensorflow.serving.PredictionService/Predict",
            T.PredictRequest.SerializeToString,
            T.PredictResponse.FromString,
        )
        self._stream = self._channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", serialize, M.ModelStreamInferResponse.FromString
        )

    def close(self) -> None:
        self._connection.close()
        self._channel.close()

    def round(self) -> None:
        """One call over some door."""
        doors = (
            self._native,
            self._composed,
            self._kserve,
            self._rows,
            self._vectors,
            self._words,
            self._parts,
            self._bytes,
            self._rpc,
        )
        self._dice.choice(doors)()

    # Over HTTP

    def _native(self) -> None:
        number = self._dice.choice((1.0, 2.5, 9.0))  # few, so that some are asked for at the same time
        self._ask("/models/costly", number, 1, lambda body: json.loads(body) == number)

    def _composed(self) -> None:
        number = self._dice.choice((1.0, 2.5, 9.0))
        self._ask("/models/tripled", number, 1, lambda body: json.loads(body) == 3 * number)

    def _numbers(self) -> list[float]:
        return [self._dice.choice((1.0, 2.5, 9.0)) for _ in range(self._dice.choice((1, 1, 2, ROWS)))]

    def _parameters(self) -> dict[str, Any]:
        dice, found = self._dice, {}
        if dice.random() < 0.4:
            found["priority"] = pick(dice, dice.choice((0, 1, 2, 4, 10**6)), -1, "x", 1.5, True, 2**70, None)
        if dice.random() < 0.2:
            found["timeout"] = pick(dice, dice.choice((3000, 10**6, 10**15)), -1, 0, "x", 1.5, 2**70)
        return found

    def _kserve(self) -> None:
        numbers = self._numbers()
        one = {"name": "input", "datatype": "FP64", "shape": [len(numbers)], "data": numbers}
        sent = {"inputs": [one], "parameters": self._parameters()}
        self._ask(
            "/v2/models/costly/infer",
            sent,
            len(numbers),
            lambda body: json.loads(body)["outputs"][0]["data"] == numbers,
            may_be_wrong=bool(sent["parameters"]),
        )

    def _rows(self) -> None:
        numbers = self._numbers()
        right = {"predictions": numbers}
        self._ask(
            "/v1/models/costly:predict", {"instances": numbers}, len(numbers), lambda body: json.loads(body) == right
        )

    def _vectors(self) -> None:
        texts = self._dice.choice((["x"], ["same", "other"]))
        sent: dict[str, Any] = {"model": "vectors", "input": texts}
        tier = self._tier(sent)
        tokens = sum(map(len, texts))
        self._ask(
            "/v1/embeddings",
            sent,
            1,
            lambda body: json.loads(body)["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens},
            may_be_wrong=tier,
        )

    def _tier(self, sent: dict[str, Any]) -> bool:
        if self._dice.random() < 0.5:
            return False
        sent["service_tier"] = pick(self._dice, self._dice.choice(("priority", "flex", "auto")), "no", 5, None, [])
        return True

    def _words(self) -> None:
        is_stream = self._dice.random() < 0.5
        sent: dict[str, Any] = {
            "model": "words",
            "stream": is_stream,
            "messages": [{"role": "user", "content": "to be"}],
        }
        tier = self._tier(sent)
        tokens = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
        if is_stream:
            ends = re.compile(rb".*data: \[DONE\]\n\n: forebay-cost ([^\n]+)\n\n", re.DOTALL)
            self._ask("/v1/chat/completions", sent, 1, ends.fullmatch, may_be_wrong=tier, is_stream=True)
        else:
            is_right = lambda body: json.loads(body)["usage"] == tokens  # noqa: E731
            self._ask("/v1/chat/completions", sent, 1, is_right, may_be_wrong=tier)

    def _parts(self) -> None:
        ends = re.compile(rb"data: 0\n\ndata: 1\n\ndata: 2\n\nevent: cost\ndata: ([^\n]+)\n\n")
        self._ask("/models/parts", 1, 1, ends.fullmatch, is_stream=True)

    def _bytes(self) -> None:
        self._ask("/models/bytes", 1, 1, lambda body: body == b"part\n" * 3, is_stream=True)

    def _ask(
        self,
        path: str,
        value: Any,
        rows: int,
        is_right: Callable[[bytes], Any],
        *,
        may_be_wrong: bool = False,
        is_stream: bool = False,
    ) -> None:
        """Call, and look at what comes.

        Args:
            path: What is called.
            value: The body, before it is JSON.
            rows: Samples that an answer says it was charged for.
            is_right: Tells whether an answer is the right one; of a stream, a match of its end says what it cost.
            may_be_wrong: Whether something in the body may be refused.
            is_stream: Whether it comes in parts.
        """
        call, connection, counts = said(self._dice), self._connection, self._findings.counts
        counts["requests"] += 1
        body = json.dumps(value).encode()
        connection.putrequest("POST", path)
        for name, text in [*call.headers, ("Content-Type", b"application/json"), ("Content-Length", b"%d" % len(body))]:
            connection.putheader(name, text)
        connection.endheaders(body)
        if self._dice.random() < 0.05:
            connection.close()
            counts["left"] += 1
            return
        answer = connection.getresponse()
        content = answer.read()
        counts[f"status {answer.status}"] += 1
        told = answer.headers.get("forebay-cost")
        if told and not self._bill.add(call.tenant, told):
            self._findings.differ("a cost that cannot be read", told)
        wrong = self._wrong(call, answer.status, answer.headers, may_be_wrong=may_be_wrong)
        if wrong or answer.status != 200:
            if wrong:
                self._findings.differ(wrong, path, answer.status, content, call, body)
            return
        found = is_right(content)
        if isinstance(found, re.Match):
            told = found[1].decode()
            rows = rows if self._bill.add(call.tenant, told) == rows else -1
        elif not is_stream and (told is None or f";rows={rows}" not in told):
            rows = -1
        if not found and is_stream:  # it ended after its beginning
            found = any(f'"{code}"'.encode() in content for code in ENDS) or b"rate_limit" in content
            found = found or b'"server_error"' in content
        if not found or rows < 0:
            self._findings.differ("another answer, or bill", path, content, told, call, body)

    def _wrong(self, call: Said, status: int, headers: Any, *, may_be_wrong: bool) -> str:
        """Return what is wrong with a status; empty if it may be."""
        if call.is_sure and not call.tenant:
            return "" if status == 401 else "let in without a key"
        if status == 401:
            return "a known key was refused" if call.is_sure else ""
        if status == 400:
            is_possible = call.is_wrong is not False or may_be_wrong
            return "" if is_possible else "refused, and nothing is wrong"
        if call.is_wrong:
            return "a wrong header was taken"
        if status in {429, 503} and not re.fullmatch("[1-9][0-9]*", headers.get("retry-after") or ""):
            return "refused without a time to try again"
        return "" if status == 200 or status in NO_ROOM else "a status that nobody expects"

    # Over gRPC

    def _message(self, numbers: list[float]) -> Any:
        made: Any = infer_request("costly", np.array(numbers))
        for name, value in self._parameters().items():
            if type(value) is str:
                made.parameters[name].string_param = value
            elif type(value) is int and value < 2**62:
                made.parameters[name].int64_param = value
        return made

    def _rpc(self) -> None:
        dice, counts = self._dice, self._findings.counts
        counts["requests"] += 1
        tenant, child = dice.choice("abc"), f"u{dice.randrange(10**9)}"
        key = pick(dice, KEYS[tenant], "", "key-", "k" * 3000)
        metadata = [("x-api-key", key)] if key else []
        metadata += [(CHILD, child)] * pick(dice, 1, 0, 2)
        numbers = [self._numbers() for _ in range(dice.choice((0, 1, 3)))]
        row = self._numbers()
        one = [self._message(each) for each in numbers or [row]]
        timeout_s = pick(dice, dice.choice((0.004, 0.3, 60.0)), 1e-9, 1e8)
        call: Any = None
        try:
            if numbers:
                call = self._stream(iter(one), metadata=metadata, timeout=timeout_s)
                if dice.random() < 0.05:
                    call.cancel()
                answers = [each for each in call if not each.error_message]
                found = [np.frombuffer(each.infer_response.raw_output_contents[0]).tolist() for each in answers]
                is_right = all(each in numbers for each in found)
            elif dice.random() < 0.5:
                asked = T.PredictRequest()
                asked.model_spec.name = "costly"
                put(asked.inputs["input"], from_array("input", np.array(row)))
                answer, call = self._predict.with_call(asked, metadata=metadata, timeout=timeout_s)
                is_right = to_array(tensor_of("output", answer.outputs["output"])).tolist() == row
            else:
                answer, call = self._infer.with_call(one[0], metadata=metadata, timeout=timeout_s)
                is_right = answer.raw_output_contents == one[0].raw_input_contents
            status = "OK"
        except grpc.RpcError as error:
            is_right, status, call = True, error.code().name, error
        counts[f"gRPC {status}"] += 1
        cost = dict(call.trailing_metadata() or ()).get("forebay-cost")
        if cost is not None and not self._bill.add(tenant, cost):
            self._findings.differ("a cost that cannot be read", cost)
        allowed = {"OK", "CANCELLED", "INVALID_ARGUMENT", *GRPC_NO_ROOM}
        if key != KEYS[tenant]:
            allowed = {"UNAUTHENTICATED", "CANCELLED", "DEADLINE_EXCEEDED"}
        if status not in allowed or not is_right:
            self._findings.differ("another answer over gRPC", status, metadata, numbers, call)


def page(port: int, path: str) -> str:
    """Read a page as a client with a key."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", path, headers={"X-API-Key": KEYS["a"]})
        return connection.getresponse().read().decode()


def metric(text: str, name: str) -> dict[tuple[str, str], float]:
    """Read a family, by endpoint and tenant."""
    found: dict[tuple[str, str], float] = {}
    for labels, value in re.findall(rf"^{name}\{{(.*?)\}} (\S+)$", text, re.MULTILINE):
        told = dict(re.findall(r'(\w+)="(.*?)"', labels))
        key = told["endpoint"], told.get("tenant", "")
        found[key] = found.get(key, 0.0) + float(value)
    return found


def settled(server: Running, findings: Findings) -> str:
    """Wait until nothing is inside; returns the metrics then."""
    end = awake() + HANG_S
    while True:
        text = page(server.ports["http"], "/metrics")
        if not any((*metric(text, "forebay_in_flight").values(), *metric(text, "forebay_waiting_samples").values())):
            return text
        if awake() > end:
            findings.differ("something is left inside", text)
            return text
        time.sleep(0.05)


def audit(server: Running, bill: Bill, findings: Findings, lasted_s: float) -> None:
    """Compare the bill of a server that has lasted for so long with everything that it has to agree with."""
    text = settled(server, findings)
    billed = metric(text, "forebay_tenant_worker_seconds_total")
    if not {tenant for _, tenant in billed} <= {"", *KEYS}:
        findings.differ("tenants that have no key", {tenant for _, tenant in billed})
    busy = metric(text, "forebay_model_seconds_sum")
    for name in {endpoint for endpoint, _ in billed}:
        total_s = sum(seconds for (endpoint, _), seconds in billed.items() if endpoint == name)
        print(f"tenants: {name}: billed {total_s:.6f} s, busy {busy[name, '']:.6f} s", flush=True)
        # Of streams that share a worker each is busy for the time of all, so they are held to the time there was.
        if total_s > lasted_s if name in STREAMS else abs(total_s - busy[name, ""]) > 1e-6 * max(total_s, 1.0):
            findings.differ("the bill is not what the workers were busy", name, total_s, busy[name, ""])
    for tenant in KEYS:
        total_s = sum(seconds for (_, whose), seconds in billed.items() if whose == tenant)
        if bill.told_s[tenant] > total_s + 1e-6 * findings.counts["requests"]:
            findings.differ("answers say that they cost more than was billed", tenant, bill.told_s[tenant], total_s)
    end = awake() + HANG_S
    while True:  # the files are written once a second
        lines = json.loads(page(server.ports["http"], "/costs?since_s=86400"))
        written = {(one["model"], one["tenant"]): one["worker_s"] for one in lines}
        off = {key for key, seconds in billed.items() if abs(seconds - written.get(key, 0.0)) > 1e-6}
        if not off:
            return
        if awake() > end:
            findings.differ("the files of costs say something else", off, billed, written)
            return
        time.sleep(0.2)


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    findings, bill = Findings("tenants"), Bill()
    with tempfile.TemporaryDirectory() as folder:
        dice = random.Random(seed)
        kind, fronts = dice.choice(("thread", "process")), dice.choice(((), (), ("--fronts", "2")))
        print("tenants:", "workers of the kind", kind, *fronts, flush=True)
        flags = ("--config", str(settings(Path(folder), kind)), "--grpc-port", "0", "--answer-cost", *fronts)
        began = time.monotonic()
        with running(options=(*flags, "--cost-log", str(Path(folder) / "costs"))) as server:
            make = lambda dice: Client(findings, bill, server, dice)  # noqa: E731
            findings.run(min(seconds / 4, 5.0), seed, make, CLIENTS)
            before = start_peak(server.process.pid)
            findings.run(seconds - min(seconds / 4, 5.0), seed + 1, make, CLIENTS)
            audit(server, bill, findings, time.monotonic() - began)
            grown = peak_bytes(server.process.pid) - before
            findings.counts["MiB grown"] = grown >> 20
            if grown > GROWTH_BYTES:
                findings.differ(f"the server has taken {grown >> 20} MiB more")
    return findings.end(server)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
