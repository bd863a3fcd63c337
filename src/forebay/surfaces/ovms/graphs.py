# SPDX-License-Identifier: Apache-2.0
"""A graph that is served: one endpoint for it, and one for each of its nodes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError
from forebay.graph.drawing.draw import Drawable
from forebay.graph.pool import GraphPool, Node
from forebay.protocols.native import Contract
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.ovms.graph_calls import VERSION, GraphCalls, GraphStream, face_of
from forebay.surfaces.ovms.graph_pbtxt import meant
from forebay.surfaces.ovms.handlers import HandlerRunner, Modules
from forebay.surfaces.ovms.linked_graph import GraphLayout, InferenceNode
from forebay.surfaces.ovms.linker import read_layout
from forebay.surfaces.ovms.model_nodes import InferenceRunner, PassingRunner, SharedModels
from forebay.surfaces.ovms.model_versions import ModelEntry
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import Runner, RunnerSpec

if TYPE_CHECKING:
    from forebay.server.config import Overrides
    from forebay.surfaces.ovms.config import GraphEntry

THREADS: Final = 8
"""Threads that call one handler at a time, if nobody says."""
SLOTS: Final = 4096
"""Requests and streams that may be inside a graph at a time."""
TIMEOUT_S: Final = 300.0
"""Time a request has; the original sets none."""


class GraphServed(NamedTuple):
    """What came of a graph.

    Attributes:
        sessions: The nodes that run a model, and which; without those whose model is not there.
    """

    served: Served
    layout: GraphLayout
    sessions: list[tuple[InferenceNode, ModelEntry]]


def serve_graph(
    entry: GraphEntry, known: Sequence[ModelEntry], models: SharedModels, overrides: Overrides
) -> GraphServed:
    """Build a graph; none of its code is run here.

    Raises:
        ConfigError: If its file is wrong, with the line, or its configuration.
    """
    if entry.problem:
        raise ConfigError(entry.problem)
    if entry.where and not entry.graph_path.is_file():
        msg = f"{entry.where}: the graph '{entry.name}' is to be in {entry.graph_path}, and no file is there"
        raise ConfigError(msg)
    layout = read_layout(entry.name, entry.graph_path, entry.base_path)
    _check_metadata(entry, layout)
    sessions, unknown = _sessions(layout, known)
    layout = msgspec.structs.replace(layout, warnings=(*layout.warnings, *unknown))
    calls = GraphCalls(entry.name, layout, entry.inputs, "; ".join(unknown))
    modules = Modules()
    threads = overrides.threads if overrides.threads > 1 else THREADS
    endpoints = {
        name: _endpoint(f"{entry.name}/{name}", HandlerRunner(node, modules), threads, overrides.stuck_s)
        for name, node in layout.python.items()
    }
    for name, node in layout.inference.items():
        model = sessions[name]
        # No request comes as far as a model that is not there.
        runner = Runner() if model is None else InferenceRunner(node, model, models)
        at_a_time = 1 if model is None else model.options.requests
        endpoints[name] = _endpoint(f"{entry.name}/{name}", runner, at_a_time, overrides.stuck_s)
    for name, called in layout.passing.items():
        endpoints[name] = _endpoint(f"{entry.name}/{name}", PassingRunner(called), threads, overrides.stuck_s)
    pool = GraphPool(
        layout.spec,
        {name: Node(endpoint=endpoint) for name, endpoint in endpoints.items()},
        slots=SLOTS,
        decode=calls.decode,
        encode=calls.encode,
    )
    config = EndpointConfig(
        name=entry.name,
        version=VERSION,
        timeout_s=TIMEOUT_S if overrides.timeout_ms is None else overrides.timeout_ms / 1000,
        max_timeout_s=float("inf"),
        deadline_ms=overrides.deadline_ms,
        split=False,
        streams=True,
        is_mixed=True,
    )
    batching = BatchConfig(max_size=1, idle="go", capacity=overrides.max_queue or SLOTS)
    drawing = Drawable(layout.spec, _labels(layout), {name: f"{entry.name}/{name}" for name in endpoints})
    endpoint = Endpoint(config, batching, pool)
    face = face_of(calls, entry.inputs, entry.outputs)
    session = functools.partial(GraphStream, calls, endpoint)
    served = Served(
        endpoint, Contract(), nodes=endpoints, drawing=drawing, tensors=face, session=session, has_versions=False
    )
    there = [(node, model) for name, node in layout.inference.items() if (model := sessions[name]) is not None]
    return GraphServed(served, layout, there)


def _check_metadata(entry: GraphEntry, layout: GraphLayout) -> None:
    """Refuse types and shapes of streams that the graph has not, naming the nearest that it has."""
    outputs = [one.called for one in layout.outputs]
    for side, declared, names in (("inputs", entry.inputs, layout.inputs), ("outputs", entry.outputs, outputs)):
        for one in declared:
            if one.name not in names:
                msg = f"{entry.where}: metadata.{side} names '{one.name}', which the graph has not"
                raise ConfigError(msg + meant(one.name, names))


def _endpoint(name: str, runner: Runner, threads: int, stuck_s: float) -> Endpoint:
    """Put a runner behind a queue. All threads share it: all callers have the same handler object."""
    spec = RunnerSpec(factory="", local=lambda: runner)
    config = EndpointConfig(name=name, version=VERSION, timeout_s=TIMEOUT_S, max_timeout_s=float("inf"), split=False)
    batching = BatchConfig(max_size=1, idle="go", capacity=1 << 20)
    return Endpoint(config, batching, ThreadPool(spec, workers=1, threads=threads, stuck_s=stuck_s))


def _sessions(layout: GraphLayout, known: Sequence[ModelEntry]) -> tuple[dict[str, ModelEntry | None], list[str]]:
    """Return the model of each node that infers, and what is said of those that are not there."""
    found: dict[str, ModelEntry | None] = {}
    unknown: list[str] = []
    for name, node in layout.inference.items():
        found[name] = _model(node, known)
        if found[name] is None:
            version = f" version {node.version}" if node.version else ""
            there = ", ".join(f"'{one.name}' version {one.version}" for one in known) or "none"
            unknown.append(
                f"{layout.path}:{node.line}: there is no model '{node.servable}'{version} for the session of "
                f"node '{name}'; there is {there}"
            )
    return found, unknown


def _model(node: InferenceNode, known: Sequence[ModelEntry]) -> ModelEntry | None:
    named = [one for one in known if one.name == node.servable and node.version in {"", "0", one.version}]
    return max(named, key=lambda one: int(one.version), default=None)


def _labels(layout: GraphLayout) -> Mapping[str, Sequence[str]]:
    labels = {name: [node.handler.rpartition("/")[2]] for name, node in layout.python.items()}
    labels |= {name: ["reads the tensor"] for name in layout.passing}
    return labels | {name: [f"model {node.servable}"] for name, node in layout.inference.items()}
