# SPDX-License-Identifier: Apache-2.0
"""Turns ops that know their predecessors into a checked graph: which ops are used, what each reads, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import msgspec

from forebay.errors import ConfigError
from forebay.graph.spec import OUT, GraphSpec, NodeSpec, check
from forebay.surfaces.pipeline.config import PipelineConfig, settle
from forebay.surfaces.pipeline.dag.input_order import input_order
from forebay.surfaces.pipeline.ops import hooks
from forebay.surfaces.pipeline.ops.op import REQUEST, Op, RequestOp, ResponseOp
from forebay.surfaces.pipeline.predictors.model_settings import PredictorSettings
from forebay.types.did_you_mean import listed, meant

RESULT: Final = "result"
"""The one output of the graph."""
NEVER_S: Final = 24 * 3600.0
"""Time a request has where none is configured: the original sets none, and nothing may wait for ever."""


class Dag(msgspec.Struct, frozen=True):
    """A pipeline ready to be put on workers.

    Attributes:
        spec: Its nodes, one for each op that leads to the answer, named as the ops are.
        ops: The ops by name, each after those it reads.
        settings: The settings that hold for each of them.
    """

    spec: GraphSpec
    request_op: RequestOp
    response_op: ResponseOp
    ops: Mapping[str, Op]
    settings: Mapping[str, Mapping[str, Any]]
    warnings: tuple[str, ...] = ()

    def is_shared(self, stream: str) -> bool:
        """Tell whether a stream has several readers: ops, or the client."""
        readers = sum(stream in node.inputs.values() for node in self.spec.nodes)
        return readers + (stream in self.spec.outputs.values()) > 1

    def levels(self) -> list[list[str]]:
        """Return the names of its ops by level: the length of the longest path from the request."""
        level = {REQUEST: 0}
        for name, op in self.ops.items():
            level[name] = 1 + max(level[before.name] for before in op.get_input_ops())
        return [[name for name, at in level.items() if at == wanted] for wanted in range(max(level.values()) + 1)]

    def lines(self) -> list[str]:
        """Return the levels and the edges, for a person."""
        levels = [f"level {number}: {', '.join(names)}" for number, names in enumerate(self.levels())]
        edges = [
            f"{name} <- {', '.join(before.name for before in op.get_input_ops())}" for name, op in self.ops.items()
        ]
        return levels + edges


def wire(name: str, response_op: ResponseOp, config: PipelineConfig) -> Dag:
    """Check the ops that lead to the answer and make a graph of them.

    Args:
        name: What messages and metrics call it.

    Raises:
        ConfigError: If they are not a graph from one request op to the answer, or one of them has settings that are
            wrong; it names the ops concerned.
    """
    used = _before(response_op)
    sources = [op for op in used if isinstance(op, RequestOp)]
    ops = [op for op in used if not isinstance(op, RequestOp)]
    if not ops:
        raise ConfigError("expected at least one op between the RequestOp and the ResponseOp, got none")
    first_arrival = config.dag.first_arrival
    _check_ops(ops, first_arrival=first_arrival)
    if len(sources) != 1:
        msg = (
            f"expected one RequestOp that leads to the answer, got {len(sources)}; it is the input op of the first ops"
        )
        raise ConfigError(msg)
    _check_circle(ops)
    order = input_order(response_op.get_input_ops()[0])
    spec = GraphSpec(
        name=name,
        inputs=(REQUEST,),
        outputs={RESULT: response_op.get_input_ops()[0].name},
        nodes=tuple(_node(op, order.get(op), first_arrival=first_arrival) for op in ops),
    )
    warnings = [*check(spec), *_unused(used, config)]
    by_name = {op.name: op for op in _sorted(ops)}
    settings = {op.name: _settings(op, config, warnings) for op in by_name.values()}
    warnings += _batches(settings, config)
    return Dag(spec, sources[0], response_op, by_name, settings, tuple(warnings))


def _before(response_op: ResponseOp) -> list[Op]:
    """Return the ops the answer depends on, nearest first."""
    found: dict[Op, None] = {}
    waiting = response_op.get_input_ops()
    while waiting:
        op = waiting.pop(0)
        if op not in found:
            found[op] = None
            waiting += op.get_input_ops()
    return list(found)


def _check_ops(ops: Iterable[Op], *, first_arrival: bool) -> None:
    names: set[str] = set()
    for op in ops:
        inputs = op.get_input_ops()
        if op.name in names or op.name == REQUEST:
            whose = "is the request's own" if op.name == REQUEST else "is given to two ops"
            raise ConfigError(f"the name '{op.name}' {whose}; give each op a name of its own")
        names.add(op.name)
        hooks.OpHooks(op)  # raises if one of them cannot be called
        if not inputs:
            msg = f"op '{op.name}' has no input_ops, so nothing would ever run it; give it the RequestOp or another op"
            raise ConfigError(msg)
        if len(set(inputs)) < len(inputs):
            raise ConfigError(f"op '{op.name}' names the same op twice in its input_ops")
        if op.get_jump_to_ops():
            msg = f"op '{op.name}' has jump_to_ops, which is not supported; let the next ops skip what is not for them"
            raise ConfigError(msg)
        if len(inputs) > 1 and not first_arrival and not hooks.overrides(op, "preprocess"):
            several = listed(one.name for one in inputs)
            msg = (
                f"op '{op.name}' has several input ops ({several}); override its preprocess to make one dict of theirs"
            )
            raise ConfigError(msg)


def _node(op: Op, order: Sequence[Op] | None, *, first_arrival: bool) -> NodeSpec:
    inputs = {one.name: one.name for one in order or op.get_input_ops()}
    policy = "first" if first_arrival and len(inputs) > 1 else "sync"
    return NodeSpec(name=op.name, inputs=inputs, outputs={OUT: op.name}, policy=policy)


def _check_circle(ops: Iterable[Op]) -> None:
    """Refuse ops that wait for each other, naming them in the order in which they would run."""
    try:
        TopologicalSorter({op: op.get_input_ops() for op in ops}).prepare()
    except CycleError as error:
        circle = [f"'{op.name}'" for op in error.args[1]]
        cure = f"take {circle[-2]} out of the input_ops of {circle[-1]}"
        raise ConfigError(f"ops wait for each other in a cycle: {' -> '.join(circle)}; {cure}") from None


def _sorted(ops: list[Op]) -> list[Op]:
    """Return the ops of a graph without cycles, each after those it reads."""
    done: dict[Op, None] = {}
    waiting = ops
    while waiting:
        ready = [op for op in waiting if all(isinstance(one, RequestOp) or one in done for one in op.get_input_ops())]
        done.update(dict.fromkeys(ready))
        waiting = [op for op in waiting if op not in done]
    return list(done)


def _settings(op: Op, config: PipelineConfig, warnings: list[str]) -> Mapping[str, Any]:
    """Return the settings of an op, and say what is odd about them."""
    settings = settle(op.name, op.given, config.op.get(op.name, {}))
    settings["timeout"] = min(settings["timeout"], NEVER_S * 1000)  # clocks take no time without an end
    size = settings["batch_size"]
    if config.build_dag_each_worker and size > 1:
        warnings.append(f"op '{op.name}': batch_size {size} is taken as 1, because build_dag_each_worker is true")
        settings.update(batch_size=1, auto_batching_timeout=None)
    if settings["server_endpoints"] and settings["client_type"] is None:
        settings["client_type"] = config.dag.client_type
    try:
        predictor = PredictorSettings.of_op(op.name, settings, pack_tensors=op.is_tensor_format)
    except ConfigError as error:
        raise ConfigError(config.located(op.name, error.message)) from None
    if predictor.kind is None and settings["client_type"] is not None and op.local_service_handler is None:
        warnings.append(
            f"op '{op.name}' has the client_type {settings['client_type']} and no server to ask; "
            "server_endpoints or local_service_conf.model_config names its model"
        )
    local: Mapping[str, Any] = settings["local_service_conf"] or {}
    has_model = settings["server_endpoints"] or local.get("model_config")
    may_get_one = op.local_service_handler is not None or hooks.overrides(op, "init_op")
    if hooks.overrides(op, "process") and not has_model and not may_get_one and not settings["run_process"]:
        warnings.append(
            f"op '{op.name}': its process is not called, because it has no model; set run_process to true to call it"
        )
    return settings


def _batches(settings: Mapping[str, Mapping[str, Any]], config: PipelineConfig) -> list[str]:
    """Warn of batches that will not be as they are configured, or wait without an end."""
    slots = slots_of(settings, config)
    by = "worker_num" if slots == config.worker_num else "channel_size"
    warnings: list[str] = []
    for name, found in settings.items():
        size, wait_ms = found["batch_size"], found["auto_batching_timeout"]
        if size > slots:
            warnings.append(
                f"op '{name}': a batch will never have its {size} samples, because {by} lets only "
                f"{slots} requests in at a time; raise {by}"
            )
        elif size > 1 and (wait_ms is None or wait_ms <= 0):
            warnings.append(
                f"op '{name}': a batch waits until it has {size} samples, however long that takes; "
                "set auto_batching_timeout to the milliseconds it may wait"
            )
    return warnings


def slots_of(settings: Mapping[str, Mapping[str, Any]], config: PipelineConfig) -> int:
    """Return how many requests may be inside a graph of ops with these settings at a time.

    `channel_size` bounds what waits before each op. The number of requests let in is bounded, so that no more can ever
    wait there. Ops that have a result are never held up: a graph in which nobody waits for room cannot deadlock.
    """
    slots = inside_of(settings) if config.build_dag_each_worker else config.worker_num
    if config.dag.channel_size:
        busy = min(found["concurrency"] * found["batch_size"] for found in settings.values())
        slots = min(slots, config.dag.channel_size + busy)
    return slots


def inside_of(settings: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many requests the ops could work on at a time."""
    return sum(found["concurrency"] for found in settings.values())


def _unused(used: list[Op], config: PipelineConfig) -> list[str]:
    """Warn of ops that are configured but do not exist, or exist but lead nowhere."""
    names = {op.name for op in used}
    warnings: list[str] = []
    for name in config.op:
        if name not in names:
            did_you_mean = meant(name, names - {REQUEST})
            message = f"the configuration names op '{name}', which the graph does not use{did_you_mean}"
            warnings.append(config.at(f"op.{name}", message))
    warnings += [f"op '{op.name}' is not used: its result leads to no answer" for op in _dead_ends(used)]
    return warnings


def _dead_ends(used: list[Op]) -> list[Op]:
    """Return the ops outside the graph that read from it, directly or not."""
    found: dict[Op, None] = {}
    waiting = list(used)
    while waiting:
        for op in waiting.pop(0).readers:
            if op not in used and op not in found and not isinstance(op, ResponseOp):
                found[op] = None
                waiting.append(op)
    return list(found)
