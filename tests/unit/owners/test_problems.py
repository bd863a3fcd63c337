# SPDX-License-Identifier: Apache-2.0
"""What an owner says of a model that has no worker."""

from types import SimpleNamespace
from typing import Any

import pytest

from forebay.owners.model_description import problem_of
from forebay.workers.pool import PoolStatistics


@pytest.mark.parametrize(
    "told, problem",
    [
        (PoolStatistics(slots=1, idle=0, alive=1), ""),
        (PoolStatistics(slots=1, idle=0), "no worker is attached"),
        (PoolStatistics(slots=1, idle=0, problem="it cannot start"), "it cannot start"),
        (PoolStatistics(slots=1, idle=0, may_sleep=True), ""),  # a request would start one
        (PoolStatistics(slots=1, idle=0, may_sleep=True, problem="it cannot start"), "it cannot start"),
    ],
)
def test_a_model_has_a_problem_if_no_worker_would_answer(told, problem):
    endpoint: Any = SimpleNamespace(pool=SimpleNamespace(statistics=lambda: told))
    assert problem_of(endpoint) == problem
