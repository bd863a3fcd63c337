# SPDX-License-Identifier: Apache-2.0
"""Runs the handler of a Python node: one `OvmsPythonModel`, which the threads of the node share.

A generator lives on the loop of its node: each turn is a packet that holds it, and thus an item in the node's queue
like any other. So its item is sent before the next one is computed, and many that generate take turns. One that nobody
goes on with is closed in a thread for that, whoever drops it: user code does not run on the server's loop. Those that
are on their way when the node ends are closed before the model is finalised.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast
from weakref import WeakSet

from forebay.arrays.numpy_tensors import as_json
from forebay.errors import ModelError, RequestError
from forebay.graph.values import Outputs
from forebay.surfaces.ovms import shim
from forebay.surfaces.ovms.linked_graph import PythonNode
from forebay.surfaces.ovms.modules import HandlerFolder
from forebay.surfaces.ovms.pyovms_tensor import PyTensor, check_numbers, check_writable, sealed, written
from forebay.surfaces.ovms.stream_values import ExecutionFailed, as_python, wants_in_json
from forebay.types.failures import failure_of, text_of, trace_of
from forebay.types.user_exceptions import answered
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.user_code import attempt, caught, close

if TYPE_CHECKING:
    from forebay.types.call import Item, Outcome

log = logging.getLogger("forebay.ovms")

UNARY: Final = "unary"
"""Among the params of a request: it wants one answer."""


class _Kwargs(dict[str, Any]):
    """What `initialize` is given; it answers to a misspelt key of the original's documentation as well."""

    def __missing__(self, key: str) -> Any:
        if key == "outputs_names":
            return self["output_names"]
        raise KeyError(key)


class Turning:
    """A generator on its way round the loop of a node."""

    __slots__ = ("__weakref__", "_dropped", "steps")

    def __init__(self, steps: Iterator[Any], dropped: SimpleQueue[Any]) -> None:
        self.steps: Iterator[Any] | None = steps
        self._dropped = dropped

    def __del__(self) -> None:
        if self.steps is not None:
            self._dropped.put(self.steps)


class Modules:
    """The modules of the handlers of one graph; its nodes share what lies in the same folder."""

    def __init__(self) -> None:
        self._folders: dict[Path, HandlerFolder] = {}
        self._lock = threading.Lock()
        self._nodes = 0

    def load(self, path: Path) -> ModuleType:
        """Import a handler's file."""
        with self._lock:
            self._nodes += 1
            folder = self._folders.get(path.parent)
            if folder is None:
                folder = self._folders[path.parent] = HandlerFolder(path.parent)
            return folder.load(path)

    def close(self) -> None:
        """Forget them once all nodes that have loaded one have said so."""
        with self._lock:
            self._nodes -= 1
            if self._nodes == 0:
                for folder in self._folders.values():
                    folder.close()
                self._folders.clear()


class HandlerRunner(Runner):
    """Runs a Python node. Bodies are dicts of packets by port."""

    def __init__(self, node: PythonNode, modules: Modules) -> None:
        self._node = node
        self._modules = modules
        self._model: Any = None
        self._dropped: SimpleQueue[Any] = SimpleQueue()
        self._turnings: WeakSet[Turning] = WeakSet()
        self._closer: threading.Thread | None = None

    def open(self, ctx: WorkerContext) -> None:
        """Import the handler and initialise its model; raises ModelError if that fails, with node and reason."""
        shim.install()
        node = self._node
        path = Path(node.handler)
        where = f"node '{node.name}' ({path})"
        module, raised = caught(self._modules.load, path)
        if raised is not None:
            raise _not_loaded(f"{where}: the handler cannot be imported", raised)
        made = getattr(module, "OvmsPythonModel", None)
        if not inspect.isclass(made):
            raise ModelError(f"{where} has no class OvmsPythonModel")
        if not callable(getattr(made, "execute", None)):
            raise ModelError(f"{where}: OvmsPythonModel has no method execute")
        model, raised = caught(made)
        if raised is not None:
            raise _not_loaded(f"{where}: OvmsPythonModel() raised", raised)
        initialize = getattr(model, "initialize", None)
        if initialize is not None:
            kwargs = _Kwargs(
                node_name=node.name,
                input_names=list(node.input_names),
                output_names=list(node.output_names),
                base_path=str(path.resolve().parent),
            )
            _, raised = caught(initialize, kwargs)
            if raised is not None:
                raise _not_loaded(f"{where}: initialize raised", raised)
        self._model = model
        if node.loop:
            self._closer = threading.Thread(target=self._close_dropped, name=f"forebay-ovms-{node.name}", daemon=True)
            self._closer.start()

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Run the handler for each item."""
        return [attempt(self._outcome, item) for item in items]

    def close(self) -> None:
        """Finalise the model."""
        if self._closer is not None:
            for turning in list(self._turnings):  # these are in outcomes that the loop has not dropped yet
                steps, turning.steps = turning.steps, None
                if steps is not None:
                    self._dropped.put(steps)
            self._dropped.put(None)
            self._closer.join()
        model, self._model = self._model, None
        finalize = getattr(model, "finalize", None)
        if finalize is not None:
            _, raised = caught(finalize)
            if raised is not None:
                log.error(
                    "node '%s': finalize raised %s", self._node.name, text_of(raised), extra={"trace": trace_of(raised)}
                )
        self._modules.close()

    def _outcome(self, item: Item) -> Outcome:
        node, body = self._node, item.body
        turning: Turning | None = body.get(node.loop)
        if turning is not None:
            return self._step(turning, item)
        inputs = [
            as_python(body[read.port], read.name, is_renamed=read.is_renamed)
            for read in node.reads
            if read.port in body
        ]
        result = answered(lambda: self._model.execute(inputs), self._fails)
        if hasattr(result, "__next__"):
            return self._step(self._turning(result, is_unary=bool(item.params.get(UNARY))), item)
        if result is None and len(inputs) < len(node.reads):
            return Outputs({})  # it waits for the rest
        return Outputs(self._ports(result, item.params, is_kept=False))

    def _turning(self, steps: Any, *, is_unary: bool) -> Turning:
        node = self._node
        if not node.loop or is_unary:
            close(steps)
            if node.loop:
                msg = f"node '{node.name}' generates, and this call has one answer; use ModelStreamInfer"
            else:
                msg = f"node '{node.name}' returned a generator and has no LOOPBACK in the graph; return a list"
            raise ExecutionFailed(msg)
        turning = Turning(steps, self._dropped)
        self._turnings.add(turning)
        return turning

    def _step(self, turning: Turning, item: Item) -> Outputs:
        """Ask a generator for its next item."""
        steps = turning.steps
        assert steps is not None
        turning.steps = None  # it is over, unless it gives something
        found = answered(lambda: next(steps, self), self._fails)
        if found is self:
            return Outputs({})
        turning.steps = steps
        return Outputs({**self._ports(found, item.params, is_kept=True), self._node.turn: turning})

    def _ports(self, result: Any, params: Mapping[str, Any], *, is_kept: bool) -> dict[str, Any]:
        """Return what a handler returned by port; what leaves the graph, or is of a generator, is sealed.

        What one answer wants in JSON is written here, in the worker.

        Raises:
            ExecutionFailed: If it is no list of tensors with names of the node's outputs, or an answer cannot hold one.
        """
        node = self._node
        if not isinstance(result, (list, tuple)):
            raise ExecutionFailed(f"{self._where} returned {type(result).__name__}; expected a list of pyovms.Tensor")
        ports: dict[str, Any] = {}
        for one in cast("Sequence[Any]", result):
            if not isinstance(one, PyTensor):
                kind = type(one).__name__
                raise ExecutionFailed(f"{self._where} returned a list with a {kind}; only pyovms.Tensor can be in it")
            port = node.writes.get(one.name)
            if port is None:
                msg = f"{self._where} returned the tensor '{one.name[:100]}'; its outputs are {', '.join(node.writes)}"
                raise ExecutionFailed(msg)
            if port in ports:
                msg = f"{self._where} returned the tensor '{one.name}' twice in one list; each has one place in time"
                raise ExecutionFailed(msg)
            leaving = node.leaving.get(one.name)
            try:
                if one.name in node.converted:
                    check_numbers(one)
                if leaving is not None:
                    check_writable(one)
            except RequestError as error:
                raise ExecutionFailed(f"{self._where}: {error.message}") from None
            if leaving is None:
                ports[port] = sealed(one) if is_kept else one
                continue
            called = next((name for name in leaving if wants_in_json(name, params)), "") if params.get(UNARY) else ""
            ports[port] = as_json(written(one, called)) if called else sealed(one)
        return ports

    @property
    def _where(self) -> str:
        return f"node '{self._node.name}'"

    def _fails(self, raised: BaseException) -> NoReturn:
        if isinstance(raised, RequestError):  # it knows what it says
            raise failure_of(raised).error
        error = ExecutionFailed(f"{self._where}: {text_of(raised)}")
        log.error("%s", error.message, extra={"trace": trace_of(raised)})
        raise error

    def _close_dropped(self) -> None:
        """Close what nobody goes on with, until the node ends."""
        while (steps := self._dropped.get()) is not None:
            close(steps)


def _not_loaded(what: str, raised: BaseException) -> ModelError:
    return ModelError(f"{what}: {text_of(raised)}", trace=trace_of(raised))
