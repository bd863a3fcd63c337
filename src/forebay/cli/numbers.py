# SPDX-License-Identifier: Apache-2.0
"""Types of arguments; what is none, or not within the bounds, is refused in a sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from forebay.types.settings import Setting, described, with_value


def reading(setting: Setting) -> Callable[[str], Any]:
    """Return what argparse reads the value of a setting with."""

    def read(text: str) -> Any:
        try:
            return setting.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(with_value(error, repr(text))) from error

    return read


def between(kind: type[int | float], lowest: float, highest: float) -> Callable[[str], float]:
    """Return a type of arguments: numbers in these bounds."""
    return reading(described(Annotated[kind, Meta(ge=lowest, le=highest)]))


def seconds(lowest: float, highest: float) -> Callable[[str], float]:
    """Return a type of arguments: durations in these bounds, in seconds if no unit is given."""
    return reading(described(Annotated[float, Meta(ge=lowest, le=highest)], "_s"))


positive = reading(described(Annotated[float, Meta(gt=0)]))
