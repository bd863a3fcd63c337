# SPDX-License-Identifier: Apache-2.0
"""Spans: what took how long, told to whoever listens. Costs nothing worth measuring while nobody does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import msgspec

from forebay.types.caught import caught
from forebay.types.failures import text_of, trace_of

log = logging.getLogger("forebay")


class Span(msgspec.Struct, frozen=True):
    """One step that has ended.

    Attributes:
        name: What it was, such as `serving.execute`.
        seconds: How long it took.
        attributes: What is known about it.
        error: What it raised, if it did.
    """

    name: str
    seconds: float
    attributes: dict[str, Any]
    error: BaseException | None = None


_listeners: tuple[Callable[[Span], object], ...] = ()


@contextmanager
def listening(listener: Callable[[Span], object]) -> Generator[None]:
    """Hand every span that ends to this function, on the thread where it ended."""
    global _listeners  # noqa: PLW0603 - replaced as a whole, so that `span` needs no lock
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        left = list(_listeners)
        left.remove(listener)
        _listeners = tuple(left)


class span:  # noqa: N801 - reads as the statement it is: `with span("serving.execute", rows=3)`
    """Measure a block. Its `as` is the dict of attributes, to add what is known only later."""

    __slots__ = ("_attributes", "_name", "_started")

    def __init__(self, name: str, **attributes: Any) -> None:
        self._name = name
        self._attributes = attributes
        self._started = 0.0

    def __enter__(self) -> dict[str, Any]:
        if _listeners:
            self._started = time.perf_counter()
        return self._attributes

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._started:
            return
        ended = Span(self._name, time.perf_counter() - self._started, self._attributes, error)
        for listener in _listeners:
            _, failed = caught(listener, ended)
            if failed is not None:
                log.error("a listener to spans failed: %s", text_of(failed), extra={"trace": trace_of(failed)})
