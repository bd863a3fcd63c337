# SPDX-License-Identifier: Apache-2.0
"""Reads strings that are packed with the Huffman code of HTTP/2's header compression (RFC 7541, appendix B).

The code is canonical: it follows from the lengths of its words. Symbols are listed in the order of their words, those
of a length together.
"""

from __future__ import annotations

from typing import Any, Final

_SYMBOLS: Final = {
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\0$@[]~",
    14: b"^}",
    15: b"<`{",
    19: bytes.fromhex("5cc3d0"),
    20: bytes.fromhex("808283a2b8c2e0e2"),
    21: bytes.fromhex("99a1a7acb0b1b3d1d8d9e3e5e6"),
    22: bytes.fromhex("8184858688929a9ca0a3a4a9aaadb2b5b9babbbdbec4c6e4e8e9"),
    23: bytes.fromhex("0187898a8b8c8d8f93959697989b9d9ea5a6a8aeafb4b6b7bcbfc5e7ef"),
    24: bytes.fromhex("098e9091949fabced7e1eced"),
    25: bytes.fromhex("c7cfeaeb"),
    26: bytes.fromhex("c0c1c8c9cacdd2d5dadbeef0f2f3ff"),
    27: bytes.fromhex("cbccd3d4d6dddedff1f4f5f6f7f8fafbfcfdfe"),
    28: bytes.fromhex("020304050607080b0c0e0f1011121314151718191a1b1c1d1e1f7fdcf9"),
    30: bytes.fromhex("0a0d16"),
}
LONGEST: Final = 30
"""Length of the word for the end, all ones. It must not stand in a string; its beginning fills the last byte."""


class BadString(Exception):
    """Bytes that this code does not give."""


def _transitions() -> tuple[list[tuple[int, bytes] | None], frozenset[int]]:
    """Return what four more bits lead to from each inner node of the tree, and the nodes where a string may end.

    A node is known by the number of its first transition: 16 follow each other. None stands for words that mean
    nothing.
    """
    children: list[list[int | bytes | None]] = [[None, None]]

    def descend(word: int, length: int) -> tuple[int, int]:
        node = 0
        for bit in range(length - 1, 0, -1):
            side = word >> bit & 1
            child = children[node][side]
            if not isinstance(child, int):
                child = children[node][side] = len(children)
                children.append([None, None])
            node = child
        return node, word & 1

    word = before = 0
    for length, symbols in _SYMBOLS.items():
        word <<= length - before
        before = length
        for symbol in symbols:
            node, side = descend(word, length)
            children[node][side] = bytes([symbol])
            word += 1
    descend((1 << LONGEST) - 1, LONGEST)

    table: list[tuple[int, bytes] | None] = []
    for node in range(len(children)):
        for nibble in range(16):
            at: int | None = node
            found = b""
            for bit in (3, 2, 1, 0):
                child = children[at][nibble >> bit & 1]
                if isinstance(child, bytes):
                    found += child
                    child = 0
                at = child
                if at is None:
                    break
            table.append(None if at is None else (at * 16, found))
    ends = [descend((1 << length) - 1, length)[0] * 16 for length in range(1, 9)]  # up to seven ones fill a byte
    return table, frozenset(ends)


_TABLE, _ENDS = _transitions()


def unpack(data: bytes) -> bytes:
    """Return the string; raises BadString if it holds the word for its end, or ends within a word."""
    table: list[Any] = _TABLE  # None cannot be taken apart, and means that this word means nothing
    node = 0
    found: list[bytes] = []
    try:
        for byte in data:
            node, symbols = table[node + (byte >> 4)]
            if symbols:
                found.append(symbols)
            node, symbols = table[node + (byte & 15)]
            if symbols:
                found.append(symbols)
    except TypeError:
        raise BadString("a packed string holds a word that means nothing") from None
    if node not in _ENDS:
        raise BadString("a packed string ends within a word")
    return b"".join(found)
