# SPDX-License-Identifier: Apache-2.0
"""Where in shared memory tensors lie, as the parameters of inputs and outputs say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from forebay.errors import InvalidRequest

Parameter = bool | int | float | str

REGION: Final = "shared_memory_region"
"""The parameter without which a tensor lies in its message."""
CLASSES: Final = "classification"
"""The parameter by which a client wants the best classes of an output, and not its tensor."""
OFFSET: Final = "shared_memory_offset"
SIZE: Final = "shared_memory_byte_size"


class Place(msgspec.Struct, frozen=True):
    """A part of a region of shared memory."""

    region: str
    offset: int
    size: int

    def told(self, size: int) -> dict[str, Parameter]:
        """Return the parameters of an output of this size that lies here."""
        return {REGION: self.region, SIZE: size, **({OFFSET: self.offset} if self.offset else {})}


def place_wanted(name: str, parameters: Mapping[str, Parameter]) -> Place | None:
    """Return the place where an output is wanted; None if that is the answer.

    Raises:
        InvalidRequest: If parameters tell it wrongly, or want something else than the tensor.
    """
    if parameters.get(CLASSES):
        name = name[:80]
        msg = f"output '{name}' is wanted as classes, an extension that this server does not have; ask for its tensor"
        raise InvalidRequest(msg)
    return place_of(f"output '{name}'", parameters)


def place_of(what: str, parameters: Mapping[str, Parameter]) -> Place | None:
    """Return the place that parameters tell; None if they tell none.

    Args:
        what: What lies there, for messages.

    Raises:
        InvalidRequest: If they tell it wrongly.
    """
    if REGION not in parameters:
        return None
    region, offset, size = parameters[REGION], parameters.get(OFFSET, 0), parameters.get(SIZE, 0)
    if not isinstance(region, str) or type(offset) is not int or type(size) is not int or offset < 0 or size < 0:
        found = f"{region!r:.100} with offset {offset!r:.30} and size {size!r:.30}"
        msg = f"{what} has a {REGION} {found}; it is named by a text, and the others are numbers of bytes"
        raise InvalidRequest(msg)
    return Place(region, offset, size)
