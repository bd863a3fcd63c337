# SPDX-License-Identifier: Apache-2.0
"""What a TLS transport is given a little at a time arrives whole, in order, and before the connection is closed."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.transports.tls_writing import PIECE_BYTES, TlsWriter


class Transport:
    """Has room for so many pieces, and then pauses until the client reads."""

    def __init__(self):
        self.written = b""
        self.room = 2
        self.is_closed = False
        self.writer: Any = None

    def write(self, piece):
        assert len(piece) <= PIECE_BYTES
        assert not self.is_closed
        assert self.room > 0
        self.written += piece
        self.room -= 1
        if self.room == 0:
            self.writer.pause()

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return self.is_closed

    def close(self):
        self.is_closed = True

    def abort(self):
        self.is_closed = True

    def told(self):
        return "what the transport says"


SIZES = st.lists(st.one_of(st.integers(0, 100), st.integers(PIECE_BYTES - 1, 4 * PIECE_BYTES)), max_size=6)


@given(SIZES, st.lists(st.integers(1, 3), max_size=10), st.booleans())
def test_all_is_written_in_order_and_the_rest_is_counted(sizes, rooms, closes):  # F78
    transport: Any = Transport()
    writer = transport.writer = TlsWriter(transport)
    parts = [bytes([index]) * size for index, size in enumerate(sizes)]
    whole = b"".join(parts)
    for part in parts[::2]:
        writer.write(part)
    writer.writelines(parts[1::2])
    whole = b"".join([*parts[::2], *parts[1::2]])
    if closes:
        writer.close()
        assert writer.is_closing()
        writer.write(b"too late")
    for room in rooms:
        assert writer.get_write_buffer_size() == len(whole) - len(transport.written)
        if not transport.is_closed and transport.room == 0:
            transport.room = room
            assert writer.resume() == (transport.room > 0)
    assert whole.startswith(transport.written)
    is_all = transport.written == whole
    assert transport.is_closed == (closes and is_all)
    if not is_all:
        writer.abort()
        assert writer.get_write_buffer_size() == 0
        assert transport.is_closed
    assert writer.told() == "what the transport says"
