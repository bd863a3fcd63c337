# SPDX-License-Identifier: Apache-2.0
"""Vectors as clients of OpenAI's protocol like them: numbers of 32 bits, the lowest byte first, in base64."""

from __future__ import annotations

import sys
from array import array
from binascii import b2a_base64
from typing import Any

from forebay.openai import Embedding


def vector_in_base64(value: Any) -> bytes:
    """Write a list of numbers, an array of one axis, or an `Embedding` of either as JSON."""
    if isinstance(value, Embedding):
        return b'{"vector":%b,"tokens":%d}' % (vector_in_base64(value.vector), value.tokens)
    if hasattr(value, "astype"):
        numbers: Any = value.astype("<f4")
    else:
        numbers = array("f", value.tolist() if hasattr(value, "tolist") else value)
        if sys.byteorder == "big":
            numbers.byteswap()
    return b'"%b"' % b2a_base64(numbers.tobytes(), newline=False)
