# SPDX-License-Identifier: Apache-2.0
"""A service's numbers under the original's names, in a registry that the user may add to.

With `PROMETHEUS_MULTIPROC_DIR` (or the older `prometheus_multiproc_dir`) in the environment, the numbers of all
processes that share the folder are added up at the scrape.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
_OLD_FOLDER: Final = "prometheus_multiproc_dir"


class Metrics:
    """The metrics of one Ventu object.

    Attributes:
        single: Time of the steps of one inference, by `process`.
        batch: Time of the steps of a batch, by `process`.
        workers: Loops that serve, by `protocol`.
        invalid: Requests that did not fit the schema.
    """

    def __init__(self) -> None:
        folder = self._folder = shared_folder(os.environ)
        if folder:
            os.environ[FOLDER] = folder  # read by prometheus_client when it is imported
            Path(folder).mkdir(parents=True, exist_ok=True)
            from forebay.surfaces.ventu.metric_files import reserve_room

            reserve_room()
        from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

        self.registry = CollectorRegistry()
        text = "Time spent in different part of the processing"
        self.single = Summary("single_process_time", text, ("process",), registry=self.registry)
        self.batch = Summary("batch_process_time", text, ("process",), registry=self.registry)
        self.workers = Gauge(
            "process_worker",
            "numbers of workers",
            ("protocol",),
            multiprocess_mode="livesum",
            registry=self.registry,
        )
        self.invalid = Counter("validation_error_counter", "numbers of validation errors", registry=self.registry)

    def page(self) -> tuple[bytes, str]:
        """Return the page for Prometheus and its media type."""
        return write(merged(self._folder) if self._folder else self.registry)


def shared_folder(environment: Mapping[str, str]) -> str | None:
    """Return the folder that an environment has processes share, None if it names none."""
    return environment.get(FOLDER) or environment.get(_OLD_FOLDER)


def merged(folder: str, alive: Collection[int] | None = None) -> CollectorRegistry:
    """Return a registry that adds up what processes have written into a folder.

    Args:
        alive: Processes that run; what others have said about the present is forgotten. None forgets nothing.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    if alive is not None:
        for file in Path(folder).glob("gauge_live*_*.db"):
            if int(file.stem.rpartition("_")[2]) not in alive:
                file.unlink(missing_ok=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)
    return registry


def write(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Return the page of a registry and its media type."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return generate_latest(registry), CONTENT_TYPE_LATEST
