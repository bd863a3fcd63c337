# SPDX-License-Identifier: Apache-2.0
"""Large bodies that land in memory of their own: they are what was sent, wherever they end up."""  # F72

from __future__ import annotations

import errno
import gc
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidRequest
from forebay.types.server_state import ServerState
from forebay.workers.memory import landing
from forebay.workers.memory.landing import (
    HERE,
    LANDING_BYTES,
    UNKNOWN_BYTES,
    Joining,
    LandedFiles,
    Landing,
    Places,
    landed_in,
    own,
)
from forebay.workers.memory.shm import ArenaWriter
from forebay.workers.wire.frames import LANDED, FrameReader, encode, landed
from forebay.workers.wire.objects import dump

pytestmark = pytest.mark.linux

SIZES = st.lists(st.sampled_from((1, 100, 40_000, LANDING_BYTES, 262_144, UNKNOWN_BYTES)), min_size=1, max_size=8)


def pieces_of(sizes):
    return [os.urandom(32) * (size // 32) + b"x" * (size % 32) for size in sizes]


@pytest.fixture
def alone():
    """Places that are empty, of a server that keeps nobody else's."""
    with ServerState().entered():
        yield Places()


def kept(places):
    """The lengths of the places that are kept, of all who are of the same server."""
    return [size for size, some in places.kept.items() for _ in some]


def written(pieces, *, is_known: bool = True, is_direct: bool = False, places=HERE) -> Any:
    """A body in pieces; directly is as the kernel does it, where there is room."""
    sink = Landing(sum(map(len, pieces)) if is_known else 0, places)
    for piece in pieces:
        while piece:
            room = sink.room(len(piece)) if is_direct else None
            if room is None:
                sink.write(piece)
                break
            room[:] = piece[: len(room)]
            sink.advance(len(room))
            piece = piece[len(room) :]  # noqa: PLW2901
    return sink.getvalue()


def seen_by_a_worker(body):
    ((seen,),) = FrameReader(view_landed=LandedFiles().view).feed(encode(ArenaWriter(-1, places=HERE).place([body])))
    return seen


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@given(SIZES, st.booleans(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_body_is_its_pieces_joined(sizes, is_known, is_direct):
    pieces = pieces_of(sizes)
    body = written(pieces, is_known=is_known, is_direct=is_direct)
    assert bytes(body) == b"".join(pieces)
    assert (type(body) is memoryview) == (len(body) >= (LANDING_BYTES if is_known else UNKNOWN_BYTES))
    if type(body) is memoryview:
        assert body.readonly
        assert seen_by_a_worker(body) == body


@given(SIZES, st.booleans(), st.booleans(), st.integers(0, 8))
@settings(max_examples=50, deadline=None)
def test_without_more_memory_the_body_goes_on_elsewhere_and_is_the_same(sizes, is_known, is_direct, room):
    left, reserve = room, os.posix_fallocate

    def posix_fallocate(descriptor, offset, size):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(landing.os, "posix_fallocate", posix_fallocate)
        pieces = pieces_of(sizes)
        body = written(pieces, is_known=is_known, is_direct=is_direct, places=Places())
    assert bytes(body) == b"".join(pieces)


def test_a_worker_sees_it():
    pieces = pieces_of((LANDING_BYTES, 5))
    body = written(pieces)
    placed = ArenaWriter(-1, places=HERE).place([body])
    assert placed[0].code == LANDED
    seen = seen_by_a_worker(body)
    assert seen.readonly
    assert seen == body == own(body) == b"".join(pieces)


@given(
    st.lists(st.tuples(SIZES, st.booleans(), st.booleans(), st.integers(0, 1)), max_size=8),
    st.integers(0, 4 * UNKNOWN_BYTES),
)
@settings(max_examples=25, deadline=None)
def test_places_are_used_again_and_never_while_somebody_refers_to_them(bodies, kept_bytes):
    held = []
    seen = LandedFiles()
    with ServerState().entered():
        owners = [Places(), Places()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(landing, "KEPT_BYTES", kept_bytes)
        files: list[set[int]] = [set(), set()]
        for sizes, is_known, is_kept, owner in bodies:
            pieces = pieces_of(sizes)
            body = written(pieces, is_known=is_known, is_direct=is_known, places=owners[owner])
            assert bytes(body) == b"".join(pieces)
            if type(body) is memoryview and (place := landed_in(body)) is not None:
                assert seen.view(*place) == body, "a map that was made for another body shows this one"
                assert [one.has(body) for one in owners] == [owner == 0, owner == 1]
                files[owner].add(place[1])
            if is_kept:
                held.append((body[1:], b"".join(pieces)[1:]))
            del body
            assert sum(kept(owners[0])) <= kept_bytes
        assert files[0].isdisjoint(files[1])
    for view, whole in held:
        assert bytes(view) == whole


def test_memory_that_is_not_kept_is_given_back(alone, monkeypatch, eventually):
    monkeypatch.setattr(landing, "KEPT_BYTES", 2 * UNKNOWN_BYTES)
    before = descriptors()
    body, other, arriving = (written([bytes(UNKNOWN_BYTES + 1)], places=alone) for _ in range(3))
    assert descriptors() == before + 6, "the map of a file has a descriptor of its own"
    del body, other, arriving
    eventually(lambda: descriptors() == before + 2)
    assert len(kept(alone)) == 1


def test_a_place_that_shares_its_file_gives_its_memory_back(alone, monkeypatch, eventually):
    monkeypatch.setattr(landing, "KEPT_BYTES", 0)
    body = written([os.urandom(500_000)], places=alone)
    place = landed_in(body)
    assert place is not None
    descriptor = place[0].rpartition("/")[2]
    before = os.fstat(int(descriptor)).st_blocks
    places = len(alone._empty[1 << 19])
    del body
    eventually(lambda: len(alone._empty[1 << 19]) == places + 1)
    assert os.fstat(int(descriptor)).st_blocks * 512 <= before * 512 - 500_000


def test_a_length_that_is_only_announced_takes_no_memory():
    waiting: Any = Landing(1 << 28, Places())
    place = waiting.room(1 << 28).obj.place
    assert place.reserved == landing.STEP_BYTES
    for _ in range(100):
        waiting.advance(len(waiting.room(3000)))
        assert place.reserved <= max(2 * waiting._at, landing.STEP_BYTES) + landing.STEP_BYTES
    assert place.reserved <= os.fstat(place.file.descriptor).st_blocks * 512 <= 2 * 300_000 + landing.STEP_BYTES


@given(st.integers(0, LANDING_BYTES), st.integers(1, LANDING_BYTES))
@settings(max_examples=25)
def test_a_part_of_a_body_is_seen_where_it_lies(begin, size):
    body = written([os.urandom(LANDING_BYTES), os.urandom(LANDING_BYTES)])
    part = body[begin : begin + size]
    assert seen_by_a_worker(part) == part == own(part)
    found, whole = landed_in(part), landed_in(body)
    assert found is not None
    assert whole is not None
    assert found[2:] == (whole[2] + begin, size)


def test_what_does_not_lie_in_one_piece_has_not_landed():
    body = written(pieces_of((2 * LANDING_BYTES,)))
    assert landed_in(body[::2]) is None
    assert landed_in(body[:0]) is None
    assert landed_in(memoryview(bytes(8))) is None


def test_a_file_that_is_gone_or_too_short_is_not_read():
    body = written(pieces_of((LANDING_BYTES,)))
    placed = landed_in(body)
    assert placed is not None
    path, inode, _, size = placed
    with pytest.raises(OSError, match="Stale"):
        LandedFiles().view(path, inode + 1, 0, size)
    with pytest.raises(ValueError, match="were announced"):
        LandedFiles().view(path, inode, 0, size + 64_000_000)
    with pytest.raises(OSError, match="No such file"):
        LandedFiles().view("/proc/self/fd/987654", inode, 0, size)
    with pytest.raises(InvalidRequest, match="extension"):
        list(FrameReader().feed(encode([landed(path, inode, 0, size)])))


def test_without_files_in_memory_bodies_stay_in_the_server(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(landing, "make_file", refuse)
    pieces = pieces_of((LANDING_BYTES, 10))
    assert written(pieces, places=Places()) == b"".join(pieces)


def test_who_has_not_used_its_places_for_the_longest_time_gives_memory_back_for_others(alone, monkeypatch, eventually):
    monkeypatch.setattr(landing, "KEPT_BYTES", 4 * LANDING_BYTES)
    other = Places()
    mine = [written([bytes(LANDING_BYTES)], places=alone) for _ in range(4)]
    first = landed_in(mine[0])
    assert first is not None
    mine.clear()
    assert len(kept(alone)) == 4
    theirs = [written([bytes(LANDING_BYTES)], places=other) for _ in range(3)]
    assert len(kept(alone)) == 4
    theirs.clear()
    assert len(kept(alone)) == 4
    assert [len(places._free[LANDING_BYTES]) for places in (alone, other)] == [1, 3]
    eventually(lambda: len(alone._empty[LANDING_BYTES]) == landing.LONGEST_SHARED_BYTES // LANDING_BYTES - 1)
    again = [written([bytes([number]) * LANDING_BYTES], places=alone) for number in range(6)]
    assert [bytes(body) for body in again] == [bytes([number]) * LANDING_BYTES for number in range(6)]


@pytest.mark.parametrize("size", [LANDING_BYTES, 2 * UNKNOWN_BYTES])
def test_files_end_with_the_pool_whose_they_were_and_bodies_in_them_later(size, alone, eventually):
    before = descriptors()
    left, body = (written([b"x" * size], places=alone) for _ in range(2))
    del left
    alone.close()
    eventually(lambda: not kept(alone))
    assert bytes(body) == b"x" * size
    del body
    eventually(lambda: descriptors() <= before)  # one of another test may end meanwhile
    assert not kept(alone)


def test_places_of_several_lengths_share_a_file(alone):
    before = descriptors()
    bodies = [written([bytes(size)], places=alone) for size in (70_000, 140_000, 280_000, 560_000, 1_000_000) * 3]
    assert descriptors() == before + 2
    spans = sorted((body.offset, body.size) for body in (view.obj.place for view in bodies))
    assert all(begin + size <= other for (begin, size), (other, _) in pairwise(spans))


def test_an_array_that_lies_in_a_body_is_seen_where_the_body_has_landed():
    body = written([bytes(range(256)) * (LANDING_BYTES // 64)])
    array = np.frombuffer(body[16:], np.int32).reshape(2, -1)[1:]
    seen = memoryview(dump(array)[1])
    assert landed_in(seen) is not None
    assert bytes(seen_by_a_worker(seen)) == array.tobytes()
    assert own(seen) == array.tobytes()
    assert landed_in(memoryview(dump(array.copy())[1])) is None


@pytest.mark.parametrize("size", [LANDING_BYTES, 8 << 20])
def test_a_body_that_only_a_circle_holds_gives_its_place_back_with_its_file(alone, size):
    circle: list[Any] = [written([b"x" * size], places=alone)]
    circle.append(circle)
    for _others in range(landing.SHARED_BYTES // size):  # nothing else holds its file
        alone.lend(size)
    del circle
    gc.collect()
    place = alone.lend(size)
    assert os.fstat(place.file.descriptor).st_ino == place.file.inode
    place.reserve(size)


def test_a_body_is_joined_as_it_comes_and_not_at_its_end():
    body = Joining()
    for _ in range(4):
        body.write(b"piece" * 1000)
    assert body.getvalue() is body.getvalue()
    assert body.getvalue() == b"piece" * 4000
