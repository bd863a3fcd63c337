# SPDX-License-Identifier: Apache-2.0
"""The values on the streams of a graph, as nodes see them.

A value that a worker process returned stays packed in the server (`workers/wire/objects.py`) until somebody looks at
it. Loading it may raise: its class is the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.workers.wire.objects import Outputs, Packed, is_packed, unpack

if TYPE_CHECKING:
    from forebay.types.call import Item

__all__ = ["SKIP", "Outputs", "inputs_of", "loaded"]

SKIP: Final[Any] = Outputs({})
"""Outcome of a node that has no result this time: its streams carry nothing, and who needs them does not run.

It may stand for a result of any type, so that a function is annotated with the type that it has otherwise."""


def inputs_of(item: Item) -> Any:
    """Return the inputs of a node: a dict by port; for an item that is spread, a list with the dict of each sample.

    Raises:
        RunnerFailed: If a value cannot be loaded; concerns this item only.
    """
    body = item.body
    if type(body) is dict:
        return loaded(cast("Mapping[str, Any]", body))
    if is_packed(body):
        return unpack(body)
    return [unpack(sample) if is_packed(sample) else loaded(sample) for sample in body]


def loaded(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values after loading the packed ones; the same mapping if none is packed.

    Raises:
        RunnerFailed: If one cannot be loaded.
    """
    for value in values.values():
        if type(value) is Packed:
            return {port: value.load() if type(value) is Packed else value for port, value in values.items()}
    return values
