# SPDX-License-Identifier: Apache-2.0
"""Folders that sentence-transformers and transformers have saved, and what these libraries answer from them."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.models.encoders import near, texts

import forebay.runtimes
from forebay.runtimes.sharing import sharing_of

pytest.importorskip("tokenizers")
HERE = Path(__file__).parent
ANSWERS = json.loads((HERE / "answers.json").read_text())


def asked(name, **columns):
    net = forebay.runtimes.load(HERE / name)
    assert sharing_of(net).why_not == ""
    return net({name: np.array(column, object) for name, column in columns.items()})


@pytest.mark.parametrize("name", ["mean", "cls"])
def test_vectors_are_those_of_sentence_transformers(name):
    assert near(asked(name, input=texts())["vector"], ANSWERS[name])


def test_ranks_are_those_of_a_cross_encoder():
    assert near(asked("ranks", query=texts(), document=texts()[::-1])["score"], ANSWERS["ranks"])


@pytest.mark.parametrize("name", ["labels", "several"])
def test_labels_are_those_of_the_pipeline(name):
    answer = asked(name, text=texts())
    wanted = ANSWERS[name]
    assert [str(label) for label in answer["label"]] == [one["label"] for one in wanted]
    assert near(answer["score"], [one["score"] for one in wanted])


def test_all_scores_are_in_the_order_of_the_labels():
    scores = asked("labels", text=texts())["scores"]
    names = json.loads((HERE / "labels/config.json").read_text())["id2label"]
    for row, told in zip(scores, ANSWERS["every"], strict=True):
        by_name = {one["label"]: one["score"] for one in told}
        assert near(row, [by_name[names[str(at)]] for at in range(len(names))])
