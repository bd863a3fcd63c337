# SPDX-License-Identifier: Apache-2.0
"""What a node takes and returns for one request, read off the annotations of its function or of its model's methods."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from forebay.errors import ConfigError
from forebay.graph.composition.types_fit import element_of, spell
from forebay.serving.models.annotations import io_types
from forebay.serving.models.model import Model, settings_of
from forebay.types.call_signature import as_written, signature_of
from forebay.types.failures import text_of
from forebay.types.type_names import expanded
from forebay.workers.user_calls.user_code import caught


class NodeInput(msgspec.Struct, frozen=True, eq=False):
    """An input.

    Attributes:
        annotation: Its type; Any if it says none.
        is_optional: Whether it has a default.
        default: The default, if there is one.
        in_query: Whether it is keyword-only; such an input of a composed function is taken from the query of a request.
    """

    annotation: Any
    is_optional: bool = False
    default: Any = None
    in_query: bool = False


class NodeSignature(msgspec.Struct, frozen=True, eq=False):
    """The inputs and the result of a node for one request.

    Attributes:
        ports: Inputs by name, in their order.
        result: Type of the result; Any if it says none.
        warnings: Annotations that could not be read, and therefore are not checked.
    """

    ports: Mapping[str, NodeInput]
    result: Any
    warnings: list[str]

    def result_of(self, output: str) -> Any:
        """Return the type of one of several results, as far as the annotation tells."""
        result = self.result
        if typing.is_typeddict(result):
            return typing.get_type_hints(result).get(output, Any)
        arguments = typing.get_args(result)
        kind = typing.get_origin(result)
        return arguments[1] if isinstance(kind, type) and issubclass(kind, Mapping) and len(arguments) == 2 else Any


def signature_of_function(function: Callable[..., Any], *, batched: bool) -> NodeSignature:
    """Read the signature of a function.

    Args:
        batched: Whether it takes and returns lists, one element a sample.

    Raises:
        ConfigError: If its inputs have no names of their own.
    """
    return _Reader(function, None, skip=0).signature(batched=batched)


def signature_of_model(model: type[Model]) -> NodeSignature:
    """Read the signature of one sample of a model: that of `predict`, between `preprocess` and `postprocess`.

    Raises:
        ConfigError: If its inputs have no names of their own, or are several and there is a `preprocess`.
    """
    if settings_of(model, one_input=False).streams:
        return _signature_of_stream(model)
    predict = _method(model, "predict").signature(batched=True)
    ports, result, warnings = predict.ports, predict.result, predict.warnings
    if len(ports) > 1 and model.pad is not None:
        msg = f"{model.__qualname__} has pad and predict takes {len(ports)} inputs; samples of one input can be padded"
        raise ConfigError(msg)
    if hasattr(model, "preprocess"):
        if len(ports) > 1:
            raise ConfigError(
                f"{model.__qualname__}.predict takes {len(ports)} inputs and the class has `preprocess`, which takes "
                "one sample; prepare the inputs in a node before it, or in predict"
            )
        before = _method(model, "preprocess").signature(batched=False)
        ports, warnings = before.ports, [*warnings, *before.warnings]
    if hasattr(model, "postprocess"):
        after = _method(model, "postprocess").signature(batched=False)
        result, warnings = after.result, [*warnings, *after.warnings]
    return NodeSignature(ports, result, warnings)


def _signature_of_stream(model: type[Model]) -> NodeSignature:
    """Read the signature of a model that streams: what is given is one sample, and what is returned a part."""
    given, answer = io_types(model)
    if given.in_pieces:
        raise ConfigError(f"{model.__qualname__} takes bodies as they arrive, and a node is given whole values")
    first = next(name for name in ("preprocess", "start", "predict") if hasattr(model, name))
    name = _method(model, first).first
    return NodeSignature({name: NodeInput(given.annotation)}, answer.annotation, [])


class _Reader:
    """Reads one function."""

    def __init__(self, function: Callable[..., Any], owner: type | None, *, skip: int) -> None:
        self._function = inspect.unwrap(function)
        self._owner = owner
        self._skip = skip
        name = getattr(function, "__name__", repr(function))
        self._where = name if owner is None else f"{owner.__qualname__}.{name}"
        self._warnings: list[str] = []

    def signature(self, *, batched: bool) -> NodeSignature:
        try:
            signature = signature_of(self._function)
        except (TypeError, ValueError) as error:
            msg = f"{self._where} does not tell what it takes; wrap it in a function: def {self._where}(...)"
            raise ConfigError(msg) from error
        ports: dict[str, NodeInput] = {}
        for parameter in list(signature.parameters.values())[self._skip :]:
            if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
                msg = f"{self._where} takes {parameter}; a node's inputs are known by their names: write each one"
                raise ConfigError(msg)
            annotation = self._resolved(f"`{parameter.name}`", parameter.annotation)
            if batched:
                annotation = self._element(f"`{parameter.name}`", annotation)
            is_optional = parameter.default is not parameter.empty
            default = parameter.default if is_optional else None
            in_query = parameter.kind is parameter.KEYWORD_ONLY
            ports[parameter.name] = NodeInput(annotation, is_optional, default, in_query)
        result = self._resolved("the return value", signature.return_annotation)
        if batched:
            result = self._element("the return value", result)
        return NodeSignature(ports, result, self._warnings)

    @property
    def first(self) -> str:
        """The name of its first parameter."""
        return list(signature_of(self._function).parameters)[self._skip]

    def _resolved(self, what: str, annotation: Any) -> Any:
        if annotation is inspect.Signature.empty:
            return Any
        holder = types.SimpleNamespace(__annotations__={"it": annotation})
        names = {} if self._owner is None else {self._owner.__name__: self._owner, **vars(self._owner)}
        scope: dict[str, Any] = getattr(self._function, "__globals__", {})
        hints, error = caught(lambda: typing.get_type_hints(holder, scope, names, include_extras=True))
        if error is None:
            found, error = caught(expanded, hints["it"])
            if error is None:
                return found
        self._warnings.append(
            f"{self._where}: {what} is annotated {as_written(annotation)}, which is not checked ({text_of(error)})"
        )
        return Any

    def _element(self, what: str, annotation: Any) -> Any:
        is_list, element = element_of(annotation)
        if not is_list:
            msg = f"{self._where} runs for batches: {what}: expected a list as annotation, got {spell(annotation)}"
            raise ConfigError(msg)
        return element


def _method(model: type[Model], name: str) -> _Reader:
    for owner in model.__mro__:
        if name in vars(owner):
            found: Any = vars(owner)[name]
            is_static = isinstance(found, staticmethod)
            function = cast("Callable[..., Any]", getattr(found, "__func__", found))
            return _Reader(function, owner, skip=0 if is_static else 1)
    raise ConfigError(f"{model.__qualname__} has no method `{name}`")
