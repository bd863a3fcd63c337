# SPDX-License-Identifier: Apache-2.0
"""What clients are sent that speak something else than the port does: an answer of HTTP/1, which most can read.

A client of gRPC that gets it gives up at once and says so. A GOAWAY would tell it that the port speaks HTTP/2, and it
would connect again without a pause.
"""

from __future__ import annotations

from typing import Final


def _refusal(sentence: str) -> bytes:
    body = sentence.encode() + b"\n"
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % len(body) + body


NEEDS_HTTP_2: Final = _refusal("this port speaks gRPC, which needs HTTP/2")
NEEDS_TLS: Final = _refusal("this port speaks gRPC over TLS, and a client came without TLS")
