# SPDX-License-Identifier: Apache-2.0
"""The compiler `torch`; it and torch are loaded on first use."""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from typing import Any

import numpy as np

from forebay.arrays.compilers import Function, Options, check_options, concurrent
from forebay.arrays.tree_structure import map_leaves
from forebay.arrays.value_hooks import Sink, collecting, collector

torch: Any = importlib.import_module("torch")  # it need not be installed where this file is type-checked

_OPTIONS = ("backend", "disable", "dynamic", "fullgraph", "mode", "options")

_sink: ContextVar[Sink] = ContextVar("forebay_torch_sink")


@torch.compiler.disable
def _deliver(name: str, value: Any) -> None:
    """Stand in for the sink of each run: torch would compile that into the function, and again for the next run."""
    _sink.get()(name, value)


class Torch:
    """Compiles with `torch.compile`."""

    def compile(self, fn: Function, options: Options) -> Function:
        """Return the compiled function; it gets tensors, also where the batch holds numpy arrays.

        No gradients are kept: it runs in inference mode.

        Args:
            fn: A function that takes and returns tensors.
            options: `device` is where the tensors are moved to. `backend`, `disable`, `dynamic`, `fullgraph`, `mode`
                and `options` go to `torch.compile`.

        Raises:
            ConfigError: An option is unknown.
        """
        check_options("torch", options, _OPTIONS)
        compiled = torch.compile(fn, **{name: options[name] for name in _OPTIONS if name in options})
        device = options.get("device")

        def tensor(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
            return leaf if device is None else leaf.to(device)

        @torch.inference_mode()
        def call(tree: Any) -> Any:
            arguments = map_leaves(tensor, tree)
            current = collector()
            if current is None:
                return compiled(arguments)
            token = _sink.set(current.sink)
            try:
                with collecting(current.names, _deliver):
                    return compiled(arguments)
            finally:
                _sink.reset(token)

        return call

    def partitions(self, options: Options) -> list[dict[str, Any]]:
        """Return one partition for each CUDA device; without one, as many as `max_concurrency` on the CPU.

        Raises:
            ConfigError: `max_concurrency` is not a positive whole number.
        """
        if torch.cuda.is_available():
            return [{**options, "device": f"cuda:{index}"} for index in range(torch.cuda.device_count())]
        return concurrent(options)
