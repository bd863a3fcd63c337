# SPDX-License-Identifier: Apache-2.0
"""A test that passes only after most of its patience is seen."""  # F120

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = """
import pytest
from tests import waiting
from tests.patience import pytest_runtest_makereport, pytest_terminal_summary

waiting.PATIENCE_S = 4.0

def pytest_configure(config):
    config.addinivalue_line("markers", "lasts(seconds): as in pyproject.toml")
"""
TESTS = """
import asyncio, threading, time
import pytest
from tests.waiting import eventually, reached

def after(seconds):
    began = time.monotonic()
    return lambda: time.monotonic() - began > seconds

def test_quick():
    eventually(after(0), "the quick", 600)

def test_of_a_thread():
    eventually(after(0.6), "the slow", 1)

def test_of_a_coroutine():
    asyncio.run(reached(after(0.6), "the slower", 1))

def test_of_an_event_that_nobody_looks_at():
    threading.Event().wait(2.1)

@pytest.mark.lasts(9)
def test_of_many_steps():
    threading.Event().wait(2.1)

@pytest.mark.lasts(1)
def test_of_many_steps_that_are_slow():
    threading.Event().wait(1.1)

@pytest.fixture(scope="module")
def late():
    eventually(after(0.6), "the set-up", 1)

def test_of_its_fixture(late):
    pass

def test_that_fails():
    eventually(after(0.6), "the failed", 1)
    assert not 1
"""
LATE = [
    "test_them.py::test_of_a_coroutine (call): the slower happened after 0.",
    "test_them.py::test_of_a_thread (call): the slow happened after 0.",
    "test_them.py::test_of_an_event_that_nobody_looks_at (call): took ",
    "test_them.py::test_of_its_fixture (setup): the set-up happened after 0.",
    "test_them.py::test_of_many_steps_that_are_slow (call): took ",
]


def test_late_tests_are_listed_and_fail_if_strict(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(TESTS)
    cases = [
        ("2", "", "7 passed, 1 failed"),
        ("2", "1", "2 passed, 5 failed, 1 error"),
        ("0", "1", "2 passed, 5 failed, 1 error"),
    ]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-n", processes, "-p", "no:cacheprovider", "--tb=line", tmp_path],
            env={**os.environ, "STRICT": strict, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for processes, strict, _ in cases
    ]  # side by side, since most of their time they only wait
    for (*_, outcome), one in zip(cases, running, strict=True):
        told, _ = one.communicate()
        listed = told.partition("passed only after more than half of their patience ==")[2].splitlines()[1:6]
        assert [line[: len(late)] for line, late in zip(sorted(listed), LATE, strict=True)] == LATE, told
        counts = told.splitlines()[-1]
        assert {part.strip("= ") for part in counts.partition(" in ")[0].split(",")} == set(outcome.split(", "))
