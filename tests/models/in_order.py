# SPDX-License-Identifier: Apache-2.0
"""A model whose answers are ready in another order than its requests; it needs four workers that are threads."""

import threading

import forebay

WORKERS = 4
_answered = threading.Condition()
_numbers: set[int] = set()


class Later(forebay.Model):
    """Answers each number after the next one, but for the last one of every four."""

    name = "later"
    max_batch_size = 1

    def predict(self, samples: list[int]) -> list[int]:
        (number,) = samples
        with _answered:
            _answered.wait_for(lambda: number % WORKERS == WORKERS - 1 or number + 1 in _numbers, 120)
            _numbers.add(number)
            _answered.notify_all()
        return samples
