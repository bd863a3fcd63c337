# SPDX-License-Identifier: Apache-2.0
"""Listeners: `listening` adds a function that is told of something for as long as a block lasts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ClassVar, Generic, TypeVar

from forebay.types.failures import text_of, trace_of
from forebay.types.user_exceptions import caught

log = logging.getLogger("forebay")

T = TypeVar("T")


class Listeners(Generic[T]):
    """Functions that are told of the same.

    Attributes:
        subject: What of, for the log.
        told: All of them; replaced as a whole, so that a loop over them needs no lock.
    """

    subject: ClassVar[str]

    def __init__(self) -> None:
        """Begin without any."""
        self.told: tuple[Callable[[T], object], ...] = ()

    @contextmanager
    def listening(self, listener: Callable[[T], object]) -> Generator[None]:
        """Tell this function as well, where it happens; it must not block."""
        self.told = (*self.told, listener)
        try:
            yield
        finally:
            left = list(self.told)
            left.remove(listener)
            self.told = tuple(left)

    def tell(self, what: T) -> None:
        """Tell all of them; one that fails keeps nobody else from it."""
        for listener in self.told:
            _, failed = caught(listener, what)
            if failed is not None:
                told = f"a listener to {self.subject} failed"
                log.error("%s: %s", told, text_of(failed), extra={"trace": trace_of(failed)})
