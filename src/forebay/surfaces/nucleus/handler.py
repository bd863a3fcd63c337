# SPDX-License-Identifier: Apache-2.0
"""A project's `Handler`: how its file is loaded, what its methods want, and how it is constructed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from forebay.errors import ModelError
from forebay.surfaces.nucleus.handler_models import HandlerModels, ModelRules
from forebay.surfaces.nucleus.logs import logger
from forebay.surfaces.nucleus.project_settings import NO_PYTHON_CLIENT
from forebay.surfaces.nucleus.worker_requests import DeskClient
from forebay.types.call_signature import Arguments, signature_of
from forebay.types.failures import text_of, trace_of
from forebay.types.first_use import known
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.coroutines import Coroutines
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.nucleus.tensorflow_client import TensorFlowClient, TensorFlowModels
    from forebay.types.call import Item, Outcome

MODULE: Final = "cortex_handler"
ALIASES: Final = {"python_client": "model_client", "module_proto_pb2": "proto_module_pb2"}
CONSTRUCTOR_ARGUMENTS: Final = ("config", "model_client", "tensorflow_client", "proto_module_pb2")


class HandlerHost(Runner):
    """What runners with a handler have in common; the threads of a worker share one."""

    borrows_input = True  # bodies are copied

    def __init__(self, handler: Path, *, config: str, requirements: str) -> None:
        """Describe the handler.

        Args:
            config: The project's own `config`, as YAML so that every type of its survives.
            requirements: Where the project lists its packages, for the message when one is missing.
        """
        self._path = handler
        self._config = config
        self._requirements = requirements
        self._coroutines = Coroutines(asks=False)
        self._models: Mapping[str, Any] | None = None
        self._desk: DeskClient | None = None
        self._client: HandlerModels | None = None

    def connect(self, desk: str, models: Mapping[str, Any] | None) -> None:
        """Have the handler ask its server for more.

        Args:
            models: What the configuration says of its models; None if it has none.
        """
        self._desk = DeskClient(desk)
        self._models = models

    def open(self, ctx: WorkerContext) -> None:
        """Import and construct the handler; raises ModelError if that fails, with the reason in words."""
        from forebay.surfaces.nucleus import shim

        shim.install()
        _, error = caught(self._load)
        if error is not None:
            logger.error("failed to start api", exc_info=error)
            if isinstance(error, ModelError):
                raise error
            raise ModelError(f"failed to start api: {self._path}: {text_of(error)}", trace=trace_of(error)) from error

    def close(self) -> None:
        """Close the loops of its threads; the handler itself has no way to be closed."""
        self._coroutines.close()

    def run(self, items: Sequence[Item]) -> Sequence[Outcome] | Any:
        """Answer requests; the models that the handler gets for them stay as long as that takes."""
        client = self._client
        if client is None:
            return self._answers(items)
        client.begin()
        try:
            answers: Any = self._answers(items)
        except BaseException:
            client.end()
            raise
        if hasattr(answers, "__next__"):
            return client.during(answers)
        client.end()
        return answers

    def _answers(self, items: Sequence[Item]) -> Sequence[Outcome] | Any:
        raise NotImplementedError

    def _load(self) -> None:
        self._make(handler_class(self._path, self._requirements))

    def _make(self, cls: type) -> None:
        """Check and construct the handler."""
        raise NotImplementedError

    def _waited(self, result: Any) -> Any:
        return self._coroutines.run(result) if inspect.isawaitable(result) else result

    def _construct(self, cls: type, **given: Any) -> Any:
        """Construct it; what is not given of what its constructor may ask for is None."""
        values: dict[str, Any] = dict.fromkeys(CONSTRUCTOR_ARGUMENTS) | given
        values["config"] = yaml.safe_load(self._config) or {}
        plan = constructor_arguments(cls)
        desk, models = self._desk, self._models
        if desk is None or models is None:
            if desk is not None:
                desk.start()
            return plan.call(cls, values)
        rules, tensorflow = msgspec.convert(models["rules"], known(ModelRules)), models.get("tensorflow")
        new: Any = cls.__new__
        if tensorflow is None:
            _check_models(cls, plan, models["key"])
            client = values["model_client"] = HandlerModels(rules, desk)
            handler: Any = new(cls)
            client.bind(handler.load_model)  # its constructor may ask for a model
            desk.start()
        else:
            client, values["tensorflow_client"] = _tensorflow(plan, rules, tensorflow, desk)
            handler = new(cls)
            desk.start()
            if rules.cache_size is None:
                client.load_all()
        client.begin()
        try:
            plan.call(handler.__init__, values)
        finally:
            client.end()
        self._client = client
        return handler


def _tensorflow(
    plan: Arguments, rules: ModelRules, told: Mapping[str, Any], desk: DeskClient
) -> tuple[TensorFlowModels, TensorFlowClient]:
    """Make the client of a TensorFlow project; raises ModelError if the handler does not ask for it."""
    from forebay.surfaces.nucleus.tensorflow_client import TensorFlowClient, TensorFlowModels, TensorFlowRules

    if "tensorflow_client" not in plan.wanted:
        raise ModelError(
            '"tensorflow_client" is a required argument, but was not provided; a handler of the type tensorflow asks '
            "its models by it: def __init__(self, config, tensorflow_client)"
        )
    models = TensorFlowModels(rules, desk)
    return models, TensorFlowClient(models, msgspec.convert(told, known(TensorFlowRules)))


def _check_models(cls: type, plan: Arguments, key: str) -> None:
    """Check that a handler of a project with models does what it takes; raises ModelError if not."""
    if key == "models" and "python_client" not in signature_of(cls.__init__).parameters:
        raise ModelError(NO_PYTHON_CLIENT)
    if "model_client" not in plan.wanted:
        raise ModelError(
            f'"model_client" is a required argument, but was not provided; with {key} a handler asks for its models by '
            "it: def __init__(self, config, model_client)"
        )
    if not callable(getattr(cls, "load_model", None)):
        msg = "required method `load_model` is not defined; it returns the model of a folder: load_model(self, path)"
        raise ModelError(msg)


def constructor_arguments(cls: type) -> Arguments:
    """Return what a handler's constructor wants; raises ModelError if it asks for something there is not."""
    if cls.__init__ is object.__init__:
        return Arguments((), ())
    signature = signature_of(cls.__init__)
    parameters = list(signature.parameters.values())[1:]
    offered = {name: name for name in CONSTRUCTOR_ARGUMENTS} | ALIASES
    return match(parameters, offered, CONSTRUCTOR_ARGUMENTS, shown("__init__", signature))


def match(
    parameters: Sequence[inspect.Parameter], offered: Mapping[str, str], names: Sequence[str], what: str
) -> Arguments:
    """Match parameters with what is offered, by name; raises ModelError if one is needed that is not offered."""
    found, unknown = matched(parameters, offered, names)
    if unknown:
        reasons = "; ".join(f'"{name}" is not a supported argument' for name in unknown)
        msg = f'invalid signature for method "{what}": {reasons}; the arguments it may have are {", ".join(names)}'
        raise ModelError(msg)
    return found


def matched(
    parameters: Sequence[inspect.Parameter], offered: Mapping[str, str], names: Sequence[str]
) -> tuple[Arguments, list[str]]:
    """Match parameters with what is offered, by name; returns those that are needed and not offered as well."""
    positional: list[str] = []
    keywords: dict[str, str] = {}
    unknown: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            taken = {*positional, *keywords.values()}
            keywords |= {name: name for name in names if name not in taken}
        elif parameter.name not in offered:
            if parameter.default is parameter.empty:
                unknown.append(parameter.name)
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(offered[parameter.name])
        else:
            keywords[parameter.name] = offered[parameter.name]
    return Arguments(tuple(positional), tuple(keywords.items())), unknown


def method_parameters(cls: type, name: str) -> tuple[inspect.Signature, list[inspect.Parameter]]:
    """Return the signature of a handler's method, and what it is given: all but the handler itself.

    Raises:
        ModelError: If it has no place for the handler.
    """
    signature = signature_of(getattr(cls, name))
    parameters = list(signature.parameters.values())
    written: object = inspect.getattr_static(cls, name)
    binds = hasattr(type(written), "__get__")  # as functions do, and what decorators make of them
    if not binds or isinstance(written, staticmethod | classmethod | MethodType):  # to no handler
        return signature, parameters
    if not parameters or parameters[0].kind in {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}:
        raise ModelError(f'invalid signature for method "{shown(name, signature)}": it has no self')
    return signature, parameters[1:]


def shown(name: str, signature: inspect.Signature) -> str:
    """Return a method as it is written, without annotations."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [stars.get(parameter.kind, "") + parameter.name for parameter in signature.parameters.values()]
    return f"{name}({', '.join(names)})"


def handler_class(path: Path, requirements: str) -> type:
    """Load the file and return its `Handler`; raises ModelError if there is none, or a package is missing."""
    if path.suffix == ".pickle":
        dill: Any = importlib.import_module("dill")  # an extra
        with path.open("rb") as file:
            found: Any = dill.load(file)  # the project's own code, as trusted as its Python files
    else:
        try:
            module = _import(path)
        except ModuleNotFoundError as error:
            logger.exception("the handler cannot be imported")
            listed = f" (its packages are listed in {requirements})" if Path(requirements).is_file() else ""
            what = f"{path}: ModuleNotFoundError: {error}"
            msg = f"failed to start api: {what}; install what the project needs first{listed}"
            raise ModelError(msg, trace="".join(traceback.format_exception(error))) from error
        found = getattr(module, "Handler", None)
    if not inspect.isclass(found):
        raise ModelError(f"Handler class is not defined in {path}")
    return found


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} is not a Python file")
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
