# SPDX-License-Identifier: Apache-2.0
"""Runners for the nodes of test graphs; importable, so that worker processes can build them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from forebay.errors import InvalidRequest
from forebay.graph.values import SKIP, Outputs, inputs_of
from forebay.types.call import Failure
from forebay.types.failures import failure_of
from forebay.workers.runner import Runner


class Each(Runner):
    """Calls a function with the inputs of each item, or of each sample of an item that is spread."""

    def __init__(self, function: Callable[[dict[str, Any]], Any]) -> None:
        self.function = function
        self.batches: list[int] = []

    def run(self, items: Any) -> list[Any]:
        self.batches.append(sum(item.size for item in items))
        return [self.one(inputs_of(item)) for item in items]

    def one(self, inputs: Any) -> Any:
        try:
            return [self.function(each) for each in inputs] if isinstance(inputs, list) else self.function(inputs)
        except Exception as error:
            return failure_of(error)


def total(inputs: dict[str, Any]) -> Any:
    return sum(inputs.values())


def double(inputs: dict[str, Any]) -> Any:
    (value,) = inputs.values()
    return value * 2


def pid_and_sum(inputs: dict[str, Any]) -> Any:
    (value,) = inputs.values()
    return {"pid": os.getpid(), "sum": float(value.sum()), "array": value + 1}


def nap(inputs: dict[str, Any]) -> Any:
    (value,) = inputs.values()
    time.sleep(value)
    return threading.get_ident()


def parity(inputs: dict[str, Any]) -> Any:
    (value,) = inputs.values()
    return Outputs({"odd" if value % 2 else "even": value})


def dies(inputs: dict[str, Any]) -> Any:
    if "die" in inputs.values():
        os.kill(os.getpid(), 9)
    return fails(inputs)


def fails(inputs: dict[str, Any]) -> Any:
    (value,) = inputs.values()
    if value == "raise":
        raise ValueError("it cannot be")
    if value == "refuse":
        return Failure(InvalidRequest("not like this"))
    if value == "skip":
        return SKIP
    if value == "sleep":
        time.sleep(0.2)
    return value


def named(function: str) -> Each:
    return Each(globals()[function])
