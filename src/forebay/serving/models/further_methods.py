# SPDX-License-Identifier: Apache-2.0
"""Further methods of a model that answer requests, each with a path of its own: `@forebay.endpoint("/embed")`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec

from forebay.errors import ConfigError
from forebay.serving.models.function_kinds import generates, may_await
from forebay.types.call_signature import signature_of
from forebay.types.context import PARAM
from forebay.types.did_you_mean import nearest

CALL: Final = "call"
"""Where the params of a request name the method that is asked; what names none asks `predict`."""

RESERVED: Final = frozenset({"docs", "healthz", "metrics", "models", "openapi.json", "readyz", "trace", "ui"}) | {
    *("load", "swap", "unload", "versions", "weights")
}
"""How no path may begin: the server's own pages, beside a model and below it."""
_PATH: Final = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*){1,16}")
_MAX_LENGTH: Final = 256
_VERBS: Final = ("GET", "POST")
_MARK: Final = "__forebay_endpoint__"

F = TypeVar("F", bound=Callable[..., Any])


class ModelMethod(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a model beside `predict`.

    Attributes:
        name: What it is called.
        path: Where it answers, below the model.
        verbs: The methods of HTTP that ask it.
        batchable: Whether the body is an array of samples.
        streams: Whether it generates.
        is_async: Whether it is a coroutine function.
        has_context: Whether it asks for the context of requests.
        description: Its docstring.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    path: Annotated[str, msgspec.Meta(max_length=_MAX_LENGTH)]
    verbs: Annotated[tuple[Literal["GET", "POST"], ...], msgspec.Meta(min_length=1, max_length=2)] = ("POST",)
    batchable: bool = False
    streams: bool = False
    is_async: bool = False
    has_context: bool = False
    description: Annotated[str, msgspec.Meta(max_length=16_384)] = ""


class _Mark(msgspec.Struct, frozen=True):
    path: Any
    methods: Any
    batchable: bool | None


def endpoint(path: str, *, methods: Sequence[str] = ("POST",), batchable: bool | None = None) -> Callable[[F], F]:
    """Let a method of a model answer requests as `predict` does, at a path of its own.

        class Words(forebay.Model):
            def predict(self, batch: list[str]) -> list[str]: ...

            @forebay.endpoint("/embed")  # POST /models/words/embed
            def embed(self, batch: list[str]) -> list[list[float]]: ...

    It takes a list of samples and returns as many results. Its requests wait in the model's queue and run in its
    workers, with the same loaded model; a batch is of one method. `preprocess`, `postprocess`, `batch_key` and `pad`
    are for `predict` alone.

    Args:
        path: Where it answers: below `/models/NAME`, below each version, and by itself if the model is the only one.
        methods: The methods of HTTP: "POST", "GET" or both. The query of a GET has the fields of the sample.
        batchable: Whether the body is an array of samples; None leaves that to the model, and a GET has one sample.
    """
    if callable(cast("Any", path)):
        name = getattr(path, "__name__", "embed")
        msg = f"@forebay.endpoint takes a path; write `@forebay.endpoint('/{_dashed(name)}')` above `{name}`"
        raise ConfigError(msg)

    def mark(function: F) -> F:
        setattr(getattr(function, "__func__", function), _MARK, _Mark(path, methods, batchable))
        return function

    return mark


def is_marked(value: Any) -> bool:
    """Tell whether what a class defines is such a method."""
    return _mark_of(value) is not None


def methods_of(model: type[Any]) -> tuple[ModelMethod, ...]:
    """Read the further methods of a model class, in the order of their names.

    Raises:
        ConfigError: Naming the method, what was found and what may be meant.
    """
    found = tuple(_read(model, name, mark) for name, mark in _marks(model))
    twice = next(_same_path(found), None)
    if twice is not None:
        one, other = twice
        raise ConfigError(
            f"{model.__qualname__}.{one.name} and {other.name} both have the path '{one.path}'; "
            f"write `@forebay.endpoint('{_free(other.name, found)}')` above `{other.name}`"
        )
    return found


def check_paths(methods: Sequence[ModelMethod]) -> None:
    """Check what another process says of a model's methods; raises a `ConfigError` if it cannot be served."""
    for method in methods:
        problem = _problem(method.path, method.name)
        if problem:
            raise ConfigError(f"the path of '{method.name}' {problem}")
        if method.batchable and (method.streams or "GET" in method.verbs):
            raise ConfigError(f"'{method.name}' takes arrays of samples, so it neither streams nor answers a GET")
    if any(_same_path(methods)) or len({method.name for method in methods}) < len(methods):
        raise ConfigError("two methods have the same name or path")


def path_like(name: str, taken: Collection[str]) -> str:
    """Return the nearest path to a name that comes from elsewhere, and that no other one has."""
    path = f"/{name}"
    path = _spelled(path, name) if _problem(path, name) else path
    while path in taken:
        path += "-2"
    return path


def _marks(model: type[Any]) -> Iterator[tuple[str, _Mark]]:
    names = sorted({name for cls in model.__mro__ for name, value in vars(cls).items() if is_marked(value)})
    for name in names:
        if getattr(model, name) is None:  # a subclass has taken it away
            continue
        # What overrides a method answers in its place, whether it says so again or not.
        values = [vars(cls)[name] for cls in model.__mro__ if name in vars(cls)]
        yield name, next(mark for value in values if (mark := _mark_of(value)) is not None)


def _mark_of(value: Any) -> _Mark | None:
    mark = getattr(getattr(value, "__func__", value), _MARK, None) if callable(value) else None
    return mark if isinstance(mark, _Mark) else None


def _read(model: type[Any], name: str, mark: _Mark) -> ModelMethod:
    where = f"{model.__qualname__}.{name}"
    function = getattr(model, name)
    problem = _problem(mark.path, name)
    if problem:
        raise ConfigError(f"{where}: the path {problem}")
    verbs = _verbs(where, mark.methods)
    streams = generates(function)
    batchable = (model.batchable and not streams and "GET" not in verbs) if mark.batchable is None else mark.batchable
    if batchable and (streams or "GET" in verbs):
        what = "an answer is an array or a stream" if streams else "the query of a GET has one sample"
        msg = f"{where} is batchable, and {what}; leave out `batchable`" + ("" if streams else ", or the GET")
        raise ConfigError(msg)
    return ModelMethod(
        name=name,
        path=mark.path,
        verbs=verbs,
        batchable=batchable,
        streams=streams,
        is_async=may_await(function),
        has_context=PARAM in signature_of(function).parameters,
        description=inspect.getdoc(function) or "",
    )


def _verbs(where: str, given: Any) -> tuple[Literal["GET", "POST"], ...]:
    one = isinstance(given, str)
    said = list(cast("Collection[Any]", given)) if isinstance(given, Collection) and not one else [given]
    wrong = next((verb for verb in said if verb not in _VERBS), None)
    if one or wrong is not None or not said:
        meant = nearest(str(wrong), [verb.lower() for verb in _VERBS]) if wrong is not None else None
        hint = f'write `methods=["{(meant or "POST").upper() if wrong is not None or not said else given}"]`'
        raise ConfigError(f"{where}: expected the HTTP methods 'GET' or 'POST', got {given!r}; {hint}")
    return tuple(verb for verb in _VERBS if verb in said)  # pyright: ignore[reportReturnType]


def _problem(path: Any, name: str) -> str:
    """Return what is wrong with a path, and the nearest one that is right; empty if nothing is."""
    if not isinstance(path, str):
        return f"is {path!r}; write '/{_dashed(name)}'"
    first = path.split("/")[1] if path.startswith("/") else ""
    if first in RESERVED:
        return f"'{path}' is one of the server's own; write '{_spelled(path, name)}'"
    if _PATH.fullmatch(path) and len(path) <= _MAX_LENGTH:
        return ""
    why = "has no '/' at its beginning" if not path.startswith("/") else "is not a path that a model can have"
    if path.endswith("/"):
        why = "has a '/' at its end"
    return f"'{path[:_MAX_LENGTH]}' {why}; write '{_spelled(path, name)}'"


def _spelled(path: str, name: str) -> str:
    """Return the nearest path that can be had."""
    parts = [re.sub(r"[^A-Za-z0-9._~-]+", "-", part).strip("-.") for part in path.split("/")]
    tidy = "".join(f"/{part}" for part in parts if part)
    if not tidy or len(tidy) > _MAX_LENGTH or not _PATH.fullmatch(tidy):
        tidy = f"/{_dashed(name)}"
    return f"/my{tidy.replace('/', '-', 1)}" if tidy.split("/")[1] in RESERVED else tidy


def _free(name: str, taken: Sequence[ModelMethod]) -> str:
    path, paths = f"/{_dashed(name)}", {method.path for method in taken}
    return f"{path}-2" if path in paths else path


def _dashed(name: str) -> str:
    return name.strip("_").replace("_", "-")


def _same_path(methods: Sequence[ModelMethod]) -> Iterator[tuple[ModelMethod, ModelMethod]]:
    seen: dict[str, ModelMethod] = {}
    for method in methods:
        if method.path in seen:
            yield seen[method.path], method
        seen[method.path] = method
