# SPDX-License-Identifier: Apache-2.0
"""A model file in memory: it is asked by name, and what its library raises has become an error of ours."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Protocol

from forebay.errors import ConfigError, ForebayError, RunnerFailed
from forebay.runtimes.boosters import BoostedTrees
from forebay.runtimes.encoder import Encoder
from forebay.runtimes.encoder_folder import is_encoder_folder
from forebay.runtimes.library import RunOptions, Runtime, Trust, accelerator
from forebay.runtimes.onnx import OnnxRuntime
from forebay.runtimes.openvino import OpenVino
from forebay.runtimes.paddle import Paddle
from forebay.runtimes.pytorch import PyTorch
from forebay.runtimes.saved_model import folder_of, runtime_of
from forebay.runtimes.scikit_learn import ScikitLearn
from forebay.runtimes.signature import Feed, Signature, Value, Var, named
from forebay.runtimes.tensorflow import TensorFlow
from forebay.types.failures import failure_of, trace_of, words_of
from forebay.types.user_exceptions import answered
from forebay.workers.user_calls.user_code import caught

_MAX_REASON: Final = 2000
"""Characters of what a library says: OpenVINO names a whole graph's worth of operators."""
_VERDICT: Final = re.compile(r"^\(\w+\) |^\w*Error: ")
_WHERE: Final = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
"""When and in which of its files XGBoost found a problem."""
_HEAD_BYTES: Final = 1024
"""What is read of a file to tell its kind."""


class FileKind(NamedTuple):
    """Files of one suffix.

    Attributes:
        runtime: What loads them.
        extra: The extra that installs its library.
        found: The name without the suffix by which such a file in a folder is the model there: `*` for any, empty for
            none, since a pickle or JSON may be anything.
        head: What such a file begins with, where others have its suffix as well, or would end the library's process.
    """

    runtime: Callable[[Path, RunOptions], Runtime]
    extra: str
    found: str = "*"
    head: re.Pattern[bytes] | None = None

    def holds(self, file: Path) -> bool:
        """Tell whether a file of this suffix is of this kind."""
        if self.head is None or not file.is_file():
            return True
        with file.open("rb") as opened:
            return self.head.match(opened.read(_HEAD_BYTES)) is not None


KINDS: Final = {
    ".onnx": FileKind(OnnxRuntime, "onnx"),
    ".xml": FileKind(OpenVino, "openvino"),
    ".tflite": FileKind(OpenVino, "openvino", head=re.compile(rb".{4}TFL3", re.DOTALL)),
    ".skops": FileKind(ScikitLearn, "sklearn"),
    **dict.fromkeys((".joblib", ".pkl", ".pickle"), FileKind(ScikitLearn, "sklearn", found="")),
    **dict.fromkeys((".pt2", ".pt", ".ts"), FileKind(PyTorch, "torch", found="")),
    ".ubj": FileKind(BoostedTrees, "xgboost", head=re.compile(rb"\{.{0,200}?learner", re.DOTALL)),
    ".json": FileKind(
        BoostedTrees, "xgboost", found="", head=re.compile(rb'\{\s*("version"\s*:\s*\[[^\]]*\]\s*,\s*)?"learner"\s*:')
    ),
    ".txt": FileKind(BoostedTrees, "lightgbm", found="model", head=re.compile(rb"tree\r?\n")),
}
"""Files that are a model by themselves, or with those of the same name beside them, by their suffixes."""


class Backend(Protocol):
    """A model by its own names: in this process or behind a connection."""

    def signature(self) -> Signature | None:
        """Return what the model says of itself; None if it says nothing."""
        ...

    def run(self, feed: Feed, fetch: Sequence[Var], id: int, /) -> Sequence[Value]:
        """Return the value of each output that is wanted, in this order.

        Args:
            feed: All of its inputs, cast to what it takes.
            id: Number of the call, for the log of a server.

        Raises:
            InvalidRequest: If it cannot be asked this.
            DeadlineExceeded: If it does not answer in time.
            Unavailable: If nobody answers.
            RunnerFailed: If it fails.
        """
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class ModelFile:
    """A model that runs in this process; threads take turns where its library wants that.

    Attributes:
        name: What messages call it.
        runtime: What runs it.
    """

    def __init__(self, name: str, runtime: Runtime) -> None:
        self.name = name
        self.runtime = runtime
        self._turn = contextlib.nullcontext() if runtime.is_shared else threading.Lock()

    def __call__(self, arrays: Mapping[str, Any], wanted: Sequence[str] = ()) -> dict[str, Any]:
        """Run the model on NumPy arrays.

        Args:
            arrays: All of its inputs by name; they are cast to the types that the file declares.
            wanted: Names of the outputs; none for all.

        Returns:
            The outputs by name.

        Raises:
            InvalidRequest: If the names are not the model's.
            ValidationError: If a value is not an array of the type that is declared.
            RunnerFailed: If the model cannot be run on this.
        """
        signature = self.signature()
        fetches = signature.fetched(wanted)
        return named(fetches, self.run(signature.fed(arrays, batch=True), fetches))

    def signature(self) -> Signature:
        """Return what its file says of inputs and outputs."""
        return self.runtime.signature

    def signatures(self) -> tuple[str, dict[str, ModelFile]]:
        """Return which signature of a SavedModel this is, and its others, loaded with it; none of what has one only."""
        runtime = self.runtime
        if not isinstance(runtime, TensorFlow):
            return "", {}
        names = [name for name in runtime.signatures if name != runtime.name]
        return runtime.name, {name: ModelFile(self.name, runtime.of(name)) for name in names}

    def run(self, feed: Feed, fetch: Sequence[Var], id: int = 0) -> Sequence[Value]:
        """Run it, as `Backend.run`."""
        given = {var.name: value for var, value in feed}
        with self._turn:
            found = answered(lambda: self.runtime.run(given, [var.name for var in fetch]), self._failed)
        return [_sequences(var, value) for var, value in zip(fetch, found, strict=True)]

    def _failed(self, problem: BaseException) -> NoReturn:
        if isinstance(problem, ForebayError):
            raise failure_of(problem).error
        text = f"the model '{self.name}' cannot be run on this: {reason_of(problem)}"
        raise RunnerFailed(text, trace=trace_of(problem)) from problem

    def close(self) -> None:
        """Leave it to the garbage collector, as the libraries do."""


def _sequences(var: Var, value: Value) -> Value:
    """Return a result with offsets if it is declared to have some: a library that knows none runs one sequence."""
    if not var.is_lod or value.lod is not None or not value.array.ndim:
        return value
    import numpy as np

    return Value(value.array, np.array([0, len(value.array)], np.int32))


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    signature: str | None = None,
    trust_types: Sequence[str] = (),
    trust_pickle: bool = False,
) -> ModelFile:
    """Load a model, as inside `forebay.Model.load`.

    Args:
        path: Its file, or a folder with one model in it.
        threads: Threads that compute one batch; None leaves it to the library.
        device: Where it runs: `cpu`, `gpu`, `cuda:1`.
        precision: fp32, fp16 or bf16, where the library can choose.
        signature: Which signature of a SavedModel; `serving_default`, or the only one, if it is not said.
        trust_types: Full names of types that a `.skops` file may hold beside those that skops trusts.
        trust_pickle: Whether to load a pickle or a program of PyTorch, which can run any code.

    Raises:
        ConfigError: If there is no model, or nothing that runs it, with what to do.
    """
    trust = Trust(types=tuple(trust_types), pickle=trust_pickle)
    options = RunOptions(
        threads=threads, device=accelerator(device), precision=precision, signature=signature, trust=trust
    )
    return load_with(Path(path), options)


def load_with(path: Path, options: RunOptions, named: str = "the model is") -> ModelFile:
    """Load a model, told all that a library may know.

    Args:
        path: Its file, or a folder with one model in it.
        named: How messages begin, before the path.

    Raises:
        ConfigError: As `load`.
    """
    if not path.exists():
        raise ConfigError(f"{named} '{path}', and there is no such file or folder")
    make, file = _loader(path, path if path.is_dir() else path.parent, named, options)
    if make is None:
        raise ConfigError(
            f"{named} '{path}', which holds no model; expected an .onnx or .skops file, XGBoost's .ubj or .json, "
            "LightGBM's .txt, PyTorch's .pt2, OpenVINO's .xml and .bin, TensorFlow's saved_model.pb or .tflite, or "
            "Paddle's .pdmodel and .pdiparams or __model__ with its parameters"
        )
    runtime, problem = caught(make, options)
    if problem is None:
        return ModelFile(path.name, runtime)
    why = problem.message if isinstance(problem, ConfigError) else f"{file} cannot be loaded: {reason_of(problem)}"
    raise ConfigError(f"{named} '{path}', and {why}") from problem


def reason_of(problem: BaseException) -> str:
    """Return what a library says without the trace that some of them say it with."""
    text = _WHERE.sub("", words_of(problem), count=1)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Exception from ")]  # where in OpenVINO, before what
    told = [line for line in lines if _VERDICT.search(line)] or lines[:3]
    text = " ".join(told) or type(problem).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


def _loader(
    path: Path, folder: Path, named: str, options: RunOptions
) -> tuple[Callable[[RunOptions], Runtime] | None, str]:
    """Return what loads the model that is there, and the name of its file; None if none is there.

    Raises:
        ConfigError: If there are several.
    """
    if options.openvino is not None:
        return partial(OpenVino, path), path.name
    if is_encoder_folder(path):
        return partial(Encoder, path), "it"
    for suffix, kind in KINDS.items():
        name = "*" if path.is_file() else kind.found
        if name and (found := _only(path, suffix, named, name)) and kind.holds(found):
            return partial(kind.runtime, found), found.name
    if (found := folder_of(path)) is not None:
        try:
            return runtime_of(found, options), found.name
        except ConfigError as problem:
            raise ConfigError(f"{named} '{path}', a SavedModel: {problem.message}") from None
    for suffix in (".pdmodel", ".json"):
        if (found := _only(path, suffix, named)) and (parameters := _only(folder, ".pdiparams", named)):
            return partial(Paddle, [found, parameters]), found.name
    program, together = folder / "__model__", folder / "__params__"
    if program.is_file():
        return partial(Paddle, [program, together] if together.is_file() else [folder]), program.name
    return None, ""


def _only(path: Path, suffix: str, named: str, name: str = "*") -> Path | None:
    """Return the file of this kind, or None; raises a `ConfigError` if there are several."""
    if path.is_file():
        return path if path.suffix == suffix else None
    found = sorted(path.glob(f"{name}{suffix}"))
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        msg = f"{named} '{path}', which holds several models: {names}; name the file itself, or move the others away"
        raise ConfigError(msg)
    return found[0] if found else None
