# SPDX-License-Identifier: Apache-2.0
"""The shared arena: what one side places, the other sees, also after it has grown."""

from __future__ import annotations

import msgspec
import pytest

from forebay.errors import InvalidRequest
from forebay.workers import shm
from forebay.workers.frames import FrameReader, encode
from forebay.workers.shm import THRESHOLD_BYTES, ArenaReader, ArenaWriter

LARGE = THRESHOLD_BYTES


@pytest.fixture
def arena(tmp_path):
    writer, reader = ArenaWriter(tmp_path / "arena"), ArenaReader(str(tmp_path / "arena"))
    yield writer, reader
    writer.close()
    reader.close()
    assert not (tmp_path / "arena").exists()


def through(arena, bodies):
    """What the other side reads of these bodies."""
    writer, reader = arena
    (message,) = FrameReader(reader.view).feed(encode([writer.place(bodies)]))
    return [bytes(body) if isinstance(body, memoryview) else body for body in message[0]]


def is_placed(body):
    return isinstance(body, msgspec.msgpack.Ext)


def test_large_bodies_are_placed_and_small_ones_are_not(arena):
    placed = arena[0].place([b"x" * LARGE, b"x" * (LARGE - 1), "x" * LARGE, None])
    assert [is_placed(body) for body in placed] == [True, False, False, False]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_arrives(arena, kind):
    assert through(arena, [kind(b"ab" * LARGE)]) == [b"ab" * LARGE]


def test_several_bodies_lie_side_by_side(arena):
    bodies = [bytes([number]) * (LARGE + number) for number in range(5)]
    assert through(arena, bodies) == bodies


def test_the_arena_is_used_again_for_the_next_batch(arena):
    for number in range(50):
        body = bytes([number]) * (600 * 1024)
        assert through(arena, [body, b"small"]) == [body, b"small"]
    assert arena[0].path.stat().st_size <= 2 << 20


def test_the_arena_grows_in_the_middle_of_a_batch(arena):
    bodies = [bytes([number]) * (1 << 20) for number in range(6)]
    assert through(arena, bodies[:1]) == bodies[:1]
    assert through(arena, bodies) == bodies
    assert through(arena, bodies[::-1]) == bodies[::-1]


def test_what_does_not_fit_goes_inside_the_frame(arena, monkeypatch):
    monkeypatch.setattr(shm, "MAX_ARENA_BYTES", 2 << 20)
    bodies = [b"a" * (1 << 20), b"b" * (3 << 20), b"c" * (1 << 20)]
    assert [is_placed(body) for body in arena[0].place(bodies)] == [True, False, True]
    assert through(arena, bodies) == bodies


def test_a_full_disk_of_memory_sends_bodies_inside_the_frame(arena, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm.os, "posix_fallocate", full)
    body = b"x" * LARGE
    assert arena[0].place([body]) == [body]


def test_a_place_beyond_the_arena_is_refused(arena):
    writer, reader = arena
    writer.place([b"x" * LARGE])
    size = writer.path.stat().st_size
    with pytest.raises(InvalidRequest, match="the shared arena has"):
        reader.view(size - 1, 2)
    assert len(reader.view(0, size)) == size


def test_the_reader_cannot_write(arena):
    writer, reader = arena
    writer.place([b"x" * LARGE])
    with pytest.raises(TypeError):
        reader.view(0, 1)[0] = 1
