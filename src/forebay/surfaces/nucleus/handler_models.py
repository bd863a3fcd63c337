# SPDX-License-Identifier: Apache-2.0
"""The `model_client` of a handler: models by name and version, loaded by the handler when they are first asked for.

What the server has is told to the worker whenever it changes, so that a model that is loaded already costs a look into
two tables. A version whose files have changed is loaded anew at the next call; its predecessor serves on if that fails,
and leaves when the last call that uses it is over.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import msgspec

from forebay.errors import Unavailable
from forebay.repository.cache import Cache, Lease
from forebay.surfaces.nucleus.logs import logger
from forebay.surfaces.nucleus.project_settings import DEFAULT_MODEL
from forebay.surfaces.nucleus.shim import UserRuntimeException
from forebay.types.failures import text_of
from forebay.types.user_exceptions import answered

if TYPE_CHECKING:
    from forebay.surfaces.nucleus.worker_requests import DeskClient

LATEST: Final = "latest"
AGAIN_S: Final = 10.0
"""A version that could not be loaded anew, while its predecessor serves on, is not tried again before this."""
FIRST_S: Final = 60.0
"""Time in which a worker must have been told what there is."""
ANSWER_S: Final = 3600.0
"""Time that the server has to bring a model or to have one loaded elsewhere; a large one may take long."""
LOOK_S: Final = 10.0
"""Time that a call waits for the next look at a version whose files are others by now."""

Kind = Literal["path", "paths", "dir"]

_Versions = dict[int, tuple[str, str, int]]
"""By number: a version's text, its key and its size."""
_Models = dict[str, _Versions]


class ModelRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says of models.

    Attributes:
        names: Those of `paths`.
        cache_size: Versions that are kept in memory; None keeps all. Calls that use more at the same time have them all
            the same, as with the original, which counts every ten seconds; what is too much leaves with its last call.
    """

    kind: Kind
    names: tuple[str, ...] = ()
    cache_size: int | None = None


class _Loaded:
    """A version in memory."""

    def __init__(self, key: str, model: Any) -> None:
        self.key = key
        self.model = model


class HandlerModels:
    """Gives handlers their models; for all threads of a worker."""

    def __init__(self, rules: ModelRules, desk: DeskClient) -> None:
        """Listen to the server; the handler is named by `bind`."""
        self._rules = rules
        self._desk = desk
        self._load_model: Callable[[str], Any] | None = None
        self._models: _Models = {}
        self._served: dict[tuple[str, int], str] = {}
        self._failed: dict[str, float] = {}
        self._is_told = threading.Event()
        self._news = threading.Condition()
        self._is_over = False
        self._cache: Cache[_Loaded] = Cache(
            "models in memory", self._unload, max_count=rules.cache_size, may_exceed=True
        )
        self._asked: dict[int, Future[str]] = {}
        self._numbers = itertools.count(1)
        self._here = threading.local()
        desk.told["catalog"] = self._catalog
        desk.told["taken"] = self._taken
        desk.told["changed"] = self._changed
        desk.told["failed"] = self._refused
        desk.on_end.append(self._end)

    def bind(self, load_model: Callable[[str], Any]) -> None:
        """Say what loads a model from its folder."""
        self._load_model = load_model

    def get_model(self, model_name: str | None = None, model_version: str | int | None = LATEST) -> Any:
        """Return a model: what `load_model` returned for it.

        Args:
            model_name: Its name; not needed where there is one model only.
            model_version: Its version, or `latest`.

        Raises:
            UserRuntimeException: If there is no such model or version, or it cannot be loaded.
        """
        if not self._is_told.wait(FIRST_S):
            raise UserRuntimeException("the server does not say which models there are")
        lease = self._current(model_name, model_version)
        model = lease.value.model
        leases: list[Lease[_Loaded]] | None = getattr(self._here, "leases", None)
        if leases is None:
            lease.release()  # nobody says when it is over
        else:
            leases.append(lease)
        return model

    def _current(self, model_name: str | None, model_version: str | int | None) -> Lease[_Loaded]:
        """Return the use of a version as the server has it; what turns out to have changed is waited for."""
        until = time.monotonic() + LOOK_S
        while True:
            models = self._models  # another one takes its place whenever the server says so
            name = self._name(models, model_name, model_version)
            number = self._number(models[name], name, model_version)
            version, key, size = models[name][number]
            try:
                return self._lease(name, number, version, key, size)
            except _Changed as error:
                if not self._has_news_of(name, number, key, until - time.monotonic()):
                    raise UserRuntimeException(_failed(name, version), text_of(error)) from error

    def _has_news_of(self, name: str, number: int, key: str, within_s: float) -> bool:
        """Wait until the server says that a version is another one, or gone; False if it does not."""

        def is_other() -> bool:
            return self._is_over or self._models.get(name, {}).get(number, ("", "", 0))[1] != key

        with self._news:
            return self._news.wait_for(is_other, within_s)

    # Calls

    def begin(self) -> None:
        """Note that a call of the handler begins in this thread: what it gets stays until it is over."""
        self._here.leases = []

    def end(self) -> None:
        """Note that it is over."""
        leases: list[Lease[_Loaded]] = self._here.leases
        self._here.leases = None
        for lease in leases:
            lease.release()

    def during(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Yield the steps of a call that has begun, and end it after them."""
        try:
            yield from steps
        finally:
            self.end()

    # Which one

    def _name(self, models: _Models, name: str | None, version: str | int | None) -> str:
        kind = self._rules.kind
        if kind == "path":
            name = DEFAULT_MODEL
        elif not name and kind == "paths":
            raise UserRuntimeException(
                f"model_name was not specified, choose one of the following: {list(self._rules.names)}"
            )
        elif not name:
            raise UserRuntimeException("model_name was not specified")
        assert name is not None
        if models.get(name):
            return name
        raise self._no_model(name, version)

    def _no_model(self, name: str, version: str | int | None) -> Exception:
        """Return what says that there is no such model, or no version of it any more."""
        kind = self._rules.kind
        if kind == "path" or name in self._rules.names:
            return UserRuntimeException(
                f"'{name}' model's versions have been removed; add at least a version to the model to resume operations"
            )
        tag = " of tag latest" if kind == "dir" and self._rules.cache_size and self._is_latest(version) else ""
        return UserRuntimeException(f"'{name}' model{tag} wasn't found in the list of available models")

    def _no_version(self, name: str, version: str) -> Exception:
        """Return what says that there is no such version."""
        return UserRuntimeException(f"model {name} of version {version} wasn't found")

    @staticmethod
    def _is_latest(version: str | int | None) -> bool:
        return version is None or version in {"", LATEST}

    def _number(self, versions: _Versions, name: str, version: str | int | None) -> int:
        if self._is_latest(version):
            return max(versions)
        text = str(version)
        if isinstance(version, bool) or not (text.isascii() and text.isdigit()):
            raise UserRuntimeException("model_version must be either a parse-able numeric value or 'latest'")
        if int(text) not in versions:
            raise self._no_version(name, text)
        return int(text)

    # Loading

    def _lease(self, name: str, number: int, version: str, key: str, size: int) -> Lease[_Loaded]:
        before = self._served.get((name, number))
        if before is None or before == key or before not in self._cache:
            return self._loaded(name, number, version, key, size)
        # Its files have changed since it was loaded. What there is stays until the new one is here.
        old: Lease[_Loaded] | None = answered(lambda: self._cache.take(before, 0, _left), lambda _: None)
        if old is None:
            return self._loaded(name, number, version, key, size)
        if time.monotonic() < self._failed.get(key, 0.0):
            return old
        new: Lease[_Loaded] | None = answered(
            lambda: self._loaded(name, number, version, key, size),
            lambda error: logger.error("%s; the model loaded before stays", text_of(error)),
        )
        if new is None:
            self._failed[key] = time.monotonic() + AGAIN_S
            return old
        self._failed.pop(key, None)
        old.release()
        return new

    def _loaded(self, name: str, number: int, version: str, key: str, size: int) -> Lease[_Loaded]:
        """Return the use of a version, which is loaded if it is not there."""
        lease = self._cache.take(key, size, functools.partial(self._load, name, version, key))
        if self._served.get((name, number)) != key:
            self._served[name, number] = key
            self._drop()
        return lease

    def _load(self, name: str, version: str, key: str) -> _Loaded:
        assert self._load_model is not None
        what = _failed(name, version)
        load_model = self._load_model

        def refuse(error: BaseException) -> NoReturn:
            if isinstance(error, _Changed):
                raise error
            raise UserRuntimeException(what, text_of(error)) from error

        def give_back(error: BaseException) -> NoReturn:
            self._desk.ask("release", key)
            logger.error("%s: %s", what, text_of(error), exc_info=error)
            raise UserRuntimeException(what, text_of(error)) from error

        folder = answered(lambda: self._take(key), refuse)
        return _Loaded(key, answered(lambda: load_model(folder), give_back))

    def _take(self, key: str) -> str:
        """Return the folder of a version once the server has it; it stays until it is given back."""
        return self._ask("take", key, late=lambda: self._desk.ask("release", key))

    def _ask(self, kind: str, *what: str, late: Callable[[], object] = lambda: None) -> str:
        """Ask the server and wait for its answer; `late` is called if one comes when nobody waits any more."""
        answer: Future[str] = Future()
        number = next(self._numbers)
        self._asked[number] = answer
        if self._is_over:
            raise Unavailable("the server is gone")
        self._desk.ask(kind, number, *what)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            answer.add_done_callback(lambda answer: answer.exception() or late())
            raise Unavailable(f"the server gave no answer within {ANSWER_S:g} s") from None

    def _unload(self, loaded: _Loaded) -> None:
        loaded.model = None  # who is just giving it back still knows it
        self._desk.ask("release", loaded.key)

    def _drop(self) -> None:
        """Let leave what is not there any more; what waits for its successor stays."""
        models = self._models
        there = {key for versions in models.values() for _, key, _ in versions.values()}
        for place in list(self._served):  # other threads load meanwhile
            if place[1] not in models.get(place[0], ()):
                self._served.pop(place, None)
        self._cache.keep_only({*there, *list(self._served.values())})

    # What the server says, in the thread that hears it

    def _catalog(self, models: dict[str, list[list[Any]]]) -> None:
        self._models = {
            name: dict(sorted((int(version), (version, key, size)) for version, key, size in versions))
            for name, versions in models.items()
        }
        self._drop()
        self._is_told.set()
        with self._news:
            self._news.notify_all()

    def _taken(self, number: int, folder: str) -> None:
        self._asked.pop(number).set_result(folder)

    def _changed(self, number: int, reason: str) -> None:
        self._asked.pop(number).set_exception(_Changed(reason))

    def _refused(self, number: int, reason: str) -> None:
        self._asked.pop(number).set_exception(Unavailable(reason))

    def _end(self) -> None:
        self._is_over = True
        with self._news:
            self._news.notify_all()
        for answer in list(self._asked.values()):
            answer.set_exception(Unavailable("the server is gone"))


class _Changed(Unavailable):
    """The files of a version are others by now, and the server looks at them again."""


def _failed(name: str, version: str) -> str:
    return f"failed (re-)loading model {name} of version {version} (thread {threading.get_ident()})"


def _left() -> NoReturn:
    raise Unavailable("it has left meanwhile")
