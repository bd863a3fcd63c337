# SPDX-License-Identifier: Apache-2.0
"""How many elements a request may have: counted in its bytes, before a Python object is made for any of them.

Theory of operation. One byte of JSON, msgpack or protobuf can become an object of a hundred bytes, so a limit on bytes
bounds neither memory nor time. `json_elements`, `msgpack_elements` and `message_elements`, each in the module of its
name, count what a decoder would make. Every protocol calls one of them before it decodes.

Each is a generator that yields about every millisecond. On an event loop other work runs between two steps
(`transports/reading_turns.py`); in a thread, `at_once` runs all steps in a row. Data that is shorter than the limit is
not looked at, since no format has more elements than bytes. Longer JSON is first held to an upper bound at the speed
of memory, and only if that exceeds the limit are texts left out.

A count is never too low. It is at most twice as high as what is made: an empty list counts itself and its bracket.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeVar

import msgspec

from forebay.errors import TooLarge

T = TypeVar("T")

Data = bytes | bytearray | memoryview
Steps = Generator[None, None, T]
"""Work in steps of about a millisecond."""

MAX_TENSOR_ELEMENTS: Final = 16_000_000
MAX_ELEMENTS: Final = 1_000_000


class ElementLimits(msgspec.Struct, frozen=True):
    """How many elements one request may have.

    Attributes:
        tensors: Elements of tensors and of arrays of samples.
        elsewhere: All others: objects and their members, map entries, repeated fields.
    """

    tensors: int = MAX_TENSOR_ELEMENTS
    elsewhere: int = MAX_ELEMENTS


DEFAULT: Final = ElementLimits()


def at_once(steps: Steps[T]) -> T:
    """Run all steps in a row."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def too_long(what: str, limit: int, size: int | None = None) -> TooLarge:
    """Return the error of bytes over a limit; None if their number is not known."""
    return TooLarge(f"{what}: expected at most {limit} bytes, got {'more' if size is None else size}")


def too_many(what: str, elements: str, limit: int) -> TooLarge:
    """Return the error of data with too many elements."""
    return TooLarge(f"{what}: expected at most {limit} {elements}, got more")
