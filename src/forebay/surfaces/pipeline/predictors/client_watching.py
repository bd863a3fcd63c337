# SPDX-License-Identifier: Apache-2.0
"""Clients whose model is replaced when its files change; see `forebay.repository.file_watching`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.repository.file_watching import FileWatch, UnfitModel, WatchedModel
from forebay.surfaces.pipeline.predictors.descriptions import DESCRIPTIONS
from forebay.surfaces.pipeline.predictors.local_models import is_reference, load_model, local_client
from forebay.surfaces.pipeline.predictors.model_client import ModelClient

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.predictors.model_client import Predictor
    from forebay.surfaces.pipeline.predictors.model_settings import LocalConf

log = logging.getLogger("forebay.pipeline")


class RepeatedPrediction(msgspec.Struct, frozen=True, eq=False):
    """A prediction that the model in use has made, for another model to repeat.

    Attributes:
        feed: What it was given.
        fetch: The results that were wanted.
        batch: Whether the first axis counted samples.
        types: The types of the results.
    """

    feed: Any
    fetch: Sequence[str] | None
    batch: bool
    types: Mapping[str, Any]

    def run(self, model: ModelClient) -> None:
        """Ask another model for the same prediction.

        Raises:
            Unfit: If its answer has other types.
            ForebayError: As `Predictor.predict`.
        """
        found = model.predict(self.feed, self.fetch, self.batch)
        for name, dtype in self.types.items():
            if found[name].dtype != dtype:
                raise UnfitModel(f"it gives '{name}' as {found[name].dtype} instead of {dtype}")


class WatchedClient(WatchedModel[ModelClient]):
    """A `Predictor` whose model is replaced; what replaces it is tried with the first feed that was answered."""

    takes_text = False
    is_shared = False

    @property
    def feed_names_(self) -> list[str] | None:
        """Aliases of what the model takes."""
        return self._model.feed_names_

    @property
    def fetch_names_(self) -> list[str] | None:
        """Aliases of what the model gives."""
        return self._model.fetch_names_

    def predict(
        self,
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        fetch: Sequence[str] | None = None,
        batch: bool = True,
        log_id: int = 0,
    ) -> dict[str, Any]:
        """Ask the model, as `Predictor.predict`."""
        found = self.model.predict(feed, fetch, batch, log_id)
        if self.trial is None:
            types = {name: array.dtype for name, array in found.items()}
            # The feed may lie in borrowed memory.
            self.trial = RepeatedPrediction(copy.deepcopy(feed), fetch, batch, types).run
        return found


class ModelWatch(FileWatch[WatchedClient]):
    """Looks at the files of one model for all predictors in this process that use it."""

    def __init__(self, name: str, path: Path, poll_s: float) -> None:
        super().__init__(name, path, poll_s, log=log, beside=DESCRIPTIONS)

    def client(self, load: Callable[[], ModelClient]) -> WatchedClient:
        """Load the model once more and replace it when it changes; see `FileWatch.add`."""
        return self.add(partial(WatchedClient, self, load))


def watch_of(name: str, conf: LocalConf) -> ModelWatch | None:
    """Return what watches the files of a local model; None if that is not wanted, or if it has no files.

    Args:
        name: Whose model it is, for the log.
    """
    if conf.model_config is None or not conf.model_poll_s or is_reference(conf.model_config):
        return None
    return ModelWatch(name, Path(conf.model_config), conf.model_poll_s)


def watched_client(conf: LocalConf, wanted: Sequence[str], index: int | None, watch: ModelWatch | None) -> Predictor:
    """Load a model as `local_client` does; one that is watched is replaced when it changes.

    Raises:
        ConfigError: If there is no model, or nothing that runs it.
    """
    if watch is None:
        return local_client(conf, wanted, index)
    return watch.client(partial(load_model, conf, wanted, index))
