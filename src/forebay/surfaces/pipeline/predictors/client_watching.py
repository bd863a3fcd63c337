# SPDX-License-Identifier: Apache-2.0
"""Clients whose model is replaced when its files change.

A thread looks at the files from time to time (`Looking`). A change counts once it has settled (`Settling`), so that a
model is not read while it is being copied. It is then loaded beside the one in use, by that thread, and takes its place
if it can: what cannot be loaded or run, or takes or gives something else, is left alone (`Refusals`), and the one in
use goes on. `Repository` and `Stock` do the same with the models of a repository and the endpoints of a server.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ConfigError, ForebayError
from forebay.repository.listing import StoredFile
from forebay.repository.local_source import files_of_model, written_at
from forebay.repository.look_thread import Looking
from forebay.repository.retries import Refusals
from forebay.repository.settling import Settling
from forebay.runtimes.model_file import reason_of
from forebay.surfaces.pipeline.predictors.descriptions import DESCRIPTIONS
from forebay.surfaces.pipeline.predictors.local_models import is_reference, load_model, local_client
from forebay.surfaces.pipeline.predictors.model_client import ModelClient, Predictor
from forebay.types.failures import failure_of
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.predictors.model_settings import LocalConf

log = logging.getLogger("forebay.pipeline")

END_S: Final = 5.0
"""How long the thread may take to end: no longer than this is waited for a model it is loading."""

Found = tuple[StoredFile, ...]
"""What is seen of a model's files without reading them."""

_versions: ContextVar[dict[Any, ModelClient] | None] = ContextVar("forebay_model_versions", default=None)
"""The models that the batch of this context has asked so far, by who holds them."""


@contextlib.contextmanager
def one_version() -> Generator[None]:
    """Ask one and the same model in the block, even if it is replaced meanwhile.

    Holds in this context and its copies; other threads get what is there when they ask.
    """
    held = _versions.set({})
    try:
        yield
    finally:
        _versions.reset(held)


class RepeatedPrediction(msgspec.Struct, frozen=True, eq=False):
    """A prediction that the model in use has made, for another model to repeat.

    Attributes:
        batch: Whether the first axis counted samples.
    """

    feed: Any
    fetch: Sequence[str] | None
    batch: bool
    types: Mapping[str, Any]

    def run(self, model: ModelClient) -> None:
        """Ask another model for the same prediction.

        Raises:
            UnfitModel: If its answer has other types.
            ForebayError: As `Predictor.predict`.
        """
        found = model.predict(self.feed, self.fetch, self.batch)
        for name, dtype in self.types.items():
            if found[name].dtype != dtype:
                raise UnfitModel(f"it gives '{name}' as {found[name].dtype} instead of {dtype}")


class WatchedClient(Predictor):
    """A client whose model is replaced; what replaces it is tried with the first feed that was answered.

    Attributes:
        loaded_from: What was there when it was loaded.
    """

    def __init__(self, watch: ModelWatch, load: Callable[[], ModelClient], found: Found) -> None:
        """Load what is there now, which is `found`; `ModelWatch.client` does so."""
        self.loaded_from = found
        self._watch = watch
        self._load = load
        self._model = load()
        self._trial: RepeatedPrediction | None = None  # some models load well and cannot be run

    @property
    def feed_names_(self) -> list[str] | None:
        """Aliases of what the model takes."""
        return self._model.feed_names_

    @property
    def fetch_names_(self) -> list[str] | None:
        """Aliases of what the model gives."""
        return self._model.fetch_names_

    def ask(self, feed: Any, fetch: Sequence[str] | None, batch: bool, log_id: int) -> dict[str, Any]:
        """Ask the model; within `one_version` always the same."""
        versions = _versions.get()
        model = self._model if versions is None else versions.setdefault(self, self._model)
        found = model.predict(feed, fetch, batch, log_id)
        if self._trial is None:
            types = {name: array.dtype for name, array in found.items()}
            # The feed may lie in borrowed memory.
            self._trial = RepeatedPrediction(copy.deepcopy(feed), fetch, batch, types)
        return found

    def close(self) -> None:
        """Let go of the model and look at its files no longer."""
        self._watch.leave(self)
        self._model.close()

    def different(self, other: WatchedClient) -> str | None:
        """Return what the model of another one takes or gives that this one's does not; None if it is nothing."""
        return self._model.different(other._model)

    def successor(self) -> ModelClient:
        """Load what is there now, and try it.

        Raises:
            UnfitModel: If it takes or gives something else than the model in use.
            Exception: Whatever says why it cannot be loaded or run.
        """
        found = self._load()
        different = self._model.different(found)
        if different is not None:
            raise UnfitModel(different)
        if self._trial is not None:
            self._trial.run(found)
        return found

    def replace(self, model: ModelClient, found: Found) -> None:
        """Ask another model from now on; the old one stays in memory until the last call of it has ended."""
        self._model = model
        self.loaded_from = found


class UnfitModel(Exception):
    """A model cannot take the place of the one in use."""


class ModelWatch:
    """Looks at the files of one model for all in this process who hold it, one copy each."""

    def __init__(self, name: str, path: Path, poll_s: float) -> None:
        """Describe it, for the log by its name; it looks every `poll_s` from the first holder to the last."""
        self._name = name
        self._path = path
        self._lock = threading.Lock()
        self._holders: list[WatchedClient] = []
        self._settling: Settling[str, Found] = Settling()
        self._refusals: Refusals[str, Found] = Refusals(poll_s)
        self._looking = Looking("forebay-model-watch", self.look, lambda _: poll_s)

    def client(self, load: Callable[[], ModelClient]) -> WatchedClient:
        """Load the model once more and replace it when it changes.

        Args:
            load: Loads what is there now; what it raises goes through.

        Raises:
            ConfigError: If that takes or gives something else than what the others have, and has been refused to them.
        """
        made = WatchedClient(self, load, self._look())
        with self._lock:
            different = self._holders[0].different(made) if self._holders else None
            if different is not None:
                raise ConfigError(f"the model in {self._path} has changed, and not as the one in use: {different}")
            self._holders.append(made)
            if len(self._holders) == 1:
                self._looking.start()
        return made

    def leave(self, holder: WatchedClient) -> None:
        """Replace the model of this one no longer."""
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.remove(holder)
            is_last = not self._holders
        if is_last:  # a process must not end while a library loads a model in it
            self._looking.stop(END_S)

    def look(self) -> None:
        """Look at the files, and replace the model if they have changed and are what they were at the last look."""
        found = self._look()
        self._settling.look({"": found})
        if not self._settling.is_moving:
            self._consider(found)

    def _look(self) -> Found:
        return files_of_model(self._path, DESCRIPTIONS)

    def _consider(self, found: Found) -> None:
        """Bring those up to date that hold something other than what was found."""
        with self._lock:
            holders = [holder for holder in self._holders if holder.loaded_from != found]
        if not holders:
            if self._refusals.forget(""):
                log.info("%s: the model in %s is the served one again", self._name, self._path)
            return
        if self._refusals.is_resting("", found, time.monotonic()):
            return
        before = holders[0].loaded_from
        for holder in holders:
            model, problem = caught(holder.successor)
            if problem is not None:
                self._refuse(found, problem)
                return
            if self._look() != found:
                return  # it went on changing; what was loaded may be half of each
            holder.replace(model, found)
        self._refusals.forget("")
        log.info(
            "%s: replaced the model in %s: that of %s by that of %s",
            *(self._name, self._path, written_at(before), written_at(found)),
        )

    def _refuse(self, found: Found, problem: BaseException) -> None:
        """Tell why, once: what has no memory left to be loaded in may have some later."""
        error = problem if isinstance(problem, ForebayError) else ConfigError(reason_of(problem))
        is_unfit = isinstance(problem, UnfitModel)
        if self._refusals.refuse("", found, error, time.monotonic(), is_final=is_unfit).is_new:
            reason = failure_of(problem).error.message if error is problem else error.message
            log.warning(
                "%s: the model in %s has changed and is rejected; the served one stays: %s",
                *(self._name, self._path, " ".join(reason.split())),
            )


def watch_of(name: str, conf: LocalConf) -> ModelWatch | None:
    """Return what watches the files of a local model, for the log by its name; None if nothing is to be watched."""
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
