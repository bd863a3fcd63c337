# SPDX-License-Identifier: Apache-2.0
"""Refusals in the log: at most one line a second for each reason, and none is lost from the count."""

import pytest

from forebay.observe.logs.refusal_log import MAX_REASONS, RefusalLog


@pytest.fixture
def lines(caplog):
    return lambda: [record.getMessage() for record in caplog.records if record.name == "forebay.refusals"]


def test_one_line_a_second_for_each_reason(lines):
    told = RefusalLog("client")
    for number in range(5):
        told.refused(0, ("192.0.2.1", 7), "full", f"{number} wait")
        told.refused(0, "unix", "closed", "it is closed")
    assert lines() == ["client 192.0.2.1:7 was refused: 0 wait", "client unix was refused: it is closed"]
    told.refused(1, ("::1", 8), "full", "6 wait")
    assert lines()[2:] == ["client [::1]:8 was refused: 6 wait (4 more were refused for this reason and not logged)"]
    told.refused(2, None, "full", "7 wait")
    assert lines()[3:] == ["a client was refused: 7 wait"]


def test_texts_that_differ_in_numbers_are_one_reason(lines):
    told = RefusalLog("client")
    for number in range(1000):
        told.refused(0, "x", f"frame {number} is {number} bytes long", f"frame {number} is {number} bytes long")
    assert lines() == ["client x was refused: frame 0 is 0 bytes long"]


def test_reasons_that_are_a_clients_words_are_bounded(lines):
    told = RefusalLog("client")
    words = ["x" * number for number in range(1, 1000)]
    for second in range(3):
        before = len(lines())
        for word in words:
            told.refused(second, "x", word, word)
        # One for each, one for all the others, and how many of those before were not told.
        assert MAX_REASONS // 2 < len(lines()) - before <= MAX_REASONS + 1
        assert len(told._told) <= MAX_REASONS
    told.close()
    counted = sum(int(line.split(" more")[0].split("(")[-1]) for line in lines() if " more" in line)
    assert counted + sum("was refused" in line for line in lines()) == 3 * len(words)


def test_what_was_not_told_is_told_at_the_end(lines):
    told = RefusalLog("client")
    for _ in range(3):
        told.refused(0, "x", "full", "it is full")
    told.close()
    told.close()
    assert lines()[1:] == ["2 more were refused and not logged: it is full"]
