# SPDX-License-Identifier: Apache-2.0
"""How repositories, and the memory that their models share, stand on the page of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from prometheus_client import Metric

_OF_EACH: Final = {
    "models": "Models that are there",
    "versions": "Versions that are there",
    "looks_total": "How often the source was listed",
    "look_failures_total": "How often it could not be listed",
    "look_seconds": "How long the last look took",
    "looked_timestamp_seconds": "When it was listed last",
    "disk_versions": "Versions on the disk",
    "disk_bytes": "Bytes of the versions on the disk",
    "copied_total": "Versions that were copied to the disk",
    "copied_bytes_total": "Bytes that were copied to the disk",
    "disk_evictions_total": "Versions that left the disk to make room",
}
_OF_MEMORY: Final = {
    "loaded_versions": "Versions in memory",
    "loaded_bytes": "Bytes of the files of the versions in memory",
    "load_hits_total": "Requests whose version was in memory",
    "load_misses_total": "Requests that waited until their version was loaded",
    "loads_total": "Versions that were loaded, or begun to be",
    "load_failures_total": "Versions that could not be loaded",
    "load_evictions_total": "Versions that left the memory to make room",
    "load_waiting": "Requests that wait until their version is loaded",
}


class StockReading(msgspec.Struct, frozen=True):
    """The numbers of all repositories at this moment, by the names of the families.

    Attributes:
        repositories: Of each, by its place.
        memory: Of the memory.
    """

    repositories: Mapping[str, Mapping[str, float]]
    memory: Mapping[str, float]


class RepositoryCollector:
    """Adds repositories to a page of metrics.

    Attributes:
        reading: What is written; None where there are no repositories.
    """

    def __init__(self) -> None:
        self.reading: StockReading | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; the interface of prometheus-client's collectors."""
        reading = self.reading
        if reading is None:
            return
        for name, text in _OF_EACH.items():
            family = _family(f"forebay_repository_{name}", text, ["repository"])
            for place, told in reading.repositories.items():
                family.add_metric([place], told[name])
            yield family
        for name, text in _OF_MEMORY.items():
            family = _family(f"forebay_{name}", text, [])
            family.add_metric([], reading.memory[name])
            yield family


def _family(name: str, text: str, labels: list[str]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    return (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, text, labels=labels)
