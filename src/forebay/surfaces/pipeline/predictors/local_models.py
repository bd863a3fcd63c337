# SPDX-License-Identifier: Apache-2.0
"""Models in this process: a folder or a file that `forebay.runtimes` runs, or a Python callable."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from forebay.errors import ConfigError
from forebay.runtimes.library import PaddleOptions, RunOptions, tell
from forebay.runtimes.model_file import load_with
from forebay.runtimes.onnx import OnnxRuntime
from forebay.runtimes.openvino import OpenVino
from forebay.surfaces.pipeline.predictors.descriptions import describe
from forebay.surfaces.pipeline.predictors.function import FunctionClient
from forebay.surfaces.pipeline.predictors.model_client import ModelClient, Predictor
from forebay.surfaces.pipeline.predictors.model_settings import LocalConf
from forebay.types.devices import Device

_REFERENCE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_DEVICES: Final = {-1: "gpu", 1: "gpu", 2: "tensorrt", 4: "xpu", 5: "Ascend", 6: "Ascend", 7: "IPU"}
_PADDLE_ONLY: Final = ("mem_optim", "use_mkldnn", "mkldnn_cache_capacity", "mkldnn_op_list", "mkldnn_bf16_op_list")
_TENSORRT_ONLY: Final = ("use_calib", "min_subgraph_size")


def local_client(conf: LocalConf, wanted: Sequence[str], index: int | None) -> Predictor:
    """Load a model.

    Args:
        wanted: Aliases of the results for a call that names none; if empty, all.
        index: Number of the worker process, which decides on the device; None in threads.

    Raises:
        ConfigError: If there is no model, or nothing that runs it.
    """
    assert conf.model_config is not None
    if is_reference(conf.model_config):
        return FunctionClient(conf.model_config, wanted)
    return load_model(conf, wanted, index)


def load_model(conf: LocalConf, wanted: Sequence[str], index: int | None) -> ModelClient:
    """Load a model that is not a callable, but a folder or a file; see `local_client`."""
    assert conf.model_config is not None
    path = Path(conf.model_config)
    if not path.exists():
        msg = f"model_config: expected a folder, a file or module:callable, got '{path}', which does not exist"
        raise ConfigError(msg)
    model = load_with(path, run_options(conf, conf.device_of(index)), "model_config is")
    _tell_ignored(model.runtime, conf)
    described = describe(path)
    signature = model.signature()
    if described is not None:
        try:
            signature = described.bound(signature)
        except ConfigError as problem:
            raise ConfigError(f"{path}: {problem.message}") from None
    return ModelClient(model, signature, wanted)


def is_reference(model_config: str) -> bool:
    """Tell whether this is `module:callable` and not a path."""
    return _REFERENCE.fullmatch(model_config) is not None and not Path(model_config).exists()


def run_options(conf: LocalConf, device: int | None) -> RunOptions:
    """Return how a model runs on a device, or on the CPU for None."""
    by = conf.device_type
    said = f"device_type {by}" if by != -1 else f"devices {conf.devices}"
    return RunOptions(
        threads=conf.thread_num,
        device=None if device is None else Device(_DEVICES[by], device, said),
        precision=conf.precision,
        paddle=PaddleOptions(
            reuses_memory=conf.mem_optim,
            rewrites=conf.ir_optim,
            onednn=conf.use_mkldnn,
            onednn_cache=conf.mkldnn_cache_capacity,
            onednn_ops=conf.mkldnn_op_list,
            onednn_bf16_ops=conf.mkldnn_bf16_op_list,
            tensorrt_min_nodes=conf.min_subgraph_size,
            tensorrt_calibrates=conf.use_calib,
        ),
    )


def _tell_ignored(runtime: Any, conf: LocalConf) -> None:
    """Log, once for each model, which of its settings its runtime has no use for."""
    if isinstance(runtime, OnnxRuntime):
        library, names = "onnxruntime", (*_PADDLE_ONLY, *_TENSORRT_ONLY, "precision")
    elif isinstance(runtime, OpenVino):
        library, names = "OpenVINO", (*_PADDLE_ONLY, *_TENSORRT_ONLY)
    else:
        library, names = "Paddle without TensorRT", () if runtime.has_tensorrt else _TENSORRT_ONLY
    usual = LocalConf()
    given = [name for name in names if getattr(conf, name) != getattr(usual, name)]
    if given:
        tell(f"{runtime.file}: {library} has no use for {', '.join(given)}")
