# SPDX-License-Identifier: Apache-2.0
"""In which order an op gets its inputs: it decides what `preprocess` sees first, and which of several errors counts.

The original lays its channels level by level from the request on, and the producers of a channel are in the order in
which they were found (paddle_serving_server 0.9.0, pipeline/dag.py, `DAG._topo_sort` and `DAG._build_dag`). That is the
order of `input_ops` unless an input skips a level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.ops.op import Op


def input_order(last: Op) -> Mapping[Op, Sequence[Op]]:
    """Return the inputs of each op in the order in which it gets them; the ops before `last` go round in no circle."""
    readers: dict[Op, list[Op]] = {last: []}
    waiting = [last]
    while waiting:
        op = waiting.pop(0)
        for before in op.get_input_ops():
            if before not in readers:
                readers[before] = []
                waiting.append(before)
            readers[before].append(op)
    levels = _levels(last, {op: len(found) for op, found in readers.items()})
    found: dict[Op, Sequence[Op]] = {}
    writers = [_Writer(op, readers[op]) for op in levels[0]]
    for level in levels[1:]:
        reached: dict[Op, list[_Writer]] = {}
        following: list[_Writer] = []
        for writer in writers:
            for reader in writer.readers:
                if reader not in level:
                    following.append(_Writer(writer.op, [reader]))  # it skips this level
                    continue
                if reader not in reached:
                    reached[reader] = []
                    following.append(_Writer(reader, readers[reader]))
                reached[reader].append(writer)
        for op, inputs in reached.items():
            # Ops of one level that read the same writers share the channel of the first of them.
            shared = next(other for other in reached.values() if set(other) == set(inputs))
            found[op] = [writer.op for writer in shared]
        writers = following
    return found


class _Writer(msgspec.Struct, frozen=True, eq=False):
    """An op at a level, or what carries its result past one to a single reader."""

    op: Op
    readers: Sequence[Op]


def _levels(last: Op, unread: dict[Op, int]) -> list[list[Op]]:
    """Return the ops by levels, each as late as its readers allow; the request comes first."""
    levels = [[last]]
    while level := levels[-1]:
        levels.append([])
        for op in level:
            for before in op.get_input_ops():
                unread[before] -= 1
                if unread[before] == 0:
                    levels[-1].append(before)
    return levels[-2::-1]
