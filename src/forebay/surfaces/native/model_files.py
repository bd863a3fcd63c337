# SPDX-License-Identifier: Apache-2.0
"""Targets that are model files: `forebay serve net.onnx`, `net.xml`, `net.skops`, a SavedModel, an encoder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from forebay.errors import ConfigError
from forebay.runtimes.encoder_folder import TOKENIZER, is_encoder_folder
from forebay.runtimes.library import OpenVinoOptions, RunOptions, Trust
from forebay.runtimes.model_file import KINDS
from forebay.runtimes.saved_model import chosen, folder_of, signatures_of
from forebay.runtimes.trial import SharedFile, TrialLimits, tried
from forebay.serving.models.file_model import FileModel, FilePlan, class_of, unserved
from forebay.surfaces.native.model_options import devices_of, workers_of
from forebay.workers.processes.cores import usable_cores
from forebay.workers.runner import RunnerSpec

if TYPE_CHECKING:
    from forebay.server.config import Overrides


class ModelTarget(NamedTuple):
    """The class of a model file, how a worker builds its runner, and what is odd about it."""

    model: type[FileModel]
    spec: RunnerSpec
    warnings: list[str]


def is_model_file(target: str) -> bool:
    """Tell whether a target is a model file, by its name; one that is not there is told when it is loaded."""
    path = Path(target)
    return path.suffix in KINDS or folder_of(path) is not None or is_encoder_folder(path)


def read_model_file(
    path: Path,
    overrides: Overrides,
    shared: SharedFile | None = None,
    openvino: OpenVinoOptions | None = None,
) -> ModelTarget:
    """Try a model file and find out what it takes and gives, and how it can be batched.

    Args:
        shared: The file, where workers in this process share it with others who use it.

    Raises:
        ConfigError: If it is not there or no model, nothing here runs it, or requests cannot carry what it takes.
    """
    path = folder_of(path) or path
    if shared is None and not path.is_file() and path.suffix in KINDS:
        raise ConfigError(f"the model is '{path}', and no file is there")
    devices = devices_of(str(path), overrides.devices, overrides.worker_kind)
    threads = max(1, usable_cores() // workers_of(overrides.workers, devices))
    wanted = [device for device in devices if device.kind != "cpu"]
    trust = Trust(types=overrides.trust_types, pickle=overrides.trust_pickle)
    if shared is None:
        limits = TrialLimits(overrides.trial_s, overrides.max_trial_bytes)
        options = RunOptions(threads=threads, signature="", trust=trust, openvino=openvino)
        trial = tried(path, options, wanted, limits)
    else:
        trial = shared.trial(wanted)
    if trial.missing:
        raise ConfigError(
            f"{path} cannot run on {trial.missing[0]}: what runs it here ({trial.library}) knows no such device"
        )
    why_not = trial.main.sharing.why_not
    if trial.ends_process and overrides.worker_kind != "process":  # which would be the server
        raise ConfigError(f"{path} needs worker kind process, found {overrides.worker_kind}: {why_not}")
    is_tied = any(device.cores for device in devices)
    others = {name: one for name, one in trial.others.items() if not unserved(one.signature)}
    own = None if is_tied else threads
    plan = FilePlan(str(path.absolute()), trial.main, own, trial.name, others, trust=trust, openvino=openvino)
    model = class_of(plan, None if shared is None else shared.load)
    spec = RunnerSpec(factory="forebay.serving.models.file_model:runner_of", kwargs={"plan": msgspec.to_builtins(plan)})
    warnings = [f"{path} is run on one request at a time: {why_not}"] if why_not else []
    if path.suffix == ".onnx" and path.with_name(TOKENIZER).is_file() and not is_encoder_folder(path.parent):
        warnings.append(f"{path} takes tokens, not texts: beside it is a {TOKENIZER}, but no config.json")
    return ModelTarget(model, spec, [*warnings, *_unreached(path, trial.name, others)])


def _unreached(path: Path, name: str, others: Collection[str]) -> list[str]:
    """Return what is to be said of a SavedModel's signatures: those that are not served, and one that was picked."""
    if folder_of(path) is None:
        return []
    known = signatures_of(path)
    told: list[str] = []
    if chosen(known) is None:
        told.append(f"{path} has no signature 'serving_default'; what names none is answered by '{name}'")
    left = [one for one in known if one not in others and one != (name or chosen(known))]
    if left and not name:
        names = ", ".join(map(repr, left))
        told.append(
            f"of {path} the signatures {names} are not served; TensorFlow can: pip install 'forebay[tensorflow]'"
        )
    elif left:
        told.append(f"of {path} the signatures {', '.join(map(repr, left))} have types that requests cannot carry")
    return told
