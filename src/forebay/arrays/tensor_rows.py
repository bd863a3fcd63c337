# SPDX-License-Identifier: Apache-2.0
"""The rows of tensors along their first axis: found, cut out, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, cast

import msgspec

from forebay.types.datatypes import datatype_of
from forebay.types.tensor import Data, Tensor, element_ends, elements

STEP_ELEMENTS: Final = 4096
"""Elements of BYTES that are passed over in one step."""

_listed: Final = msgspec.json.Decoder(list[msgspec.Raw])


class Rows:
    """Where the rows of a tensor lie."""

    def __init__(self, tensor: Tensor, count: int) -> None:
        """Begin with raw data of so many rows; what is in it is not looked at yet."""
        self._tensor = tensor
        self._count = count
        self._data = memoryview(cast("bytes", tensor.data))
        self._row_bytes = len(self._data) // count
        self._ends: list[int] = []
        """Where rows of BYTES end, behind where the first one begins; others are equally long."""

    def finding(self) -> Iterator[None]:
        """Find them, in steps of a millisecond or so.

        Raises:
            ValidationError: If BYTES holds another number of elements than its shape says.
        """
        tensor = self._tensor
        if datatype_of(tensor.datatype, tensor.name).size:
            return
        each = elements(tensor.name, tensor.shape[1:])
        found = element_ends(tensor.name, self._data, each * self._count)
        self._ends = [0] if each else [0] * (self._count + 1)
        number = 0
        while part := list(islice(found, STEP_ELEMENTS)):
            self._ends += part[(each - 1 - number) % each :: each]
            number += len(part)
            if len(part) == STEP_ELEMENTS:
                yield

    def of(self, rows: Sequence[int]) -> Data:
        """Return the data of some of them, one after the other; of those that lie so, as a view."""
        if type(rows) is range and rows.step == 1:
            return self._data[self._start(rows.start) : self._start(rows.stop)]
        return b"".join([self._data[self._start(row) : self._start(row + 1)] for row in rows])

    def _start(self, row: int) -> int:
        return self._ends[row] if self._ends else row * self._row_bytes


class JoinedRows:
    """Rows that come in any order, as they lie in memory or as lists in JSON."""

    def __init__(self) -> None:
        """Begin without any."""
        self._parts: dict[int, Data] = {}
        """By the first row that is in it."""

    def add(self, rows: Sequence[int], tensor: Tensor) -> None:
        """Keep a tensor of these rows.

        Raises:
            ValidationError: If it has another number of elements than its shape says.
        """
        if type(rows) is range and rows.step == 1:
            self._parts[rows.start] = bytes(tensor.data).strip()[1:-1] if tensor.is_json else tensor.data
        elif tensor.is_json:
            values = _listed.decode(tensor.data)
            each = len(values) // len(rows)
            for place, row in enumerate(rows):
                self._parts[row] = b",".join(values[place * each : (place + 1) * each])
        else:
            found = Rows(tensor, len(rows))
            for _ in found.finding():
                pass
            for place, row in enumerate(rows):
                self._parts[row] = found.of(range(place, place + 1))

    def whole(self, *, is_json: bool) -> bytes:
        """Return all of them in order."""
        parts = [self._parts[row] for row in sorted(self._parts)]
        return b"[%s]" % b",".join(filter(None, parts)) if is_json else b"".join(parts)
