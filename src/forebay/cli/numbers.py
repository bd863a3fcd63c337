# SPDX-License-Identifier: Apache-2.0
"""Types of arguments that are numbers; what is none, or not within the bounds, is refused in a sentence."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def between(kind: type[int | float], lowest: float, highest: float) -> Callable[[str], float]:
    """Return a type of arguments: numbers in these bounds."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(lowest) - 1
        if not lowest <= value <= highest:
            what = "a whole number" if kind is int else "a number"
            msg = f"{text!r} is not possible, {what} from {lowest:g} to {highest:g} is needed"
            raise argparse.ArgumentTypeError(msg)
        return value

    return parse


def positive(text: str) -> float:
    """Read a number above 0, as a type of argparse.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
