# SPDX-License-Identifier: Apache-2.0
"""Fuzz of the Open Inference Protocol over HTTP: JSON and binary bodies whose sizes, shapes and elements lie.

One call in four is of Triton's `generate`, as plain JSON.

The oracle is a reader of its own, written after the protocol: what it can read is answered with the double of every
number, on both lanes of HTTP alike, to several clients that send in pieces. Anything else is 400 with an error in the
protocol's form. Nothing is a fault of the server, and whoever asks something plain in between gets what is right.

    .venv/bin/python -m tests.fuzz.door_inference SECONDS SEED
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.serving import Findings, Sender, is_text, pick, running

LENGTH = "Inference-Header-Content-Length"
TARGET = f"{Path(__file__).parents[1] / 'models' / 'tensors.py'}:Doubled"
PATHS = "/v2/models/doubled/infer", "/v2/models/doubl%65d/infer"
GENERATE = "/v2/models/doubled/generate", "/v2/models/doubl%65d/generate"
ODD = (None, True, "x", "", 1e39, [], [1], {})
PLAIN = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
NUMPY = {"FP32": "<f4", "FP16": "<f2", "INT8": "<i1", "UINT16": "<u2", "INT16": "<i2", "UINT8": "<u1", "BF16": "<u2"}


def body(dice: random.Random) -> tuple[bytes, str | None]:
    """A call that is right, or nearly."""
    rows = pick(dice, dice.choice((1, 2, 9)), 0, -1, 2**31, 2**62, 2**70, 1.5, "1", True)
    width = pick(dice, 3, 2, -1, 2**62, None)
    shape = pick(dice, [rows, width], [rows], [], [rows, width, 1], [1] * 40, {}, "3")
    kind = pick(dice, dice.choice(("FP32", "FP16", "INT8", "UINT16")), "FP64", "BYTES", "BF16", "fp32", "", 7, None)
    count = rows * 3 if type(rows) is int and 0 <= rows < 100 else 3
    values = [
        dice.choice((0, 1, 2, -1, 100, pick(dice, 3, 0.5, 1e39, 300, "x", None, True, [1]))) for _ in range(count)
    ]
    one: dict[str, Any] = {"name": pick(dice, "input", "output", "", "\x00", 5), "datatype": kind, "shape": shape}
    told: dict[str, Any] = {"inputs": pick(dice, [one], [one, one], [], {}, None, [5])}
    if dice.random() < 0.3:
        told["parameters"] = pick(
            dice, {"binary_data_output": True}, {"x": {}}, [], {"timeout": 60_000_000}, {"a": None}
        )
    if dice.random() < 0.2:
        told["outputs"] = pick(dice, [{"name": "output"}], [{"name": "no"}], [], [{}], {"name": "output"})
    if dice.random() < 0.2:
        told["id"] = pick(dice, "seven", 7, "")
    if dice.random() < 0.5:
        nested = [values[at : at + 3] for at in range(0, len(values), 3)]
        one["data"] = dice.choice((values, nested, pick(dice, values, values[:-1], {}, None, "data", [[[]]] * 3)))
        return spoilt(dice, json.dumps(told).encode()), pick(dice, None, "5", "-1", "x", "99999999999999999999")
    plain = [value if isinstance(value, int) and 0 <= value <= 100 else 1 for value in values]
    data = np.array(plain).astype(NUMPY.get(kind, "<f4") if isinstance(kind, str) else "<f4").tobytes()
    data = pick(dice, data, data[:-1], data + b"x", b"", b"\xff\xff\xff\xff" * 3)
    if dice.random() < 0.95:
        one["parameters"] = {"binary_data_size": pick(dice, len(data), len(data) + 1, -1, 2**63, "12", 1.5, None, True)}
    head = spoilt(dice, json.dumps(told).encode())
    return head + data, str(pick(dice, len(head), len(head) - 1, len(head) + 1, 0, "", "+5", "٣"))


def spoilt(dice: random.Random, text: bytes) -> bytes:
    """Mostly the same."""
    if dice.random() < 0.9:
        return text
    at = dice.randrange(len(text))
    return text[:at] + dice.choice((b"", b"\xff", b"[", b'"', b"{}", b"0", b"\x00", b"[" * 5000)) + text[at + 1 :]


def generate_body(dice: random.Random) -> bytes:
    """A call of `generate` that is right, or nearly."""
    values = [pick(dice, dice.randint(-9, 9), *ODD) for _ in range(dice.choice((3, 3, 6, 9, 1, 2)))]
    told: dict[str, Any] = {pick(dice, "input", "text_input", "other"): pick(dice, values, 1, [values], *ODD)}
    if dice.random() < 0.4:
        told["id"] = pick(dice, "seven", "", *ODD)
    inner = {pick(dice, "x", "input", "id", "y"): pick(dice, 1, *ODD)}
    if dice.random() < 0.3:
        told["parameters"] = pick(dice, inner, {}, *ODD)
    if dice.random() < 0.3:
        told |= inner
    return spoilt(dice, json.dumps(told).encode())


def generate_expected(sent: bytes) -> Any:
    """The answer of the double to `generate`; None if it is to be refused."""
    told = json.loads(sent.decode("utf-8"))
    inner = told.pop("parameters", {})
    if not isinstance(inner, dict) or told.keys() & inner:
        return None
    fields = {**told, **inner}
    given = [fields.pop(name) for name in ("input", "text_input") if name in fields]
    name = fields.pop("id", "")
    if len(given) != 1 or not isinstance(name, str) or any(isinstance(one, dict | list) for one in fields.values()):
        return None
    (values,) = given
    if not isinstance(values, list) or not values or len(values) % 3:
        return None
    limit = float(np.finfo("f4").max)
    if any(type(one) not in {int, float} or abs(one) > limit for one in values):
        return None
    doubled = (np.array(values, np.float32) * 2).tolist()
    return {**({"id": name} if name else {}), "model_name": "doubled", "model_version": "1", "text_output": doubled}


def expected(sent: bytes, length: str | None) -> Any:
    """The numbers that the answer to a call has, in the order of its rows; None if it is to be refused."""
    if length is not None and not (re.fullmatch("[0-9]{1,15}", length) and int(length) <= len(sent)):
        return None
    at = len(sent) if length is None else int(length)
    told = json.loads(sent[:at].decode("utf-8"))
    parameters = told.get("parameters")
    if not isinstance(parameters, dict | None) or not isinstance(told.get("id"), str | None):
        return None
    if any(isinstance(value, dict | list) for value in (parameters or {}).values()):
        return None
    (one,) = told["inputs"]
    kind, shape = one["datatype"], one["shape"]
    if one["name"] != "input" or kind not in NUMPY or len(shape) != 2 or any(type(axis) is not int for axis in shape):
        return None
    if shape[1] != 3 or not 0 < shape[0] < 1000:
        return None
    if [each for each in told.get("outputs") or [] if each["name"] != "output"]:
        return None
    size = (one.get("parameters") or {}).get("binary_data_size")
    data = one.get("data")
    if "data" in one and size is None:
        if kind in {"FP16", "BF16"} or at != len(sent):
            return None
        values = data
        if data and isinstance(data[0], list):
            if len(data) != shape[0] or any(not isinstance(row, list) or len(row) != 3 for row in data):
                return None
            values = [value for row in data for value in row]
        whole = (int,) if kind != "FP32" else (int, float)
        if any(type(value) not in whole for value in values) or len(values) != shape[0] * 3:
            return None
        limits = np.finfo("f4") if kind == "FP32" else np.iinfo(NUMPY[kind])
        if any(not float(limits.min) <= value <= float(limits.max) for value in values):
            return None
        array = np.array(values, np.float32)
    else:
        if "data" in one or length is None or size is True:
            return None
        needed = shape[0] * 3 * np.dtype(NUMPY[kind]).itemsize
        if size is None:
            size = needed
        if type(size) is not int or size != needed or len(sent) - at != size:
            return None
        array = np.frombuffer(sent[at:], NUMPY[kind])
        array = (array.astype("<u4") << 16).view("<f4") if kind == "BF16" else array.astype(np.float32)
    with np.errstate(over="ignore"):
        doubled = array * 2
    is_binary = (parameters or {}).get("binary_data_output") is True
    return doubled.tolist() if is_binary or np.isfinite(doubled).all() else None


class Client:
    """Asks on both lanes, and compares."""

    def __init__(self, findings: Findings, port: int, dice: random.Random) -> None:
        self._findings, self._dice = findings, dice
        self._sender = Sender(port, dice)

    def _ask(self, path: str, sent: bytes, length: str | None) -> Any:
        """The numbers of an answer; None if it was refused."""
        self._findings.counts["requests"] += 1
        answer = self._sender.post(path, sent, {} if length is None else {LENGTH: length.encode()})
        content = answer.read()
        if answer.status != 200:
            is_told = list(json.loads(content)) == ["error"] and answer.headers["content-type"] == "application/json"
            if answer.status != 400 or not is_told:
                self._findings.differ(f"status {answer.status}", content, sent, length)
            return None
        self._findings.counts["answered"] += 1
        at = int(answer.headers.get(LENGTH, len(content)))
        (one,) = json.loads(content[:at])["outputs"]
        return one["data"] if "data" in one else np.frombuffer(content[at:], "<f4").tolist()

    def _generate(self, path: str, sent: bytes) -> Any:
        """The answer to a call of `generate`, its numbers in one list; None if it was refused."""
        self._findings.counts["requests"] += 1
        answer = self._sender.post(path, sent, {})
        told = json.loads(answer.read())
        if answer.status != 200:
            if answer.status != 400 or list(told) != ["error"] or answer.headers["content-type"] != "application/json":
                self._findings.differ(f"status {answer.status}", told, sent)
            return None
        self._findings.counts["answered"] += 1
        return {**told, "text_output": np.ravel(told["text_output"]).tolist()}

    def close(self) -> None:
        """Close the connection."""
        self._sender.leave()

    def round(self) -> None:
        """One call on both lanes, and a plain one after it."""
        differ = self._findings.differ
        if self._dice.random() < 0.25:
            sent = generate_body(self._dice)
            found = [self._generate(path, sent) for path in GENERATE]
            try:
                right = generate_expected(sent)
            except Exception:
                right = None
            if found != [right, right] and is_text(sent):
                differ("another answer to generate than the protocol's", *found, right, sent)
            return
        sent, length = body(self._dice)
        found = [self._ask(path, sent, length) for path in PATHS]
        if str(found[0]) != str(found[1]):
            differ("the lanes give two answers", *found, sent, length)
        try:
            right = expected(sent, length)
        except Exception:
            right = None
        at = int(length) if length is not None and length.isascii() and length.isdigit() else len(sent)
        if str(found[0]) != str(right) and is_text(sent[:at]):  # else it may be in a name that nobody looks at
            differ("another answer than the protocol's", found[0], right, sent, length)
        if self._dice.random() < 0.2 and self._ask(PATHS[0], json.dumps(PLAIN).encode(), None) != [2, 4, 6]:
            differ("a neighbour got something else", sent)


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    findings = Findings("inference")
    shared = ("--worker-kind", "thread", "--single-flight", "all")  # clients send equal calls, and each gets its answer
    with running(TARGET, options=shared) as server:
        findings.run(seconds, seed, lambda dice: Client(findings, server.ports["http"], dice))
    return findings.end(server)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
