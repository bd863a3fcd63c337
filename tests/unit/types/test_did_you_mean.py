# SPDX-License-Identifier: Apache-2.0
"""A suggestion is near in spelling, or holds what was written; none is better than a wrong one."""

from __future__ import annotations

import pytest

from forebay.types.did_you_mean import nearest

FLAGS = [
    *("--port", "--devices", "--idle", "--otel", "--attach", "--python", "--help", "--versions", "--workers"),
    *("--max-batch-size", "--max-queue", "--certfile", "--config", "--log-level", "--cors-origin", "--timeout-ms"),
]
FAR = ["--env", "--cpu", "--gpu", "--tls", "--file", "--watch", "--token", "--health", "--auth", "--metrics"]


@pytest.mark.parametrize("word", FAR)
def test_what_is_not_near_is_not_suggested(word):
    assert nearest(word, FLAGS) is None


@pytest.mark.parametrize(
    "word, near",
    [
        ("--prot", "--port"),
        ("--wrokers", "--workers"),
        ("--max_batchsize", "--max-batch-size"),
        ("--queue", "--max-queue"),
        ("--batchsize", "--max-batch-size"),
        ("--cert", "--certfile"),
        ("--num-workers", "--workers"),
        ("--config-file", "--config"),
        ("--configuration", "--config"),
        ("--LOG-LEVEL", "--log-level"),
        ("--versoin", "--versions"),
    ],
)
def test_slips_and_names_not_written_whole_are_suggested(word, near):
    assert nearest(word, FLAGS) == near


def test_a_word_of_a_stranger_may_be_long_and_of_many():
    known = [f"model-{number:05}" * 8 for number in range(10_000)]
    assert nearest("model-x" * 10_000, known) is None
    assert nearest(f"{known[7]}x", known) == known[7]
