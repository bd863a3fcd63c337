# SPDX-License-Identifier: Apache-2.0
"""Header compression: what others write is read, what is written is read by others, and nonsense is refused."""

from __future__ import annotations

import pytest
from hpack import Decoder as OtherDecoder
from hpack import Encoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.transports.grpc import huffman, statuses
from forebay.transports.grpc.hpack import BadBlock, Decoder, HeaderBlockTooLarge, literal

PLENTY = 1 << 20

names = st.sampled_from([b":path", b":method", b"te", b"user-agent", b"x-a", b"x-b"]) | st.binary(
    min_size=1, max_size=9
)
values = st.sampled_from([b"POST", b"trailers", b"", b"a" * 100]) | st.binary(max_size=40)
lists = st.lists(st.tuples(names, values), max_size=8)


def packed(*symbols):
    """Write a string with the Huffman code, as it comes, filled with ones."""
    bits = "".join(format(REQUEST_CODES[symbol], f"0{REQUEST_CODES_LENGTH[symbol]}b") for symbol in symbols)
    bits += "1" * (-len(bits) % 8)
    return bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8))


def fields(block, decoder=None):
    return (decoder or Decoder(PLENTY)).decode(block)[0]


# ---------------------------------------------------------------------------------------------------------------------
# The examples of RFC 7541, appendix C

REQUESTS = [
    [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")],
    [
        (b":method", b"GET"),
        (b":scheme", b"http"),
        (b":path", b"/"),
        (b":authority", b"www.example.com"),
        (b"cache-control", b"no-cache"),
    ],
    [
        (b":method", b"GET"),
        (b":scheme", b"https"),
        (b":path", b"/index.html"),
        (b":authority", b"www.example.com"),
        (b"custom-key", b"custom-value"),
    ],
]


@pytest.mark.parametrize(
    "blocks",
    [
        [
            "828684410f7777772e6578616d706c652e636f6d",
            "828684be58086e6f2d6361636865",
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        ],
        [
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            "828684be5886a8eb10649cbf",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        ],
    ],
    ids=["C.3 plain", "C.4 packed"],
)
def test_requests_of_the_rfc(blocks):
    decoder = Decoder(PLENTY)
    assert [fields(bytes.fromhex(block), decoder) for block in blocks] == REQUESTS


def test_single_fields_of_the_rfc():  # C.2
    assert fields(b"\x40\x0acustom-key\x0dcustom-header") == [(b"custom-key", b"custom-header")]
    assert fields(b"\x04\x0c/sample/path") == [(b":path", b"/sample/path")]
    assert fields(b"\x10\x08password\x06secret") == [(b"password", b"secret")]
    assert fields(b"\x82") == [(b":method", b"GET")]


def test_responses_of_the_rfc_with_eviction():  # C.5: the table has room for 256 bytes
    decoder = Decoder(PLENTY)
    date = b"Mon, 21 Oct 2013 20:13:21 GMT"
    first = b"\x3f\xe1\x01\x48\x03302\x58\x07private\x61\x1d%b\x6e\x17https://www.example.com" % date
    common = [(b"cache-control", b"private"), (b"date", date), (b"location", b"https://www.example.com")]
    assert fields(first, decoder) == [(b":status", b"302"), *common]
    assert fields(bytes.fromhex("4803333037c1c0bf"), decoder) == [(b":status", b"307"), *common]
    with pytest.raises(BadBlock):  # ":status: 302" has made room for it
        fields(b"\xc2", decoder)


@pytest.mark.parametrize("block,number", [("0a", 10), ("1f9a0a", 1337)])
def test_numbers_of_the_rfc(block, number):  # C.1, as the size of the table
    decoder = Decoder(PLENTY)
    update = bytearray(bytes.fromhex(block))
    update[0] |= 0x20
    decoder.decode(bytes(update))
    decoder.decode(literal(b"a", b"b").replace(b"\0", b"\x40", 1))
    assert bool(decoder._entries) is (number >= 34)


# ---------------------------------------------------------------------------------------------------------------------
# Others


def test_the_huffman_code_is_that_of_others():
    for symbol in range(256):
        assert huffman.unpack(packed(symbol)) == bytes([symbol])
    assert huffman.unpack(packed(*range(256))) == bytes(range(256))


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_packed_strings_are_unpacked(text):
    assert huffman.unpack(packed(*text)) == text


@given(st.lists(st.tuples(lists, st.booleans(), st.none() | st.integers(0, 4096)), max_size=8))
@settings(max_examples=100, deadline=None)
def test_what_others_write_is_read(blocks):
    encoder, decoder = Encoder(), Decoder(PLENTY)
    for sent, is_packed, table_bytes in blocks:
        if table_bytes is not None:
            encoder.header_table_size = table_bytes
        found, size = decoder.decode(encoder.encode(sent, huffman=is_packed))
        assert found == sent
        assert size == sum(len(name) + len(value) + 32 for name, value in sent)


@given(lists)
@settings(max_examples=100, deadline=None)
def test_others_read_what_is_written_and_keep_nothing_of_it(sent):
    other = OtherDecoder()
    assert other.decode(b"".join(literal(*field) for field in sent), raw=True) == sent
    assert not other.header_table.dynamic_entries


@pytest.mark.parametrize("length", [0, 126, 127, 128, 254, 255, 2000, 100_000])
def test_strings_of_any_length_are_written(length):
    assert fields(literal(b"n" * length, b"v" * length)) == [(b"n" * length, b"v" * length)]


def test_the_blocks_of_answers_are_what_they_say():
    assert fields(statuses.HEADERS) == [(b":status", b"200"), (b"content-type", b"application/grpc")]
    assert fields(statuses.OK) == [(b"grpc-status", b"0")]
    odd = statuses.trailers(statuses.Status.INTERNAL, "50 % of ä\n")
    assert fields(odd) == [(b"grpc-status", b"13"), (b"grpc-message", b"50 %25 of %C3%A4%0A")]


@pytest.mark.parametrize(
    "text, written",
    [(" a b ", b"%20a b%20"), ("  ", b"%20%20"), ("a\n ", b"a%0A%20"), (" " * 3000, b"%20" * 2000), ("a  b", b"a  b")],
)
def test_texts_neither_begin_nor_end_with_a_space(text, written):
    """A field of HTTP/2 must not: clients of nghttp2 (Node.js) drop it."""
    ((_, _), (_, found)) = fields(statuses.trailers(statuses.Status.INTERNAL, text))
    assert found == written


def test_long_texts_are_cut_between_characters():
    ((_, _), (_, text)) = fields(statuses.trailers(statuses.Status.INTERNAL, "ä" * 5000))
    assert text == b"%C3%A4" * 1000
    ((_, _), (_, text)) = fields(statuses.trailers(statuses.Status.INTERNAL, "x\ud800"))
    assert text == b"x?"


# ---------------------------------------------------------------------------------------------------------------------
# The table


def test_changes_are_counted_when_blocks_begin_to_mean_something_else():
    decoder = Decoder(PLENTY)
    decoder.decode(b"\x82\x86" + literal(b"a", b"b"))
    assert decoder.changes == 0
    decoder.decode(b"\x40\x01a\x01b")
    changed = decoder.changes
    assert changed > 0
    assert fields(b"\xbe", decoder) == [(b"a", b"b")]
    assert decoder.changes == changed
    decoder.decode(b"\x20")
    assert decoder.changes > changed
    with pytest.raises(BadBlock):
        decoder.decode(b"\xbe")


def test_an_entry_that_does_not_fit_empties_the_table():  # RFC 7541, 4.4
    decoder = Decoder(PLENTY)
    decoder.decode(b"\x40\x01a\x01b")
    long = b"v" * 5000
    block = b"\x40" + literal(b"long", long)[1:]
    assert fields(block, decoder) == [(b"long", long)]
    with pytest.raises(BadBlock):
        decoder.decode(b"\xbe")


def test_lists_that_are_too_long_are_measured_and_not_kept():
    decoder = Decoder(1000)
    found, size = decoder.decode(b"\x40\x01a\x7f\xf1\x05" + b"v" * 880 + b"\xbe")
    assert found == [(b"a", b"v" * 880)]
    assert size == 2 * (1 + 880 + 32)
    assert fields(b"\x82", decoder) == [(b":method", b"GET")]


def test_a_client_may_write_each_size_that_its_table_had():
    decoder = Decoder(PLENTY)
    assert fields(b"\x20\x3f\xe1\x1f" * 4 + b"\x40\1a\1b", decoder) == [(b"a", b"b")]
    assert fields(b"\xbe", decoder) == [(b"a", b"b")]


BAD = b"\x80"
"""A field that cannot be read, at which reading stops with another error if it comes so far."""
TOO_MUCH = {
    "references": b"\x40\x01a\x7f\x81\x05" + b"v" * 768 + b"\xbe" * 50_000,
    "references to nothing much": b"\x82" * 50_000,
    "literals": b"\0\1a\1b" * 10_000,
    "a long value": b"\0\1a" + literal(b"", b"v" * 3000)[2:],
    "a long name": b"\0" + literal(b"n" * 3000, b"v")[1:],
    "a long packed value": b"\0\1a\xff" + literal(b"", packed(*b"\0" * 8000))[3:],
    "a value that is short before it is packed": b"\0\1a\xff" + literal(b"", packed(*b"\2" * 600))[3:],
    "resizes": b"\x20" * 50_000,
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_reading_stops_where_it_is_too_much(name):  # F10
    with pytest.raises(HeaderBlockTooLarge):
        Decoder(1000).decode(TOO_MUCH[name] + BAD)


def test_the_table_never_holds_more_than_its_size():
    decoder = Decoder(PLENTY)
    for number in range(1000):
        decoder.decode(b"\x40" + literal(b"name%d" % number, b"v" * (number % 90))[1:])
        assert decoder._used_bytes == sum(len(name) + len(value) + 32 for name, value in decoder._entries) <= 4096


# ---------------------------------------------------------------------------------------------------------------------
# Nonsense


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # no field has the index 0
        b"\xbe",  # the table is empty
        b"\xff\x80\x80\x80\x80\x01",
        b"\xff\xff\xff\xff\x7f",
        b"\x40\x01a",  # no value
        b"\x40\x05a",  # a name cut short
        b"\x00\x01a\x7f\xff\xff",  # a length cut short
        b"\x3f\xe2\x1f",  # a table of 4097 bytes
        b"\x82\x20",  # a size after a field
        b"\x20" * 9 + b"\x82",  # more sizes than there is a reason for
        b"\x00\x81\xfe\x00",  # a zero where ones should fill the byte
        b"\x00\x81\xff\x00",  # eight ones
        b"\x00\x84\xff\xff\xff\xff\x00",  # the word for the end
    ],
)
def test_blocks_that_cannot_be_read(block):
    with pytest.raises(BadBlock):
        Decoder(PLENTY).decode(block)


@given(st.lists(st.binary(max_size=40), max_size=6))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_else(blocks):
    decoder = Decoder(2000)
    try:
        for block in blocks:
            found, size = decoder.decode(block)
            assert sum(len(name) + len(value) + 32 for name, value in found) <= min(size, 2000)
    except (BadBlock, HeaderBlockTooLarge):
        pass
