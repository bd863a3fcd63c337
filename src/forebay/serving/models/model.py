# SPDX-License-Identifier: Apache-2.0
"""The class people write their model as, and how it is found in a file."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import Meta

from forebay.errors import ConfigError
from forebay.serving.models.class_places import shown_path, with_place
from forebay.serving.models.function_kinds import generates, may_await
from forebay.serving.models.further_methods import ModelMethod, methods_of
from forebay.serving.models.misspelt_names import STEPS, check_called_bare, check_spelling, like_predict
from forebay.serving.models.padding import Pad
from forebay.types.call_signature import as_written, signature_of
from forebay.types.context import PARAM
from forebay.types.devices import written
from forebay.types.did_you_mean import nearest
from forebay.types.names import NAME, VERSION, endpoint_name, version_name
from forebay.types.settings import (
    Checked,
    Count,
    DeadlineMilliseconds,
    Milliseconds,
    Sharing,
    SomeMilliseconds,
    checked,
    declared,
    with_value,
)
from forebay_target import TargetSpec, package_of

_MAX_FUNCTIONS = 5
"""Functions that an error names."""


class Model:
    """A model: `load` it once in each worker, `predict` batches of samples.

    Write annotations and forebay validates requests, answers with the declared types and describes both in OpenAPI:

        class Iris(Model):
            def load(self):
                self.tree = joblib.load("tree.joblib")

            def predict(self, batch: list[Flower]) -> list[str]:
                return list(self.tree.predict([[f.length, f.width] for f in batch]))

    `predict` takes a list of samples and returns a list of as many results, in order. A result that is an exception
    (or a `forebay.Failure`) fails that sample only; an exception that is raised fails the batch. `preprocess(sample)`
    and `postprocess(result)`, if defined, run for each sample, and what they raise fails that sample only. `unload`, if
    defined, is called when a worker ends or its model is exchanged. `healthy`, if defined, is called between batches
    and returns whether the model can answer; if it returns False or raises, the model is not ready. Methods may be
    `async def`. A `predict` that is a generator streams: each `yield` is a list with the next part for each sample,
    None where there is none.

    A model whose streams advance together has three methods instead of `predict`: `start(sample)` begins one and
    returns its state, `step(states)` returns the next part of each that is open now, `finish(state)` lets go of one.
    Streams join and leave between two steps, and up to `max_batch_size` are open in a worker:

        class Story(Model):
            def start(self, sample: Prompt) -> Chat:
                return self.llm.open(sample.text)

            def step(self, states: list[Chat]) -> list[str | forebay.Last[str] | None]:
                return [word if more else forebay.Last(word) for word, more in self.llm.next_words(states)]

            def finish(self, state: Chat) -> None:
                self.llm.drop(state)

    A part is what is sent, `forebay.Last(part)` or `forebay.Last()` the end of a stream, None nothing this time; an
    exception (or a `forebay.Failure`) ends that stream only. `finish` may be left out; it is called once for every
    state, whatever ended its stream.

    A class without these methods, or with abstract ones, may hold what models of its file have in common.

    Attributes:
        name: Name of the endpoint, such as `iris` or `org/iris`; the class's name in kebab-case if None.
        version: Version reported in answers and metrics.
        max_batch_size: Most samples in a batch.
        max_wait_ms: Time a free worker waits for a batch to fill. None, the default, needs no number: a free worker
            takes the waiting requests, and waits only for clients it has just answered, while that pays.
        policy: "auto" learns batch sizes and waits that keep `latency_objective_ms` at the highest throughput. None
            leaves both to the settings above.
        latency_objective_ms: Latency that 95 of 100 requests must meet.
        timeout_ms: Time limit of a request that states none (`X-Request-Timeout-Ms`); of a streamed answer, until its
            first part.
        deadline_ms: Deadline of a request that states none; one that cannot meet it is refused at once. `timeout_ms`
            refuses none.
        stream_idle_ms: Longest pause between two parts of a streamed answer; a longer one ends it. 0 sets no limit.
        max_queue: Most samples that wait; further requests get 429.
        batchable: Whether a request's body is an array of samples, and its answer the array of their results.
        split: Whether a request larger than a batch is split and its results joined again; otherwise it is refused.
        batch_key: A function of one decoded sample, as a rule a `staticmethod`; only samples with equal keys share a
            batch. It runs in the server, before the sample is queued and without the model: keep it quick.
        pad: A `forebay.Pad`: samples of different lengths get an equal shape before `predict`, which then gets a
            `forebay.Padded` list.
        isolate_errors: Whether a batch that fails as a whole is halved and run again until the failing sample is alone.
            For models that may run a sample more than once.
        single_flight: Whether equal requests that are open at the same time run once: "off", those of one "tenant", or
            "all". For models whose answer depends on the request alone.
        borrows_input: A promise to keep nothing of a sample once `predict` has returned. It saves a copy of large
            samples in worker processes, for types that can refer to the body they came in: `memoryview` and
            `msgspec.Raw`. Without it, the model owns what it keeps of a sample.
        check_outputs: Whether a result that is not of the declared type fails its sample; False sends it unchecked.
        devices: Devices of the workers, assigned in turn: `["cuda:0", "cuda:1"]`, or sets of processors,
            `["cpu:0-3", "cpu:4-7"]`. Without a number of workers, there is one for each.
        repository: A folder or a bucket (`s3://bucket/models`) with any number of models and versions. The class serves
            them all: `load(self, path)` gets the folder of one of them.
        device: The name by which libraries know this worker's device: `net.to(self.device)`. The default is "cpu".
    """

    name: ClassVar[str | None] = None
    version: ClassVar[str] = "1"
    max_batch_size: ClassVar[Count] = 64
    max_wait_ms: ClassVar[Milliseconds | None] = None
    timeout_ms: ClassVar[Count] = 30_000
    deadline_ms: ClassVar[DeadlineMilliseconds | None] = None
    stream_idle_ms: ClassVar[Milliseconds] = 30_000
    max_queue: ClassVar[Count] = 4096
    batchable: ClassVar[bool] = False
    split: ClassVar[bool] = True
    policy: ClassVar[Literal["auto"] | None] = None
    latency_objective_ms: ClassVar[SomeMilliseconds | None] = None
    pad: ClassVar[Pad | None] = None
    isolate_errors: ClassVar[bool] = False
    single_flight: ClassVar[Sharing] = "off"
    borrows_input: ClassVar[bool] = False
    check_outputs: ClassVar[bool] = True
    devices: ClassVar[Annotated[Sequence[str], Checked(written)]] = ()
    repository: ClassVar[str | None] = None
    device: str = "cpu"

    if TYPE_CHECKING:
        # Only for type checkers: a subclass may declare any sample type, take a path where it has a repository, and
        # `preprocess` is absent unless written.
        load: Any
        predict: Any
        start: Any
        step: Any
        finish: Any
        batch_key: Any
    else:
        batch_key = None

        def load(self) -> Any:
            """Load what `predict` needs; called once in each worker, before any request."""


_WireCount = Annotated[int, Meta(ge=1, le=1 << 31)]
_WireTime = Annotated[float, Meta(ge=0.0, le=1e9)]


class PlainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a model says of itself in plain data, in the bounds that hold for what comes from another interpreter."""

    name: Annotated[str, Meta(pattern=rf"\A{NAME}\Z")]
    version: Annotated[str, Meta(pattern=rf"\A{VERSION}\Z")]
    description: Annotated[str, Meta(max_length=16_384)]
    max_batch_size: _WireCount
    max_wait_ms: _WireTime | None
    policy: Literal["auto"] | None
    latency_objective_ms: _WireTime | None
    timeout_ms: _WireCount
    deadline_ms: DeadlineMilliseconds | None = None
    stream_idle_ms: _WireTime = 30_000
    max_queue: _WireCount
    batchable: bool
    split: bool
    isolate_errors: bool
    streams: bool
    steps: bool = False
    is_async: bool
    devices: Annotated[tuple[Annotated[str, Meta(max_length=16_384)], ...], Meta(max_length=1024)] = ()
    has_context: bool = False
    has_health: bool = False
    single_flight: Sharing = "off"


class ModelSettings(PlainSettings, frozen=True, kw_only=True):
    """The attributes of a model class after checking, with what the command line overrode."""

    batch_key: Callable[[Any], Hashable] | None
    pad: Pad | None
    methods: Sequence[ModelMethod] = ()

    def of(self, method: ModelMethod) -> ModelSettings:
        """Return the settings of a further method, without those that are for the samples of `predict` only."""
        return msgspec.structs.replace(
            self,
            batchable=method.batchable,
            streams=method.streams,
            steps=False,
            is_async=method.is_async,
            has_context=method.has_context,
            isolate_errors=self.isolate_errors and not method.streams,
            description=method.description,
            batch_key=None,
            pad=None,
            methods=(),
        )


def settings_of(model: type[Model], *, one_input: bool = True) -> ModelSettings:
    """Check a model class and read its settings.

    Args:
        one_input: Whether `predict` takes the samples and nothing else, as in a model that answers requests.

    Raises:
        ConfigError: With file and line, naming the class, the attribute, what was found and what is allowed.
    """
    try:
        return _settings_of(model, one_input=one_input)
    except ConfigError as error:
        raise ConfigError(with_place(model, error.message)) from error


def _settings_of(model: type[Model], *, one_input: bool) -> ModelSettings:
    steps = has_steps(model)
    _check_answers(model)
    check_spelling(model, Model)
    check_called_bare(model, "__init__")
    if steps:
        _check_steps(model)
    elif one_input:
        _check_parameters(model, "predict", "batch")
    _check_load(model, one_input=one_input)
    methods = methods_of(model) if one_input else ()
    for method in methods:
        _check_parameters(model, method.name, "batch")
    for hook, takes in (("preprocess", "sample"), ("postprocess", "result")):
        if hasattr(model, hook):
            _check_parameters(model, hook, takes, may_have_context=one_input)
    said = _checked_settings(model)
    name, version = model.name or kebab(model.__name__), str(model.version)
    for attribute, text, check in (("name", name, endpoint_name), ("version", version, version_name)):
        try:
            check(text)
        except ValueError as error:
            raise ConfigError(f"{model.__qualname__}.{attribute}: {with_value(error, repr(text))}") from error
    streams = steps or generates(getattr(model, "predict", None))
    how = "it streams by start and step" if steps else "its predict is a generator"
    if streams and model.batchable:
        msg = f"{model.__qualname__} is batchable and {how}; an answer is an array or a stream, not both"
        raise ConfigError(msg)
    _check_key_and_pad(model, streams=streams, one_input=one_input)
    if streams and model.isolate_errors:
        msg = f"{model.__qualname__}.isolate_errors is set and {how}; a stream that has begun cannot run again"
        raise ConfigError(msg)
    told: dict[str, Any] = {key: value for key, value in said.items() if key in ModelSettings.__struct_fields__}
    told |= {"name": name, "version": version}
    return ModelSettings(
        **told,
        batch_key=_key_of(model),
        streams=streams,
        is_async=any(may_await(getattr(model, name, None)) for name in (STEPS if steps else ("predict",))),
        description=inspect.cleandoc(model.__doc__ or "") if model.__doc__ != Model.__doc__ else "",
        steps=steps,
        has_context=one_input
        and any(takes_context(model, name) for name in ("start" if steps else "predict", "preprocess", "postprocess")),
        has_health=_has_health(model),
        methods=methods,
    )


def _has_health(model: type[Model]) -> bool:
    """Tell whether a model says how it is, and check that it can be asked."""
    function = getattr(model, "healthy", None)
    if isinstance(function, property):
        raise ConfigError(f"{model.__qualname__}.healthy is a property; make it a method: leave out @property")
    if not callable(function):
        return False
    check_called_bare(model, "healthy")
    if generates(function):
        raise ConfigError(f"{model.__qualname__}.healthy is a generator; return True or False instead of `yield`")
    return True


def _check_answers(model: type[Model]) -> None:
    """Check that there is a method that answers, and that nothing of it is abstract."""
    where = model.__qualname__
    if not callable(getattr(model, "predict", None)) and not has_steps(model):
        half = next((name for name in STEPS[:2] if callable(getattr(model, name, None))), None)
        if half is not None:
            other, takes = ("step", "states") if half == "start" else ("start", "sample")
            raise ConfigError(
                f"{where} has `{half}` and no `{other}`; streams that share their steps need both: write "
                f"`def {other}(self, {takes})`"
            )
        like = like_predict(model)
        instead = f"; it takes a list of samples, unlike `{like}`" if like else ""
        raise ConfigError(f"{where} has no method `predict`; write `def predict(self, batch): ...`{instead}")
    if inspect.isabstract(model):
        names: frozenset[str] = getattr(model, "__abstractmethods__", frozenset())
        missing = ", ".join(f"`{name}`" for name in sorted(names))
        raise ConfigError(f"{where} is abstract: {missing} is not implemented")


def _checked_settings(model: type[Model]) -> dict[str, Any]:
    """Return what the class says for each setting, checked."""
    # A version may be a number, too.
    given = {name: getattr(model, name) for name in declared(Model) if name != "version"}
    try:
        return checked(Model, given)
    except ConfigError as error:
        raise ConfigError(f"{model.__qualname__}.{error.message}") from error


def set_in_vain(model: Model) -> list[str]:
    """Return the settings that a loaded model has on itself, where they are not read: the class was asked before."""
    own: dict[str, Any] = getattr(model, "__dict__", {})
    names = (*declared(Model), "batch_key")
    return [name for name in names if name in own and own[name] is not getattr(type(model), name)]


def has_steps(model: type[Any]) -> bool:
    """Tell whether a model makes the next part of all streams at once, instead of running batches."""
    return callable(getattr(model, "start", None)) and callable(getattr(model, "step", None))


def _check_load(model: type[Model], *, one_input: bool) -> None:
    """Check that `load` takes the folder of a version where there is a repository, and nothing elsewhere."""
    where, repository = model.__qualname__, model.repository
    if repository is None:
        with contextlib.suppress(TypeError, ValueError):  # it has no signature
            if _takes_path(model):
                raise ConfigError(f"{where}.load takes a path, and {where} has no `repository` that it could come from")
            check_called_bare(model, "load")
        return
    if not one_input:
        msg = f"{where} has a repository, so it is many models, and a graph has one in each node; load a path instead"
        raise ConfigError(msg)
    if not isinstance(cast("Any", repository), str) or not repository:
        msg = f"{where}.repository: expected a path or an address such as 's3://bucket/models', got {repository!r}"
        raise ConfigError(msg)
    _check_parameters(model, "load", "path", may_have_context=False)


def _takes_path(model: type[Model]) -> bool:
    parameters = list(signature_of(model.load).parameters.values())
    return [one.name for one in parameters if one.default is one.empty][1:] == ["path"]


def takes_context(model: type[Model], method: str) -> bool:
    """Tell whether a method asks for the context of requests: it has a parameter of that name."""
    try:
        return PARAM in signature_of(getattr(model, method, None)).parameters  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return False  # there is none, or it has no signature


def kebab(name: str) -> str:
    """Return a class name in kebab-case: `FileType` is `file-type`, `HTTPEcho2` is `http-echo2`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name)
    return words.replace("_", "-").lower()


def load_module(path: Path, package: str = "") -> ModuleType:
    """Import a Python file by its path, under a module name of its own, with its folder importable.

    Its imports by dots begin in `package`, or else in that which the files of its folder say.

    Raises:
        ConfigError: If there is no such file.
    """
    path = path.resolve()
    if path.is_dir():
        raise ConfigError(f"expected a Python file, got a folder ({shown_path(path)})")
    if not path.is_file():
        siblings = [str(other.name) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        module, colon, name = path.name.partition(":")
        is_module = colon and f"{module}.py" in siblings  # as others name what is in a file
        hint = f"{module}.py:{name}" if is_module else nearest(path.name, siblings)
        msg = f"there is no file {shown_path(path)}" + (f"; did you mean {hint}?" if hint else "")
        raise ConfigError(msg)
    spec = TargetSpec(path, package)
    name = spec.name
    if name in sys.modules:
        return sys.modules[name]
    for folder in (str(path.parent), package_of(path)[0]):
        if folder not in sys.path:
            sys.path.append(folder)  # at the end: a sibling named like an installed package must not shadow it
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        assert spec.loader is not None
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def defined_models(module: ModuleType) -> list[type[Model]]:
    """Return the models a module defines; not those it imports, nor what its models only have in common."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Model) and value.__module__ == module.__name__
    ]
    return [model for model in found if _answers(model) or not any(model in other.__mro__[1:] for other in found)]


def _answers(model: type[Model]) -> bool:
    has_predict = callable(getattr(model, "predict", None))
    return (has_predict or has_steps(model)) and not inspect.isabstract(model)


def models_in(module: ModuleType, name: str | None = None) -> list[type[Model]]:
    """Return the models a module defines, or the one of that name.

    Raises:
        ConfigError: If there is none; names the nearest.
    """
    where = shown_path(Path(module.__file__ or module.__name__))
    found = defined_models(module)
    if name is None:
        if found:
            return found
        functions = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
        ]
        msg = "; write `class MyModel(forebay.Model): ...` with a method `predict`"
        if functions:
            more = ", ..." if len(functions) > _MAX_FUNCTIONS else ""
            shown = ", ".join(functions[:_MAX_FUNCTIONS]) + more
            msg = f", only functions ({shown}); {_in_class(where, functions[0])}"
        raise ConfigError(f"{where} defines no forebay.Model{msg}")
    value = getattr(module, name, None)
    if not (inspect.isclass(value) and issubclass(value, Model)):
        known = {model.__name__.lower(): model.__name__ for model in found}
        hint = nearest(name, known)
        others = ", ".join(known.values())
        did_you_mean = f"; did you mean {known[hint]}?" if hint else f"; there is {others}" if others else ""
        if inspect.isfunction(value):
            did_you_mean = f", but a function; {_in_class(where, name)}"
        raise ConfigError(f"{where} has no forebay.Model named {name}{did_you_mean}")
    return [value]


def _in_class(where: str, function: str) -> str:
    """Return how to serve a function."""
    name = function.title().replace("_", "")
    return (
        f"call {function} in the method `predict` of a class, `class {name}(forebay.Model): ...`, and serve that: "
        f"forebay serve {where}:{name}"
    )


def _check_steps(model: type[Model]) -> None:
    where = model.__qualname__
    if callable(getattr(model, "predict", None)):
        raise ConfigError(
            f"{where} has `predict` as well as `start` and `step`, and one of both can answer; remove one, or give "
            "methods of your own names that begin with '_'"
        )
    for name, takes in (("start", "sample"), ("step", "states"), ("finish", "state")):
        function = getattr(model, name, None)
        if function is None:
            continue
        if generates(function):
            msg = f"{where}.{name} is a generator; write a function that returns, or a `predict` that yields instead"
            raise ConfigError(msg)
        _check_parameters(model, name, takes, may_have_context=name == "start")


def _check_key_and_pad(model: type[Model], *, streams: bool, one_input: bool) -> None:
    where = model.__qualname__
    key_of, pad = model.batch_key, model.pad
    if key_of is not None:
        if not callable(key_of):
            raise ConfigError(f"{where}.batch_key: expected a function of one sample, got {key_of!r}")
        if may_await(key_of):
            msg = f"{where}.batch_key is a coroutine function; it runs before a request is queued and must not wait"
            raise ConfigError(msg)
        if one_input:
            _check_key_parameters(model, key_of)
    if pad is None:
        return
    if not isinstance(cast("Any", pad), Pad):
        raise ConfigError(f"{where}.pad: expected a forebay.Pad or None, got {pad!r}")
    if streams:
        how = "streams by start and step" if has_steps(model) else "its predict is a generator"
        raise ConfigError(f"{where} has pad and {how}; streams are not padded: pad in predict, and yield")


def _key_of(model: type[Model]) -> Callable[[Any], Hashable] | None:
    """Return the key of a class; without one of its own the bucket is.

    What `preprocess` makes of a sample is not known before the queue: then workers run the buckets of a batch apart.
    """
    pad = model.pad
    if model.batch_key is not None or pad is None:
        return model.batch_key
    return pad.key_of if pad.buckets and not hasattr(model, "preprocess") else None


def _check_key_parameters(model: type[Model], key_of: Callable[[Any], Hashable]) -> None:
    try:
        signature = signature_of(key_of)
    except (TypeError, ValueError):
        return  # a callable without a signature: found out when it is called
    try:
        signature.bind(None)
    except TypeError:
        written = f"{model.__qualname__}.batch_key{as_written(signature)}"
        raise ConfigError(
            f"{written} cannot be called with one sample; it runs where there is no model: write `@staticmethod` and "
            "`def batch_key(sample)`"
        ) from None


def _check_parameters(model: type[Model], method: str, takes: str, *, may_have_context: bool = True) -> None:
    function = inspect.getattr_static(model, method)
    static = isinstance(function, staticmethod)
    try:
        parameters = list(signature_of(getattr(model, method)).parameters.values())
    except (TypeError, ValueError):
        return  # a callable without a signature: found out when it is called
    if may_have_context:
        parameters = [p for p in parameters if p.name != PARAM]
    bound = static or isinstance(function, classmethod)
    needed = [p for p in parameters if p.default is p.empty and p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    starred = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    expected = 1 if bound else 2
    if (len(needed) != expected and not starred) or any(
        p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters
    ):
        written = f"{method}{as_written(signature_of(getattr(model, method)))}"
        msg = f"{model.__qualname__}.{written} cannot be called with one argument; write `def {method}(self, {takes})`"
        raise ConfigError(msg)
