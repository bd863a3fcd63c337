# SPDX-License-Identifier: Apache-2.0
"""How repositories, and the memory that their models share, stand on the page of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from prometheus_client import Metric

_OF_EACH: Final = {
    "models": ("models", "Models that are there"),
    "versions": ("versions", "Versions that are there"),
    "looks_total": ("looks", "How often the source was listed"),
    "look_failures_total": ("failures", "How often it could not be listed"),
    "look_seconds": ("look_s", "How long the last look took"),
    "looked_timestamp_seconds": ("looked_s", "When it was listed last"),
    "disk_versions": ("disk.count", "Versions on the disk"),
    "disk_bytes": ("disk.bytes", "Bytes of the versions on the disk"),
    "copied_total": ("disk.misses", "Versions that were copied to the disk"),
    "copied_bytes_total": ("copied_bytes", "Bytes that were copied to the disk"),
    "disk_evictions_total": ("disk.evictions", "Versions that left the disk to make room"),
}
"""The families of a repository, by what its statistics call them."""
_OF_MEMORY: Final = {
    "loaded_versions": ("loaded", "Versions in memory"),
    "loaded_bytes": ("bytes", "Bytes of the files of the versions in memory"),
    "load_hits_total": ("hits", "Requests whose version was in memory"),
    "load_misses_total": ("misses", "Requests that waited until their version was loaded"),
    "loads_total": ("loads", "Versions that were loaded, or begun to be"),
    "load_failures_total": ("failures", "Versions that could not be loaded"),
    "load_evictions_total": ("evictions", "Versions that left the memory to make room"),
    "load_waiting": ("waiting", "Requests that wait until their version is loaded"),
}


class StockReading(msgspec.Struct, frozen=True):
    """What all repositories tell about themselves at this moment, as plain data.

    Attributes:
        repositories: Of each, by its place.
        memory: Of the memory.
    """

    repositories: Mapping[str, Mapping[str, Any]]
    memory: Mapping[str, Any]


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
        for name, (key, text) in _OF_EACH.items():
            family = _family(f"forebay_repository_{name}", text, ["repository"])
            for place, statistics in reading.repositories.items():
                outer, _, inner = key.rpartition(".")
                found = statistics[outer] or {inner: 0} if outer else statistics  # some keep nothing on the disk
                family.add_metric([place], found[inner])
            yield family
        for name, (key, text) in _OF_MEMORY.items():
            family = _family(f"forebay_{name}", text, [])
            family.add_metric([], reading.memory[key])
            yield family


def _family(name: str, text: str, labels: list[str]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    return (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, text, labels=labels)
