# SPDX-License-Identifier: Apache-2.0
"""Requests for the runners of ops, and runners of ops, without a server."""

from __future__ import annotations

from typing import Any

import msgspec

from forebay.surfaces.pipeline.codes import number_of
from forebay.surfaces.pipeline.ops.op import REQUEST, Op
from forebay.surfaces.pipeline.ops.runner import OpInstances, OpRun, OpRunner
from forebay.types.call import Failure
from forebay.workers.runner import WorkerContext


class Item(msgspec.Struct):
    body: Any
    params: dict[str, Any]
    size: int = 1


def request(value: Any, data_id: int = 0, log_id: int = 0) -> Item:
    """An item whose op comes first in its pipeline."""
    return Item({REQUEST: value}, {"data_id": data_id, "log_id": log_id})


def requests(*values: Any) -> list[Item]:
    return [request(value, data_id=place, log_id=100 + place) for place, value in enumerate(values)]


def opened(op: Op, *, client: Any = None, own_process: bool = False, index: int = 0, **settings: Any) -> OpRunner:
    """A runner of an op, ready for batches."""
    client_for = None if client is None else lambda _index: client
    instances = OpInstances(op, OpRun(**settings), client_for=client_for, own_process=own_process)
    runner = instances.runner()
    runner.open(WorkerContext(index=index))
    return runner


def told(outcome: Any) -> tuple[int | None, str]:
    """The number and the text of a failure."""
    assert isinstance(outcome, Failure), outcome
    return number_of(outcome.error), outcome.error.message


def run_one(op: Op, value: Any, **arguments: Any) -> Any:
    """The outcome of one request."""
    (outcome,) = opened(op, **arguments).run([request(value, data_id=3, log_id=7)])
    return outcome
