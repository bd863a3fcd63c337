# SPDX-License-Identifier: Apache-2.0
"""Large bodies that land in memory of their own: they are what was sent, wherever they end up."""  # F72

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidRequest
from forebay.workers import landing
from forebay.workers.frames import LANDED, FrameReader, encode, landed
from forebay.workers.landing import LANDING_BYTES, Landing, landed_in, own, view_landed
from forebay.workers.shm import ArenaWriter

SIZES = st.lists(st.sampled_from((1, 100, 65_536, 262_144, LANDING_BYTES - 1, LANDING_BYTES)), min_size=1, max_size=8)


def pieces_of(sizes):
    return [os.urandom(32) * (size // 32) + b"x" * (size % 32) for size in sizes]


def written(pieces) -> Any:
    sink = Landing()
    for piece in pieces:
        sink.write(piece)
    return sink.getvalue()


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@given(SIZES)
@settings(max_examples=25)
def test_a_body_is_its_pieces_joined(sizes):
    pieces = pieces_of(sizes)
    body = written(pieces)
    assert bytes(body) == b"".join(pieces)
    assert (type(body) is memoryview) == (len(body) >= LANDING_BYTES)


@given(SIZES, st.integers(0, 3_000_000))
@settings(max_examples=25)
def test_without_more_memory_the_body_goes_on_elsewhere_and_is_the_same(sizes, room):
    left, write = room, os.pwrite

    def pwrite(descriptor, data, offset):
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = write(descriptor, data[:left], offset)
        left -= size
        return size

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(landing.os, "pwrite", pwrite)
        pieces = pieces_of(sizes)
        body = written(pieces)
    assert bytes(body) == b"".join(pieces)


def test_a_worker_sees_it():
    pieces = pieces_of((LANDING_BYTES, 5))
    body = written(pieces)
    placed = ArenaWriter(-1).place([body])
    assert placed[0].code == LANDED
    ((seen,),) = FrameReader(view_landed=view_landed).feed(encode(placed))
    assert seen.readonly
    assert seen == body == own(body) == b"".join(pieces)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=8), st.integers(0, 4 * LANDING_BYTES))
@settings(max_examples=25)
def test_files_are_used_again_and_never_while_somebody_refers_to_them(bodies, kept_bytes):
    kept = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(landing, "KEPT_BYTES", kept_bytes)
        patched.setattr(landing, "_free", free := [])
        for sizes, is_kept in bodies:
            pieces = pieces_of(sizes)
            body = written(pieces)
            assert bytes(body) == b"".join(pieces)
            if is_kept:
                kept.append((body[1:], b"".join(pieces)[1:]))
            del body
            assert sum(file.size for file in free) <= kept_bytes
    for view, whole in kept:
        assert bytes(view) == whole


def test_memory_that_is_not_kept_is_given_back(monkeypatch, eventually):
    monkeypatch.setattr(landing, "_free", [])
    monkeypatch.setattr(landing, "KEPT_BYTES", LANDING_BYTES + 10)
    before = descriptors()
    body, other, arriving = written(pieces_of((LANDING_BYTES, 5))), written(pieces_of((LANDING_BYTES, 5))), Landing()
    arriving.write(bytes(LANDING_BYTES))
    assert descriptors() == before + 5, "each body that is there is mapped as well"
    del body, other, arriving
    eventually(lambda: descriptors() == before + 1)


@given(st.integers(0, LANDING_BYTES), st.integers(1, LANDING_BYTES))
@settings(max_examples=25)
def test_a_part_of_a_body_is_seen_where_it_lies(begin, size):
    body = written([os.urandom(LANDING_BYTES), os.urandom(LANDING_BYTES)])
    part = body[begin : begin + size]
    ((seen,),) = FrameReader(view_landed=view_landed).feed(encode(ArenaWriter(-1).place([body, part])[1:]))
    assert seen == part == own(part)
    found = landed_in(part)
    assert found is not None
    assert found[2:] == (begin, size)


def test_what_does_not_lie_in_one_piece_has_not_landed():
    body = written(pieces_of((2 * LANDING_BYTES,)))
    assert landed_in(body[::2]) is None
    assert landed_in(body[:0]) is None
    assert landed_in(memoryview(bytes(8))) is None


def test_a_file_that_is_gone_or_too_short_is_not_read():
    body = written(pieces_of((LANDING_BYTES,)))
    placed = landed_in(body)
    assert placed is not None
    path, inode, offset, size = placed
    assert offset == 0
    with pytest.raises(OSError, match="Stale"):
        view_landed(path, inode + 1, 0, size)
    with pytest.raises(ValueError, match="mmap length"):
        view_landed(path, inode, 0, size + 64_000_000)
    with pytest.raises(OSError, match="No such file"):
        view_landed("/proc/self/fd/987654", inode, 0, size)
    with pytest.raises(InvalidRequest, match="extension"):
        list(FrameReader().feed(encode([landed(path, inode, 0, size)])))


def test_without_files_in_memory_bodies_stay_in_the_server(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(landing, "make_file", refuse)
    pieces = pieces_of((LANDING_BYTES, 10))
    assert written(pieces) == b"".join(pieces)
