# SPDX-License-Identifier: Apache-2.0
"""The libraries that run models in this process, each imported when a model needs it."""

from __future__ import annotations

import importlib
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from forebay.errors import ConfigError
from forebay.surfaces.pipeline.codes import CustomExceptionCode, error
from forebay.surfaces.pipeline.predictors.settings import LocalConf
from forebay.surfaces.pipeline.predictors.signature import Signature, Value, Var

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.predictors.signature import Array

log = logging.getLogger("forebay.pipeline")


class Runtime(Protocol):
    """One model in memory, used by one thread at a time.

    Attributes:
        signature: What it takes and gives, as its file says.
    """

    signature: Signature

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Return the outputs of these names, in this order; whatever the library raises goes through."""
        ...


_BY_DEVICES: Final = -1
_GPU: Final = 1
_TENSORRT: Final = 2
_XPU: Final = 4
_NOT_SUPPORTED: Final[Mapping[int, str]] = {5: "Ascend", 6: "Ascend", 7: "IPU"}
_ONE_SEQUENCE: Final = 2
_PADDLE_ONLY: Final = ("mem_optim", "use_mkldnn", "mkldnn_cache_capacity", "mkldnn_op_list", "mkldnn_bf16_op_list")
_TENSORRT_ONLY: Final = ("use_calib", "min_subgraph_size")
_ONNX_TYPES: Final = {
    "tensor(bool)": "bool",
    "tensor(double)": "float64",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "uint16",
    "tensor(string)": "str",
    **{f"tensor({kind})": kind for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}
_OPENVINO_PRECISIONS: Final = {"fp16": "f16", "bf16": "bf16"}


class OnnxRuntime:
    """A model in ONNX's format."""

    def __init__(self, model: Path, conf: LocalConf, device: int | None) -> None:
        """Load it.

        Args:
            model: The `.onnx` file.
            conf: Threads and devices.
            device: Number of the GPU; None for the CPU.
        """
        ort = library("onnxruntime", f"{model.name} is run by onnxruntime", "forebay[onnx]")
        options = ort.SessionOptions()
        options.intra_op_num_threads = conf.thread_num
        options.inter_op_num_threads = 1
        providers = _onnx_providers(model, ort.get_available_providers(), conf, device)
        self._session = ort.InferenceSession(str(model), options, providers=providers)
        self.signature = Signature(
            tuple(map(_onnx_var, self._session.get_inputs())), tuple(map(_onnx_var, self._session.get_outputs()))
        )
        _ignored(model, "onnxruntime", conf, *_PADDLE_ONLY, *_TENSORRT_ONLY, "precision")

    @property
    def threads(self) -> int:
        """Threads that compute one prediction."""
        return self._session.get_session_options().intra_op_num_threads

    @property
    def providers(self) -> list[str]:
        """The devices it runs on, as onnxruntime calls them."""
        return self._session.get_providers()

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Run it."""
        found = self._session.run(list(fetch), {name: _without_lod(name, value) for name, value in feed.items()})
        return [Value(array) for array in found]


class OpenVino:
    """A model in OpenVINO's format."""

    def __init__(self, model: Path, conf: LocalConf, device: int | None) -> None:
        """Load it.

        Args:
            model: The `.xml` file, beside its `.bin`.
            conf: Threads and precision.
            device: Number of the GPU; None for the CPU.
        """
        # Else the import tells the maker's server of itself, from a process that it forks off this one.
        sys.modules.setdefault("openvino_telemetry", cast("Any", None))
        openvino = library("openvino", f"{model.name} is run by OpenVINO", "forebay[openvino]")
        # A file that is mapped and then copied over changes the model that is in use, or ends its process.
        config: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "ENABLE_MMAP": False}
        if device is None:
            config["INFERENCE_NUM_THREADS"] = conf.thread_num
        precision = _OPENVINO_PRECISIONS.get(conf.precision.lower())
        if precision is not None:
            config["INFERENCE_PRECISION_HINT"] = precision
        self._model: Any = openvino.Core().compile_model(
            str(model), "CPU" if device is None else f"GPU.{device}", config
        )
        self._request = self._model.create_infer_request()
        self._shape = openvino.PartialShape
        self.signature = Signature(_openvino_ports(self._model.inputs), _openvino_ports(self._model.outputs))
        _ignored(model, "OpenVINO", conf, *_PADDLE_ONLY, *_TENSORRT_ONLY)

    @property
    def threads(self) -> int:
        """Threads that compute one prediction."""
        return self._model.get_property("INFERENCE_NUM_THREADS")

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Run it."""
        arrays = {name: _without_lod(name, value) for name, value in feed.items()}
        for name, array in arrays.items():
            wanted = self._model.input(name).partial_shape
            # Not checked by the library, which would compute something.
            if not wanted.compatible(self._shape(list(array.shape))):
                msg = f"'{name}' has the shape {list(array.shape)}, and the model takes {wanted}"
                raise ValueError(msg)
        self._request.infer(arrays)
        # The tensors belong to the request and are written over by the next one.
        return [Value(self._request.get_tensor(name).data.copy()) for name in fetch]


class Paddle:
    """A model in one of Paddle's formats."""

    def __init__(self, files: Sequence[Path], conf: LocalConf, device: int | None) -> None:
        """Load it.

        Args:
            files: A folder with `__model__` and a file for each parameter; or the program and all parameters.
            conf: Threads, precision, and what else Paddle takes.
            device: Number of the GPU or XPU; None for the CPU.
        """
        where = files[0]
        paddle = library("paddle.inference", f"{where.name} is run by Paddle", "paddlepaddle", "setuptools")
        config: Any = paddle.Config(*map(str, files))
        config.disable_glog_info()
        config.switch_ir_optim(conf.ir_optim)
        # Paddle cannot load its newest format when it is told this.
        if conf.mem_optim and where.suffix != ".json":
            config.enable_memory_optim()
        config.set_cpu_math_library_num_threads(conf.thread_num)
        if device is None:
            config.disable_gpu()
            _paddle_onednn(config, conf)
        elif unsupported := _NOT_SUPPORTED.get(conf.device_type):
            config.disable_gpu()
            _tell(f"{where}: models on {unsupported} devices are not supported; the model runs on the CPU")
        elif conf.device_type == _XPU:
            config.enable_xpu()
            config.set_xpu_device_id(device)
        else:
            precision = {"fp16": paddle.PrecisionType.Half, "bf16": paddle.PrecisionType.Bfloat16}
            config.enable_use_gpu(100, device, precision.get(conf.precision.lower(), paddle.PrecisionType.Float32))
        if device is not None and conf.device_type == _TENSORRT:
            kind = {"fp16": paddle.PrecisionType.Half, "int8": paddle.PrecisionType.Int8}
            config.enable_tensorrt_engine(
                workspace_size=1 << 25,
                max_batch_size=32,
                min_subgraph_size=conf.min_subgraph_size,
                precision_mode=kind.get(conf.precision.lower(), paddle.PrecisionType.Float32),
                use_static=False,
                use_calib_mode=conf.use_calib,
            )
        else:
            _ignored(where, "Paddle without TensorRT", conf, *_TENSORRT_ONLY)
        self._config = config
        self._predictor: Any = paddle.create_predictor(config)
        self.signature = Signature(
            tuple(Var(name, name) for name in self._predictor.get_input_names()),
            tuple(Var(name, name) for name in self._predictor.get_output_names()),
        )

    @property
    def threads(self) -> int:
        """Threads that compute one prediction."""
        return self._config.cpu_math_library_num_threads()

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Run it."""
        import numpy as np

        for name, value in feed.items():
            handle = self._predictor.get_input_handle(name)
            handle.copy_from_cpu(np.ascontiguousarray(value.array))
            if value.lod is not None:
                handle.set_lod([value.lod.tolist()])
        self._predictor.run()
        found: list[Value] = []
        for name in fetch:
            handle = self._predictor.get_output_handle(name)
            levels = handle.lod()
            found.append(Value(handle.copy_to_cpu(), np.asarray(levels[0], np.int32) if levels else None))
        return found


def library(module: str, why: str, *install: str) -> Any:
    """Import the library that runs a model.

    Raises:
        ConfigError: If it is not installed, with what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        msg = f"{why}, which cannot be imported ({problem}); install it: pip install {shlex.join(install)}"
        raise ConfigError(msg) from problem


def _ignored(model: Path, runtime: str, conf: LocalConf, *names: str) -> None:
    """Tell, once for a model, which of the settings it was given its runtime has no use for."""
    usual = LocalConf()
    given = tuple(name for name in names if getattr(conf, name) != getattr(usual, name))
    if given:
        _tell(f"{model}: {runtime} has no use for {', '.join(given)}")


@cache
def _tell(text: str) -> None:
    log.warning("%s", text)


def _onnx_providers(model: Path, available: Sequence[str], conf: LocalConf, device: int | None) -> list[Any]:
    providers: list[Any] = []
    if device is not None:
        options = {"device_id": str(device)}
        wanted = {_GPU: ["CUDA"], _BY_DEVICES: ["CUDA"], _TENSORRT: ["Tensorrt", "CUDA"]}.get(conf.device_type, [])
        names = [f"{name}ExecutionProvider" for name in wanted]
        providers = [(name, options) for name in names if name in available]
        if not providers:
            kind = f"device_type {conf.device_type}" if conf.device_type != _BY_DEVICES else f"devices {conf.devices}"
            _tell(f"{model}: the onnxruntime installed here runs nothing on {kind}; the model runs on the CPU")
    return [*providers, "CPUExecutionProvider"]


def _onnx_var(port: Any) -> Var:
    return Var(port.name, port.name, _ONNX_TYPES.get(port.type), _sample(port.shape))


def _sample(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return a shape without its first axis, which counts samples; whatever is no number stands for any length."""
    return tuple(axis if type(axis) is int else -1 for axis in shape[1:])


def _openvino_ports(ports: Sequence[Any]) -> tuple[Var, ...]:
    import numpy as np

    found: list[Var] = []
    for port in ports:
        name, *others = sorted(port.get_names())
        axes: Any = port.partial_shape
        shape = _sample([None if axis.is_dynamic else axis.get_length() for axis in axes])
        found.append(Var(name, name, np.dtype(port.element_type.to_dtype()).name, shape, synonyms=tuple(others)))
    return tuple(found)


def _paddle_onednn(config: Any, conf: LocalConf) -> None:
    if not conf.use_mkldnn:
        config.disable_onednn()
        return
    config.enable_onednn()
    config.set_onednn_cache_capacity(conf.mkldnn_cache_capacity)
    if conf.mkldnn_op_list:
        config.set_onednn_op(set(conf.mkldnn_op_list))
    if conf.precision.lower() == "bf16":
        config.enable_onednn_bfloat16()
        if conf.mkldnn_bf16_op_list:
            config.set_bfloat16_op(set(conf.mkldnn_bf16_op_list))


def _without_lod(name: str, value: Value) -> Array:
    """Return the array for a runtime that knows no sequences: one sequence is an ordinary array."""
    if value.lod is not None and len(value.lod) > _ONE_SEQUENCE:
        text = f"'{name}' has {len(value.lod) - 1} sequences, and only Paddle's runtime takes more than one at a time"
        raise error(CustomExceptionCode.INPUT_PARAMS_ERROR.value, text)
    return value.array
