# SPDX-License-Identifier: Apache-2.0
"""Runs a project's Ventu object in a worker process of `forebay serve`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from forebay.errors import ConfigError, ForebayError, ModelError
from forebay.serving.models.model import load_module
from forebay.surfaces.ventu import self_serving_files, shim
from forebay.surfaces.ventu.inference import HookFailed
from forebay.surfaces.ventu.service_pages import reply_to
from forebay.types.call_signature import signature_of
from forebay.types.did_you_mean import nearest
from forebay.types.failures import failure_of, text_of, trace_of
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.ventu.model import Ventu
    from forebay.types.call import Item, Outcome

FACTORIES = ("create_model", "create_app")
"""Functions that are called when a file holds no Ventu object."""


def build(*, path: str, name: str | None) -> VentuBatchRunner:
    """Build the runner; the reference that worker processes are given.

    Args:
        name: The object in it, or the function that makes it; None looks for one.

    Raises:
        ForebayError: If the file cannot be imported or there is no such object.
    """
    shim.install()
    with self_serving_files.loading():
        runner, error = caught(_loaded, Path(path), name)
    if error is None:
        return runner
    if isinstance(error, ConfigError):
        raise ConfigError(_placed(path, error.message)) from error
    if isinstance(error, ForebayError):
        raise error
    wrong = _wrong(path, error)
    if wrong is not None:
        raise ConfigError(wrong) from error
    raise ModelError(f"{path} cannot be loaded: {text_of(error)}", trace=trace_of(error)) from error


def _loaded(path: Path, name: str | None) -> VentuBatchRunner:
    try:
        return VentuBatchRunner(find(load_module(path), name), path)
    except self_serving_files.Handed as handed:
        module = handed.module
        if module is None:
            raise
        sys.modules[module.__name__] = module  # an import that was broken off leaves nothing behind
        model = handed.model if name is None or not hasattr(module, name) else None
        return VentuBatchRunner(model or find(module, name), path, left_out=handed.call)


def _placed(path: str, message: str) -> str:
    return message if path in message else f"{path}: {message}"


def _wrong(path: str, error: BaseException) -> str | None:
    """Return what a person wrote wrong, if that is why a file cannot be loaded."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing == "pydantic":
        return f"{path} needs pydantic, which is not installed here; install it with: pip install forebay[pydantic]"
    if missing:
        return f"{path} imports '{missing}', which is not installed here"
    if isinstance(error, ImportError):
        return f"{path}: {error}"
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    if getattr(error, "title", None) == "Config" and hasattr(error, "errors"):
        return f"{path}: the settings of the Ventu object are wrong: {_settings(cast('Any', error).errors())}"
    return None


def _settings(problems: Sequence[Mapping[str, Any]]) -> str:
    from forebay.surfaces.ventu.config import Config

    words: list[str] = []
    for problem in problems:
        key = ".".join(map(str, problem["loc"]))
        hint = nearest(key, Config.model_fields) if key not in Config.model_fields else None
        did_you_mean = f"; did you mean '{hint}'?" if hint else ""
        words.append(f"{key}: {problem['msg']}, found {problem['input']!r}{did_you_mean}")
    return "; ".join(words)


def find(module: ModuleType, name: str | None = None) -> Ventu:
    """Return the Ventu object of a module.

    Raises:
        ConfigError: If there is none or more than one; names the nearest.
    """
    where = module.__file__
    if name is not None:
        if not hasattr(module, name):
            hint = nearest(name, [known for known in vars(module) if not known.startswith("_")])
            msg = f"{where} has nothing named {name}" + (f"; did you mean {hint}?" if hint else "")
            raise ConfigError(msg)
        value = getattr(module, name)
        if _is_project_class(value):
            what = f"{name} in {where} is a class; make an object of it"
            raise ConfigError(f"{what}: model = {value.__name__}(Request, Response)")
        found = _made(value, f"{name} in {where}")
        if found is None:
            raise ConfigError(
                f"{name} in {where}: expected a Ventu object or a function that returns one, got {value!r:.80}"
            )
        return found
    models = {id(model): key for key, value in vars(module).items() if (model := _model_of(value)) is not None}
    if len(models) > 1:
        raise ConfigError(f"{where} holds several Ventu objects: {', '.join(models.values())}; name one as FILE:NAME")
    for key in [*models.values(), *FACTORIES]:
        found = _made(getattr(module, key, None), f"{key} in {where}")
        if found is not None:
            return found
    cls = next((value.__name__ for value in vars(module).values() if _is_project_class(value)), None)
    if cls is not None:
        raise ConfigError(f"{where} holds no Ventu object; make one of its class: model = {cls}(Request, Response)")
    raise ConfigError(
        f"{where} holds no Ventu object; make one at its top level, as `model = MyModel(Request, Response)`, or write "
        "a function `create_model` that returns it"
    )


def _is_project_class(value: Any) -> bool:
    from forebay.surfaces.ventu.model import Ventu

    return isinstance(value, type) and issubclass(value, Ventu) and value is not Ventu


def _made(value: Any, what: str) -> Ventu | None:
    """Return the Ventu object that something is or, called, returns.

    Raises:
        ConfigError: If it cannot be called without arguments.
    """
    found = _model_of(value)
    if found is not None or not callable(value):
        return found
    try:
        signature_of(value).bind()
    except TypeError:
        raise ConfigError(f"{what} needs arguments; expected a function without any") from None
    except ValueError:  # something written in C, which does not say
        pass
    return _model_of(value())


def _model_of(value: Any) -> Ventu | None:
    """Return the Ventu object that something is or belongs to."""
    from forebay.surfaces.ventu.model import Ventu
    from forebay.surfaces.ventu.wsgi import WsgiApp

    if isinstance(value, Ventu):
        return value
    if isinstance(value, WsgiApp):
        return cast("Ventu", value.service.model)
    return None


class VentuBatchRunner(Runner):
    """Answers batches with `[status, media type, body]` for each request.

    A model that only has `inference` is asked for one result after the other.
    """

    borrows_input = True  # bodies are copied

    def __init__(self, model: Ventu, path: Path, left_out: str = "") -> None:
        """Take a model.

        Args:
            left_out: The call of the file's that would have served it.
        """
        from forebay.surfaces.ventu.model import Ventu

        self._model = model
        self._path = path
        self._left_out = left_out
        self._service = model.ventu_service
        self._workers = self._service.metrics.workers.labels("http")
        kind = type(model)
        self._is_batched = not (kind.batch_inference is Ventu.batch_inference and kind.inference is not Ventu.inference)

    def open(self, ctx: WorkerContext) -> None:
        """Warm the model up; from then on it counts as a worker.

        Raises:
            ConfigError: If an example does not fit its schema, or its result is not the expected one.
        """
        try:
            self._model.health_check(batch=self._is_batched)
        except ConfigError as error:
            raise ConfigError(_placed(str(self._path), error.message)) from error
        self._workers.inc()

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Answer a batch; see `Runner.run`."""
        verb = items[0].params.get("verb")
        if verb == "about":
            about = {"use_msgpack": self._model.use_msgpack, "document": self._service.document()}
            return [{**about, "left_out": self._left_out}]
        if verb == "health":
            self._model.health_check(batch=self._is_batched)
            return [True]
        media, inference = self._service.media, self._service.inference
        bodies = [bytes(item.body) or media.nothing for item in items]
        outcomes = inference.many(bodies) if self._is_batched else [inference.one(body) for body in bodies]
        return [
            failure_of(outcome.error) if isinstance(outcome, HookFailed) else list(reply_to(outcome, media))[:3]
            for outcome in outcomes
        ]

    def close(self) -> None:
        """Count no longer."""
        self._workers.dec()
