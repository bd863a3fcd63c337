# SPDX-License-Identifier: Apache-2.0
"""Models in this process: which files a folder has, and which library runs them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError, ForebayError
from forebay.surfaces.pipeline.codes import CustomExceptionCode, error
from forebay.surfaces.pipeline.predictors.function import FunctionClient
from forebay.surfaces.pipeline.predictors.model_client import ModelClient
from forebay.surfaces.pipeline.predictors.runtimes import OnnxRuntime, OpenVino, Paddle
from forebay.surfaces.pipeline.predictors.signature import Signature, Value, read_signature
from forebay.types.failures import failure_of, trace_of, words_of
from forebay.workers.user_code import caught

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.surfaces.pipeline.predictors.model_client import Client, Feed
    from forebay.surfaces.pipeline.predictors.runtimes import Runtime
    from forebay.surfaces.pipeline.predictors.settings import LocalConf
    from forebay.surfaces.pipeline.predictors.signature import Var

DESCRIPTIONS: Final = ("serving_server_conf.prototxt", "serving_client_conf.prototxt")
"""What describes the model in a folder, the first of them that is there."""

_VERDICT: Final = re.compile(r"^\(\w+\) |^\w*Error: ")
_REFERENCE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def local_client(conf: LocalConf, wanted: Sequence[str], index: int | None) -> Client:
    """Load a model.

    Args:
        conf: Where it is and how it runs.
        wanted: Aliases of the results a call gets that names none; none for all.
        index: Number of the worker process, which decides on the device; None in threads.

    Raises:
        ConfigError: If there is no model, or nothing that runs it.
    """
    assert conf.model_config is not None
    if is_reference(conf.model_config):
        return FunctionClient(conf.model_config, wanted)
    return load_model(conf, wanted, index)


def load_model(conf: LocalConf, wanted: Sequence[str], index: int | None) -> ModelClient:
    """Load a model that is no callable but a folder or a file; see `local_client`."""
    assert conf.model_config is not None
    path = Path(conf.model_config)
    runtime = _runtime(path, conf, conf.device_of(index))
    described = describe(path)
    signature = runtime.signature
    if described is not None:
        try:
            signature = described.bound(signature)
        except ConfigError as problem:
            raise ConfigError(f"{path}: {problem.message}") from None
    return ModelClient(LocalBackend(path.name, runtime), signature, wanted)


def is_reference(model_config: str) -> bool:
    """Tell whether this is `module:callable` and not a path."""
    return _REFERENCE.fullmatch(model_config) is not None and not Path(model_config).exists()


def describe(path: Path) -> Signature | None:
    """Read the description in a folder, or beside a file, or in that very file; None if there is none.

    Raises:
        ConfigError: If it describes no model.
    """
    if path.suffix == ".prototxt":
        return read_signature(path)
    folder = path if path.is_dir() else path.parent
    found = next((folder / name for name in DESCRIPTIONS if (folder / name).is_file()), None)
    return None if found is None else read_signature(found)


class LocalBackend:
    """A model that runs in this process, for one thread at a time.

    Attributes:
        runtime: What runs it.
    """

    def __init__(self, name: str, runtime: Runtime) -> None:
        self.runtime = runtime
        self._name = name

    def signature(self) -> Signature:
        """Return what its file says."""
        return self.runtime.signature

    def run(self, feed: Feed, fetch: Sequence[Var], log_id: int) -> Sequence[Value]:
        """Run it."""
        given = {var.name: value for var, value in feed}
        found, problem = caught(self.runtime.run, given, [var.name for var in fetch])
        if problem is None:
            return found
        if isinstance(problem, ForebayError):
            raise failure_of(problem).error
        text = f"the model '{self._name}' cannot be run on this: {reason_of(problem)}"
        raise error(CustomExceptionCode.CLIENT_ERROR.value, text, trace=trace_of(problem)) from problem

    def close(self) -> None:
        """Leave it to the garbage collector, as the libraries do."""


def reason_of(problem: BaseException) -> str:
    """Return what a library says without the trace that some of them say it with."""
    lines = [" ".join(line.split()) for line in words_of(problem).splitlines() if line.strip()]
    told = [line for line in lines if _VERDICT.search(line)] or lines[:3]
    return " ".join(told)[:400] or type(problem).__name__


def _runtime(path: Path, conf: LocalConf, device: int | None) -> Runtime:
    if not path.exists():
        msg = f"model_config is '{path}', and nothing is there; a folder, a file or module:callable is needed"
        raise ConfigError(msg)
    folder = path if path.is_dir() else path.parent
    load, file = _loader(path, folder)
    if load is not None:
        runtime, problem = caught(load, conf, device)
        if problem is None:
            return runtime
        why = problem.message if isinstance(problem, ConfigError) else f"{file} cannot be loaded: {reason_of(problem)}"
        raise ConfigError(f"model_config is '{path}', and {why}") from problem
    msg = (
        f"model_config is '{path}', which holds no model; an .onnx file, OpenVINO's .xml and .bin, or Paddle's "
        ".pdmodel and .pdiparams or __model__ with its parameters is needed"
    )
    raise ConfigError(msg)


def _loader(path: Path, folder: Path) -> tuple[Callable[[LocalConf, int | None], Runtime] | None, str]:
    """Return what loads the model that is there, and the name of its file; None if none is there.

    Raises:
        ConfigError: If there are several.
    """
    if found := _only(path, ".onnx"):
        return partial(OnnxRuntime, found), found.name
    if found := _only(path, ".xml"):
        return partial(OpenVino, found), found.name
    for suffix in (".pdmodel", ".json"):
        if (found := _only(path, suffix)) and (parameters := _only(folder, ".pdiparams")):
            return partial(Paddle, [found, parameters]), found.name
    program, together = folder / "__model__", folder / "__params__"
    if program.is_file():
        return partial(Paddle, [program, together] if together.is_file() else [folder]), program.name
    return None, ""


def _only(path: Path, suffix: str) -> Path | None:
    """Return the file of this kind, or None.

    Raises:
        ConfigError: If there are several.
    """
    if path.is_file():
        return path if path.suffix == suffix else None
    found = sorted(path.glob(f"*{suffix}"))
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        cure = "name the file in model_config, or move the others away"
        msg = f"model_config is '{path}', which holds several models: {names}; {cure}"
        raise ConfigError(msg)
    return found[0] if found else None
