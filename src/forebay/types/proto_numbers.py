# SPDX-License-Identifier: Apache-2.0
"""Numbers that repeat in a message of protobuf, as an array, a part at a time: each is a Python object for a moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy.typing as npt

_PART: Final = 16 * 1024


def array_in_parts(values: Sequence[Any], kind: str) -> npt.NDArray[Any]:
    """Return numbers as an array.

    Args:
        kind: Its dtype, which can hold all of them.
    """
    import numpy as np

    array = np.empty(len(values), kind)
    for at in range(0, len(values), _PART):
        array[at : at + _PART] = values[at : at + _PART]
    return array
