# SPDX-License-Identifier: Apache-2.0
"""What is told of repositories: at `/models`, at the start, and to Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from forebay.observe.metrics.repository_metrics import StockReading
from forebay.types.plurals import counted

if TYPE_CHECKING:
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
    """Return the numbers of the repositories and of the memory, for Prometheus."""
    repositories = {one.repository.place: msgspec.to_builtins(one.repository.statistics()) for one in stock.stocked}
    return StockReading(repositories, msgspec.to_builtins(stock.statistics()))
