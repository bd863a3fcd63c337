# SPDX-License-Identifier: Apache-2.0
"""Spans: what took how long, for listeners. Costs nothing worth measuring while there are none."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from forebay.observe.listeners import Listeners


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


class _SpanListeners(Listeners[Span]):
    subject = "spans"


_spans: Final = _SpanListeners()
listening: Final = _spans.listening
"""Hands every span that ends in the block to a function, on the thread where it ended."""


class span:  # noqa: N801 - reads as the statement it is: `with span("serving.execute", rows=3)`
    """Measure a block. Its `as` is the dict of attributes, to add what is known only later."""

    __slots__ = ("_attributes", "_name", "_started")

    def __init__(self, name: str, **attributes: Any) -> None:
        self._name = name
        self._attributes = attributes
        self._started = 0.0

    def __enter__(self) -> dict[str, Any]:
        if _spans.told:
            self._started = time.perf_counter()
        return self._attributes

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._started:
            return
        _spans.tell(Span(self._name, time.perf_counter() - self._started, self._attributes, error))
