# SPDX-License-Identifier: Apache-2.0
"""Models whose files change while they are in use.

A thread looks at the files from time to time. A change counts once two looks in a row have found the same, so that a
model is not read while it is being copied. It is then loaded beside the one in use, by that thread, and takes its place
if it can: what cannot be loaded or run, or takes or gives something else, is left alone, and the one in use goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from forebay.errors import ConfigError, ForebayError
from forebay.runtimes.model_file import reason_of
from forebay.types.failures import failure_of
from forebay.workers.user_code import caught

MAX_PAUSE_S: Final = 60.0
"""Longest pause before files that could not be loaded are tried again."""
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


_Model = TypeVar("_Model", bound=Replaceable)
_Watched = TypeVar("_Watched", bound="WatchedModel[Any]")


class Fingerprint(msgspec.Struct, frozen=True):
    """What can be seen of a model's files without reading them.

    Attributes:
        place: The folder or file, with every symbolic link followed.
        files: Name, size in bytes and time of the last change in nanoseconds of each file; of a symbolic link where it
            leads to instead of its name.
    """

    place: str
    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, path: Path, beside: Collection[str] = ()) -> Fingerprint:
        """Look at the folder of a model, or at its file and those that belong to it; a model that is gone has none.

        Args:
            path: The folder or file.
            beside: Other files that belong to any model in their folder.
        """
        found: list[tuple[str, int, int]] = []
        with contextlib.suppress(OSError):  # what is gone by now is missed by the next look as well
            is_file = path.is_file()
            weights = path / "variables"  # of a SavedModel
            entries = [*path.parent.iterdir()] if is_file else [*path.iterdir()]
            for entry in [*entries, *(weights.iterdir() if weights.is_dir() else ())]:
                is_part = not is_file or entry.name.startswith(path.stem) or entry.name in beside
                if is_part and not entry.name.startswith(".") and entry.is_file():
                    about = entry.stat()
                    name = os.path.realpath(entry) if entry.is_symlink() else entry.name
                    found.append((name, about.st_size, about.st_mtime_ns))
        return cls(os.path.realpath(path), tuple(sorted(found)))

    def __str__(self) -> str:
        """Return when a file was last changed, for a person."""
        if not self.files:
            return "unknown time"
        newest_ns = max(changed_ns for _, _, changed_ns in self.files)
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest_ns / 1e9))


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

    def __init__(self, watch: FileWatch[Any], load: Callable[[], _Model], found: Fingerprint) -> None:
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

    def replace(self, model: _Model, found: Fingerprint) -> None:
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
            beside: See `Fingerprint.of`.
        """
        self._log = log
        self._beside = beside
        self._name = name
        self._path = path
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._holders: list[_Watched] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: Fingerprint | None = None
        self._refused: Fingerprint | None = None
        self._pause_s = poll_s
        self._again = 0.0

    def add(self, make: Callable[[Fingerprint], _Watched]) -> _Watched:
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
                msg = f"the model in {self._path} has changed, and not as the one in use: {different}"
                raise ConfigError(msg)
            self._holders.append(made)
            if self._thread is None:
                self._end = threading.Event()
                self._thread = threading.Thread(
                    target=self._watch, args=(self._end,), name="forebay-model-watch", daemon=True
                )
                self._thread.start()
        return made

    def leave(self, holder: _Watched) -> None:
        """Replace the model of this one no longer."""
        with self._lock:
            if holder in self._holders:
                self._holders.remove(holder)
            thread, is_last = self._thread, not self._holders
            if not is_last or thread is None:
                return
            self._thread = None
            self._end.set()
        thread.join(END_S)  # a process must not end while a library loads a model in it

    def look(self) -> None:
        """Look at the files, and replace the model if they have changed and are what they were at the last look."""
        found = self._look()
        if found == self._seen:
            self._consider(found)
        self._seen = found

    def _look(self) -> Fingerprint:
        return Fingerprint.of(self._path, self._beside)

    def _watch(self, end: threading.Event) -> None:
        while not end.wait(self._poll_s):
            self.look()

    def _consider(self, found: Fingerprint) -> None:
        """Bring those up to date that hold something other than what was found."""
        with self._lock:
            holders = [holder for holder in self._holders if holder.loaded_from != found]
        if not holders:
            if self._refused is not None:
                self._refused = None
                self._log.info("%s: the model in %s is the one in use again", self._name, self._path)
            return
        if found == self._refused and time.monotonic() < self._again:
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
        self._refused = None
        self._log.info(
            "%s: the model in %s was replaced, that of %s by that of %s", self._name, self._path, before, found
        )

    def _refuse(self, found: Fingerprint, problem: BaseException) -> None:
        """Tell why, once, and when to try again: what has no memory left to be loaded in may have some later."""
        is_new = found != self._refused
        self._refused = found
        self._pause_s = self._poll_s if is_new else min(self._pause_s * 2, MAX_PAUSE_S)
        self._again = float("inf") if isinstance(problem, UnfitModel) else time.monotonic() + self._pause_s
        if is_new:
            told = isinstance(problem, ForebayError)
            reason = failure_of(problem).error.message if told else reason_of(problem)
            self._log.warning(
                "%s: the model in %s has changed and is not taken, the one in use goes on: %s",
                *(self._name, self._path, " ".join(reason.split())),
            )
