# SPDX-License-Identifier: Apache-2.0
"""Header compression of HTTP/2 (RFC 7541): reads what clients write, and writes without state.

What is written never enters a client's table, so a written block is a constant that holds for every connection.

Reading is our own code and not the library `hpack`: a block with an id of its own for each call, which is what cannot
be remembered, takes 3 to 10 us here (plain, packed) and 15 to 35 us there, while a whole call takes 7. Measured with
hpack 4.2, which also counts no resizes of the table (40 ms for 60 KB of them); the tests have it as an oracle.
"""

from __future__ import annotations

from typing import Final

from forebay.transports.grpc import huffman

Field = tuple[bytes, bytes]

TABLE_BYTES: Final = 4096
"""Size of the table a client may fill; it is the one of the protocol, and none is announced."""
OVERHEAD_BYTES: Final = 32
"""What a field counts beside its name and value, in the table and in a list."""
MAX_RESIZES: Final = 8
"""How often a block may resize the table. Two are what the protocol needs; some clients write each size they had."""
MAX_NUMBER: Final = 1 << 24
"""No length or index of an honest client comes near this."""

_STATIC: Final[tuple[Field, ...]] = (
    (b"", b""),  # indices begin at 1
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)


class BadBlock(Exception):
    """A header block that cannot be read; nothing after it on its connection can be read either."""


class HeaderBlockTooLarge(Exception):
    """A header block that says far more than is allowed; as it was not read, nothing after it can be read."""


class Decoder:
    """Reads the header blocks of one connection, in the order in which they came.

    Attributes:
        changes: How often the table has changed. A block that changed nothing means the same until this grows.
    """

    def __init__(self, max_list_bytes: int) -> None:
        """Begin with an empty table.

        Args:
            max_list_bytes: How much of a block is kept: names, values and 32 bytes for each field. Twice as much is
                read, so that the connection of a client that goes a little too far can be used on; a block that is
                itself longer than that says too much, or says it in bytes that take almost four when they are packed.
        """
        self.changes = 0
        self._max_list_bytes = max_list_bytes
        self._max_read_bytes = 2 * max_list_bytes
        self._entries: list[Field] = []  # the newest last
        self._used_bytes = 0
        self._max_bytes = TABLE_BYTES

    def decode(self, block: bytes) -> tuple[list[Field], int]:
        """Return the fields of a block and how long their list is; a list that is too long is not complete.

        Raises:
            BadBlock: If it cannot be read.
            HeaderBlockTooLarge: As soon as there is too much to read on.
        """
        fields: list[Field] = []
        limit, listed = self._max_list_bytes, 0
        left = self._max_read_bytes
        at, end = 0, len(block)
        if end > left:
            raise HeaderBlockTooLarge
        resizes = MAX_RESIZES
        try:
            while at < end:
                byte = block[at]
                if byte & 0x80:
                    index, at = _number(block, at, 0x7F)
                    name, value = field = self._field(index)
                elif byte & 0xE0 == 0x20:
                    size, at = _number(block, at, 0x1F)
                    if not resizes or size > TABLE_BYTES:
                        raise BadBlock(f"the table may not be resized to {size} bytes here")
                    resizes -= 1
                    self._max_bytes = size
                    self._evict(0)
                    continue
                else:
                    is_new = byte & 0x40
                    index, at = _number(block, at, 0x3F if is_new else 0x0F)
                    if index:
                        name = self._field(index)[0]
                    else:
                        name, at = _string(block, at)
                    value, at = _string(block, at)
                    field = name, value
                    if is_new:
                        self._add(field)
                resizes = 0
                size = len(name) + len(value) + OVERHEAD_BYTES
                left -= size
                if left < 0:
                    raise HeaderBlockTooLarge
                listed += size
                if listed <= limit:
                    fields.append(field)
        except IndexError:
            raise BadBlock("a header block ends within a field") from None
        except huffman.BadString as error:
            raise BadBlock(str(error)) from None
        return fields, listed

    def _field(self, index: int) -> Field:
        if 0 < index < len(_STATIC):
            return _STATIC[index]
        back = index - len(_STATIC) + 1
        if not 0 < back <= len(self._entries):
            raise BadBlock(f"a header block refers to field {index}, which is not in the table")
        return self._entries[-back]

    def _add(self, field: Field) -> None:
        size = len(field[0]) + len(field[1]) + OVERHEAD_BYTES
        self._evict(size)
        if size <= self._max_bytes:
            self._entries.append(field)
            self._used_bytes += size

    def _evict(self, room_bytes: int) -> None:
        self.changes += 1
        entries = self._entries
        gone = 0
        while gone < len(entries) and self._used_bytes + room_bytes > self._max_bytes:
            name, value = entries[gone]
            self._used_bytes -= len(name) + len(value) + OVERHEAD_BYTES
            gone += 1
        del entries[:gone]


def literal(name: bytes, value: bytes) -> bytes:
    """Write a field that enters no table."""
    return b"\0%b%b%b%b" % (_length(len(name)), name, _length(len(value)), value)


def _number(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Read an integer whose first bits stand under `mask`; returns it and where it ends."""
    number = block[at] & mask
    at += 1
    if number < mask:
        return number, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << shift
        shift += 7
        if number > MAX_NUMBER or shift > 28:
            raise BadBlock("a header block holds a number that is too large")
        if byte < 0x80:
            return number, at


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    is_packed = block[at] & 0x80
    length, at = _number(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise IndexError
    data = block[at:end]
    return (huffman.unpack(data) if is_packed else data), end


def _length(number: int) -> bytes:
    if number < 0x7F:
        return bytes([number])
    found = [0x7F]
    number -= 0x7F
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
