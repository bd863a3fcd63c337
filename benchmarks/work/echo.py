# SPDX-License-Identifier: Apache-2.0
"""Answer the request itself: what is left is the cost of serving."""

from __future__ import annotations

from typing import Any

from benchmarks.work import Predict

ROW = {"x": [5.1, 3.5, 1.4, 0.2, 6.7, 3.1, 4.7, 1.5], "text": "a small request, as most are"}


def load() -> Predict:
    return list


def is_answer(answer: Any) -> bool:
    return answer == ROW
