# SPDX-License-Identifier: Apache-2.0
"""Models whose files change while they are in use.

A thread looks at the files from time to time. A change counts once two looks in a row have found the same, so that a
model is not read while it is being copied. It is then loaded beside the one in use, by that thread, and takes its place
if it can: what cannot be loaded or run, or takes or gives something else, is left alone, and the one in use goes on.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ConfigError, ForebayError
from forebay.surfaces.pipeline.predictors.local import DESCRIPTIONS, is_reference, load_model, local_client, reason_of
from forebay.types.failures import failure_of
from forebay.workers.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.predictors.model_client import Client, ModelClient
    from forebay.surfaces.pipeline.predictors.settings import LocalConf

log = logging.getLogger("forebay.pipeline")

MAX_PAUSE_S: Final = 60.0
"""Longest pause before files that could not be loaded are tried again."""
END_S: Final = 5.0
"""How long the thread may take to end: no longer than this is waited for a model it is loading."""

_versions: ContextVar[dict[WatchedClient, ModelClient] | None] = ContextVar("forebay_model_versions", default=None)
"""The models that the batch of this context has asked so far, by who is asked for them."""


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
    def of(cls, path: Path) -> Fingerprint:
        """Look at the folder of a model, or at its file and those that belong to it; a model that is gone has none."""
        found: list[tuple[str, int, int]] = []
        with contextlib.suppress(OSError):  # what is gone by now is missed by the next look as well
            is_file = path.is_file()
            for entry in (path.parent if is_file else path).iterdir():
                is_part = not is_file or entry.name.startswith(path.stem) or entry.name in DESCRIPTIONS
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
    """Ask the same model all the time, though it be replaced in between.

    Holds in this context and its copies; other threads get what is there when they ask.
    """
    held = _versions.set({})
    try:
        yield
    finally:
        _versions.reset(held)


class Trial(msgspec.Struct, frozen=True, eq=False):
    """A prediction that the model in use has made, to be made by another one: some load well and cannot be run.

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
        """Ask another model the same.

        Raises:
            Unfit: If its answer has other types.
            ForebayError: As `Client.predict`.
        """
        found = model.predict(self.feed, self.fetch, self.batch)
        for name, dtype in self.types.items():
            if found[name].dtype != dtype:
                raise Unfit(f"it gives '{name}' as {found[name].dtype} instead of {dtype}")


class WatchedClient:
    """A `Client` whose model is replaced when its files change."""

    takes_text = False

    def __init__(self, watch: ModelWatch, load: Callable[[], ModelClient], found: Fingerprint) -> None:
        """Load the model; `ModelWatch.client` does so.

        Args:
            watch: Who replaces it.
            load: Loads what is there now.
            found: What is there now.
        """
        self.loaded_from = found
        self._watch = watch
        self._load = load
        self._model = load()
        self._trial: Trial | None = None

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
        """Ask the model, as `Client.predict`."""
        versions = _versions.get()
        model = self._model if versions is None else versions.setdefault(self, self._model)
        found = model.predict(feed, fetch, batch, log_id)
        if self._trial is None:
            types = {name: array.dtype for name, array in found.items()}
            self._trial = Trial(copy.deepcopy(feed), fetch, batch, types)  # the feed may lie in borrowed memory
        return found

    def close(self) -> None:
        """Let go of the model and look at its files no longer."""
        self._watch.leave(self)
        self._model.close()

    def different(self, other: WatchedClient) -> str | None:
        """Return what the model of another one takes or gives that this one's does not; None if it is nothing."""
        return self._model.different(other._model)

    def successor(self) -> ModelClient:
        """Load what is there now, and try it with the first feed that was answered here.

        Raises:
            Unfit: If it takes or gives something else than the model in use.
            Exception: Whatever says why it cannot be loaded or run.
        """
        found = self._load()
        different = self._model.different(found)
        if different is not None:
            raise Unfit(different)
        if self._trial is not None:
            self._trial.run(found)
        return found

    def replace(self, model: ModelClient, found: Fingerprint) -> None:
        """Ask another model from now on; who asks the old one holds it, and its memory is free after that."""
        self._model = model
        self.loaded_from = found


class Unfit(Exception):
    """A model cannot take the place of the one in use."""


class ModelWatch:
    """Looks at the files of one model for all in this process who use it, one predictor each."""

    def __init__(self, name: str, path: Path, poll_s: float) -> None:
        """Describe it; it looks from the first client to the last.

        Args:
            name: Whose model it is, for the log.
            path: The folder or file.
            poll_s: Seconds between two looks.
        """
        self._name = name
        self._path = path
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._clients: list[WatchedClient] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: Fingerprint | None = None
        self._refused: Fingerprint | None = None
        self._pause_s = poll_s
        self._again = 0.0

    def client(self, load: Callable[[], ModelClient]) -> WatchedClient:
        """Load the model once more and replace it when it changes.

        Args:
            load: Loads what is there now; what it raises goes through.

        Raises:
            ConfigError: If that takes or gives something else than what the others have, and has been refused to them.
        """
        client = WatchedClient(self, load, Fingerprint.of(self._path))
        with self._lock:
            different = self._clients[0].different(client) if self._clients else None
            if different is not None:
                msg = f"the model in {self._path} has changed, and not as the one in use: {different}"
                raise ConfigError(msg)
            self._clients.append(client)
            if self._thread is None:
                self._end = threading.Event()
                self._thread = threading.Thread(
                    target=self._watch, args=(self._end,), name="forebay-model-watch", daemon=True
                )
                self._thread.start()
        return client

    def leave(self, client: WatchedClient) -> None:
        """Replace the model of this client no longer."""
        with self._lock:
            if client in self._clients:
                self._clients.remove(client)
            thread, is_last = self._thread, not self._clients
            if not is_last or thread is None:
                return
            self._thread = None
            self._end.set()
        thread.join(END_S)  # a process must not end while a library loads a model in it

    def look(self) -> None:
        """Look at the files, and replace the model if they have changed and are what they were at the last look."""
        found = Fingerprint.of(self._path)
        if found == self._seen:
            self._consider(found)
        self._seen = found

    def _watch(self, end: threading.Event) -> None:
        while not end.wait(self._poll_s):
            self.look()

    def _consider(self, found: Fingerprint) -> None:
        """Bring those up to date who have something else than what was found."""
        with self._lock:
            clients = [client for client in self._clients if client.loaded_from != found]
        if not clients:
            if self._refused is not None:
                self._refused = None
                log.info("%s: the model in %s is the one in use again", self._name, self._path)
            return
        if found == self._refused and time.monotonic() < self._again:
            return
        before = clients[0].loaded_from
        for client in clients:
            model, problem = caught(client.successor)
            if problem is not None:
                self._refuse(found, problem)
                return
            if Fingerprint.of(self._path) != found:
                return  # it went on changing; what was loaded may be half of each
            client.replace(model, found)
        self._refused = None
        log.info("%s: the model in %s was replaced, that of %s by that of %s", self._name, self._path, before, found)

    def _refuse(self, found: Fingerprint, problem: BaseException) -> None:
        """Tell why, once, and when to try again: what has no memory left to be loaded in may have some later."""
        is_new = found != self._refused
        self._refused = found
        self._pause_s = self._poll_s if is_new else min(self._pause_s * 2, MAX_PAUSE_S)
        self._again = float("inf") if isinstance(problem, Unfit) else time.monotonic() + self._pause_s
        if is_new:
            told = isinstance(problem, ForebayError)
            reason = failure_of(problem).error.message if told else reason_of(problem)
            log.warning(
                "%s: the model in %s has changed and is not taken, the one in use goes on: %s",
                *(self._name, self._path, " ".join(reason.split())),
            )


def watch_of(name: str, conf: LocalConf) -> ModelWatch | None:
    """Return what looks at the files of a local model; None if nobody shall, or if it has none.

    Args:
        name: Whose model it is, for the log.
        conf: The model.
    """
    if conf.model_config is None or not conf.model_poll_s or is_reference(conf.model_config):
        return None
    return ModelWatch(name, Path(conf.model_config), conf.model_poll_s)


def watched_client(conf: LocalConf, wanted: Sequence[str], index: int | None, watch: ModelWatch | None) -> Client:
    """Load a model as `local_client` does; one that is watched is replaced when it changes.

    Raises:
        ConfigError: If there is no model, or nothing that runs it.
    """
    if watch is None:
        return local_client(conf, wanted, index)
    return watch.client(partial(load_model, conf, wanted, index))
