# SPDX-License-Identifier: Apache-2.0
"""A store for values that are too large to be handed on: ops put them there and pass on a key.

Theory of operation. Every entry belongs to a run, the way of one request through the graph, and only that run can read
it. The server forgets a run when its request was answered, however it ended, and with it whatever is left of its
entries: an error, a time-out, a client that went away or a worker that was killed frees them all the same. Whatever is
put after that, by code that nobody waits for any more, is freed when its time to live is over.

    Storage   the server's side: makes the place, forgets runs, clears up
    Store     what ops see: put, get, release
    Backend   where the entries lie: files (`file_store.py`) or a redis server (`redis.py`)
"""

from __future__ import annotations

import functools
import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from forebay.errors import BadOutcome, ConfigError, ForebayError, NotFound
from forebay.observe.logs.throttled_log import ThrottledLog
from forebay.types.settings import Setting, declared

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.store.file_store import FileBackend
    from forebay.surfaces.pipeline.store.redis import RedisBackend

log = logging.getLogger("forebay.pipeline")
_unfreed = ThrottledLog(log)

Type = Literal["shm", "file", "redis"]
AtLeastOne = Annotated[float, Meta(ge=1)]

SWEEP_S = 1.0
"""Shortest time between two looks for entries whose time is over."""
GATHER_S = 0.05
"""Runs that end within this time are forgotten together."""

_KEY = re.compile(r"[0-9a-f]{32}(?:\.[1-9][0-9]{0,3})?")
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_READERS = 9999


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where large values go, `dag.external_store` of the configuration. Plain data, so that any worker can be told.

    Attributes:
        type: `shm` for files in memory, `file` for files in `dir`, `redis` for a server.
        threshold_kb: Arrays and bytes of this size and more are stored by `Store.offload`.
        dir: Folder for `file`; None takes the one for temporary files.
        url: Address for `redis`, `redis://[user:password@]host:port/database`.
        timeout_ms: Time a redis server has to answer.
        ttl_s: Time after which an entry is freed that nobody has freed.
        max_mb: Largest entry.
        place: Set by `Storage`: the folder, or what the names of all keys begin with.
    """

    type: Type = "shm"
    threshold_kb: Annotated[float, Meta(ge=0)] = 64
    dir: str | None = None
    url: str = "redis://127.0.0.1:6379/0"
    timeout_ms: AtLeastOne = 2000
    ttl_s: AtLeastOne = 600
    max_mb: AtLeastOne = 1024
    place: str = ""


STORE_KEYS: Final[Mapping[str, Setting]] = {
    name: setting for name, setting in declared(StoreConfig).items() if name != "place"
}
"""The keys of `dag.external_store`."""


class Stored(msgspec.Struct, frozen=True):
    """What stands for a value that `Store.offload` has put away."""

    key: str


class Store:
    """The entries of one run, or of the runs that share a batch."""

    def __init__(self, config: StoreConfig, runs: Sequence[str]) -> None:
        self._backend = _backend(config)
        self._threshold_bytes = config.threshold_kb * 1024
        self._runs = runs

    def put(self, value: Any, *, readers: int | None = None) -> str:
        """Store a value until the request is answered.

        Args:
            value: Arrays, bytes, and what pickle takes; with redis plain data and arrays only.
            readers: Times it will be read; after the last one it is freed at once.

        Returns:
            Its key, for `get` in any op, thread or process that works on the same request.

        Raises:
            BadOutcome: If the value cannot be stored.
            Unavailable: If the store is full or does not answer.
        """
        if readers is not None and not 1 <= readers <= MAX_READERS:
            raise BadOutcome(f"readers: expected a number from 1 to {MAX_READERS} or None, got {readers}")
        name = secrets.token_hex(16)
        for run in self._runs:
            self._backend.write(run, name, value, readers or 0)
        return f"{name}.{readers}" if readers else name

    def get(self, key: str) -> Any:
        """Return a stored value, in memory of its own.

        Raises:
            NotFound: If there is no such entry, or not any more.
            Unavailable: If the store does not answer.
        """
        name, readers = _parts_of(key)
        for run in self._runs:
            try:
                return self._backend.read(run, name, readers)
            except LookupError:
                continue
        raise NotFound(
            f"the store has no entry {key[:50]!r} for this request; it was released, read, or its time is over"
        )

    def release(self, key: str) -> None:
        """Free a value now; nothing happens if that is done already, or if the store does not answer."""
        name, readers = _parts_of(key)
        for run in self._runs:
            try:
                self._backend.release(run, name, readers)
            except ForebayError as error:
                _unfreed.warning("an entry could not be freed, it will be when its time is over: %s", error)

    def offload(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Store large arrays and bytes; each is replaced by a `Stored` with its key."""
        return {name: Stored(self.put(value)) if self._is_large(value) else value for name, value in values.items()}

    def restore(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Put back what `offload` has put away; the entries stay until the request is answered."""
        return {name: self.get(value.key) if isinstance(value, Stored) else value for name, value in values.items()}

    def _is_large(self, value: Any) -> bool:
        if isinstance(value, bytes | bytearray):
            return len(value) >= self._threshold_bytes
        is_array = hasattr(value, "dtype") and hasattr(value, "__array__")
        return is_array and getattr(value, "nbytes", 0) >= self._threshold_bytes


def open_store(config: StoreConfig, *, run: str | Sequence[str]) -> Store:
    """Return the store as one run sees it; cheap enough to be called for every sample.

    Args:
        run: Whose entries: letters, digits, '-' and '_'. Several for a batch: what is put then belongs to each of them.
    """
    runs = (run,) if isinstance(run, str) else tuple(run)
    for one in runs:
        if not _RUN.fullmatch(one):
            raise ConfigError(f"expected a run name of at most 64 letters, digits, '-' and '_', got {one[:80]!r}")
    return Store(config, runs)


class Storage:
    """The server's side of the store."""

    def __init__(self, config: StoreConfig) -> None:
        """Make the place where entries lie.

        Raises:
            ConfigError: If that is not possible, in one sentence.
        """
        self._folder: Any = None
        if config.type == "redis":
            from forebay.surfaces.pipeline.store import redis as store_redis

            place = store_redis.claim(config.url, config.timeout_ms / 1000)
        else:
            from forebay.surfaces.pipeline.store import file_store as store_files

            self._folder = store_files.folder_for(config.dir, in_memory=config.type == "shm")
            place = str(self._folder.path)
        self.config = msgspec.structs.replace(config, place=place)
        self._backend = _backend(self.config)
        self._ended: deque[str] = deque()
        self._due = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._clear_up, name="forebay-store", daemon=True)
        self._thread.start()

    def forget(self, run: str) -> None:
        """Free all that is left of a run, soon; returns at once and never fails."""
        self._ended.append(run)
        if not self._due.is_set():
            self._due.set()

    def close(self) -> None:
        """Free everything."""
        self._is_closing = True
        self._due.set()
        self._thread.join()
        self._backend.close()
        if self._folder is not None:
            self._folder.remove()

    def _clear_up(self) -> None:
        """Forget runs and free what is too old; in a thread, because that may take a while."""
        interval_s = max(self.config.ttl_s / 4, SWEEP_S)
        is_closing = is_failing = False
        while not is_closing:
            is_due = self._due.wait(interval_s)
            if is_due and not self._is_closing:
                time.sleep(GATHER_S)
            is_closing = self._is_closing
            self._due.clear()
            runs = [self._ended.popleft() for _ in range(len(self._ended))]
            try:
                if runs:
                    self._backend.forget(runs)
                if not is_due:
                    self._backend.sweep()
            except (ForebayError, OSError) as error:
                if not is_failing:
                    log.warning("cannot delete entries of the store, they stay until they expire: %s", error)
                is_failing = True
            else:
                is_failing = is_failing and not runs


@functools.lru_cache(maxsize=8)
def _backend(config: StoreConfig) -> FileBackend | RedisBackend:
    """Return where the entries of this process lie, which all of its threads share."""
    max_bytes = int(config.max_mb * (1 << 20))
    if config.type == "redis":
        from forebay.surfaces.pipeline.store.redis import RedisBackend

        return RedisBackend(config.url, config.place, config.timeout_ms / 1000, config.ttl_s, max_bytes)
    from forebay.surfaces.pipeline.store.file_store import FileBackend

    return FileBackend(config.place, config.ttl_s, max_bytes)


def _parts_of(key: str) -> tuple[str, int]:
    """Return the name in a key and how many readers it has; a key may have come with a request and is not trusted."""
    if not isinstance(cast("Any", key), str) or not _KEY.fullmatch(key):
        raise NotFound(f"{str(key)[:50]!r} is not a key of the store")
    name, _, readers = key.partition(".")
    return name, int(readers or 0)
