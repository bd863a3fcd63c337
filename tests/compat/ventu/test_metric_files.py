# SPDX-License-Identifier: Apache-2.0
"""The numbers of a process and a disk that is full; the error is made up where it comes from, in the allocation."""

import contextlib
import errno
import os

import pytest

from forebay.surfaces.ventu import metric_files
from forebay.surfaces.ventu.metric_files import FIRST_BYTES, RoomyDict


@pytest.fixture
def full_from(monkeypatch):
    """A disk on which no file may have more bytes than this."""

    def limit(most):
        def allocate(descriptor, start, size, real=os.posix_fallocate):
            if size > most:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor, start, size)

        monkeypatch.setattr(metric_files.os, "posix_fallocate", allocate)
        metric_files._tell_full.cache_clear()

    return limit


def values_of(numbers):
    return {key: value for key, value, _ in numbers.read_all_values()}


@pytest.fixture
def filled():
    """Files with more numbers than they hold at first."""
    with contextlib.ExitStack() as stack:

        def fill(path):
            numbers = stack.enter_context(contextlib.closing(RoomyDict(str(path))))
            for number in range(1500):
                numbers.write_value(f"a number with a long name {number:08}", float(number), 0.0)
            return numbers

        yield fill


def test_room_is_taken_before_it_is_mapped(tmp_path, filled):
    numbers = filled(tmp_path / "counter_1.db")
    assert len(values_of(numbers)) == 1500
    status = (tmp_path / "counter_1.db").stat()
    assert status.st_size == 2 * FIRST_BYTES
    assert status.st_blocks * 512 >= status.st_size
    numbers.close()
    again = RoomyDict(str(tmp_path / "counter_1.db"))
    assert values_of(again)["a number with a long name 00001499"] == 1499.0
    again.close()


def test_without_room_at_first_numbers_are_kept_in_memory(tmp_path, filled, full_from, caplog):
    full_from(0)
    first, second = filled(tmp_path / "counter_1.db"), filled(tmp_path / "summary_1.db")
    assert len(values_of(first)) == len(values_of(second)) == 1500
    assert list(tmp_path.iterdir()) == []
    assert [record.message for record in caplog.records] == [
        f"the metrics folder {tmp_path} is full: No space left on device; process {os.getpid()} keeps its own counts"
    ]


def test_without_further_room_what_is_on_the_disk_stays_and_more_is_kept_in_memory(tmp_path, filled, full_from, caplog):
    full_from(FIRST_BYTES)
    numbers = filled(tmp_path / "counter_1.db")
    found = values_of(numbers)
    assert found["a number with a long name 00000000"] == 0.0
    assert found["a number with a long name 00001499"] == 1499.0
    assert (tmp_path / "counter_1.db").stat().st_size == FIRST_BYTES
    assert len(caplog.records) == 1


def test_a_file_system_that_promises_no_room_is_used_all_the_same(tmp_path, filled, monkeypatch):
    def refuse(*_arguments):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(metric_files.os, "posix_fallocate", refuse)
    assert len(values_of(filled(tmp_path / "counter_1.db"))) == 1500


def test_another_trouble_than_a_full_disk_is_told_as_before(tmp_path):
    with pytest.raises(FileNotFoundError):
        RoomyDict(str(tmp_path / "missing" / "counter_1.db"))
