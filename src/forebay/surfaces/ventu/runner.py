# SPDX-License-Identifier: Apache-2.0
"""Runs a project's Ventu object in a worker process of `forebay serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError, ForebayError, ModelError, nearest
from forebay.serving.models.model import load_module
from forebay.surfaces.ventu import shim
from forebay.surfaces.ventu.inference import Failed
from forebay.surfaces.ventu.pages import reply_to
from forebay.types.failures import failure_of, text_of, trace_of
from forebay.workers.user_code import caught

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from forebay.surfaces.ventu.model import Ventu
    from forebay.types.call import Item, Outcome
    from forebay.workers.runner import WorkerContext

FACTORIES = ("create_model", "create_app")
"""Functions that are called when a file holds no Ventu object."""


def build(*, path: str, name: str | None) -> BatchRunner:
    """Build the runner; the reference that worker processes are given.

    Args:
        path: The project's file.
        name: The object in it, or the function that makes it; None looks for one.

    Raises:
        ForebayError: If the file cannot be imported or there is no such object.
    """
    shim.install()
    runner, error = caught(lambda: BatchRunner(find(load_module(Path(path)), name)))
    if error is None:
        return runner
    if isinstance(error, ForebayError):
        raise error
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing == "pydantic":
        msg = f"{path} needs pydantic, which is not installed here; install it with: pip install forebay[pydantic]"
    elif missing:
        msg = f"{path} imports '{missing}', which is not installed here"
    else:
        msg = f"{path} cannot be loaded: {text_of(error)}"
    raise ModelError(msg, trace=trace_of(error)) from error


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
        found = _model_of(getattr(module, name), call=True)
        if found is None:
            msg = f"{name} in {where} is no Ventu object and no function that returns one"
            raise ConfigError(msg)
        return found
    models = {id(model): key for key, value in vars(module).items() if (model := _model_of(value)) is not None}
    if len(models) > 1:
        msg = f"{where} holds several Ventu objects: {', '.join(models.values())}; name one as FILE:NAME"
        raise ConfigError(msg)
    for key in [*models.values(), *FACTORIES]:
        found = _model_of(getattr(module, key, None), call=True)
        if found is not None:
            return found
    msg = (
        f"{where} holds no Ventu object; make one at its top level, as `model = MyModel(Request, Response)`, or write "
        "a function `create_model` that returns it"
    )
    raise ConfigError(msg)


def _model_of(value: Any, *, call: bool = False) -> Ventu | None:
    """Return the Ventu object that something is, belongs to or, if it may be called, returns."""
    from forebay.surfaces.ventu.model import Ventu
    from forebay.surfaces.ventu.wsgi import WsgiApp

    if isinstance(value, Ventu):
        return value
    if isinstance(value, WsgiApp):
        return value.model
    return _model_of(value()) if call and callable(value) else None


class BatchRunner:
    """Answers batches with `[status, media type, body]` for each request.

    A model that only has `inference` is asked for one result after the other.
    """

    borrows_input = True  # bodies are copied

    def __init__(self, model: Ventu) -> None:
        from forebay.surfaces.ventu.model import Ventu

        self._model = model
        self._service = model.ventu_service
        kind = type(model)
        self._is_batched = not (kind.batch_inference is Ventu.batch_inference and kind.inference is not Ventu.inference)

    def open(self, ctx: WorkerContext) -> None:
        """Warm the model up.

        Raises:
            AssertionError: If the result of its example is not the expected one.
        """
        self._model.health_check(batch=self._is_batched)

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Answer a batch; see `Runner.run`."""
        verb = items[0].params.get("verb")
        if verb == "about":
            return [{"use_msgpack": self._model.use_msgpack, "document": self._service.document()}]
        if verb == "health":
            self._model.health_check(batch=self._is_batched)
            return [True]
        media, inference = self._service.media, self._service.inference
        bodies = [bytes(item.body) or media.nothing for item in items]
        outcomes = inference.many(bodies) if self._is_batched else [inference.one(body) for body in bodies]
        return [
            failure_of(outcome.error) if isinstance(outcome, Failed) else list(reply_to(outcome, media))[:3]
            for outcome in outcomes
        ]

    def close(self) -> None:
        """Let go of the model."""
