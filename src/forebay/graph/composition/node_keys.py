# SPDX-License-Identifier: Apache-2.0
"""Batch keys of nodes: a function of a sample's inputs, asked on the loop before the sample is queued."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from forebay.graph.values import inputs_of
from forebay.serving.models.batch_keys import key_of_sample

if TYPE_CHECKING:
    from forebay.types.call import Item


class NodeKeys:
    """Reads the batch key of each sample that a node is asked for."""

    def __init__(self, key_of: Callable[..., Hashable], name: str, ports: Sequence[str]) -> None:
        """Prepare to read with the user's function; it gets the inputs in their order, None for an absent one."""
        self._key_of = key_of
        self._name = name
        self._ports = ports

    def __call__(self, item: Item) -> list[Hashable]:
        """Return one key for each sample.

        Raises:
            ForebayError: What the function raised; RunnerFailed if it returned what cannot be a key.
        """
        inputs: Any = inputs_of(item)
        rows = cast("list[Mapping[str, Any]]", inputs) if isinstance(inputs, list) else [inputs]
        return [key_of_sample(self._key_of, self._name, *map(row.get, self._ports)) for row in rows]
