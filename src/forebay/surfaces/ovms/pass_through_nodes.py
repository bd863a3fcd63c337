# SPDX-License-Identifier: Apache-2.0
"""Nodes between an input and an output of a graph: they read its tensor, so that no answer holds an unchecked one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.arrays.numpy_tensors import as_json, as_raw
from forebay.surfaces.ovms.handlers import UNARY
from forebay.surfaces.ovms.stream_values import wants_in_json
from forebay.workers.runner import Runner
from forebay.workers.user_calls.user_code import attempt

if TYPE_CHECKING:
    from forebay.types.call import Item, Outcome
    from forebay.types.tensor import Tensor


class PassingRunner(Runner):
    """Runs such a node. Bodies are one packet by its port, and results are tensors."""

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
