# SPDX-License-Identifier: Apache-2.0
"""Regions of shared memory: what may be registered, read and written, and what happens when its owner cuts it."""

import os
import secrets
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from forebay.errors import InvalidRequest, NotFound, QueueFull, TooLarge
from forebay.protocols.kserve.places import Place
from forebay.server import shared_regions
from forebay.server.shared_regions import Region, SharedRegions


@pytest.fixture
def memory():
    made = SharedMemory(create=True, size=8192, name=f"forebay-test-{secrets.token_hex(4)}")
    assert made.buf is not None
    made.buf[:4] = b"abcd"
    yield made
    made.close()
    made.unlink()


@pytest.fixture
def regions():
    made = SharedRegions(1 << 20)
    yield made
    made.unregister()


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_region_is_read_and_written_within_its_bounds(regions, memory):
    regions.register(Region("in", f"/{memory.name}", 2, 6))
    assert regions.read("in", 1, 4) == b"d\0\0\0"
    regions.write("in", 0, b"CD")
    assert bytes(memory.buf[:4]) == b"abCD"
    assert regions.status() == {"in": Region("in", f"/{memory.name}", 2, 6)} == regions.status("in")


@pytest.mark.parametrize("offset, size", [(0, 7), (6, 1), (-1, 2), (2**63, 1), (0, 2**63)])
def test_nothing_beyond_a_region_is_touched(regions, memory, offset, size):
    regions.register(Region("in", memory.name, 2, 6))
    with pytest.raises(InvalidRequest, match="region 'in'"):
        regions.require(Place("in", offset, size))
    if size < 100:
        with pytest.raises(InvalidRequest, match="it has 6"):
            regions.read("in", offset, size)
        with pytest.raises(InvalidRequest, match="it has 6"):
            regions.write("in", offset, bytes(size))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "..",
        "/..",
        ".",
        "../etc/passwd",
        "/a/b",
        "/../shm/x",
        "//x",
        "a\0b",
        "x" * 300,
        "/nothing-of-this-name",
    ],
)
def test_a_key_never_becomes_another_path(regions, key):
    before = descriptors()
    with pytest.raises(InvalidRequest, match="shared memory"):
        regions.register(Region("in", key, 0, 1))
    assert descriptors() == before


def test_links_fifos_and_folders_are_no_memory(regions, memory):
    base = f"{shared_regions.FOLDER}/{memory.name}"
    made = {"-link": lambda path: Path(path).symlink_to("/etc/passwd"), "-fifo": os.mkfifo, "-folder": os.mkdir}
    before = descriptors()
    for suffix, make in made.items():
        make(base + suffix)
        try:
            with pytest.raises(InvalidRequest):
                regions.register(Region("in", memory.name + suffix, 0, 1))
        finally:
            (os.rmdir if suffix == "-folder" else os.unlink)(base + suffix)
    assert descriptors() == before


@pytest.mark.parametrize("offset, size", [(0, 8193), (8192, 1), (0, 0), (-1, 4), (2**64 - 1, 1), (0, 2**64 - 1)])
def test_a_region_lies_within_its_memory(regions, memory, offset, size):
    before = descriptors()
    with pytest.raises(InvalidRequest, match="which has 8192"):
        regions.register(Region("in", memory.name, offset, size))
    assert descriptors() == before


def test_memory_that_its_owner_cuts_is_an_error_and_not_the_end(regions, memory):
    regions.register(Region("in", memory.name, 0, 8192))
    os.truncate(f"{shared_regions.FOLDER}/{memory.name}", 100)
    with pytest.raises(InvalidRequest, match="which has 100"):
        regions.read("in", 0, 10)
    with pytest.raises(InvalidRequest, match="which has 100"):
        regions.write("in", 0, bytes(10))
    os.truncate(f"{shared_regions.FOLDER}/{memory.name}", 8192)


def test_names_are_taken_once_and_given_back(regions, memory):
    before = descriptors()
    regions.register(Region("in", memory.name, 0, 10))
    with pytest.raises(InvalidRequest, match="registered already"):
        regions.register(Region("in", memory.name, 0, 10))
    regions.unregister("another")
    regions.unregister("in")
    with pytest.raises(NotFound, match="'in'"):
        regions.status("in")
    with pytest.raises(NotFound, match="register it first"):
        regions.read("in", 0, 1)
    regions.register(Region("a", memory.name, 0, 10))
    regions.register(Region("b", memory.name, 0, 10))
    regions.unregister()
    assert not regions.status()
    assert descriptors() == before


def test_what_a_thread_reads_stays_open_when_it_is_unregistered(regions, memory, monkeypatch):
    """A number of a file that was closed is given to the next that is opened: of another client."""
    regions.register(Region("in", memory.name, 0, 4))
    read = os.preadv
    opened = []

    def late(descriptor, *rest):
        if not opened:
            regions.unregister("in")
            opened.append(os.open("/dev/zero", os.O_RDONLY))
        return read(descriptor, *rest)

    monkeypatch.setattr(os, "preadv", late)
    assert regions.read("in", 0, 4) == b"abcd"
    os.close(opened.pop())


def test_only_so_much_is_read_for_a_request(memory):
    regions = SharedRegions(3)
    regions.register(Region("in", memory.name, 0, 8192))
    read = regions.reader()
    assert read(Place("in", 0, 2)) == b"ab"
    assert read(Place("in", 3, 1)) == b"d"
    with pytest.raises(TooLarge, match="expected at most 3 bytes of shared memory, got 4"):
        read(Place("in", 0, 1))
    assert regions.reader()(Place("in", 0, 3)) == b"abc"


def test_only_so_many_may_be_registered(regions, memory, monkeypatch):
    monkeypatch.setattr(shared_regions, "MAX_REGIONS", 2)
    regions.register(Region("a", memory.name, 0, 10))
    regions.register(Region("b", memory.name, 0, 10))
    with pytest.raises(QueueFull, match="unregister some"):
        regions.register(Region("c", memory.name, 0, 10))
