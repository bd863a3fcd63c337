# SPDX-License-Identifier: Apache-2.0
"""Fuzz of tensors of every type, over REST as JSON and as binary, and over gRPC with raw contents.

The oracle is slow and obvious: it cuts the data as the sizes say, counts, and frames BYTES by hand. What it finds sound
comes back from a model that echoes, byte by byte; anything else is refused with a status that blames the client. A
call is told over all doors that can say it, by several clients at once, in pieces.

    .venv/bin/python -m tests.fuzz.door_typed SECONDS SEED
"""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from tests.fuzz.serving import Findings, Sender, pick, running

from forebay.protocols.kserve.messages import SERVICE, messages

M = messages()
TARGET = f"{Path(__file__).parents[1] / 'models' / 'tensors.py'}:Typed"
PATH = "/v2/models/typed/infer"
LENGTH = "Inference-Header-Content-Length"
FORMATS = {"BOOL": "?", "FP16": "e", "FP32": "f", "FP64": "d"}
FORMATS |= {
    f"{sign}INT{bits}": "bhiq"[at].upper() if sign else "bhiq"[at]
    for sign in ("", "U")
    for at, bits in enumerate((8, 16, 32, 64))
}
KINDS = [*FORMATS, "BYTES"]
BLAMES = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}


class Sent(NamedTuple):
    """A tensor as it is told, right or not."""

    name: str
    kind: str
    shape: list[Any]
    data: bytes


def framed(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(one)) + one for one in texts)


def texts_of(data: bytes) -> list[bytes] | None:
    """The elements of BYTES; None if their lengths lie."""
    found = []
    while data:
        if len(data) < 4:
            return None
        (size,) = struct.unpack("<I", data[:4])
        if len(data) < 4 + size:
            return None
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


def may_become(narrow: str, wide: str) -> bool:
    """Whether all numbers of a type are numbers of the other one."""
    if narrow == wide:
        return True
    if "BYTES" in (narrow, wide) or narrow == "BOOL" or (narrow[-5:] == "INT64" and wide == "FP64"):
        return False
    return np.can_cast(f"<{FORMATS[narrow]}", f"<{FORMATS[wide]}", "safe")


def truths(data: bytes) -> bytes:
    """BOOL as it is usually written: any other byte than 0 is true as well."""
    return bytes(bool(one) for one in data)


def widened(one: Sent) -> bytes:
    """The data of a tensor as the model's type has it."""
    if one.name == "BOOL":
        return truths(one.data)
    if one.kind == one.name:
        return one.data
    with np.errstate(invalid="ignore"):
        return np.frombuffer(one.data, f"<{FORMATS[one.kind]}").astype(f"<{FORMATS[one.name]}").tobytes()


def is_sound(one: Sent) -> bool:
    """Whether a tensor is what it says it is, and what the model takes."""
    if one.kind not in KINDS or one.name not in KINDS or not one.shape or not may_become(one.kind, one.name):
        return False
    if any(type(axis) is not int or axis < 0 for axis in one.shape) or not 0 < one.shape[0] <= 64:
        return False
    count = math.prod(one.shape)
    if one.kind != "BYTES":
        size, wide = (struct.calcsize("<" + FORMATS[kind]) for kind in (one.kind, one.name))
        return len(one.data) == count * size and math.prod(max(axis, 1) for axis in one.shape) * wide < 2**63
    texts = texts_of(one.data)
    if len(one.shape) != 1 or texts is None or len(texts) != count:
        return False
    try:
        return all(text.decode("utf-8") is not None for text in texts)
    except UnicodeDecodeError:
        return False


def expected(sent: list[Sent]) -> dict[str, tuple[str, list[int], bytes]] | None:
    """What comes back, by name; None if the call is to be refused."""
    if not sent or len({one.name for one in sent}) != len(sent) or not all(map(is_sound, sent)):
        return None
    if len({one.shape[0] for one in sent}) != 1:
        return None
    return {one.name: (one.name, one.shape, widened(one)) for one in sent}


def tensor(dice: random.Random, kind: str, rows: int) -> Sent:
    """A tensor that is right, or nearly."""
    shape: list[Any] = [rows] if kind == "BYTES" else [rows, *(dice.randint(0, 3) for _ in range(dice.randint(0, 2)))]
    count = math.prod(shape)
    if kind == "BYTES":
        texts = [dice.choice((b"", b"a", "é€😀".encode(), b"x" * dice.randint(0, 300))) for _ in range(count)]
        if dice.random() < 0.1 and texts:
            texts[dice.randrange(count)] = dice.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"a\x80"))
        data = framed(texts)
    elif kind == "BOOL":
        data = bytes(dice.randrange(2) for _ in range(count))
    elif kind.startswith("FP") and dice.random() < 0.8:
        data = struct.pack(f"<{count}{FORMATS[kind]}", *(dice.choice((0.0, -1.5, 2.0, 1000.0)) for _ in range(count)))
    else:
        data = dice.randbytes(count * struct.calcsize("<" + FORMATS[kind]))
    if dice.random() < 0.12:
        data = dice.choice((data[:-1], data + b"\0", b"", data * 2, struct.pack("<I", 2**32 - 1) + data, data[4:]))
    if dice.random() < 0.12:
        lie = dice.choice((-1, 2**31, 2**62, 2**63 - 1, rows + 1, 0))
        at = dice.randrange(len(shape) + 1)
        shape = dice.choice(([*shape[:at], lie, *shape[at + 1 :]], [*shape[:at], lie, *shape[at:]], [], [2**32] * 2))
    name = pick(dice, kind, dice.choice(KINDS), "", "input") if dice.random() < 0.2 else kind
    return Sent(name, pick(dice, kind, dice.choice(KINDS), "") if dice.random() < 0.15 else kind, shape, data)


def call(dice: random.Random) -> list[Sent]:
    """The tensors of a call."""
    rows = dice.choice((1, 1, 2, 5))
    kinds = dice.sample(KINDS, dice.choice((1, 1, 2, 4)))
    if dice.random() < 0.02:
        kinds.append(kinds[0])
    return [tensor(dice, kind, pick(dice, rows, rows + 1) if dice.random() < 0.1 else rows) for kind in kinds]


def in_json(one: Sent, dice: random.Random) -> Any:
    """The data of a tensor as JSON has it; None if JSON cannot say it."""
    if one.kind == "BYTES":
        texts = texts_of(one.data)
        try:
            values: list[Any] = [text.decode("utf-8") for text in texts] if texts is not None else [None]
        except UnicodeDecodeError:
            return None
    else:
        letter = FORMATS.get(one.kind, "")
        if not letter or letter == "e" or len(one.data) % struct.calcsize("<" + letter):
            return None
        values = list(struct.unpack(f"<{len(one.data) // struct.calcsize('<' + letter)}{letter}", one.data))
        if letter in "fd" and not all(map(math.isfinite, values)):
            return None
    axes = one.shape
    if dice.random() < 0.5 and all(type(axis) is int and axis > 0 for axis in axes) and math.prod(axes) == len(values):
        for axis in reversed(axes[1:]):
            values = [values[at : at + axis] for at in range(0, len(values), axis)]
    return None if values == [None] else values


def rest(sent: list[Sent], dice: random.Random) -> tuple[bytes, dict[str, str], list[Sent], bool]:
    """A body and its headers; what it says, as the oracle reads it; and whether the answer is to be binary."""
    inputs, parts, sizes, is_lying = [], b"", [], dice.random() < 0.1
    told: list[Sent] = []
    for one in sent:
        about: dict[str, Any] = {"name": one.name, "datatype": one.kind, "shape": one.shape}
        values = in_json(one, dice) if dice.random() < 0.4 else None
        if values is None:
            size = max(len(one.data) + dice.choice((-1, 1, 2)), 0) if is_lying else len(one.data)
            about["parameters"] = {"binary_data_size": size}
            sizes.append((one, size))
            parts += one.data
        else:
            about["data"] = values
            told.append(one)
        inputs.append(about)
    # Who lies of the size of one may be right of all: then the next one begins elsewhere.
    if is_lying and len(sizes) > 1 and dice.random() < 0.7:
        rest_of = len(parts) - sum(size for _, size in sizes[:-1])
        sizes[-1] = (sizes[-1][0], rest_of)
        for about in reversed(inputs):
            if "parameters" in about:
                about["parameters"]["binary_data_size"] = rest_of
                break
    at = 0
    for one, size in sizes:
        told.append(one._replace(data=parts[at : at + size] if size >= 0 else b""))
        at += max(size, 0)
    if at != len(parts) or any(size < 0 for _, size in sizes):
        told = []
    is_binary = dice.random() < 0.7
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": is_binary}}).encode()
    headers = {LENGTH: str(len(head))} if sizes else {}
    return head + parts, headers, told, is_binary


def answered(head: bytes, behind: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of an answer over REST."""
    found = {}
    for one in json.loads(head)["outputs"]:
        kind, size = one["datatype"], one.get("parameters", {}).get("binary_data_size")
        if size is not None:
            data, behind = behind[:size], behind[size:]
        elif kind == "BYTES":
            data = framed([text.encode() for text in one["data"]])
        else:
            data = struct.pack(f"<{len(one['data'])}{FORMATS[kind]}", *one["data"])
        found[one["name"]] = (kind, one["shape"], truths(data) if kind == "BOOL" else data)
    assert not behind
    return found


def can_be_json(wanted: dict[str, tuple[str, list[int], bytes]]) -> bool:
    """Whether an answer can be told in JSON."""
    for kind, _, data in wanted.values():
        if kind == "FP16" or (
            kind.startswith("FP") and not np.isfinite(np.frombuffer(data, f"<{FORMATS[kind]}")).all()
        ):
            return False
    return True


class Client:
    """Tells calls over both doors, and compares."""

    def __init__(self, findings: Findings, ports: dict[str, int], dice: random.Random) -> None:
        self._findings, self._dice = findings, dice
        self._sender = Sender(ports["http"], dice)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}")
        self._infer = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")

    def close(self) -> None:
        """Close the connections."""
        self._sender.leave()
        self._channel.close()

    def round(self) -> None:
        """One call over each door."""
        sent = call(self._dice)
        self._ask_rest(sent)
        self._ask_grpc(sent)

    def _ask_rest(self, sent: list[Sent]) -> None:
        body, headers, told, is_binary = rest(sent, self._dice)
        wanted = expected(told)
        if wanted is not None and not is_binary and not can_be_json(wanted):
            wanted = None
        answer = self._sender.post(PATH, body, headers)
        data = answer.read()
        self._findings.counts[f"http {answer.status}"] += 1
        if answer.status != 200:
            if wanted is not None or answer.status != 400 or list(json.loads(data)) != ["error"]:
                self._findings.differ(f"REST: status {answer.status}", data, body, headers, wanted)
            return
        at = int(answer.headers.get(LENGTH, len(data)))
        found = answered(data[:at], data[at:])
        if found != wanted:
            self._findings.differ("REST: another answer", found, wanted, body, headers)

    def _ask_grpc(self, sent: list[Sent]) -> None:
        made = M.ModelInferRequest(model_name="typed")
        told, raw = list(sent), [one.data for one in sent]
        for one in sent:
            made.inputs.add(name=one.name, datatype=one.kind, shape=one.shape)
        if self._dice.random() < 0.05 and len(raw) > 1:
            raw = self._dice.choice((raw[:-1], [*raw, b""], raw[::-1]))
            told = (
                [one._replace(data=data) for one, data in zip(sent, raw, strict=True)] if len(raw) == len(sent) else []
            )
        made.raw_input_contents.extend(raw)
        wanted = expected(told)
        try:
            answer = M.ModelInferResponse.FromString(self._infer(made.SerializeToString()))
        except grpc.RpcError as error:
            status = error.code().name
            self._findings.counts[status] += 1
            if wanted is not None or status not in BLAMES:
                self._findings.differ(f"gRPC: {status}", error.details(), made, wanted)
            return
        self._findings.counts["OK"] += 1
        raw = list(answer.raw_output_contents)
        pairs = zip(answer.outputs, raw, strict=True)
        found = {
            one.name: (one.datatype, list(one.shape), truths(data) if one.datatype == "BOOL" else bytes(data))
            for one, data in pairs
        }
        if found != wanted:
            self._findings.differ("gRPC: another answer", found, wanted, made)


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    findings = Findings("typed")
    with running(TARGET, options=("--grpc-port", "0", "--worker-kind", "thread", "--single-flight", "all")) as server:
        findings.run(seconds, seed, lambda dice: Client(findings, server.ports, dice))
    return findings.end(server)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
