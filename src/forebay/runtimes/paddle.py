# SPDX-License-Identifier: Apache-2.0
"""Models in Paddle's formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from forebay.runtimes.library import PaddleOptions, RunOptions, Runtime, library, tell
from forebay.runtimes.signature import Signature, Value, Var
from forebay.types.devices import Device

_KNOWN: Final = ("cuda", "gpu", "tensorrt", "xpu")


class Paddle(Runtime):
    """A model in one of Paddle's formats; its files are not read here, and do not tell which axes count samples.

    Attributes:
        has_tensorrt: Whether TensorRT takes parts of it.
    """

    is_shared = False

    def __init__(self, files: Sequence[Path], options: RunOptions) -> None:
        """Load a folder with `__model__` and a file for each parameter, or the program and all parameters."""
        where = self.file = files[0]
        paddle = library("paddle.inference", f"{where.name} is run by Paddle", "paddlepaddle", "setuptools")
        config: Any = paddle.Config(*map(str, files))
        own, device = options.paddle, options.device
        config.disable_glog_info()
        config.switch_ir_optim(own.rewrites)
        # Paddle cannot load its newest format when it is told this.
        if own.reuses_memory and where.suffix != ".json":
            config.enable_memory_optim()
        if options.threads is not None:
            config.set_cpu_math_library_num_threads(options.threads)
        self.has_tensorrt = device is not None and device.kind == "tensorrt"
        if device is None:
            config.disable_gpu()
            _onednn(config, own, options.precision)
        elif device.kind not in _KNOWN:
            config.disable_gpu()
            tell(f"{where}: models on {device.kind} devices are not supported; the model runs on the CPU")
        elif device.kind == "xpu":
            config.enable_xpu()
            config.set_xpu_device_id(device.index)
        else:
            _gpu(paddle, config, device, options)
        if self.has_tensorrt:
            kind = {"fp16": paddle.PrecisionType.Half, "int8": paddle.PrecisionType.Int8}
            config.enable_tensorrt_engine(
                workspace_size=1 << 25,
                max_batch_size=32,
                min_subgraph_size=own.tensorrt_min_nodes,
                precision_mode=kind.get(options.precision.lower(), paddle.PrecisionType.Float32),
                use_static=False,
                use_calib_mode=own.tensorrt_calibrates,
            )
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

    def can_run_on(self, device: Device) -> bool:
        """Tell whether it is of a kind that Paddle knows."""
        return device.kind in _KNOWN

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


def _gpu(paddle: Any, config: Any, device: Device, options: RunOptions) -> None:
    precision = {"fp16": paddle.PrecisionType.Half, "bf16": paddle.PrecisionType.Bfloat16}
    config.enable_use_gpu(100, device.index, precision.get(options.precision.lower(), paddle.PrecisionType.Float32))


def _onednn(config: Any, own: PaddleOptions, precision: str) -> None:
    if not own.onednn:
        config.disable_onednn()
        return
    config.enable_onednn()
    config.set_onednn_cache_capacity(own.onednn_cache)
    if own.onednn_ops:
        config.set_onednn_op(set(own.onednn_ops))
    if precision.lower() == "bf16":
        config.enable_onednn_bfloat16()
        if own.onednn_bf16_ops:
            config.set_bfloat16_op(set(own.onednn_bf16_ops))
