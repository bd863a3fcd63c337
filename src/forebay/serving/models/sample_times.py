# SPDX-License-Identifier: Apache-2.0
"""Divide the time of a batch that runs in parts among its samples.

A part is divided by the sizes of its samples, and the sample that sets the padded size pays for the padding of the
others. Runs of halves are paid by the samples that failed; if none did, by those that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forebay.types.call import Failure


class SampleTimes:
    """The runs of one batch."""

    def __init__(self, sizes: Callable[[Sequence[int]], Sequence[float]] | None) -> None:
        """Begin before the first run.

        Args:
            sizes: Gives what each of some samples, by their places, causes of a run together; None if all cause alike.
        """
        self._sizes = sizes
        self._runs: list[tuple[Sequence[int], float]] = []

    def ran(self, group: Sequence[int], seconds: float) -> None:
        """Note how long the samples of these places ran together."""
        self._runs.append((group, seconds))

    def seconds(self, results: Sequence[Any]) -> list[float]:
        """Return the seconds that each sample pays."""
        paid = [0.0] * len(results)
        wholes: dict[int, Sequence[int]] = {}
        for group, seconds in self._runs:
            whole = wholes.get(group[0])
            payers = group
            sizes: Sequence[float] = [1.0] * len(group)
            if whole is not None:
                payers = [place for place in whole if isinstance(results[place], Failure | BaseException)] or group
                sizes = [1.0] * len(payers)
            else:
                wholes.update(dict.fromkeys(group, group))
                if self._sizes is not None:
                    sizes = self._sizes(group)
            unit_s = seconds / sum(sizes)
            for place, size in zip(payers, sizes, strict=True):
                paid[place] += size * unit_s
        return paid
