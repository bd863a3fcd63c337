# SPDX-License-Identifier: Apache-2.0
"""What `/models` tells of a model: its settings, the batch sizes that happen, what its workers do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.batching.auto import AutoState
    from forebay.server.served import Served, ServedMethod
    from forebay.serving.endpoint import Endpoint


def facts_of(one: Served) -> dict[str, Any]:
    """Return what is told of a version of a model."""
    endpoint = one.endpoint
    facts = {
        "name": endpoint.name,
        "version": endpoint.config.version,
        "ready": endpoint.accepting and endpoint.pool.statistics().can_answer,
        "description": one.described.description if one.described else "",
        "streams": one.contract.streams,
        "batchable": one.contract.batchable,
        "timeout_ms": round(endpoint.config.timeout_s * 1000),
        "deadline_ms": endpoint.config.deadline_ms,
        **_facts(endpoint),
    }
    if one.methods:
        facts["endpoints"] = [_told_of(method) for method in one.methods]
    if one.nodes:
        facts["nodes"] = {node: _facts(endpoint) for node, endpoint in one.nodes.items()}
    return facts


def _facts(endpoint: Endpoint) -> dict[str, Any]:
    """Return how an endpoint batches and what its workers do."""
    batching = endpoint.batching
    sizes = endpoint.metrics.batch_size
    pool = endpoint.pool.statistics()
    return {
        "batching": {
            "max_batch_size": batching.max_size,
            "idle": batching.idle,
            "max_wait_ms": batching.max_wait_s * 1000 if batching.idle == "wait" else None,
            "max_queue": batching.capacity,
            "batches": sizes.count,
            "mean_batch_size": round(sizes.total / sizes.count, 2) if sizes.count else None,
            "auto": None if endpoint.auto is None else _told(endpoint.auto),
        },
        "workers": {
            "slots": pool.slots,
            "idle": pool.idle,
            "alive": pool.alive,
            "wanted": pool.wanted,
            "restarts": pool.restarts,
            "joined": pool.joined,
            "left": pool.left,
            "devices": pool.devices,
        },
        "in_flight": endpoint.in_flight,
        "waiting": endpoint.waiting,
    }


def _told_of(method: ServedMethod) -> dict[str, Any]:
    """Return what the page of a model tells of a further method."""
    return {
        "path": method.described.path,
        "methods": method.contract.verbs,
        "description": method.described.description,
        "streams": method.contract.streams,
        "batchable": method.contract.batchable,
    }


def _told(auto: AutoState) -> dict[str, Any]:
    """Return what a latency objective has led to, in the units of the page."""
    return {
        "latency_objective_ms": auto.objective_s * 1000,
        "objective_held": auto.objective_held,
        "because": auto.because or None,
        "late": round(auto.late, 4),
        "batch_size": auto.size,
        "waits_for": auto.goal,
        "wait_ms": round(auto.wait_s * 1000, 3),
        "fixed_ms": round(auto.fixed_s * 1000, 4),
        "per_sample_ms": round(auto.per_row_s * 1000, 4),
        "samples_per_s": round(auto.rows_per_s, 1),
    }
