# SPDX-License-Identifier: Apache-2.0
"""LastRefusals are found by the ids of their answers, and no more of them are kept than may be."""

import time

from forebay.cli.explain_refusal import lines_of_refusal
from forebay.errors import QueueFull, TooLate
from forebay.observe.logs.noted_refusals import MAX_EACH, MAX_ID, MAX_PAIRS, Decision, LastRefusals


def full(tenant="", reason="full"):
    error = QueueFull("the queue is full")
    error.decision = Decision(1000.0, ("it", "1"), tenant, 1, reason, 8, 8, 3 if tenant else None, float("inf"), 0.0)
    return error


def test_the_last_of_each_tenant_and_reason_are_kept():
    refusals = LastRefusals()
    for number in range(3 * MAX_EACH):
        refusals.note(full(), f"a-{number}")
    refusals.note(full("team-a", "share"), "b")
    assert refusals.find("a-0") is None
    assert refusals.find(f"a-{2 * MAX_EACH - 1}") is None
    assert refusals.find(f"a-{2 * MAX_EACH}") is not None
    found = refusals.find("b")
    assert found is not None
    assert (found.tenant, found.reason, found.own) == ("team-a", "share", 3)
    for number in range(3 * MAX_PAIRS):
        for turn in range(MAX_EACH + 1):
            refusals.note(full(f"t{number}"), f"{number}-{turn}" + "x" * 10_000)
    assert len(refusals) == MAX_EACH * MAX_PAIRS
    assert refusals.find(("7-7" + "x" * 10_000)[:MAX_ID]) is None


def test_answers_with_ids_that_follow_each_other_are_one_note():
    refusals = LastRefusals()
    refusals.note(full(), "abcd-", 0xFE, 4)
    assert len(refusals) == 1
    for given in ("abcd-000000fe", "abcd-00000101"):
        found = refusals.find(given)
        assert found is not None
        assert (found.id, found.together) == (given, 4)
    for given in (
        "abcd-000000fd",
        "abcd-00000102",
        "abcd-",
        "abcd-+ff",
        "abcd-ff ",
        "abce-000000fe",
        "abcd-" + "f" * 99,
    ):
        assert refusals.find(given) is None, given


def test_an_error_that_no_queue_has_decided_on_is_no_refusal():
    refusals = LastRefusals()
    refusals.note(QueueFull("all connections are taken"), "a")
    assert len(refusals) == 0


def test_what_was_predicted_is_told():
    error = TooLate("too late", after_s=0.15)
    error.decision = Decision(1000.0, ("it", "2"), "team-a", 0, "late", 8, 20, 3, 0.1, 0.15)
    error.retry_at = time.monotonic() + 2.0
    refusals = LastRefusals()
    refusals.note(error, "me")
    found = refusals.find("me")
    assert found is not None
    assert 1900 <= found.retry_ms <= 2000
    lines = list(lines_of_refusal(found))
    assert lines[0] == "request me of team-a (class 0) to it, version 2, refused at 1970-01-01T00:16:40Z"
    assert lines[2:4] == [
        "ahead: 8 samples waited, 3 of them of team-a; the queue takes 20",
        "deadline: it had 100 ms left; its answer was predicted after 250 ms",
    ]
