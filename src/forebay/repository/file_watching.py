# SPDX-License-Identifier: Apache-2.0
"""Models whose files change while they are in use.

A thread looks at the files from time to time (`Looking`). A change counts once it has settled (`Settling`), so that a
model is not read while it is being copied. It is then loaded beside the one in use, by that thread, and takes its place
if it can: what cannot be loaded or run, or takes or gives something else, is left alone (`Refusals`), and the one in
use goes on. `Repository` and `Stock` do the same with the models of a repository and the endpoints of a server.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from forebay.errors import ConfigError, ForebayError
from forebay.repository.listing import StoredFile
from forebay.repository.local_source import files_of_model, written_at
from forebay.repository.look_thread import Looking
from forebay.repository.retries import Refusals
from forebay.repository.settling import Settling
from forebay.runtimes.model_file import reason_of
from forebay.types.failures import failure_of
from forebay.workers.user_calls.user_code import caught

END_S: Final = 5.0
"""How long the thread may take to end: no longer than this is waited for a model it is loading."""

_versions: ContextVar[dict[Any, Any] | None] = ContextVar("forebay_model_versions", default=None)
"""The models that the batch of this context has asked so far, by who holds them."""


class Replaceable(Protocol):
    """A model that another one may replace."""

    def different(self, other: Any) -> str | None:
        """Return what another one takes or gives that this one does not; None if it is nothing."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


Found = tuple[StoredFile, ...]
"""What is seen of a model's files without reading them."""
_Model = TypeVar("_Model", bound=Replaceable)
_Watched = TypeVar("_Watched", bound="WatchedModel[Any]")


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


class WatchedModel(Generic[_Model]):
    """Holds a model that is replaced when its files change.

    Attributes:
        loaded_from: What was there when it was loaded.
        trial: Asks a model that is to replace it for something that it was asked itself, since some load well and
            cannot be run; raises if it cannot, or answers otherwise. None for no such trial.
    """

    def __init__(self, watch: FileWatch[Any], load: Callable[[], _Model], found: Found) -> None:
        """Load the model; `FileWatch.add` does so.

        Args:
            watch: Who replaces it.
            load: Loads what is there now.
            found: What is there now.
        """
        self.loaded_from = found
        self.trial: Callable[[_Model], None] | None = None
        self._watch = watch
        self._load = load
        self._model = load()

    @property
    def model(self) -> _Model:
        """The model to ask now; within `one_version` always the same."""
        versions = _versions.get()
        return self._model if versions is None else versions.setdefault(self, self._model)

    def close(self) -> None:
        """Let go of the model and look at its files no longer."""
        self._watch.leave(self)
        self._model.close()

    def different(self, other: WatchedModel[_Model]) -> str | None:
        """Return what the model of another one takes or gives that this one's does not; None if it is nothing."""
        return self._model.different(other._model)

    def successor(self) -> _Model:
        """Load what is there now, and try it.

        Raises:
            Unfit: If it takes or gives something else than the model in use.
            Exception: Whatever says why it cannot be loaded or run.
        """
        found = self._load()
        different = self._model.different(found)
        if different is not None:
            raise UnfitModel(different)
        if self.trial is not None:
            self.trial(found)
        return found

    def replace(self, model: _Model, found: Found) -> None:
        """Ask another model from now on; the old one stays in memory until the last call of it has ended."""
        self._model = model
        self.loaded_from = found


class UnfitModel(Exception):
    """A model cannot take the place of the one in use."""


class FileWatch(Generic[_Watched]):
    """Looks at the files of one model for all in this process who hold it, one copy each."""

    def __init__(
        self, name: str, path: Path, poll_s: float, *, log: logging.Logger, beside: Collection[str] = ()
    ) -> None:
        """Describe it; it looks from the first holder to the last.

        Args:
            name: Whose model it is, for the log.
            path: The folder or file.
            poll_s: Seconds between two looks.
            log: Where it tells what it has replaced, and what not.
            beside: Other files that belong to any model in their folder.
        """
        self._log = log
        self._beside = beside
        self._name = name
        self._path = path
        self._lock = threading.Lock()
        self._holders: list[_Watched] = []
        self._settling: Settling[str, Found] = Settling()
        self._refusals: Refusals[str, Found] = Refusals(poll_s)
        self._looking = Looking("forebay-model-watch", self.look, lambda: poll_s)

    def add(self, make: Callable[[Found], _Watched]) -> _Watched:
        """Load the model once more and replace it when it changes.

        Args:
            make: Makes what holds it, loading what is there now; what it raises goes through.

        Raises:
            ConfigError: If that takes or gives something else than what the others have, and has been refused to them.
        """
        made = make(self._look())
        with self._lock:
            different = self._holders[0].different(made) if self._holders else None
            if different is not None:
                raise ConfigError(f"the model in {self._path} has changed, and not as the one in use: {different}")
            self._holders.append(made)
            if len(self._holders) == 1:
                self._looking.start()
        return made

    def leave(self, holder: _Watched) -> None:
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
        return files_of_model(self._path, self._beside)

    def _consider(self, found: Found) -> None:
        """Bring those up to date that hold something other than what was found."""
        with self._lock:
            holders = [holder for holder in self._holders if holder.loaded_from != found]
        if not holders:
            if self._refusals.forget(""):
                self._log.info("%s: the model in %s is the one in use again", self._name, self._path)
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
        self._log.info(
            "%s: the model in %s was replaced, that of %s by that of %s",
            *(self._name, self._path, written_at(before), written_at(found)),
        )

    def _refuse(self, found: Found, problem: BaseException) -> None:
        """Tell why, once: what has no memory left to be loaded in may have some later."""
        error = problem if isinstance(problem, ForebayError) else ConfigError(reason_of(problem))
        is_unfit = isinstance(problem, UnfitModel)
        if self._refusals.refuse("", found, error, time.monotonic(), is_final=is_unfit).is_new:
            reason = failure_of(problem).error.message if error is problem else error.message
            self._log.warning(
                "%s: the model in %s has changed and is not taken, the one in use goes on: %s",
                *(self._name, self._path, " ".join(reason.split())),
            )
