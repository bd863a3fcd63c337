# SPDX-License-Identifier: Apache-2.0
"""What a library that runs models is told and what it offers; one module here for each of them."""

from __future__ import annotations

import importlib
import logging
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from forebay.errors import ConfigError, InvalidRequest
from forebay.types.devices import Device, read_device

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array, Signature, Value

log = logging.getLogger("forebay.runtimes")

_ONE_SEQUENCE: Final = 2


def accelerator(text: str) -> Device | None:
    """Read where a model runs; None is the CPU. Raises a `ConfigError` if that is not a device."""
    try:
        device = read_device(text)
    except ValueError as error:
        raise ConfigError(f"device: {error}") from error
    return None if device.kind == "cpu" else device


class PaddleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only Paddle knows.

    Attributes:
        reuses_memory: Let it reuse memory.
        rewrites: Let it rewrite the model.
        onednn: Let it use oneDNN.
        onednn_cache: Shapes that oneDNN keeps.
        onednn_ops: Operators that oneDNN computes; None for all.
        onednn_bf16_ops: Operators that oneDNN computes in bf16; None for all.
        tensorrt_min_nodes: Nodes from which on TensorRT takes a part of the model.
        tensorrt_calibrates: Whether TensorRT calibrates int8.
    """

    reuses_memory: bool = True
    rewrites: bool = False
    onednn: bool = False
    onednn_cache: int = 0
    onednn_ops: Sequence[str] | None = None
    onednn_bf16_ops: Sequence[str] | None = None
    tensorrt_min_nodes: int = 3
    tensorrt_calibrates: bool = False


class OpenVinoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only OpenVINO knows.

    Attributes:
        properties: Names and values of properties of the device.
        shapes: Names of inputs and their shapes, as OpenVINO writes them, or `auto` for any; without a name that of all
            inputs.
        batch: Length of the first axis of all inputs that have one, as OpenVINO writes it, or `auto` for any; empty
            leaves it to the file.
        requests: How many predictions may run at a time.
        device: Devices as only it writes them, such as `AUTO:GPU,CPU`, for a model of which nobody says another one.
    """

    properties: tuple[tuple[str, str], ...] = ()
    shapes: tuple[tuple[str, str], ...] = ()
    batch: str = ""
    requests: int = 1
    device: str = ""


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """What files may hold although loading it can run code.

    Attributes:
        types: Types in files of skops, by their full names, beside those that skops trusts.
        pickle: Whether pickles and programs of PyTorch are loaded.
    """

    types: tuple[str, ...] = ()
    pickle: bool = False


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a model runs.

    Attributes:
        threads: Threads that compute one batch; None leaves it to the library.
        device: Where it runs; None is the CPU.
        precision: fp32, fp16, bf16 or int8, where the library can choose.
        signature: Which signature of a SavedModel; None takes the one that is meant where none is named, an empty one
            the first if that may be any of several.
        trust: What the file may hold although loading it can run code.
        paddle: What only Paddle knows.
        openvino: What only OpenVINO knows; where it is said, OpenVINO runs whatever file it is.
    """

    threads: int | None = None
    device: Device | None = None
    precision: str = "fp32"
    signature: str | None = None
    trust: Trust = Trust()
    paddle: PaddleOptions = PaddleOptions()
    openvino: OpenVinoOptions | None = None


class Runtime(Protocol):
    """One model in memory.

    Attributes:
        signature: What it takes and gives, as its file says.
        is_shared: Whether several threads may run it at the same time.
    """

    signature: Signature
    is_shared: bool = True

    def can_run_on(self, device: Device) -> bool:
        """Tell whether the library installed here knows such a device; one that computes on the CPU alone does not."""
        del device
        return False

    def over_samples(self) -> str:
        """Name an operator that computes over all samples of a run, as far as the file tells; empty for none."""
        return ""

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Return the outputs of these names, in this order; whatever the library raises goes through."""
        ...


def library(module: str, why: str, *install: str) -> Any:
    """Import a library that only some need; raises a `ConfigError` with what to install if it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        msg = f"{why}, which cannot be imported ({problem}); install it: pip install {shlex.join(install)}"
        raise ConfigError(msg) from problem


@cache
def tell(text: str) -> None:
    """Warn of something, once in a process however many workers load the model."""
    log.warning("%s", text)


def runs_on_cpu(model: Path, library: str, device: Device) -> None:
    """Warn that a device is not used."""
    tell(f"{model}: the {library} installed here runs nothing on {device}; the model runs on the CPU")


def ordinary(name: str, value: Value) -> Array:
    """Return the array for a runtime that knows no sequences: one sequence is an ordinary array.

    Raises:
        InvalidRequest: If there are several.
    """
    if value.lod is not None and len(value.lod) > _ONE_SEQUENCE:
        text = f"'{name}' has {len(value.lod) - 1} sequences, and only Paddle's runtime takes more than one at a time"
        raise InvalidRequest(text)
    return value.array
