# SPDX-License-Identifier: Apache-2.0
"""States and events of what is written down as a table: which event leads from which state to which.

An event that is not in the row of a state is a defect of ours. States are compared by identity, so that a hot path may
assign one itself; a test holds each such line to the table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class State:
    """A row of a table; what is true in a state are the fields of its class."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """What may happen in a state."""

    meaning: str
