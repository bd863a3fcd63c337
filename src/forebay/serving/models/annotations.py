# SPDX-License-Identifier: Apache-2.0
"""The types of a model's samples and results, read off the annotations of its methods; strings are resolved here.

    class Fish(Model):
        def predict(self, batch: list[In]) -> list[Out]: ...

`In` and `Out` are the wire types (`schema.py`). `preprocess(self, sample: X)` makes `X` the input instead,
`postprocess(...) -> Y` makes `Y` the output. A `predict` that generates (`-> Iterator[list[Out | None]]`) streams
values of `Out`. Of a model that has `start` and `step`, `In` is the parameter of `start`, and
`step(...) -> list[Out | Last[Out] | None]` says `Out`. Where nothing is written, or `Any`, every JSON value passes. A
`predict` of an `AsyncIterator[bytes]` gets the body of one request as it arrives, and returns one `Out`.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from typing import Any, Final, Literal

from forebay.errors import ConfigError
from forebay.serving.models.class_places import with_place
from forebay.serving.models.function_kinds import generates, may_await
from forebay.serving.models.schema import WireType, is_union, spell, unwrap
from forebay.types.call import Last
from forebay.types.call_signature import signature_of
from forebay.types.context import PARAM
from forebay.types.failures import words_of
from forebay.types.type_names import bound_in, expanded
from forebay.workers.user_calls.user_code import caught

if typing.TYPE_CHECKING:
    from forebay.serving.models.further_methods import ModelMethod

_BATCHES: Final = frozenset(
    {
        list,
        collections.abc.Sequence,
        collections.abc.MutableSequence,
        collections.abc.Collection,
        collections.abc.Iterable,
    }
)
_STREAMS: Final = frozenset(
    {collections.abc.Iterator, collections.abc.Generator, collections.abc.AsyncIterator, collections.abc.AsyncGenerator}
)
_PIECES: Final = {collections.abc.AsyncIterator: "async def", collections.abc.Iterator: "def"}  # by what takes them
_OF_SAMPLES: Final = ("batchable", "batch_key", "pad")
_WHOLE_RESULTS: Final = {
    "embeddings": "a vector each, such as list[float]",
    "rerank": "a score each: float or forebay.openai.Score",
    "audio/speech": "audio each: bytes",
}
"""By path of OpenAI's protocol, what models answer with that is not text."""
_MAYBE_STREAMS: Final = frozenset({collections.abc.Iterable, collections.abc.AsyncIterable})


def io_types(model_class: type, method: ModelMethod | None = None) -> tuple[WireType, WireType]:
    """Read the wire types of a model, or of a further method of it, off its annotations.

    Returns:
        The input type and the output type of one sample.

    Raises:
        ConfigError: `predict` is missing, or an annotation cannot be resolved or cannot travel; says which, and where.
    """
    try:
        return _io_types(model_class, method)
    except ConfigError as error:
        raise ConfigError(with_place(model_class, error.message)) from error


def _io_types(model_class: type, method: ModelMethod | None) -> tuple[WireType, WireType]:
    predict = _method(model_class, "predict" if method is None else method.name)
    if predict is None and (start := _method(model_class, "start")) and (step := _method(model_class, "step")):
        return _step_types(start, step, *(_method(model_class, name) for name in ("preprocess", "postprocess")))
    if predict is None:
        raise ConfigError(
            f"{model_class.__qualname__} has no method `predict`; "
            "write `def predict(self, batch: list[In]) -> list[Out]`"
        )
    preprocess = postprocess = None
    if method is None:
        preprocess, postprocess = _method(model_class, "preprocess"), _method(model_class, "postprocess")
    if preprocess is None and predict.takes_pieces():
        beside = [name for name in _OF_SAMPLES if getattr(method or model_class, name, None)]
        if beside := [*beside, *({"GET"} & {*(method.verbs if method else ())})]:
            raise ConfigError(f"{predict.place} takes a body as it arrives; leave out {' and '.join(beside)}")
        given = WireType(bytes)
        given.in_pieces = True
    else:
        given = preprocess.wire_type("input") if preprocess is not None else predict.wire_type("input", element=True)
    streams = predict.generates
    answer = (postprocess or predict).wire_type("output", element=postprocess is None, part=streams)
    batchable = getattr(model_class, "batchable", False) if method is None else method.batchable
    where = media_in_parts(batchable=batchable, streams=streams) if answer.has_media else ""
    if where:
        raise ConfigError(f"{(postprocess or predict).place}: its results are annotated as forebay.Media, and {where}")
    if why := untold_by_openai(given, answer, streams=streams):
        raise ConfigError(f"{(postprocess or predict).place}: {why}")
    return given, answer


def untold_by_openai(given: WireType, answer: WireType, *, streams: bool) -> str:
    """Return why results of what is asked in OpenAI's protocol cannot be told in it; empty if they can."""
    if not given.openai:
        return ""
    wanted = _WHOLE_RESULTS.get(given.openai, "texts: str or forebay.openai.TextPart")
    wanted += ", or a forebay.openai.Transcript" if given.openai == "audio/transcriptions" else ""
    is_audio = given.openai == "audio/speech"
    in_parts = streams and given.openai in _WHOLE_RESULTS and not is_audio
    if answer.raw != is_audio or answer.has_media or in_parts:
        found = "come in parts" if in_parts else f"are {spell(answer.annotation)}"
        return f"its samples are {spell(given.annotation)}, and its results {found}; it needs {wanted}"
    return ""


def _step_types(
    start: _Method, step: _Method, preprocess: _Method | None, postprocess: _Method | None
) -> tuple[WireType, WireType]:
    """Return the types of a model whose streams share their steps."""
    given = (preprocess or start).wire_type("input")
    answer = (postprocess or step).wire_type("output", element=postprocess is None, part=True)
    if answer.has_media:
        where = media_in_parts(batchable=False, streams=True)
        raise ConfigError(f"{(postprocess or step).place}: its parts are annotated as forebay.Media, and {where}")
    if why := untold_by_openai(given, answer, streams=True):
        raise ConfigError(f"{(postprocess or step).place}: {why}")
    return given, answer


def media_in_parts(*, batchable: bool, streams: bool) -> str:
    """Return why results of a model cannot be `Media`; empty if they can."""
    if batchable:
        return "an array of samples cannot hold any; answer requests of one sample, or return texts (base64)"
    return "a part of a stream cannot be one; yield bytes, or return the whole" if streams else ""


def _part_type(annotation: Any) -> Any:
    """Return the type of what a stream sends: None says that there is nothing this time, a `Last` that it ends."""
    parts: list[Any] = []
    for member in typing.get_args(annotation) if is_union(annotation) else (annotation,):
        if member is types.NoneType:
            continue
        is_last = Last in (member, typing.get_origin(member))
        parts += [_part_type(one) for one in typing.get_args(member) or (Any,)] if is_last else [member]
    if not parts or Any in parts:
        return Any
    return typing.Union[tuple(parts)]  # noqa: UP007


class _Method:
    """One method of the user's, and where to look up the names in its annotations."""

    def __init__(
        self, model_class: type, owner: type, function: types.FunctionType, *, bound: bool, generates: bool
    ) -> None:
        self.place = f"{model_class.__qualname__}.{function.__name__}"
        self.owner = owner
        self.types = bound_in(model_class, owner)  # if the owner is generic
        self.function = function
        self.bound = bound  # whether the first parameter is `self` or `cls`
        self.generates = generates
        self.is_alone = False  # whether it gets a body in pieces, and no batch

    def takes_pieces(self) -> bool:
        """Note whether it takes bodies in pieces; raises ConfigError if it could not read them."""
        what, annotation = self._parameter()
        found = unwrap(self._resolve(what, annotation))
        reader = _PIECES.get(typing.get_origin(found) or found)
        own = "async def" if may_await(self.function) else "def"
        if reader is not None and (typing.get_args(found) != (bytes,) or reader != own):
            raise ConfigError(
                f"{self.place}: {what} is annotated {spell(annotation)}; a body as it arrives is an "
                "`AsyncIterator[bytes]` for `async def` and an `Iterator[bytes]` for `def`, a batch is a `list[...]`"
            )
        self.is_alone = reader is not None
        return self.is_alone

    def wire_type(
        self, direction: Literal["input", "output"], *, element: bool = False, part: bool = False
    ) -> WireType:
        what, annotation = self._parameter() if direction == "input" else ("the return value", self._returned())
        annotation = self._resolve(what, annotation)
        one = self._element(what, annotation, direction) if element else annotation
        if part:
            one = _part_type(one)
        try:
            return WireType(one, direction)
        except ConfigError as error:
            raise ConfigError(f"{self.place}: {what} is annotated {spell(annotation)}: {error.message}") from error

    def _parameter(self) -> tuple[str, Any]:
        parameters = self._signature().parameters.values()
        names = [one for one in list(parameters)[1 if self.bound else 0 :] if one.name != PARAM]
        if not names:
            raise ConfigError(f"{self.place}: expected one argument beside `self`, got none")
        return f"parameter `{names[0].name}`", names[0].annotation

    def _returned(self) -> Any:
        return self._signature().return_annotation

    def _signature(self) -> inspect.Signature:
        # From Python 3.14 on, annotations are evaluated when somebody looks.
        signature, error = caught(signature_of, self.function)
        if error is not None:
            raise ConfigError(f"{self.place}: its annotations cannot be resolved: {words_of(error)}") from error
        return signature

    def _resolve(self, what: str, annotation: Any) -> Any:
        """Evaluate strings, but only in the annotation that matters, so that others may name what is not imported."""
        if annotation is inspect.Signature.empty:
            return Any
        holder = types.SimpleNamespace(__annotations__={"it": annotation})
        # As if evaluated where it stands: inside the class, then in the module. The class itself is known by then.
        names = {self.owner.__name__: self.owner, **vars(self.owner)}
        scope = self.function.__globals__
        hints, error = caught(lambda: typing.get_type_hints(holder, scope, names, include_extras=True))
        if error is None:
            found, error = caught(expanded, hints["it"], self.types)
            if error is None:
                return found
        raise ConfigError(
            f"{self.place}: {what} is annotated {spell(annotation)}, which cannot be resolved: {words_of(error)}"
        ) from error

    def _element(self, what: str, annotation: Any, direction: Literal["input", "output"]) -> Any:
        """Return the type of one sample of a batch."""
        batch = unwrap(annotation)
        origin, arguments = typing.get_origin(batch) or batch, typing.get_args(batch)
        if self.is_alone:
            return (arguments or (Any,))[0] if origin in _STREAMS else annotation
        if direction == "output" and (origin in _STREAMS or (origin in _MAYBE_STREAMS and self.generates)):
            if not arguments:
                return Any
            batch = unwrap(arguments[0])
            origin, arguments = typing.get_origin(batch) or batch, typing.get_args(batch)
        if batch is Any or batch is object:
            return Any
        if origin is tuple and (not arguments or arguments[-1] is Ellipsis):
            return arguments[0] if arguments else Any
        if origin in _BATCHES or _is_list(origin):
            return arguments[0] if arguments else Any
        if direction == "output" and hasattr(origin, "tolist"):
            return Any  # an array of results says nothing about one row
        name = self.function.__name__
        advice = f"{name} returns one result for each sample; write list[...], or Iterator[list[...]] to stream"
        if direction == "input":
            advice = f"{name} gets a list of samples; write `list[{spell(annotation).strip('`')}]`"
            if name == "predict":
                advice = "predict gets a list of samples; write list[...], or name the type of one in `preprocess`"
        raise ConfigError(f"{self.place}: {what} is annotated {spell(annotation)}, but {advice}")


def _method(model_class: type, name: str) -> _Method | None:
    for owner in model_class.__mro__:
        found = vars(owner).get(name)
        if found is None and name not in vars(owner):
            continue
        bound = not isinstance(found, staticmethod)
        method: Any = getattr(found, "__func__", found)
        function = inspect.unwrap(method)
        if not isinstance(function, types.FunctionType):
            if found is None:
                return None
            raise ConfigError(f"{model_class.__qualname__}.{name} is {spell(type(found))}, expected a method")
        # The identity hooks a base class of forebay's may define say nothing about the user's types.
        if function.__module__.startswith("forebay.serving."):
            return None
        return _Method(model_class, owner, function, bound=bound, generates=generates(method))
    return None


def _is_list(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, list)
