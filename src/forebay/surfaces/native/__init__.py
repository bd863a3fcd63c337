# SPDX-License-Identifier: Apache-2.0
"""Python files with `forebay.Model` classes: `file.py` serves all models in it, `file.py:Name` one of them."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError, ForebayError
from forebay.protocols.native import Contract
from forebay.protocols.openapi import Described
from forebay.server.app import App, Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.model import load_module, models_in, settings_of
from forebay.serving.model_runner import ModelRunner
from forebay.serving.schema import io_types
from forebay.surfaces.contract import Project
from forebay.workers.inline import InlinePool
from forebay.workers.processes import ProcessPool
from forebay.workers.runner import RunnerSpec
from forebay.workers.threads import ThreadPool

if TYPE_CHECKING:
    from types import ModuleType

    from forebay.server.config import Overrides
    from forebay.serving.model import Model, ModelSettings
    from forebay.surfaces.contract import Options
    from forebay.workers.pool import Pool


class NativeSurface:
    """Serves `forebay.Model` classes."""

    name = "native"

    def detect(self, target: str) -> bool:
        """Tell whether the target is a Python file, with or without a class name."""
        return split_target(target)[0].suffix == ".py"

    def build(self, target: str, options: Options) -> Project:
        """Import the file and build an endpoint for each model.

        Raises:
            ConfigError: If the file cannot be imported or a model is not well-formed.
        """
        from forebay.transports.http.asgi import asgi_app, routes_of

        path, name = split_target(target)
        models = models_in(_import(path), name)
        app = App([serve_model(model, options.overrides) for model in models])
        return Project(
            app=app,
            http=options.http,
            asgi=asgi_app(app, options.http),
            routes=routes_of(app, options.http),
            summary=[_summary(app, served) for served in app.served],
        )


def serve_model(model: type[Model], overrides: Overrides) -> Served:
    """Build the endpoint of a model class.

    Raises:
        ConfigError: If the class is not well-formed.
    """
    settings = settings_of(model)
    given, answer = io_types(model)
    batching = _batching(settings, overrides)
    endpoint = Endpoint(
        EndpointConfig(
            name=settings.name,
            version=settings.version,
            timeout_s=(overrides.timeout_ms or settings.timeout_ms) / 1000,
            split=settings.split,
            streams=settings.streams,
        ),
        batching,
        _pool(model, settings, overrides),
    )
    contract = Contract(
        raw_input=given.raw,
        raw_output=answer.raw,
        batchable=settings.batchable,
        streams=settings.streams,
    )
    described = Described(
        name=settings.name,
        version=settings.version,
        description=settings.description,
        input=given,
        output=answer,
        streams=settings.streams,
        batchable=settings.batchable,
    )
    return Served(endpoint, contract, described)


def split_target(target: str) -> tuple[Path, str | None]:
    """Split `file.py:Name` into the file and the name."""
    file, colon, name = target.rpartition(":")
    if colon and file.endswith(".py"):
        return Path(file), name
    return Path(target), None


def _batching(settings: ModelSettings, overrides: Overrides) -> BatchConfig:
    wait_ms = settings.max_wait_ms if overrides.max_wait_ms is None else overrides.max_wait_ms
    return BatchConfig(
        max_size=overrides.max_batch_size or settings.max_batch_size,
        max_wait_s=(wait_ms or 0.0) / 1000,
        capacity=overrides.max_queue or settings.max_queue,
        idle=overrides.idle or ("gather" if wait_ms is None else "wait"),
    )


def _pool(model: type[Model], settings: ModelSettings, overrides: Overrides) -> Pool:
    module = sys.modules[model.__module__]
    spec = RunnerSpec(
        factory="forebay.serving.model_runner:from_file",
        kwargs={"path": str(module.__file__), "name": model.__name__},
        local=lambda: ModelRunner(model),
    )
    if overrides.worker_kind == "inline":
        return InlinePool(spec, slots=overrides.workers if settings.is_async else 1)
    if overrides.worker_kind == "thread":
        return ThreadPool(spec, workers=overrides.workers)
    return ProcessPool(msgspec.structs.replace(spec, local=None), workers=overrides.workers)


def _import(path: Path) -> ModuleType:
    try:
        return load_module(path)
    except ForebayError:
        raise
    except SyntaxError as error:
        msg = f"{path}:{error.lineno}: {error.msg}"
        raise ConfigError(msg) from error
    except ModuleNotFoundError as error:
        msg = f"{path}{_line(error, path)} imports '{error.name}', which is not installed here"
        raise ConfigError(msg) from error
    except BaseException as error:
        msg = f"{path}{_line(error, path)} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error


def _line(error: BaseException, path: Path) -> str:
    """Return the last line of the file the error came through, as ':12'."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.resolve()]
    return f":{lines[-1]}" if lines else ""


def _summary(app: App, name: str) -> str:
    about = app.describe(name)
    batching = about["batching"]
    waits = f"waits {batching['max_wait_ms']:g} ms" if batching["idle"] == "wait" else batching["idle"]
    return (
        f"POST /models/{name}  version {about['version']}, batches of up to {batching['max_batch_size']} ({waits}), "
        f"{about['workers']['slots']} worker slots, timeout {about['timeout_ms']} ms"
        + (", streams" if about["streams"] else "")
        + (", arrays of samples" if about["batchable"] else "")
    )
