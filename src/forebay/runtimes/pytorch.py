# SPDX-License-Identifier: Apache-2.0
"""Programs of PyTorch: `.pt2` files of `torch.export`, `.pt` and `.ts` files of TorchScript.

A file of `torch.export` declares its inputs. In one of TorchScript, `metadata.json` (`_extra_files`) has to describe
them; outputs are those of two runs on zeros. A dict of tensors is answered by its keys, others are called `output`.

Loading such a file can run any code: PyTorch unpickles parts of `.pt2` files and evaluates expressions in them, and
TorchScript writes files. So the operator has to trust it, like a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from forebay.errors import ConfigError
from forebay.runtimes.library import RunOptions, Runtime, library, ordinary, runs_on_cpu
from forebay.runtimes.signature import Signature, Value, Var, rows_and_sample
from forebay.types.datatypes import BY_NUMPY, DATATYPES
from forebay.types.devices import Device
from forebay.types.first_use import known

_METADATA: Final = "metadata.json"
_EXAMPLE: Final = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]}'
_EXPORTED: Final = ("/models/model.json", "serialized_exported_program.json")
"""Files in an archive, of which one holds the program."""
_BY_ALL_SAMPLES: Final = re.compile(r"(?:::|\.)(\w+_dynamic|choose_qparams\w*)\b")
"""Operators that scale numbers by the largest one of all samples."""
_FREE: Final = ((2, 16), (3, 24))
"""Lengths of a free first axis and further ones in two runs: what differs between their outputs is free as well."""


class _Port(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: list[int]


class _Metadata(msgspec.Struct, frozen=True):
    inputs: list[_Port]


class PyTorch(Runtime):
    """A program of `torch.export` or TorchScript."""

    def __init__(self, model: Path, options: RunOptions) -> None:
        """Load the file; raises a `ConfigError` if it is not a program, or not trusted."""
        import numpy as np

        self._np = np
        data = _checked(model, is_trusted=options.trust.pickle)
        self._torch = library("torch", f"{model.name} is run by PyTorch", "forebay[torch]")
        self._tree = library("torch.utils._pytree", f"{model.name} is run by PyTorch", "forebay[torch]")
        self._threads = options.threads
        device = options.device
        self._device = f"cuda:{device.index}" if device is not None and self.can_run_on(device) else "cpu"
        if device is not None and self._device == "cpu":
            runs_on_cpu(model, "PyTorch", device)
        self.signature = self._exported(data) if model.suffix == ".pt2" else self._scripted(model.name, data)

    def can_run_on(self, device: Device) -> bool:
        """Tell whether PyTorch finds such a device here."""
        return device.kind in {"cuda", "gpu"} and device.index < self._torch.cuda.device_count()

    def over_samples(self) -> str:
        """Name an operator that computes over all samples of a run; empty if none is known."""
        found = _BY_ALL_SAMPLES.search(self._code)
        return found[1] if found else ""

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Run it on copies: a program may write into its inputs."""
        if self._threads is not None and self._torch.get_num_threads() != self._threads:
            self._torch.set_num_threads(self._threads)  # which counts for the thread that asks
        found = self._run({name: ordinary(name, value) for name, value in feed.items()})
        return [Value(found[name].numpy(force=True)) for name in fetch]

    def _run(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name, as tensors."""
        copies = {name: self._np.array(array, order="C") for name, array in arrays.items()}
        given = {name: self._torch.from_numpy(copy).to(self._device) for name, copy in copies.items()}
        args, kwargs = self._tree.tree_unflatten([given.get(name, name) for name in self._inputs], self._spec)
        with self._torch.inference_mode():
            return self._named(self._call(*args, **kwargs))

    def _named(self, answer: Any) -> dict[str, Any]:
        leaves: list[Any] = self._tree.tree_leaves(answer)
        if isinstance(answer, dict) and len(leaves) == len(cast("Any", answer)):
            return {str(name): one for name, one in cast("dict[Any, Any]", answer).items()}
        return {"output": leaves[0]} if len(leaves) == 1 else {f"output_{at}": one for at, one in enumerate(leaves)}

    def _exported(self, data: bytes) -> Signature:
        program = self._torch.export.load(BytesIO(data))
        if self._device != "cpu":
            program = library("torch.export.passes", "", "").move_to_device_pass(program, self._device)
        self._call: Any = program.module()
        self._code: str = program.graph_module.code
        self._spec: Any = program.call_spec.in_spec
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        signature = program.graph_signature
        self._inputs: Sequence[Any] = signature.user_inputs  # of constants their values
        feeds = [self._var(name, values[name]) for name in self._inputs if isinstance(name, str)]
        outputs = [values.get(name, name) for name in signature.user_outputs]
        fetches = self._named(self._tree.tree_unflatten(outputs, program.call_spec.out_spec))
        return Signature(tuple(feeds), tuple(self._var(name, one) for name, one in fetches.items()))

    def _scripted(self, file: str, data: bytes) -> Signature:
        extra: dict[str, Any] = {_METADATA: ""}
        self._call = self._torch.jit.load(BytesIO(data), map_location=self._device, _extra_files=extra).train(False)
        self._code = str(self._call.inlined_graph)
        ports = _declared(file, extra[_METADATA])
        self._inputs = [port.name for port in ports]
        _, self._spec = self._tree.tree_flatten((tuple(self._inputs), {}))
        feeds = [_described(port.name, DATATYPES[port.datatype].numpy, port.shape) for port in ports]
        few, more = (self._run({port.name: self._zeros(port, free) for port in ports}) for free in _FREE)
        fetches = [self._var(name, one, more[name].shape) for name, one in few.items()]
        return Signature(tuple(feeds), tuple(fetches))

    def _zeros(self, port: _Port, free: Sequence[int]) -> Any:
        shape = [free[min(axis, 1)] if size < 0 else size for axis, size in enumerate(port.shape)]
        return self._np.zeros(shape, DATATYPES[port.datatype].numpy)

    def _var(self, name: str, value: Any, other: Sequence[int] | None = None) -> Var:
        """Describe a tensor; axes that have another length in the other shape may have any."""
        if not isinstance(value, self._torch.Tensor):
            return Var(name, name, type=type(value).__name__)
        pairs = zip(value.shape, value.shape if other is None else other, strict=True)
        sizes = [one if other is None or one == two else -1 for one, two in pairs]
        return _described(name, str(value.dtype).removeprefix("torch."), sizes)


def _described(name: str, dtype: str, sizes: Sequence[Any]) -> Var:
    """Describe a tensor; sizes that are not numbers are symbols, as of an axis of any length."""
    rows, shape = rows_and_sample([size if type(size) is int else -1 for size in sizes])
    axes = tuple("" if type(size) is int else str(size) for size in sizes)
    found = BY_NUMPY.get(dtype)
    return Var(name, name, found and found.name, shape, rows=rows, axes=axes, type=dtype, is_scalar=not sizes)


def _checked(model: Path, *, is_trusted: bool) -> bytes:
    """Read the file; raises a `ConfigError` if it holds no program, or is not trusted."""
    import zipfile

    file, data = model.name, model.read_bytes()
    names = zipfile.ZipFile(BytesIO(data)).namelist() if zipfile.is_zipfile(BytesIO(data)) else ()
    if not any(name.endswith(_EXPORTED if model.suffix == ".pt2" else "/constants.pkl") for name in names):
        raise ConfigError(
            f"{file} holds no whole program: it is cut off, or has weights or a pickled module (torch.save); export "
            "the model: torch.export.save(torch.export.export(model, examples), 'model.pt2')"
        )
    if not is_trusted:
        raise ConfigError(
            f"{file} is a program of PyTorch, which can run any code when it is loaded; allow it with --trust-pickle "
            "if you trust the author of the file, or use ONNX instead: torch.onnx.export(model, examples, 'model.onnx')"
        )
    return data


def _declared(file: str, metadata: bytes | str) -> Sequence[_Port]:
    """Read what inputs a file of TorchScript takes; raises a `ConfigError` if it does not say so."""
    try:
        found = msgspec.json.decode(metadata, type=known(_Metadata)).inputs
        if wrong := [port.datatype for port in found if port.datatype not in DATATYPES]:
            raise msgspec.DecodeError(f"expected one of the datatypes {', '.join(DATATYPES)}, got '{wrong[0]}'")
    except msgspec.DecodeError as error:
        problem = f"{_METADATA}: {error}" if metadata else f"it has no {_METADATA}"
        raise ConfigError(
            f"{file} does not describe its inputs, which TorchScript leaves out ({problem}); save it again: "
            f"torch.jit.save(torch.jit.load({file!r}), {file!r}, _extra_files={{{_METADATA!r}: {_EXAMPLE!r}}})"
        ) from None
    return found
