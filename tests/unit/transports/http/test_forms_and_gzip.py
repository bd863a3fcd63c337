# SPDX-License-Identifier: Apache-2.0
"""Forms and packed bodies, in whatever pieces they come; the reference reads the whole at once, and slowly."""

import email.parser
import email.policy
import errno
import gzip
import itertools
import tempfile
import zlib
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ForebayError, InvalidRequest, TooLarge, Unavailable
from forebay.protocols.native import Contract, UnsupportedMedia
from forebay.server.byte_budget import ByteBudget
from forebay.server.config import HttpConfig
from forebay.transports.http.forms_and_gzip import MAX_MEMBERS, Staging
from forebay.transports.http.head import Head
from forebay.types.file import FormPart

MEMORY = 200


class Route:
    def __init__(self, *, shares_disk=True):
        self.contract = Contract(is_named=True, shares_disk=shares_disk)


def head(boundary="XX", packing=b"", *, form=True, shares_disk=True):
    return Head(
        route=cast("Any", Route(shares_disk=shares_disk)),
        params={"in": "form" if form else "json", "out": "json"},
        packing=packing,
        form=f'multipart/form-data; boundary="{boundary}"'.encode() if form else b"",
    )


def staging(**limits):
    config = HttpConfig(**{"form_memory_bytes": MEMORY, "max_form_bytes": 100_000, **limits})
    return Staging(config, ByteBudget(config.max_buffered_bytes))


def read(staged, pieces):
    try:
        for piece in pieces:
            staged._do(staged._entry.feed, piece)
        return staged._do(staged._finish)
    except ForebayError:
        staged.close()
        raise


def parts_of(body, cuts=(), **more):
    """Read a form in pieces; returns names, file names, types and contents."""
    staged = staging().open(head(**more), 100_000)
    try:
        return [
            (
                part.name,
                part.filename,
                part.type,
                part.content if part.size < 0 else Path(part.content.decode()).read_bytes(),
            )
            for part in msgspec.msgpack.decode(read(staged, cut(body, cuts)), type=list[FormPart])
        ]
    finally:
        staged.close()


def cut(body, places):
    places = sorted({0, len(body), *(place % (len(body) + 1) for place in places)})
    return [body[start:end] for start, end in itertools.pairwise(places)]


def written(parts, boundary="XX"):
    lines = b""
    for name, filename, kind, content in parts:
        disposition = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename is not None else "")
        lines += f"--{boundary}\r\nContent-Disposition: {disposition}\r\n".encode()
        lines += f"Content-Type: {kind}\r\n".encode() if kind else b""
        lines += b"\r\n" + content + b"\r\n"
    return lines + f"--{boundary}--\r\n".encode()


def by_email(body, boundary="XX"):
    """The reference."""
    whole = f'Content-Type: multipart/form-data; boundary="{boundary}"\r\n\r\n'.encode() + body
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(whole)
    found = []
    for part in message.iter_parts():
        disposition = part["content-disposition"].params
        kind = part["content-type"].content_type if "content-type" in part else ""
        found.append((disposition["name"], disposition.get("filename"), kind, part.get_payload(decode=True)))
    return found


# What looks like a boundary, and what nearly does, is in many of them.
CONTENT = st.lists(
    st.sampled_from([b"\r\n--XX", b"\r\n", b"--XX", b"\r", b"\n", b"-", b"X", b"\r\n--X", b"a" * 150, b"\xff\x00"]),
    max_size=6,
).map(lambda pieces: b"".join(pieces).replace(b"\r\n--XX", b"\r\n--XY"))
NAMES = st.text("abc[]. é", min_size=1, max_size=5).filter(lambda name: name == name.strip())
PARTS = st.lists(
    st.tuples(NAMES, st.none() | NAMES, st.sampled_from(["", "image/png"]), CONTENT), min_size=1, max_size=4
)
CUTS = st.lists(st.integers(0, 2000), max_size=12)


@given(PARTS, CUTS)
def test_a_form_is_read_alike_in_whatever_pieces_it_comes(parts, cuts):
    body = written(parts)
    short = [part if part[1] is not None else (*part[:3], part[3][:40]) for part in parts]
    body = written(short)
    assert parts_of(body, cuts) == short
    assert parts_of(body, range(len(body))) == short


@given(
    st.lists(
        st.tuples(
            st.text("abc", min_size=1, max_size=5),
            st.none() | st.text("abc", min_size=1),
            st.just("text/plain"),
            st.text("ab \t.-", max_size=60),
        ),
        min_size=1,
        max_size=4,
    ),
    CUTS,
)
def test_a_form_is_read_as_by_the_standard_library(parts, cuts):
    body = written([(*part[:3], part[3].encode()) for part in parts])
    assert parts_of(body, cuts) == by_email(body)


@given(PARTS, CUTS, st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=3)), min_size=1, max_size=4))
def test_nonsense_is_refused_alike_in_whatever_pieces_it_comes(parts, cuts, changes):
    body = written([(*part[:3], part[3][:40]) for part in parts])
    for where, put in changes:
        place = where % len(body)
        body = body[:place] + put + body[place + 1 :]

    def outcome(cuts):
        try:
            return parts_of(body, cuts)
        except ForebayError as error:
            return type(error)

    assert outcome(cuts) == outcome(()) == outcome(range(len(body)))


def test_without_a_folder_for_temporary_files_a_form_is_kept_in_memory(monkeypatch, caplog):  # F113
    monkeypatch.setattr(tempfile, "tempdir", None)

    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "_get_default_tempdir", none)
    content, stage = b"a" * (MEMORY * 10), staging()
    for _ in range(2):
        staged = stage.open(head(), 100_000)
        body = read(staged, [written([("image", "a.png", "image/png", content)])])
        (part,) = msgspec.msgpack.decode(body, type=list[FormPart])
        assert (part.content, part.size) == (content, -1)
        staged.close()
    with pytest.raises(TooLarge, match="longer than 1000 bytes"):
        read(stage.open(head(), 1000), [written([("image", "a.png", "image/png", content)])])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("no folder for temporary files: keeping forms in memory, with at most 67108864 bytes")
    assert "TMPDIR" in line
    stage.memory.take(stage.config.max_buffered_bytes)  # all was given back


@given(st.binary(max_size=300), CUTS, st.sampled_from([b"gzip", b"x-gzip", b"deflate"]))
def test_a_packed_body_is_read_alike_in_whatever_pieces_it_comes(body, cuts, packing):
    packed = {
        b"gzip": gzip.compress(body[:100]) + gzip.compress(body[100:]),
        b"x-gzip": gzip.compress(body),
        b"deflate": zlib.compress(body),
    }[packing]
    assert read(staging().open(head(packing=packing, form=False), 1000), cut(packed, cuts)) == body
    if packing == b"deflate":
        packer = zlib.compressobj(wbits=-15)
        bare = packer.compress(body) + packer.flush()
        assert read(staging().open(head(packing=packing, form=False), 1000), cut(bare, cuts)) == body


@pytest.mark.parametrize("packing", [b"gzip", b"deflate"])
def test_a_packed_body_that_is_none_is_refused(packing):
    packed = (gzip if packing == b"gzip" else zlib).compress(b"a" * 99)
    for broken, why in [(packed[:-1], "breaks off"), (b"", "breaks off"), (b"no" + packed, "is not packed")]:
        with pytest.raises(InvalidRequest, match=why):
            read(staging().open(head(packing=packing, form=False), 20_000), [broken])
    after = "continues after" if packing == b"deflate" else "is not packed"
    with pytest.raises(InvalidRequest, match=after):
        read(staging().open(head(packing=packing, form=False), 20_000), [packed, b"rest"])


def test_a_bomb_is_refused_at_the_limit():
    bomb = gzip.compress(bytes(50_000_000))
    stage = staging()
    staged = stage.open(head(packing=b"gzip", form=False), 100_000)
    with pytest.raises(TooLarge, match="longer than 100000 bytes once it is unpacked"):
        read(staged, [bomb])
    staged.close()  # for the second time
    stage.memory.take(stage.config.max_buffered_bytes)  # all was given back


def test_a_body_of_many_packed_parts_is_read_up_to_a_limit():
    parts = gzip.compress(b"") * (MAX_MEMBERS - 1) + gzip.compress(b"end")
    assert read(staging().open(head(packing=b"gzip", form=False), 1000), [parts]) == b"end"
    with pytest.raises(TooLarge, match="more than 10000 parts"):
        read(staging().open(head(packing=b"gzip", form=False), 1000), [parts, gzip.compress(b"")])


def test_what_is_unpacked_counts_for_all_until_it_is_closed():
    stage = staging(max_buffered_bytes=1000)
    packed = gzip.compress(bytes(600))
    first = stage.open(head(packing=b"gzip", form=False), 1000)
    read(first, [packed])
    second = stage.open(head(packing=b"gzip", form=False), 1000)
    with pytest.raises(Unavailable, match="have 1000 bytes together"):
        read(second, [packed])
    second.close()
    first.close()
    read(stage.open(head(packing=b"gzip", form=False), 1000), [packed])


def test_long_files_lie_on_disk_until_the_request_is_closed():
    long = bytes(MEMORY + 1)
    body = written(
        [("a", None, "", b"field"), ("b", "short", "", b"x"), ("c", "long", "", long), ("d", "next", "", b"y")]
    )
    staged = staging().open(head(), 100_000)
    _, short, on_disk, after = msgspec.msgpack.decode(read(staged, cut(body, range(0, 500, 7))), type=list[FormPart])
    assert (short.size, on_disk.size, after.size) == (-1, MEMORY + 1, -1)
    path = Path(on_disk.content.decode())
    assert path.read_bytes() == long
    assert path.stat().st_mode & 0o077 == 0
    staged.close()
    assert not path.exists()


def test_what_breaks_off_leaves_no_file():
    staged = staging().open(head(), 100_000)
    staged._do(staged._entry.feed, written([("c", "long", "", bytes(1000))])[:-20])
    (path,) = cast("Any", staged._sink)._paths
    assert path.exists()
    staged.close()
    assert not path.exists()
    assert staged._do(staged._entry.feed, b"more") is None  # a thread that comes late finds it closed


def test_where_workers_do_not_see_the_disk_nothing_lies_there():
    form = written([("c", "long", "", bytes(1000))])
    staged = staging().open(head(shares_disk=False), 5000)
    (part,) = msgspec.msgpack.decode(read(staged, [form]), type=list[FormPart])
    assert (part.content, part.size) == (bytes(1000), -1)
    with pytest.raises(TooLarge):
        read(staging().open(head(shares_disk=False), 500), [form])


@pytest.mark.parametrize(
    "parts, limits, why",
    [
        ([("a", None, "", b"1")] * 5, {"max_form_parts": 4}, r"more than 4 fields and files \(--max-form-parts\)"),
        ([("a", None, "", bytes(MEMORY + 1))], {}, "the fields of the form are longer than 200 bytes"),
        ([("a", "f", "", bytes(2000))], {"max_form_bytes": 1000}, "the form is longer than 1000 bytes"),
        ([("a" * 300, "f", "", b"")], {}, "the name of a field is longer"),
    ],
)
def test_limits_are_told(parts, limits, why):
    with pytest.raises(TooLarge, match=why):
        read(staging(**limits).open(head(), 100_000), [written(parts)])
    with pytest.raises(Unavailable, match="have 1000 bytes together"):
        read(staging(max_form_disk_bytes=1000).open(head(), 100_000), [written([("a", "f", "", bytes(2000))])])


@pytest.mark.parametrize(
    "body, error, why",
    [
        (b"", InvalidRequest, "breaks off before its last boundary"),
        (b"--XX\r\nContent-Disposition: form-data; name=a\r\n\r\n1", InvalidRequest, "breaks off"),
        (b'{"a": 1}', InvalidRequest, "the form cannot be read"),
        (b"--XX\r\nContent-Type: text/plain\r\n\r\n1\r\n--XX--", InvalidRequest, "has no name"),
        (b"--XX\r\nContent-Disposition: attachment; name=a\r\n\r\n1\r\n--XX--", InvalidRequest, "has no name"),
        (
            b'--XX\r\nContent-Disposition: form-data; name="\xff"\r\n\r\n1\r\n--XX--',
            InvalidRequest,
            "a name in the form: expected UTF-8",
        ),
        (
            b"--XX\r\nContent-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64\r\n\r\n1\r\n--XX--",
            UnsupportedMedia,
            "part of the form: expected none, 7bit, 8bit or binary, got 'base64'",
        ),
        (b"--XX\r\n" + b"a: b\r\n" * 9 + b"\r\n1\r\n--XX--", InvalidRequest, "header count"),
        (b"--XX\r\na: " + bytes(5000) + b"\r\n\r\n1\r\n--XX--", InvalidRequest, "header size"),
    ],
)
def test_forms_that_are_none_are_told(body, error, why):
    with pytest.raises(error, match=why):
        parts_of(body)


@pytest.mark.parametrize(
    "form", [b"multipart/form-data", b"multipart/form-data; boundary=", b"multipart/form-data; boundary=" + b"a" * 300]
)
def test_a_boundary_is_needed(form):
    asked = head()
    asked.form = form
    with pytest.raises(InvalidRequest, match="boundary"):
        staging().open(asked, 1000)
