# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow's SavedModels say of themselves, read without TensorFlow, and which library runs one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.errors import ConfigError, ForebayError
from forebay.runtimes.library import RunOptions, Runtime, library
from forebay.runtimes.openvino import OpenVino, silent_library
from forebay.runtimes.signature import Signature, Var, rows_and_sample
from forebay.runtimes.tensorflow import TensorFlow
from forebay.types.datatypes import BY_TENSORFLOW
from forebay.types.tensorflow_messages import TENSORFLOW, TYPE_NAMES

FILE: Final = "saved_model.pb"
"""The file by which a folder is a SavedModel."""
DEFAULT: Final = "serving_default"
"""The signature that is asked where none is named."""

_INIT: Final = "__saved_model_init_op"
"""A signature that TensorFlow writes for itself."""
_TAG: Final = "serve"


def folder_of(path: Path) -> Path | None:
    """Return the folder of a SavedModel: it, or that of its file; None if there is none."""
    if path.name == FILE:
        return path.parent if path.is_file() else None
    return path if (path / FILE).is_file() else None


def files_problem(paths: Collection[str]) -> str:
    """Return why files with these paths are not a SavedModel; empty if they are. It may do without variables."""
    if FILE not in paths:
        return f"there is no {FILE} in it"
    if any(path.startswith("variables/") for path in paths) and "variables/variables.index" not in paths:
        return "there are variables in it, and no variables/variables.index"
    return ""


def signatures_of(folder: Path) -> dict[str, Signature]:
    """Return the signatures of a SavedModel by name, `serving_default` first.

    Raises:
        ConfigError: If its file cannot be read, or has none.
    """
    return {name: Signature(_vars(one.inputs), _vars(one.outputs)) for name, one in _read(folder).items()}


def definitions_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the same as protobuf writes it in JSON; raises as `signatures_of` does."""
    from google.protobuf.json_format import MessageToDict

    return {name: MessageToDict(one) for name, one in _read(folder).items()}


def _read(folder: Path) -> dict[str, Any]:
    library("google.protobuf", f"{FILE} is read with protobuf", "forebay[tensorflow]")
    try:
        found = TENSORFLOW.parsed("SavedModel", (folder / FILE).read_bytes())
    except (ForebayError, OSError) as error:
        raise ConfigError(f"{FILE} cannot be read: {error}") from error
    graphs = [one for one in found.meta_graphs if _TAG in one.meta_info_def.tags]
    if not graphs:
        tags = ", ".join(tag for one in found.meta_graphs for tag in one.meta_info_def.tags) or "none"
        raise ConfigError(f"{FILE} holds no graph with the tag '{_TAG}', only {tags}")
    told = graphs[0].signature_def
    names = sorted((name for name in told if name != _INIT), key=lambda name: (name != DEFAULT, name))
    if not names:
        raise ConfigError(f"{FILE} holds no signature; save it with `signatures=`, or export it from Keras")
    return {name: told[name] for name in names}


def chosen(names: Collection[str], wanted: str | None = None) -> str | None:
    """Return the signature that is meant: the one that is named, the only one, `serving_default` or `predict`.

    None if there is none of that name, or none is named and it could be any of several.
    """
    if wanted is not None:
        return wanted if wanted in names else None
    if len(names) == 1:
        return next(iter(names))
    return next((name for name in (DEFAULT, "predict") if name in names), None)


def runtime_of(folder: Path, options: RunOptions) -> Callable[[RunOptions], Runtime]:
    """Return what loads a SavedModel: TensorFlow where it is installed, or else OpenVINO, which reads most of them.

    Raises:
        ConfigError: If it has not the signature that is wanted, or nothing here runs it.
    """
    signatures = signatures_of(folder)
    name = chosen(signatures, options.signature or None)
    is_any = options.signature == "" and importlib.util.find_spec("tensorflow") is not None
    name = next(iter(signatures)) if name is None and is_any else name
    if name is None:
        what = "no signature" if not options.signature else f"no signature '{options.signature}'"
        msg = f"it has {what} that would be meant, but {', '.join(map(repr, signatures))}; name one of them"
        raise ConfigError(msg)
    if importlib.util.find_spec("tensorflow") is not None:
        return partial(TensorFlow, folder, name, signatures)
    if DEFAULT in signatures and name != DEFAULT:
        msg = f"its signature '{name}' beside '{DEFAULT}' is run by TensorFlow only; pip install 'forebay[tensorflow]'"
        raise ConfigError(msg)
    if len(signatures) > 1 and name != DEFAULT:
        msg = f"it has several signatures and no '{DEFAULT}', which TensorFlow runs; pip install 'forebay[tensorflow]'"
        raise ConfigError(msg)
    return partial(_light, folder, signatures[name])


def _light(folder: Path, signature: Signature, options: RunOptions) -> Runtime:
    """Load a SavedModel with OpenVINO.

    Raises:
        ConfigError: If OpenVINO is not installed, or the model does what only TensorFlow can.
    """
    silent_library("a SavedModel is run by TensorFlow or OpenVINO", "forebay[tensorflow]")
    try:
        if options.precision == "fp32":  # what TensorFlow answers is answered here
            options = msgspec.structs.replace(options, precision="exact")
        runtime = OpenVino(folder, options)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip().startswith("--")]
        why = "; ".join(lines)[:300] or str(error).strip().splitlines()[-1][:300]
        msg = f"OpenVINO cannot run it ({why.lstrip('- ')}); TensorFlow can: pip install 'forebay[tensorflow]'"
        raise ConfigError(msg) from error
    # The file knows more of it: what the first axis counts, and how texts are called.
    runtime.signature = signature.as_in(runtime.signature)
    return runtime


def _vars(infos: Any) -> tuple[Var, ...]:
    found: list[Var] = []
    for name in sorted(infos):
        info = infos[name]
        known = BY_TENSORFLOW.get(info.dtype)
        shape = None if info.tensor_shape.unknown_rank else [axis.size for axis in info.tensor_shape.dim]
        rows, sample = rows_and_sample(shape)
        kind = TYPE_NAMES.get(info.dtype, str(info.dtype))
        datatype, is_scalar = known and known.name, shape == []
        found.append(Var(name, name, datatype, sample, rows=rows, type=kind, is_scalar=is_scalar, tensor=info.name))
    return tuple(found)
