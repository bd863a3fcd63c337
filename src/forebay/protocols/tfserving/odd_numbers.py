# SPDX-License-Identifier: Apache-2.0
"""NaN and infinities, which TensorFlow Serving takes as `NaN`, `Infinity` and `-Infinity`, and no decoder of JSON does.

Before a body is read they become texts that nobody else can have written. The data of a tensor is given them back.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from forebay.errors import TooLarge
from forebay.types.element_limits import Data, Steps
from forebay.types.json_segments import STEP_BYTES

MAX_ODD_BYTES: Final = 256 * 1024
"""A body with such numbers, which is looked through for them on the loop."""

_ODD: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|-(?:NaN|Inf(?:inity)?)|NaN|Inf(?:inity)?')
"""Texts, and numbers that JSON has not; a text without an end goes to the end, so that nothing is read twice."""
_MARK: Final = secrets.token_hex(8).encode()
_MARKED: Final = {name: b'"%b%b"' % (_MARK, name) for name in (b"NaN", b"Infinity", b"-Infinity")}
"""What such numbers are while a body is read."""
NUMBERS: Final = {marked[1:-1].decode(): float(name) for name, marked in _MARKED.items()}
"""What their marks stand for."""


def with_marks(body: Data) -> Steps[bytes | None]:
    """Return a body whose odd numbers are marked; None if it has none.

    Raises:
        TooLarge: If it is too long to be looked through.
    """
    if not (yield from holds(body, b"NaN", b"Inf")):
        return None
    if len(body) > MAX_ODD_BYTES:
        raise TooLarge(f"a body of more than {MAX_ODD_BYTES} bytes has NaN or an infinity; ask over gRPC")
    return _ODD.sub(_marked, bytes(body))


def without_marks(data: Data) -> bytes:
    """Return a part of such a body as it came."""
    text = bytes(data)
    for name, marked in _MARKED.items():
        text = text.replace(marked, name)
    return text


def holds(data: Data, *texts: bytes) -> Steps[bool]:
    """Tell whether one of these short texts is in data."""
    view = memoryview(data)
    for at in range(0, len(view), STEP_BYTES):
        piece = bytes(view[at : at + STEP_BYTES + len(texts[0]) - 1])
        if any(text in piece for text in texts):
            return True
        yield
    return False


def _marked(found: re.Match[bytes]) -> bytes:
    token = found[0]
    if token[:1] == b'"':
        return token
    name = b"NaN" if token.endswith(b"NaN") else b"Infinity"
    return _MARKED[b"-Infinity" if name == b"Infinity" and token[:1] == b"-" else name]
