# SPDX-License-Identifier: Apache-2.0
"""The directory: versions, what has changed, and the bounds of what is read."""

import contextlib

import msgspec
import pytest

from forebay.cluster import directory as the_directory
from forebay.cluster.directory import Directory, Member, read_directory
from forebay.errors import InvalidRequest

ONE = Member(id="a" * 16, address="tcp:10.0.0.7:9100", weight=6)
TWO = Member(id="b" * 16, address="unix:/run/two.socket")


def test_a_change_makes_another_directory_of_the_next_version():
    empty = Directory()
    first = empty.changed(members={"clip": (ONE,)})
    second = first.changed(owners={"iris": ("tcp:h:1", "tcp:h:2")}, nodes={"n1": "tcp:h:1"})
    assert (empty.version, first.version, second.version) == (0, 1, 2)
    assert empty.members == {}
    assert second.members == {"clip": (ONE,)}
    assert second.is_newer_than(first)
    assert not first.is_newer_than(first)


def test_a_change_to_the_same_is_none():
    first = Directory().changed(members={"clip": (ONE,)})
    assert first.changed(members={"clip": (ONE,)}) is first
    assert first.changed() is first


def test_what_has_changed_is_told_by_name():
    before = Directory().changed(members={"clip": (ONE,), "same": (TWO,)}, nodes={"n1": "tcp:h:1"})
    after = before.changed(members={"clip": (ONE, TWO), "same": (TWO,), "new": (ONE,)}, nodes={})
    changes = after.changes_since(before)
    assert changes
    assert (changes.owners, changes.members, changes.nodes) == (frozenset(), {"clip", "new"}, {"n1"})
    assert not after.changes_since(after)


def test_it_reads_what_was_written():
    directory = Directory().changed(
        members={"clip": (ONE, TWO)}, owners={"m": ("tcp:[::1]:80",)}, nodes={"n": "unix:x"}
    )
    assert read_directory(directory.encode()) == directory


def test_fields_of_a_later_version_are_ignored():
    told = msgspec.to_builtins(Directory().changed(members={"clip": (ONE,)})) | {"colour": "blue"}
    assert read_directory(msgspec.msgpack.encode(told)).members == {"clip": (ONE,)}


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"version": -1}),
        msgspec.msgpack.encode({"version": 1, "nodes": {"": "tcp:h:1"}}),
        msgspec.msgpack.encode({"version": 1, "nodes": {"n": "http://h"}}),
        msgspec.msgpack.encode({"version": 1, "nodes": {"n": "tcp:" + "h" * 300 + ":1"}}),
        msgspec.msgpack.encode({"version": 1, "members": {"x": [{"id": "short", "address": "unix:x"}]}}),
        msgspec.msgpack.encode({"version": 1, "members": {"x": [{"id": "a" * 16, "address": "unix:x", "weight": 0}]}}),
        msgspec.msgpack.encode({"version": 1, "nodes": {str(number): "unix:x" for number in range(5000)}}),
        msgspec.msgpack.encode({"version": 1, "owners": {"m": ["unix:x"] * 2000}}),
    ],
)
def test_anything_else_is_refused(told):
    with pytest.raises(InvalidRequest, match="expected a directory"):
        read_directory(told)


def test_an_unknown_field_that_is_deep_is_refused_or_ignored():
    with contextlib.suppress(InvalidRequest):  # how deep Python recurses depends on its version
        assert read_directory(b"\x81\xa5extra" + b"\x91" * 150_000 + b"\xc0").nodes == {}


def test_it_is_bounded_before_it_is_read():
    with pytest.raises(InvalidRequest, match="at most 3145728 bytes, got 3145729"):
        read_directory(bytes(the_directory.MAX_BYTES + 1))
    crowd = msgspec.msgpack.encode({"version": 1, "extra": [None] * the_directory.MAX_ELEMENTS})
    with pytest.raises(InvalidRequest, match="expected a directory"):
        read_directory(crowd)


def test_a_writer_cannot_make_what_readers_refuse():
    with pytest.raises(InvalidRequest):
        Directory().changed(nodes={"n": "nowhere"})
