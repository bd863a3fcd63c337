# SPDX-License-Identifier: Apache-2.0
"""What an op has as `self.store`."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from forebay.errors import ConfigError
from forebay.surfaces.pipeline.store.store import Store, StoreConfig, open_store

batch_runs: ContextVar[Sequence[str]] = ContextVar("forebay_pipeline_runs", default=())
"""The requests in the batch that a worker runs, as the store knows them."""


class OpStore:
    """What an op has as `self.store`: the entries of the requests it is working on."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config

    def put(self, value: Any, *, readers: int | None = None) -> str:
        """Keep a value until the request is answered; returns its key. See `Store.put`."""
        return self._now().put(value, readers=readers)

    def get(self, key: str) -> Any:
        """Return a value. See `Store.get`."""
        return self._now().get(key)

    def release(self, key: str) -> None:
        """Free a value now. See `Store.release`."""
        self._now().release(key)

    def _now(self) -> Store:
        runs = batch_runs.get()
        if not runs:
            msg = "the store keeps values for requests; it can be used in preprocess, process and postprocess only"
            raise ConfigError(msg)
        return open_store(self._config, run=runs)
