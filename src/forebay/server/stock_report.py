# SPDX-License-Identifier: Apache-2.0
"""What is told of repositories: at `/models`, at the start, and to Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from forebay.observe.metrics.repository_metrics import StockReading
from forebay.types.plurals import counted

if TYPE_CHECKING:
    from forebay.repository.repository import RepositoryStatistics
    from forebay.server.stock import Stock


def describe(stock: Stock) -> dict[str, Any]:
    """Return what `/models` tells of the repositories themselves, and of the memory."""
    repositories = [
        {
            "place": one.repository.place,
            "problem": one.repository.problem,
            "problems": list(one.repository.catalog.problems),
            **msgspec.to_builtins(one.repository.statistics()),
        }
        for one in stock.stocked
    ]
    return {"repositories": repositories, "memory": msgspec.to_builtins(stock.statistics())}


def summary(stock: Stock) -> list[str]:
    """Return what is served of each repository: a line for a person."""
    lines: list[str] = []
    for one in stock.stocked:
        catalog, told = one.repository.catalog, one.repository.statistics()
        shown = ", ".join([*catalog.models][:5]) + (", ..." if told.models > 5 else "")
        when = "loaded when they are asked for" if stock.is_lazy else "loaded at the start"
        count = counted(told.versions, "version")
        if told.models != 1:
            count = f"{told.models} models with {count}"
        lines.append(f"POST /models/NAME of {one.repository.place}: {count} ({shown or 'none yet'}), {when}")
    return lines


def reading(stock: Stock) -> StockReading:
    """Return the numbers of the repositories and of the memory, as Prometheus has them."""
    memory = stock.statistics()
    return StockReading(
        {one.repository.place: _numbers(one.repository.statistics()) for one in stock.stocked},
        {
            "loaded_versions": memory.loaded,
            "loaded_bytes": memory.bytes,
            "load_hits_total": memory.hits,
            "load_misses_total": memory.misses,
            "loads_total": memory.loads,
            "load_failures_total": memory.failures,
            "load_evictions_total": memory.evictions,
            "load_waiting": memory.waiting,
        },
    )


def _numbers(told: RepositoryStatistics) -> dict[str, float]:
    disk = told.disk
    return {
        "models": told.models,
        "versions": told.versions,
        "looks_total": told.looks,
        "look_failures_total": told.failures,
        "look_seconds": told.look_s,
        "looked_timestamp_seconds": told.looked_s,
        "disk_versions": 0 if disk is None else disk.count,
        "disk_bytes": 0 if disk is None else disk.bytes,
        "copied_total": 0 if disk is None else disk.misses,
        "copied_bytes_total": told.copied_bytes,
        "disk_evictions_total": 0 if disk is None else disk.evictions,
    }
