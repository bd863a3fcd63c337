# SPDX-License-Identifier: Apache-2.0
"""Fuzz of ModelInfer: bodies whose sizes, shapes and elements lie, and bytes that are hardly a message.

The oracle is the protobuf library with a reader of its own: what it finds sound is answered with the same numbers, and
anything else is refused with a status that blames the client. Nothing is a fault of the server.

    .venv/bin/python -m tests.fuzz.door_infer_rpc SECONDS SEED
"""

import random
import sys
from collections import Counter
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from tests.fuzz.patience import NEVER_S, Watch, awake
from tests.integration.kserve.served import KServed, M

from forebay.protocols.kserve.messages import SERVICE
from forebay.server.config import Overrides

BLAMES = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}


def pick(dice: random.Random, usual: Any, *others: Any) -> Any:
    """What is usual most of the time."""
    return usual if dice.random() < 0.85 else dice.choice(others)


def body(dice: random.Random) -> bytes:
    """A call of the model that mirrors floats, right or nearly."""
    rows, length = pick(dice, dice.choice((1, 2, 5)), 0, -1, 2**31, 2**62), pick(dice, 3, 0, 1, -1, 2**40)
    made = M.ModelInferRequest(model_name=pick(dice, "mirror", "add", "nothing", ""), id=pick(dice, "", "x", "é" * 50))
    made.model_version = pick(dice, "", "1", "2")
    for _ in range(pick(dice, 1, 0, 2)):
        one = made.inputs.add(name=pick(dice, "input", "", "inputs"), datatype=pick(dice, "FP32", "FP64", "x", "BYTES"))
        one.shape.extend(pick(dice, [rows, length], [], [rows], [rows, length, 1], [1] * 40))
        count = pick(dice, max(rows, 0) * max(length, 0), 0, 7)
        numbers = [dice.random() for _ in range(min(count, 50))]
        if dice.random() < 0.6:
            data = np.array(numbers, "f4").tobytes()
            made.raw_input_contents.append(pick(dice, data, data[:-1], data + b"x", b""))
        if not made.raw_input_contents or dice.random() < 0.05:
            getattr(one.contents, pick(dice, "fp32_contents", "fp64_contents")).extend(numbers)
        if dice.random() < 0.05:
            one.parameters["shared_memory_region"].string_param = "x"
    if dice.random() < 0.1:
        made.outputs.add(name=dice.choice(("output", "nothing")))
    data = bytearray(made.SerializeToString())
    for _ in range(pick(dice, 0, 1, 3)):
        if data:
            data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data[: pick(dice, len(data), dice.randint(0, len(data)))])


def expected(data: bytes) -> list[list[float]] | None:
    """What comes of it; None if it is not sound."""
    try:
        asked = M.ModelInferRequest.FromString(data)
    except DecodeError:
        return None
    is_right = len(asked.inputs) == 1 and asked.model_name == "mirror" and asked.model_version in {"", "1"}
    if not is_right or any(one.name != "output" for one in asked.outputs) or len(asked.raw_input_contents) > 1:
        return None
    (one,) = asked.inputs
    raw, typed = asked.raw_input_contents, one.HasField("contents")
    if one.name != "input" or one.datatype != "FP32" or len(one.shape) != 2 or min(one.shape) < 0 or not one.shape[0]:
        return None
    region = one.parameters.get("shared_memory_region")
    if region is not None and region.WhichOneof("parameter_choice"):  # of an unknown type it says nothing
        return None
    if (raw and typed) or "timeout" in asked.parameters:
        return None
    fields = {field.name for field, _ in one.contents.ListFields()}
    if not fields <= {"fp32_contents"} or (raw and len(raw[0]) % 4):
        return None
    values = np.frombuffer(raw[0], "f4") if raw else np.array(one.contents.fp32_contents, "f4")
    if len(values) != one.shape[0] * one.shape[1] or one.shape[0] > 1024:
        return None
    try:
        return values.reshape(tuple(one.shape)).tolist()
    except ValueError:  # nothing of it is there, and yet it is too big for any memory
        return None


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    differences = 0
    patient = Overrides(worker_kind="thread", timeout_ms=3_600_000)
    with (
        KServed(overrides=patient, read_timeout_s=NEVER_S, write_timeout_s=NEVER_S) as port,
        Watch("infer_rpc") as watch,
    ):
        infer = port.connect().unary_unary(f"/{SERVICE}/ModelInfer")
        end = awake() + seconds
        while awake() < end and differences < 20:
            watch.note()
            data = body(dice)
            wanted = expected(data)
            try:
                answer = M.ModelInferResponse.FromString(infer(data))
                found = (
                    np.frombuffer(answer.raw_output_contents[0], "f4").reshape(tuple(answer.outputs[0].shape)).tolist()
                )
                status = "OK"
            except grpc.RpcError as error:
                found, status = None, error.code().name
            counts[status] += 1
            is_right = repr(found) == repr(wanted) if wanted is not None else status in BLAMES
            if not is_right:
                differences += 1
                print(f"{data!r} gave {status} {found!r:.200}, and {wanted!r:.200} was expected", flush=True)
        if port.surprises:
            differences += 1
            print(*map(str, port.surprises[:3]), sep="\n", flush=True)
    print(f"infer_rpc: seed {seed}: {dict(counts)}, {differences} differences", flush=True)
    return differences


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
