# SPDX-License-Identifier: Apache-2.0
"""Nodes that run a model of the server's: OpenVINO, in this process, loaded once however many nodes use it.

A node between an input and an output of a graph only reads its tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakValueDictionary

from forebay.arrays.numpy_tensors import as_json, as_raw
from forebay.errors import ForebayError, InvalidRequest, ModelError, RunnerFailed
from forebay.graph.values import Outputs
from forebay.runtimes.library import OpenVinoOptions, RunOptions, accelerator
from forebay.runtimes.model_file import ModelFile, reason_of
from forebay.runtimes.openvino import OpenVino
from forebay.runtimes.signature import Value, Var
from forebay.runtimes.trial import SharedFile, Trial, TrialLimits, tried
from forebay.server.config import Overrides
from forebay.surfaces.ovms.handlers import UNARY
from forebay.surfaces.ovms.model_versions import ModelEntry, StoredModels
from forebay.surfaces.ovms.stream_values import ExecutionFailed, as_array, wants_in_json
from forebay.surfaces.ovms.tensor_checks import Ports, bound
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.user_code import attempt, caught

if TYPE_CHECKING:
    from forebay.repository.cache import Lease
    from forebay.repository.listing import StoredFile
    from forebay.surfaces.ovms.linked_graph import InferenceNode
    from forebay.types.call import Item, Outcome
    from forebay.types.devices import Device
    from forebay.types.tensor import Tensor


_Key: TypeAlias = "tuple[Path, str, OpenVinoOptions, tuple[StoredFile, ...]]"
_MAX_TRIALS: Final = 64
"""Files of which it is remembered what they are."""


class SharedModels:
    """The models in memory, each once for all its users: nodes of graphs, and the endpoint that serves it directly.

    A file is tried elsewhere before it is loaded: it may take any memory.
    """

    def __init__(self, stored: StoredModels | None = None, limits: TrialLimits | None = None) -> None:
        self.fetch = (stored or StoredModels()).fetch
        """Has the files of a model on this machine."""
        self._limits = limits or TrialLimits(Overrides().trial_s, None)
        self._loaded: WeakValueDictionary[_Key, ModelFile] = WeakValueDictionary()
        self._trials: dict[tuple[_Key, Sequence[Device]], Trial] = {}
        self._lock = threading.Lock()

    def get(self, entry: ModelEntry) -> ModelFile:
        """Return a model whose files are here, loaded; it stays in memory as long as it is referred to.

        Raises:
            ModelError: If it cannot be loaded.
        """
        with self._lock:
            key = _key(entry)
            file = self._loaded.get(key)
            if file is None:
                if not any(one == key for one, _ in self._trials):
                    self._try(entry, key, ())
                file = self._loaded[key] = self._load(entry)
            return file

    def of(self, entry: ModelEntry) -> SharedFile:
        """Return a model for who loads it later."""
        return _Shared(self, entry)

    def trial(self, entry: ModelEntry, devices: Sequence[Device]) -> Trial:
        """Return what a file is; raises ModelError if it cannot be loaded."""
        with self._lock:
            return self._try(entry, _key(entry), tuple(devices))

    def _try(self, entry: ModelEntry, key: _Key, devices: Sequence[Device]) -> Trial:
        found = self._trials.get((key, devices))
        if found is None:
            options = RunOptions(signature="", openvino=entry.options)
            found, problem = caught(tried, entry.path, options, devices, self._limits)
            if problem is not None:
                raise _unloaded(entry, problem) from problem
            while len(self._trials) >= _MAX_TRIALS:
                del self._trials[next(iter(self._trials))]
            self._trials[key, devices] = found
        return found

    @staticmethod
    def _load(entry: ModelEntry) -> ModelFile:
        device = accelerator(entry.device) if entry.device else None
        runtime, problem = caught(OpenVino, entry.path, RunOptions(device=device, openvino=entry.options))
        if problem is None:
            return ModelFile(entry.name, runtime)
        raise _unloaded(entry, problem) from problem


class _Shared:
    """A model that is shared; a `SharedFile`."""

    def __init__(self, models: SharedModels, entry: ModelEntry) -> None:
        self._models = models
        self._entry = entry

    def trial(self, devices: Sequence[Device]) -> Trial:
        return self._models.trial(self._entry, devices)

    def load(self) -> ModelFile:
        return self._models.get(self._entry)


def _key(entry: ModelEntry) -> _Key:
    return entry.path, entry.device, entry.options, entry.look()


def _unloaded(entry: ModelEntry, problem: BaseException) -> ModelError:
    why = problem.message if isinstance(problem, ForebayError) else reason_of(problem)
    return ModelError(f"the model '{entry.name}' ({entry.path}) cannot be loaded: {why}")


class InferenceRunner(Runner):
    """Runs such a node. Bodies are dicts of packets by port, and so are results."""

    def __init__(self, node: InferenceNode, entry: ModelEntry, models: SharedModels) -> None:
        self._node = node
        self._entry = entry
        self._models = models
        self._here: Lease[ModelEntry] | None = None
        self._file: ModelFile | None = None
        self._ports = Ports({}, {})

    def open(self, ctx: WorkerContext) -> None:
        """Take the model.

        Raises:
            ModelError: If it cannot be loaded, or has no tensor of a name that the graph gives.
            Unavailable: If it is in a bucket and cannot be copied.
        """
        here = self._models.fetch(self._entry)
        try:
            self._bind(self._models.get(here.value))
        except BaseException:
            here.release()
            raise
        self._here = here

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Run the model for each item."""
        return [attempt(self._outcome, item) for item in items]

    def close(self) -> None:
        """Give the model back."""
        self._file = None
        if self._here is not None:
            self._here.release()

    def _bind(self, file: ModelFile) -> None:
        """Use a model; raises ModelError if it has no tensor of a name that the graph gives."""
        self._ports, wrong = bound(self._node, file.signature())
        if wrong:
            raise ModelError("; ".join(wrong))
        self._file = file

    @property
    def _where(self) -> str:
        return f"node '{self._node.name}' (model '{self._entry.name}')"

    def _outcome(self, item: Item) -> Outcome:
        file = self._file
        assert file is not None
        feed: list[tuple[Var, Value]] = []
        for port, var in self._ports.feeds.items():
            array = as_array(item.body[port], var.name)
            if array.dtype.name != var.dtype:
                raise ExecutionFailed(
                    f"{self._where}: the input '{var.name}' came as {array.dtype.name}, and the model takes {var.type}"
                )
            feed.append((var, Value(array)))
        try:
            values = file.run(feed, list(self._ports.fetches.values()))
        except (InvalidRequest, RunnerFailed) as error:
            raise ExecutionFailed(f"{self._where}: {error.message}") from error
        found: dict[str, Any] = {port: value.array for port, value in zip(self._ports.fetches, values, strict=True)}
        return Outputs(found)


class PassingRunner(Runner):
    """Runs a node between an input and an output, which reads its tensor, so that no answer holds an unchecked one.

    Bodies are one packet by its port, and results are tensors.
    """

    def __init__(self, called: str) -> None:
        """Say what answers call the tensor."""
        self._called = called

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Read each tensor, and write what one answer wants in JSON."""
        return [attempt(self._read, item) for item in items]

    def _read(self, item: Item) -> Tensor:
        """Return a tensor as its answer holds it.

        Raises:
            ValidationError: If its JSON is none of its type and shape.
            InvalidRequest: If its answer wants JSON, which cannot say it.
        """
        (tensor,) = item.body.values()
        params = item.params
        raw = as_raw(tensor)
        return as_json(raw) if params.get(UNARY) and wants_in_json(self._called, params) else raw
