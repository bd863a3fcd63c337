# SPDX-License-Identifier: Apache-2.0
"""Models in OpenVINO's format."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.arrays.numpy_tensors import texts_or_bytes
from forebay.errors import ConfigError, InvalidRequest
from forebay.runtimes.library import OpenVinoOptions, RunOptions, library, ordinary
from forebay.runtimes.onnx_file import read_onnx
from forebay.runtimes.onnx_operators import over_samples
from forebay.runtimes.openvino_operators import program_of
from forebay.runtimes.signature import Signature, Value, Var, rows_and_sample
from forebay.types.datatypes import BY_OPENVINO
from forebay.types.devices import Device
from forebay.types.did_you_mean import meant
from forebay.types.failures import text_of
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array

log = logging.getLogger("forebay.runtimes")

_FIRST_USE: Final = threading.Lock()
_ANY: Final = "auto"
_PRECISIONS: Final = {"fp16": "f16", "bf16": "bf16", "exact": "f32"}
"""What is said where it is not left to the library, which computes in bf16 where processors are good at it."""


class OpenVino:
    """A model in OpenVINO's format."""

    def __init__(self, model: Path, options: RunOptions) -> None:
        """Load the `.xml` file, beside its `.bin`, a `.tflite` file, or the folder of a SavedModel."""
        openvino = silent_library(f"{model.name} is run by OpenVINO", "forebay[openvino]")
        config: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        device = options.device
        if device is None and options.threads is not None:
            config["INFERENCE_NUM_THREADS"] = options.threads
        precision = _PRECISIONS.get(options.precision.lower())
        if precision is not None:
            config["INFERENCE_PRECISION_HINT"] = precision
        with _FIRST_USE:
            core = _core(openvino)
        self._available: Sequence[str] = core.available_devices
        own = options.openvino or OpenVinoOptions()
        source: Any = str(model)
        if own.shapes or own.batch:
            source = _reshaped(core.read_model(source), own, openvino.PartialShape, model)
        config |= own.properties
        self._model: Any = core.compile_model(source, own.device or "CPU" if device is None else _name(device), config)
        self.is_shared = own.requests > 1
        self._requests: SimpleQueue[Any] = SimpleQueue()
        """Those that nobody uses."""
        self._has_state = False
        for _ in range(own.requests):
            request = self._model.create_infer_request()
            states, _ = caught(request.query_state)
            self._has_state = bool(states)
            self._requests.put(request)
        # With a single thread `infer` computes in the one that asks, and loses its errors: it answers with arrays of no
        # rows, and ends the process some calls later.
        threads, _ = caught(self._model.get_property, "INFERENCE_NUM_THREADS")
        self._asks_another_thread = threads == 1
        self._shape = openvino.PartialShape
        self.file = model
        self.signature = Signature(_ports(self._model.inputs), _ports(self._model.outputs))
        # By their ports, for some have no names that the library would find them by.
        # Others have several, and whoever describes a model may call it by any.
        self._inputs = _by_name(self.signature.feeds, self._model.inputs)
        self._outputs = _by_name(self.signature.fetches, self._model.outputs)
        self._texts = {name for name, port in self._outputs.items() if port.element_type.get_type_name() == "string"}

    @property
    def threads(self) -> int:
        """Threads that compute one prediction."""
        return self._model.get_property("INFERENCE_NUM_THREADS")

    def can_run_on(self, device: Device) -> bool:
        """Tell whether OpenVINO finds such a device here."""
        # A single one of a kind goes without its number.
        kind, _, index = (name := _name(device)).partition(".")
        return name in self._available or (index in {"", "0"} and kind in self._available)

    def over_samples(self) -> str:
        """Name an operator that computes over all samples of a run; empty if the file has none that is known."""
        if self.file.suffix == ".onnx":
            return over_samples(read_onnx(self.file), [name for var in self.signature.feeds for name in _names(var)])
        return over_samples(*program_of(_core(silent_library("", "")).read_model(str(self.file))))

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Run it.

        Raises:
            InvalidRequest: If an input has a shape that the model does not take, or a text ends in what the library
                would cut off.
        """
        arrays = {name: ordinary(name, value) for name, value in feed.items()}
        for name, array in arrays.items():
            wanted = self._inputs[name].partial_shape
            # Not checked by the library, which would compute something.
            if not wanted.compatible(self._shape(list(array.shape))):
                raise InvalidRequest(f"'{name}' has the shape {list(array.shape)}, and the model takes {wanted}")
            if array.dtype.hasobject:
                arrays[name] = _given_texts(name, array)
        request = self._requests.get()
        try:
            if self._has_state:  # which is of the client before, or of several that shared a batch
                request.reset_state()
            given = {self._inputs[name]: array for name, array in arrays.items()}
            if self._asks_another_thread:
                request.start_async(given)
                request.wait()
            else:
                request.infer(given)
            return [Value(self._copied(name, request.get_tensor(self._outputs[name]))) for name in fetch]
        finally:
            self._requests.put(request)

    def _copied(self, name: str, tensor: Any) -> Array:
        """Return what is in a tensor, which belongs to its request and is written over by the next one."""
        if name not in self._texts:
            return tensor.data.copy()
        import numpy as np

        # The library divides by the number of texts, and there may be none.
        texts: Array = tensor.str_data.astype(object) if tensor.size else np.empty(tuple(tensor.shape), object)
        # It decodes bytes that are not text with a replacement, and its bytes are wrong where all are empty.
        return texts_or_bytes(tensor.bytes_data) if any("\ufffd" in one for one in texts.flat) else texts


def silent_library(why: str, install: str) -> Any:
    """Import OpenVINO without its telling the maker's server of that, from a process that it forks off this one.

    Raises:
        ConfigError: If it is not installed, with what to install.
    """
    sys.modules.setdefault("openvino_telemetry", cast("Any", None))
    return library("openvino", why, install)


@functools.cache
def _core(openvino: Any) -> Any:
    """Return what loads all models of this process; it stays as long as the process.

    Whenever the last one goes, it takes the libraries of devices out of the process, beside whatever another thread
    loads or drops; and where a second one is made, some builds crash (issue 35338 of OpenVINO).
    """
    core = openvino.Core()
    # A file that is mapped and then copied over changes the model that is in use, or ends its process.
    core.set_property({"ENABLE_MMAP": False})
    return core


def read_signature(model: Path) -> Signature:
    """Read what a file takes and gives, and load it on no device; whatever the library raises is raised.

    Raises:
        ConfigError: If the library is not installed.
    """
    openvino = silent_library(f"{model.name} is run by OpenVINO", "forebay[openvino]")
    with _FIRST_USE:
        core = _core(openvino)
    read: Any = core.read_model(str(model))
    return Signature(_ports(read.inputs), _ports(read.outputs))


def _names(var: Var) -> tuple[str, ...]:
    return var.name, *var.synonyms


def _by_name(known: Sequence[Var], ports: Sequence[Any]) -> dict[str, Any]:
    every = {name: port for port in ports for name in port.get_names()}
    return every | {one.name: port for one, port in zip(known, ports, strict=True)}


def _reshaped(model: Any, options: OpenVinoOptions, make: Any, file: Path) -> Any:
    """Give the inputs of a model other shapes; one that cannot take any shape, and is to, stays as it is.

    Raises:
        ConfigError: If there is no input of a name.
    """
    shapes = dict(options.shapes)
    known = {name for port in model.inputs for name in port.get_names()}
    for name in shapes:
        if name and name not in known:
            hint = meant(name, known) or f"; there is {', '.join(sorted(known))}"
            raise ConfigError(f"the shape is for the input '{name}', which the model does not have{hint}")
    wanted: dict[Any, Any] = {}
    for port in model.inputs:
        told = next((shapes[name] for name in port.get_names() if name in shapes), shapes.get(""))
        shape = port.partial_shape if told in {None, _ANY} else make(told)
        if told == _ANY and not shape.rank.is_dynamic:
            shape = make([-1] * len(shape))
        if options.batch and not shape.rank.is_dynamic and len(shape):
            shape[0] = make(f"[{'?' if options.batch == _ANY else options.batch}]")[0]
        wanted[port] = shape
    _, problem = caught(model.reshape, wanted)
    if problem is None:
        return model
    if _ANY not in {options.batch, *shapes.values()}:
        raise problem
    log.warning("the model %s accepts only the shapes in its file: %s", file, text_of(problem))
    return str(file)


def _given_texts(name: str, array: Array) -> Array:
    """Return texts and bytes as the library takes them.

    Raises:
        InvalidRequest: If one ends in what the library would cut off.
    """
    import numpy as np

    given = [one if isinstance(one, bytes) else str(one).encode() for one in array.flat]
    if any(one.endswith(b"\0") for one in given):
        raise InvalidRequest(f"'{name}' has a text that ends in \\0, which OpenVINO would cut off")
    return np.array(given, np.bytes_).reshape(array.shape)


def _name(device: Device) -> str:
    """Return what OpenVINO calls a device; there is one NPU."""
    return (
        device.kind.upper() if device.kind == "npu" else f"{'CUDA' if device.kind == 'cuda' else 'GPU'}.{device.index}"
    )


def _ports(ports: Sequence[Any]) -> tuple[Var, ...]:
    found: list[Var] = []
    for port in ports:
        name, *others = sorted(port.get_names()) or [port.node.get_friendly_name()]
        axes: Any = port.partial_shape
        is_known = not axes.rank.is_dynamic
        rows, shape = rows_and_sample(
            [-1 if axis.is_dynamic else axis.get_length() for axis in axes] if is_known else None
        )
        kind = port.element_type
        known = BY_OPENVINO.get(kind.get_type_name())
        found.append(
            Var(
                name,
                name,
                known and known.name,
                shape,
                rows=rows,
                type=kind.get_type_name(),
                synonyms=tuple(others),
                is_scalar=is_known and not len(axes),
            )
        )
    return tuple(found)
