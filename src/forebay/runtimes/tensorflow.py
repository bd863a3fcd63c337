# SPDX-License-Identifier: Apache-2.0
"""SavedModels, run by TensorFlow."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from forebay.arrays.numpy_tensors import texts_or_bytes
from forebay.runtimes.library import RunOptions, Runtime, library, ordinary, runs_on_cpu
from forebay.runtimes.signature import Signature, Value

if TYPE_CHECKING:
    from forebay.types.devices import Device

_OVER_SAMPLES: Final = frozenset(
    {"NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5", "Unique", "UniqueV2", "Where"}
)
"""Operations that take all that they are given together, whatever axis they are told."""


class TensorFlow(Runtime):
    """One signature of a SavedModel.

    Attributes:
        signatures: What all that it has take and give.
    """

    def __init__(self, folder: Path, name: str, signatures: Mapping[str, Signature], options: RunOptions) -> None:
        """Load it.

        Args:
            name: Which signature.
            options: How it runs; the number of threads holds for the process, and the first model says it.
        """
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else it tells how it was built
        self._tensorflow = tensorflow = library(
            "tensorflow", "a SavedModel is run by TensorFlow", "forebay[tensorflow]"
        )
        if options.threads is not None:
            with contextlib.suppress(RuntimeError):  # it has begun to run, and keeps to what was said before
                tensorflow.config.threading.set_intra_op_parallelism_threads(options.threads)
                tensorflow.config.threading.set_inter_op_parallelism_threads(options.threads)
        self._device = "/CPU:0"
        if options.device is not None:
            if self.can_run_on(options.device):
                self._device = f"/GPU:{options.device.index}"
            else:
                runs_on_cpu(folder, "TensorFlow", options.device)
        with tensorflow.device(self._device):
            self._model = tensorflow.saved_model.load(str(folder), tags=["serve"])  # kept: its variables live with it
        self.file = folder
        self.signatures = signatures
        self._take(name)

    def of(self, name: str) -> Self:
        """Return another signature of the same model, which is not loaded again."""
        other = copy.copy(self)
        other._take(name)  # noqa: SLF001 - its own class
        return other

    def _take(self, name: str) -> None:
        self.name, self.signature = name, self.signatures[name]
        self._function: Any = self._model.signatures[name]
        self._types = {
            var.name: self._tensorflow.dtypes.as_dtype(self._function.structured_input_signature[1][var.name].dtype)
            for var in self.signature.feeds
        }

    def can_run_on(self, device: Device) -> bool:
        """Tell whether TensorFlow finds such a device here."""
        if device.kind not in {"cuda", "gpu"}:
            return False
        return device.index < len(self._tensorflow.config.list_physical_devices("GPU"))

    def over_samples(self) -> str:
        """Name an operation that computes over all samples of a run; empty if the function has none that is known."""
        found = self._function.graph.as_graph_def()
        for node in (*found.node, *(one for function in found.library.function for one in function.node_def)):
            if node.op in _OVER_SAMPLES or (node.op.startswith("FusedBatchNorm") and node.attr["is_training"].b):
                return f"its operation {node.op} '{node.name}' computes over all samples of a run"
        return ""

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Run it."""
        constant = self._tensorflow.constant
        with self._tensorflow.device(self._device):
            given = {name: constant(ordinary(name, value), self._types[name]) for name, value in feed.items()}
            found = self._function(**given)
        return [Value(_array(found[name])) for name in fetch]


def _array(tensor: Any) -> Any:
    """Return an array of a result; of strings those as texts that are UTF-8."""
    import numpy as np

    found = tensor.numpy()
    if tensor.dtype.name != "string":
        return np.asarray(found)
    array = np.empty(tensor.shape, object)
    array[...] = found
    return texts_or_bytes(array)
