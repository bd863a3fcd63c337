# SPDX-License-Identifier: Apache-2.0
"""When a process is started again, and when those who wait are told that it does not work."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest
from tests.waiting import PATIENCE_S

from forebay.errors import ModelError
from forebay.workers.processes.supervisor import FIRST_PAUSE_S, LIVED_S, MAX_FAILURES, MAX_PAUSE_S, Restarts, Supervisor


def test_pauses_double_up_to_the_longest():
    restarts = Restarts()
    pauses = [restarts.failed(said_why=False) for _ in range(10)]
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S


def test_it_gives_up_after_three_failures_and_hopes_again_when_one_is_ready():
    # F20
    restarts = Restarts()
    given_up = []
    for _ in range(MAX_FAILURES):
        given_up.append(restarts.has_given_up)
        restarts.failed(said_why=False)
    assert (given_up, restarts.has_given_up) == ([False, False, False], True)
    restarts.ready()
    assert not restarts.has_given_up


def test_a_first_start_that_says_why_it_fails_is_not_tried_again_in_vain():
    restarts = Restarts()
    restarts.failed(said_why=True)
    assert restarts.has_given_up
    restarts.ready()
    restarts.failed(said_why=True)  # it did work before
    assert not restarts.has_given_up


def test_who_was_of_use_for_a_second_is_replaced_at_once():
    restarts = Restarts()
    restarts.failed(said_why=False)
    restarts.ready()
    assert restarts.ended(LIVED_S) == 0.0
    assert restarts.ended(LIVED_S / 2) == FIRST_PAUSE_S
    assert restarts.ended(LIVED_S / 2) == 2 * FIRST_PAUSE_S


class Watched(Supervisor):
    """A supervisor of `sleep`, or of whatever `start` starts, with what it told."""

    def __init__(self, start=lambda: subprocess.Popen(["sleep", "60"]), **more):
        self.ends = []
        self.ended = threading.Semaphore(0)
        super().__init__("it", start, on_end=self.note, **more)

    def note(self, end):
        self.ends.append(end)
        self.ended.release()

    def wait_ends(self, count):
        for _ in range(count):
            assert self.ended.acquire(timeout=PATIENCE_S)

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, *_):
        self.stop()
        self.join(0.0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOENT])
def test_what_cannot_be_started_is_an_attempt_that_failed(number):
    # F19
    def start():
        raise OSError(number, os.strerror(number))

    with Watched(start) as it:
        with pytest.raises(ModelError, match=f"it cannot be started: {os.strerror(number)}"):
            it.wait_ready()
        it.wait_ends(MAX_FAILURES)
        assert [end.life for end in it.ends] == [1, 2, 3]


def test_it_is_tried_again_until_it_works():
    # F19
    works = threading.Event()

    def start():
        if not works.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return subprocess.Popen(["sleep", "60"])

    with Watched(start, load=lambda _: None) as it:
        it.wait_ends(1)
        assert it.problem is not None
        works.set()
        assert it.wait_ready()
        assert it.problem is None


def test_it_dies_while_it_loads_however_long_that_took(monkeypatch):
    # F20
    monkeypatch.setattr("forebay.workers.processes.supervisor.LIVED_S", 0.0)  # any life is long enough

    def load(process):
        process.kill()
        raise EOFError

    with Watched(load=load) as it, pytest.raises(ModelError, match="it ended by signal 9 before it was ready"):
        it.wait_ready()


def test_the_end_is_that_of_the_process_whoever_holds_its_files():
    # F21
    code = "import os, sys, time\nif os.fork() == 0:\n    time.sleep(60)\nprint(os.getpid(), flush=True)\nos._exit(3)"

    def start():
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)

    with Watched(start) as it:
        it.wait_ends(1)
        assert it.ends[0].status == 3
        os.killpg(it.ends[0].pid, 9)
        it.stop()


def test_a_stop_while_one_is_being_started_leaves_none():
    started, go = threading.Event(), threading.Event()

    def start():
        started.set()
        assert go.wait(PATIENCE_S)
        return subprocess.Popen(["sleep", "60"])

    it = Watched(start)
    it.begin()
    assert started.wait(PATIENCE_S)
    it.stop()
    go.set()
    it.wait_ends(1)
    assert it.ends[0].status == -9
    it.join(PATIENCE_S)


def test_a_late_word_about_an_earlier_process_is_of_no_consequence():
    with Watched() as it:
        while it.lives == 0 or it.pid is None:
            threading.Event().wait(0.002)
        it.kill(0)
        it.ready(0)
        it.refused(0, ModelError("no"))
        assert not it.is_ready
        it.ready(1)
        assert it.is_ready
