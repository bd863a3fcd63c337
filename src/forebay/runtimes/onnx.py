# SPDX-License-Identifier: Apache-2.0
"""Models in ONNX's format, run by ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.arrays.numpy_tensors import texts_or_bytes
from forebay.errors import ConfigError, InvalidRequest
from forebay.runtimes.library import RunOptions, Runtime, library, ordinary, runs_on_cpu
from forebay.runtimes.onnx_file import read_onnx, weights_of
from forebay.runtimes.onnx_operators import over_samples
from forebay.runtimes.signature import Signature, Value, Var, rows_and_sample
from forebay.types.datatypes import BY_ONNX
from forebay.types.devices import Device

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array

_TYPES: Final = {f"tensor({name})": row.name for name, row in BY_ONNX.items()}
_PROVIDERS: Final = {"cuda": ("CUDA",), "gpu": ("CUDA",), "tensorrt": ("Tensorrt", "CUDA")}


class OnnxRuntime(Runtime):
    """A model in ONNX's format."""

    def __init__(self, model: Path, options: RunOptions) -> None:
        """Load the `.onnx` file."""
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at the import; otherwise it reports to its maker
        ort = library("onnxruntime", f"{model.name} is run by onnxruntime", "forebay[onnx]")
        self._available: Sequence[str] = ort.get_available_providers()
        told = ort.SessionOptions()
        told.intra_op_num_threads = options.threads or 0
        told.inter_op_num_threads = 1
        providers = _providers(model, self._available, options)
        source: Any = str(model)
        # The library maps such files: one that is copied over changes the model in use, one that is cut ends the
        # process.
        if weights := weights_of(model):
            told.add_external_initializers_from_files_in_memory(
                [*weights], [*weights.values()], [*map(len, weights.values())]
            )
            source = model.read_bytes()
        self._session = ort.InferenceSession(source, told, providers=providers)
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = 4  # what goes wrong in a run is raised, and need not be printed as well
        self.file = model
        feeds, fetches = self._session.get_inputs(), self._session.get_outputs()
        scalars = _scalars(model) if any(not port.shape for port in (*feeds, *fetches)) else frozenset[str]()
        feeds, fetches = (tuple(_var(port, scalars) for port in side) for side in (feeds, fetches))
        self.signature = Signature(feeds, fetches)

    @property
    def threads(self) -> int:
        """Threads that compute one prediction."""
        return self._session.get_session_options().intra_op_num_threads

    @property
    def providers(self) -> list[str]:
        """The devices it runs on, as onnxruntime calls them."""
        return self._session.get_providers()

    def can_run_on(self, device: Device) -> bool:
        """Tell whether the library has a provider for such a device."""
        return bool(_names(self._available, device))

    def over_samples(self) -> str:
        """Name an operator that computes over all samples of a run; empty if the file has none."""
        return over_samples(read_onnx(self.file), [var.name for var in self.signature.feeds])

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Run it; raises an `InvalidRequest` if an input has bytes that the library does not take."""
        arrays = {name: _given(name, ordinary(name, value)) for name, value in feed.items()}
        found = self._session.run(list(fetch), arrays, self._run_options)
        return [Value(array) for array in found]


def _given(name: str, array: Array) -> Array:
    """Return an array as the library takes it: of `bytes` objects it would make their spelling in Python.

    Raises:
        InvalidRequest: If bytes that are not text are of unlike lengths.
    """
    if not array.dtype.hasobject:
        return array
    array = texts_or_bytes(array)
    if not any(type(one) is bytes for one in array.flat):
        return array
    import numpy as np

    found = [one if isinstance(one, bytes) else str(one).encode() for one in array.flat]
    lengths = set(map(len, found))
    if len(lengths) > 1:
        # The samples of a batch that fails are run one by one, so this reaches calls of several alone.
        msg = f"'{name}': expected UTF-8, or bytes of one length for onnxruntime, got {len(lengths)} lengths"
        raise InvalidRequest(msg)
    return np.frombuffer(b"".join(found), f"V{lengths.pop()}").reshape(array.shape)


def _providers(model: Path, available: Sequence[str], options: RunOptions) -> list[Any]:
    providers: list[Any] = []
    if options.device is not None:
        given = {"device_id": str(options.device.index)}
        providers = [(name, given) for name in _names(available, options.device)]
        if not providers:
            runs_on_cpu(model, "onnxruntime", options.device)
    return [*providers, "CPUExecutionProvider"]


def _names(available: Sequence[str], device: Device) -> list[str]:
    names = [f"{name}ExecutionProvider" for name in _PROVIDERS.get(device.kind, ())]
    return [name for name in names if name in available]


def _scalars(model: Path) -> frozenset[str]:
    """Return what a file says to have no axes; the library tells a tensor of which it says nothing alike."""
    try:
        ranks = read_onnx(model).graph.ranks
    except (ConfigError, OSError):
        return frozenset()
    return frozenset(name for name, rank in ranks.items() if rank == 0)


def _var(port: Any, scalars: Collection[str]) -> Var:
    axes: Sequence[Any] = port.shape
    rows, shape = rows_and_sample([axis if type(axis) is int else -1 for axis in axes])
    return Var(
        port.name,
        port.name,
        _TYPES.get(port.type),
        shape,
        rows=rows,
        type=port.type,
        is_scalar=port.name in scalars,
        axes=tuple(axis if isinstance(axis, str) else "" for axis in axes),
    )
