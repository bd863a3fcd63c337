# SPDX-License-Identifier: Apache-2.0
"""`file.py:ocr`: a composition of models and functions over HTTP, each of its nodes an endpoint of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

from forebay.batching.queue import BUNDLE_S, BatchConfig
from forebay.errors import ConfigError
from forebay.graph.composition.border import Wire, WirePool
from forebay.graph.composition.compose import Composition, compositions_in, nodes_in
from forebay.graph.composition.node_keys import NodeKeys
from forebay.graph.drawing.draw import Drawable
from forebay.graph.pool import GraphPool, Node
from forebay.protocols.openapi import Described
from forebay.server.served import Served, contract_of
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.models.model import defined_models
from forebay.surfaces.native.model_options import (
    batching_of,
    devices_of,
    isolates,
    seats_of,
    single_flight_of,
    stream_idle_of,
    times_of,
    workers_of,
)
from forebay.surfaces.native.pools import Workers, pool_of
from forebay.surfaces.native.target_file import package_in, root_of
from forebay.types.did_you_mean import nearest
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire.objects import packed

if TYPE_CHECKING:
    from forebay.graph.composition.node import Kind, NodeDefinition
    from forebay.graph.composition.symbols import NodeCall
    from forebay.server.config import Overrides
    from forebay.types.devices import Device
    from forebay.workers.pool import Pool


class GraphTarget(msgspec.Struct, frozen=True):
    """A composition that is to be served.

    Attributes:
        name: Its name there.
        overrides: What the person says about every model and node.
        given: Which of that was said and is not a default.
    """

    composition: Composition
    path: Path
    name: str
    overrides: Overrides
    given: Collection[str]


def compositions_of(module: ModuleType, name: str | None) -> dict[str, Composition]:
    """Return the compositions that a target means: the one of that name, without a name all that the module defines.

    Raises:
        ConfigError: If nothing has that name, and a composition has one much like it.
    """
    found = compositions_in(module)
    if name is None:
        return {name: one for name, one in found.items() if one.__module__ == module.__name__}
    if name in found:
        return {name: found[name]}
    hint = nearest(name, found)
    if not hasattr(module, name) and hint is not None:
        raise ConfigError(f"{module.__file__} has no composition named {name}; did you mean {hint}?")
    return {}


def unserved(module: ModuleType, compositions: Mapping[str, Composition]) -> list[str]:
    """Return warnings of what a module with compositions has and nobody serves: nodes in no graph, models."""
    used = [call.node for composition in compositions.values() for call in composition.graph.calls.values()]
    lines = [
        f"{module.__file__}: no composition calls the node '{name}'"
        for name, node in nodes_in(module).items()
        if not any(node.is_same(other) for other in used)
    ]
    in_nodes = [node.target for node in [*used, *nodes_in(module).values()]]
    return lines + [
        f"{module.__file__}: the model {model.__name__} is in no composition and is not served; name it to serve it, "
        f"as {module.__file__}:{model.__name__}"
        for model in defined_models(module)
        if model not in in_nodes
    ]


def serve_composition(target: GraphTarget) -> Served:
    """Build the endpoint of a composition, and those of its nodes.

    Raises:
        ConfigError: If the graph is not well-formed, or person and nodes want what does not go together.
    """
    composition, overrides = target.composition, target.overrides
    settings, graph = composition.settings, composition.graph
    if overrides.single_flight not in {None, "off"}:
        msg = f"{composition.name} is a graph, of which only models can share runs; leave out --single-flight, and set "
        msg += "single_flight in the classes of those that are to"
        raise ConfigError(msg)
    wire = Wire(composition)
    endpoints = _endpoints(target)
    nodes = {name: _node(call, endpoints[call.node.name], target) for name, call in graph.calls.items()}
    pool = WirePool(wire, GraphPool(graph.spec, nodes, slots=settings.max_in_flight), slots=settings.max_in_flight)
    timeout_s, max_timeout_s = times_of(
        composition.name, overrides.timeout_ms, settings.timeout_ms, overrides.max_timeout_ms
    )
    config = EndpointConfig(
        name=target.overrides.name or composition.name,
        version=target.overrides.version or settings.version,
        max_timeout_s=max_timeout_s,
        timeout_s=timeout_s,
        deadline_ms=overrides.deadline_ms or settings.deadline_ms,
        streams=graph.streams,
        stream_idle_s=0.0,  # that of the node that streams holds
    )
    batching = BatchConfig(max_size=1, idle="go", capacity=overrides.max_queue or settings.max_queue)
    described = Described(
        name=config.name,
        version=config.version,
        description=composition.function.__doc__ or "",
        input=wire.given,
        output=wire.answer,
        query=wire.query,
        streams=graph.streams,
    )
    return Served(
        Endpoint(config, batching, pool),
        contract_of(described),
        described,
        nodes=endpoints,
        drawing=drawable(target),
        tensors=wire.tensors,
    )


def drawable(target: GraphTarget) -> Drawable:
    """Return the graph of a composition with the settings of its nodes."""
    graph = target.composition.graph
    name = target.overrides.name or target.composition.name
    return Drawable(
        graph.spec,
        {called: _label(call, target) for called, call in graph.calls.items()},
        {called: f"{name}/{call.node.name}" for called, call in graph.calls.items()},
    )


def _label(call: NodeCall, target: GraphTarget) -> list[str]:
    node = call.node
    kind = _kind(node, target)
    workers, threads = _workers(node, target)
    many = {"inline": "inline", "thread": f"{workers} threads", "process": f"{workers} processes"}
    lines = [many[kind] if workers > 1 or kind == "inline" else f"1 {kind}"]
    if threads > 1:
        lines.append(f"{threads} threads each")
    batch_size = _batching(node, target).max_size
    if batch_size > 1:
        lines.append(f"batches of {batch_size}")
    if call.spread is not None:
        lines.append(f"for each of {call.spread}")
    return lines


def _endpoints(target: GraphTarget) -> dict[str, Endpoint]:
    """Build one endpoint for each node, however often it is called."""
    first_calls: dict[str, NodeCall] = {}
    for call in target.composition.graph.calls.values():
        first_calls.setdefault(call.node.name, call)
    return {name: _endpoint(call, target) for name, call in first_calls.items()}


def _endpoint(call: NodeCall, target: GraphTarget) -> Endpoint:
    node, composition = call.node, target.composition
    config = EndpointConfig(
        name=f"{target.overrides.name or composition.name}/{node.name}",
        version=target.overrides.version or composition.settings.version,
        timeout_s=composition.settings.timeout_ms / 1000,
        max_timeout_s=float("inf"),  # the graph has one
        streams=node.model_settings.streams,
        stream_idle_s=stream_idle_of(node.model_settings, target.overrides),
        single_flight=single_flight_of(f"node '{node.name}'", node.model_settings, target.overrides),
    )
    keys = None
    if node.key_of is not None:
        keys = NodeKeys(node.key_of, f"batch_key of node '{node.name}'", list(node.signature.ports))
    return Endpoint(config, _batching(node, target), _pool(call, target), keys)


def _node(call: NodeCall, endpoint: Endpoint, target: GraphTarget) -> Node:
    timeout_ms = call.node.settings.timeout_ms
    return Node(
        endpoint=endpoint,
        timeout_s=None if timeout_ms is None else timeout_ms / 1000,
        attempts=call.node.settings.attempts,
        spread=call.spread,
        packs=_kind(call.node, target) == "process",
        streams=call.node.model_settings.streams,
    )


def _batching(node: NodeDefinition, target: GraphTarget) -> BatchConfig:
    """Return how a node is batched: what it says itself, then the person, then its class."""
    own = {
        name: getattr(node.settings, name)
        for name in ("max_batch_size", "max_wait_ms", "max_queue")
        if getattr(node.settings, name) is not None
    }
    # The queue that the person means is the graph's. In those of its nodes, all that is inside has to find room.
    overrides = msgspec.structs.replace(target.overrides, **dict.fromkeys(["max_queue", *own]))
    if not node.runs_batches:  # what holds for batches says nothing about a function of one sample
        overrides = msgspec.structs.replace(
            overrides, max_batch_size=None, max_wait_ms=None, idle=None, policy=None, latency_objective_ms=None
        )
    batching = batching_of(f"node '{node.name}'", msgspec.structs.replace(node.model_settings, **own), overrides)
    is_alone = _workers(node, target) == (1, 1) and _kind(node, target) != "inline"
    if is_alone and not node.runs_batches:
        return msgspec.structs.replace(batching, idle="go", bundle_s=BUNDLE_S)
    return batching


def _kind(node: NodeDefinition, target: GraphTarget) -> Kind:
    if node.settings.worker_kind is not None:
        return node.settings.worker_kind
    if node.is_function and "worker_kind" not in target.given:
        return "thread"
    return target.overrides.worker_kind


def _workers(node: NodeDefinition, target: GraphTarget) -> tuple[int, int]:
    """Return how many workers a node has, and how many threads each of them."""
    settings, overrides = node.settings, target.overrides
    workers = workers_of(settings.workers or overrides.fixed_workers, _devices(node, target))
    return workers, settings.threads or overrides.threads


def _devices(node: NodeDefinition, target: GraphTarget) -> tuple[Device, ...]:
    """Return what the workers of a node run on; what the person says holds for models, as functions rarely need any."""
    said = node.settings.devices
    if not said and not node.is_function:
        said = target.overrides.devices or node.model_settings.devices
    return devices_of(f"node '{node.name}'", said, _kind(node, target))


def _pool(call: NodeCall, target: GraphTarget) -> Pool:
    node, overrides = call.node, target.overrides
    workers, threads = _workers(node, target)
    devices = _devices(node, target)
    is_isolating = isolates(f"node '{node.name}'", node.model_settings, overrides)
    own = msgspec.structs.replace(overrides, max_batch_size=node.settings.max_batch_size or overrides.max_batch_size)
    seats = seats_of(node.model_settings, own)
    kwargs = {
        "path": str(target.path.absolute()),
        "composition": target.name,
        "node": call.name,
        "isolate_errors": is_isolating,
        "package": package_in(target.composition.function.__module__),
    }
    spec = RunnerSpec(factory="forebay.graph.composition.compose:from_file", kwargs=kwargs)
    wanted = Workers(
        what=f"node '{node.name}'",
        kind=_kind(node, target),
        count=workers,
        threads=threads,
        devices=devices,
        seats=seats,
        isolates=is_isolating or not node.runs_batches,
        is_async=node.is_async,
        has_health=node.model_settings.has_health,
        path=root_of(target.composition.function.__module__),
        local=lambda: node.runner(isolate_errors=is_isolating),
    )
    if wanted.kind == "process" and not seats:  # parts leave as they are sent to clients
        spec = packed(spec)
    return pool_of(spec, wanted, overrides)
