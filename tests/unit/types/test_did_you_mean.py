# SPDX-License-Identifier: Apache-2.0
"""A suggestion is near in spelling, or holds what was written; none is better than a wrong one."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.types.did_you_mean import distance, nearest

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


PATHS = [f"/models/model-number-{number}/versions/{version}" for number in range(80) for version in (1, 2, 3)]


@pytest.mark.parametrize(
    "word, near",
    [
        ("/models/model-number-17/version/2", "/models/model-number-17/versions/2"),
        ("/modles/model-number-42/versions/3", "/models/model-number-42/versions/3"),
        ("/models/mdel-number-79/versions/1", "/models/model-number-79/versions/1"),
        ("/health/of/a/model", None),
    ],
)
def test_among_many_long_words_little_is_compared_and_the_nearest_found(monkeypatch, word, near):
    letters = []
    compare = difflib.get_close_matches

    def counted(written, words, **more):
        letters.append(sum(len(written) * len(one) for one in words))
        return compare(written, words, **more)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    assert nearest(word, PATHS) == near
    assert sum(letters) <= 30_000, "of a million: a client waits meanwhile, and so do all the others"


@given(st.text("ab-", max_size=8), st.text("ab-", max_size=8))
def test_the_distance_is_that_of_the_definition(one, other):
    def plain(i, j):
        if not i or not j:
            return i + j
        least = min(plain(i - 1, j) + 1, plain(i, j - 1) + 1, plain(i - 1, j - 1) + (one[i - 1] != other[j - 1]))
        if i > 1 and j > 1 and one[i - 1] == other[j - 2] and one[i - 2] == other[j - 1]:
            least = min(least, plain(i - 2, j - 2) + 1)
        return least

    one, other = one[:6], other[:6]
    assert distance(one, other) == plain(len(one), len(other))
