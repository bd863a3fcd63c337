# SPDX-License-Identifier: Apache-2.0
"""Files that run their model themselves: under `forebay serve` the call hands the model over instead."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from forebay.types.served_file import asking_file


class Handed(BaseException):
    """Ends a file at its call that would serve; no `except Exception` of the file's stops it.

    Attributes:
        model: What it would have served; None where the call does not know.
        module: The file as far as it was executed.
    """

    def __init__(self, model: Any, call: str, module: ModuleType | None) -> None:
        super().__init__(call)
        self.model = model
        self.call = call
        self.module = module


_loading = 0


@contextmanager
def loading() -> Generator[None]:
    """Let calls that would serve raise `Handed` while a file is loaded."""
    global _loading  # noqa: PLW0603 - one process loads one file
    _loading += 1
    try:
        yield
    finally:
        _loading -= 1


def hand_over(model: Any, call: str) -> None:
    """End the file that is being loaded and give its model to its loader; in any other program do nothing."""
    if _loading:
        raise Handed(model, call, asking_file())
