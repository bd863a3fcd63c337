# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
"""What all pools share: runners by reference, and how a batch fails."""

from __future__ import annotations

import pytest

from forebay.errors import BadOutcome, ConfigError, NotFound, RunnerFailed, revive
from forebay.types.call import After, Failure
from forebay.types.failures import failure_of
from forebay.workers.runner import RunnerSpec
from forebay.workers.user_calls.cancel import is_cancelled, probe
from forebay.workers.user_calls.user_code import checked, do_after, settled


def test_a_runner_is_built_by_name_with_its_arguments():
    spec = RunnerSpec("tests.pools.runners:Told", {"log": "x"})
    assert spec.build().log == "x"
    spec.require_portable()


def test_a_runner_without_a_name_stays_in_its_process():
    spec = RunnerSpec("", local=lambda: "here")
    assert spec.build() == "here"
    with pytest.raises(ConfigError, match="worker_kind='thread'"):
        spec.require_portable()


def test_own_errors_keep_their_kind_and_others_become_runner_failed():
    own = NotFound("nobody")
    assert failure_of(own).error is own
    try:
        raise KeyError("k")
    except KeyError as error:
        failed = failure_of(error).error
    assert type(failed) is RunnerFailed
    assert failed.message == "KeyError: 'k'"
    assert "raise KeyError" in failed.trace


@pytest.mark.parametrize(
    "kind, expected", [("NotFound", NotFound), ("BadOutcome", BadOutcome), ("Strange", RunnerFailed)]
)
def test_errors_come_back_by_their_kind(kind, expected):
    error = revive(kind, "m", {"path": "$"}, "trace")
    assert (type(error), error.message, error.detail) == (expected, "m", {"path": "$"})


@pytest.mark.parametrize("outcomes, count", [([1], 2), ([], 1), (None, 1), (iter([1]), 1)])
def test_the_number_of_outcomes_is_checked(outcomes, count):
    """G4."""
    with pytest.raises(BadOutcome):
        checked(outcomes, count)


def test_work_after_the_answer_is_separated_and_done():
    done = []
    outcomes, work = settled([1, After("two", lambda: done.append(2)), Failure(NotFound("x"))], 3)
    assert outcomes[:2] == [1, "two"]
    do_after([lambda: 1 / 0, *work])
    assert done == [2]


def test_outside_of_a_worker_nothing_is_cancelled():
    assert is_cancelled() is False
    token = probe.set(lambda: True)
    assert is_cancelled() is True
    probe.reset(token)
