# SPDX-License-Identifier: Apache-2.0
"""The shared arena: what one side places, the other sees, also after it has grown."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.waiting import PATIENCE_S

from forebay.errors import InvalidRequest
from forebay.workers.memory import shm
from forebay.workers.memory.shm import THRESHOLD_BYTES, ArenaReader, ArenaWriter
from forebay.workers.wire.frames import FrameReader, encode

pytestmark = pytest.mark.linux

LARGE = THRESHOLD_BYTES


@pytest.fixture
def arena():
    descriptor = os.memfd_create("arena")
    writer, reader = ArenaWriter(descriptor, 16 << 20), ArenaReader(os.dup(descriptor))
    yield writer, reader
    writer.close()
    reader.close()


def size_of(arena):
    return os.fstat(arena[0]._fd).st_size


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
    assert size_of(arena) <= 2 << 20


def test_the_arena_grows_in_the_middle_of_a_batch(arena):
    bodies = [bytes([number]) * (1 << 20) for number in range(6)]
    assert through(arena, bodies[:1]) == bodies[:1]
    assert through(arena, bodies) == bodies
    assert through(arena, bodies[::-1]) == bodies[::-1]


def test_what_does_not_fit_goes_inside_the_frame(arena):
    arena[0]._max_bytes = 2 << 20
    bodies = [b"a" * (1 << 20), b"b" * (3 << 20), b"c" * (1 << 20)]
    assert [is_placed(body) for body in arena[0].place(bodies)] == [True, False, True]
    assert through(arena, bodies) == bodies


def test_a_full_disk_of_memory_sends_bodies_inside_the_frame(arena, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm.os, "posix_fallocate", full)
    body = b"x" * LARGE
    assert arena[0].place([body]) == [body]


@contextlib.contextmanager
def no_descriptors_left():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_without_a_descriptor_for_a_map_bodies_go_inside_the_frame_until_there_is_one(arena):
    body = b"x" * LARGE
    with no_descriptors_left():
        assert through(arena, [body]) == through(arena, [body]) == [body]
        assert arena[0].place([body]) == [body]
    assert is_placed(arena[0].place([body])[0])


def test_without_a_descriptor_for_a_map_results_are_read_as_a_copy(arena):
    writer, reader = arena
    placed = writer.place([b"a" * LARGE, b"b" * LARGE])
    with no_descriptors_left():
        (message,) = FrameReader(reader.view).feed(encode([placed]))
    assert [bytes(body) for body in message[0]] == [b"a" * LARGE, b"b" * LARGE]


def test_a_place_beyond_the_arena_is_refused(arena):
    writer, reader = arena
    writer.place([b"x" * LARGE])
    size = size_of(arena)
    with pytest.raises(InvalidRequest, match="the shared arena has"):
        reader.view(size - 1, 2)
    assert len(reader.view(0, size)) == size


def test_the_reader_cannot_write(arena):
    writer, reader = arena
    writer.place([b"x" * LARGE])
    with pytest.raises(TypeError):
        reader.view(0, 1)[0] = 1


# Arenas that the server makes


@pytest.fixture
def arenas():
    made = shm.Arenas()
    yield made
    made.close()


def test_both_ends_see_what_the_other_one_placed(arenas):
    reader, writer = shm.open_arenas(arenas.handle) or pytest.fail("out of reach")
    assert through((arenas, reader), [b"x" * LARGE]) == [b"x" * LARGE]
    assert through((writer, arenas), [b"y" * LARGE]) == [b"y" * LARGE]
    reader.close()
    writer.close()


def test_nobody_can_cut_an_arena_that_the_server_made(arenas):
    """F14: whoever has mapped it would be ended by a signal."""
    arenas.place([b"x" * LARGE])
    for path, _ in arenas.handle.values():
        descriptor = os.open(path, os.O_RDWR)
        try:
            for size in (0, 1):
                os.ftruncate(descriptor, 1 << 20)
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)


def test_a_size_that_a_worker_made_up_is_not_mapped(arenas):
    """F14."""
    descriptor = os.open(arenas.handle["results"][0], os.O_RDWR)
    os.ftruncate(descriptor, 1 << 45)
    os.close(descriptor)
    with pytest.raises(InvalidRequest, match="the shared arena has"):
        arenas.view(1 << 40, 10)
    assert bytes(arenas.view(0, 10)) == bytes(10)


def test_only_the_very_file_that_was_announced_is_opened(arenas, tmp_path):
    """In another container the same path may be anything."""
    (path, inode), results = arenas.handle["bodies"], arenas.handle["results"]
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"x")
    file = [str(tmp_path / "file"), (tmp_path / "file").stat().st_ino]
    fifo = [str(tmp_path / "fifo"), (tmp_path / "fifo").stat().st_ino]
    for bodies in ([path, inode + 1], [f"{path}0", inode], file, fifo, results[0], None, "/dev/shm/x"):
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert shm.open_arenas({"bodies": bodies, "results": results}) is None
        assert shm.open_arenas({"bodies": results, "results": bodies}) is None
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_where_no_memory_can_be_made_there_is_none(monkeypatch):
    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(shm.os, "memfd_create", full)
    assert shm.make_arenas() is None


def test_nothing_is_left_of_an_arena_whose_server_was_killed():
    """F26."""
    code = (
        "import os, signal; from forebay.workers.memory import shm; arenas = shm.Arenas();"
        "arenas.place([bytes(1 << 20)]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    before = set(Path("/dev/shm").iterdir())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == -9
    assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "arena" in path.name}
