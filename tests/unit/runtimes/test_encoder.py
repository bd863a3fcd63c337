# SPDX-License-Identifier: Apache-2.0
"""Folders of encoders, compared with onnxruntime, tokenizers and numpy on one text at a time."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from tests.models import encoders
from tests.models.encoders import folder, near, pooled, reference, sigmoid, softmax, texts, write

import forebay.runtimes
from forebay.errors import ConfigError
from forebay.runtimes import encoder
from forebay.runtimes.onnx import OnnxRuntime
from forebay.runtimes.sharing import sharing_of
from forebay.runtimes.signature import Value
from forebay.server.config import Overrides
from forebay.surfaces.native.model_files import read_model_file

pytest.importorskip("tokenizers")
SEQUENCES = "TinyForSequenceClassification"


def asked(path, *columns):
    """What the model in a folder answers to all texts together, and its signature."""
    net = forebay.runtimes.load(path)
    signature = net.signature()
    arrays = {var.name: np.array(column, object) for var, column in zip(signature.feeds, columns, strict=True)}
    return net(arrays), signature


@pytest.mark.parametrize(
    "mode, pooling",
    [
        ("mean", {}),
        ("cls", {}),
        ("mean", {"pooling_mode": "mean", "include_prompt": True}),
        ("cls", {"pooling_mode": ["cls"]}),
        ("mean", {"word_embedding_dimension": 8}),
    ],
)
@pytest.mark.parametrize("after", [(), ("Normalize",)])
def test_vectors_are_pooled_as_the_folder_says(tmp_path, mode, pooling, after):
    path = pooled(folder(tmp_path / "net"), mode, *after, **pooling)
    answer, signature = asked(path, texts())
    assert signature.speaks == "embeddings"
    for text, vector, tokens in zip(texts(), answer["vector"], answer["tokens"], strict=True):
        states = reference(path, text)
        wanted = states[0] if mode == "cls" else states.mean(axis=0)
        assert near(vector, wanted / np.linalg.norm(wanted) if after else wanted)
        assert (tokens, vector.dtype) == (len(states), np.float32)


def test_without_modules_the_states_are_averaged_and_what_the_file_pools_is_left_alone(tmp_path):
    plain = folder(tmp_path / "plain", network="onnx/model.onnx", types=False)
    (vector,) = asked(plain, ["a cold day"])[0]["vector"]
    assert near(vector, reference(plain, "a cold day", network="onnx/model.onnx").mean(axis=0))
    whole = pooled(folder(tmp_path / "whole", "TinyForMaskedLM", 5, output="sentence_embedding"), "max", "Dense")
    assert near(asked(whole, ["a cold day"])[0]["vector"][0], reference(whole, "a cold day"))


@pytest.mark.parametrize(
    "problem, scored",
    [(None, softmax), ("multi_label_classification", sigmoid), ("regression", np.asarray)],
)
def test_labels_have_the_scores_of_the_problem(tmp_path, problem, scored):
    path = folder(tmp_path / "net", SEQUENCES, 3, problem_type=problem, id2label={"0": "no", "2": "yes"})
    answer, signature = asked(path, texts())
    assert (signature.speaks, [var.name for var in signature.feeds]) == ("", ["text"])
    for at, text in enumerate(texts()):
        wanted = scored(reference(path, text))
        assert near(answer["scores"][at], wanted)
        assert near(answer["score"][at], wanted.max())
        assert answer["label"][at] == ("no", "LABEL_1", "yes")[wanted.argmax()]


@pytest.mark.parametrize(
    "config, prompts, scored",
    [
        ({}, {}, sigmoid),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, np.asarray),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, np.asarray),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
            sigmoid,
        ),
    ],
)
def test_one_label_scores_pairs(tmp_path, config, prompts, scored):
    path = folder(tmp_path / "net", SEQUENCES, 1, **config)
    write(path / "config_sentence_transformers.json", **prompts)
    answer, signature = asked(path, texts(), texts()[::-1])
    assert signature.speaks == "rerank"
    for at, pair in enumerate(zip(texts(), texts()[::-1], strict=True)):
        (wanted,) = scored(reference(path, *pair))
        assert near(answer["score"][at], wanted)


def test_prompts_limits_and_lower_case_are_those_of_the_folder(tmp_path):
    path = pooled(folder(tmp_path / "net", max_position_embeddings=9))
    assert asked(path, ["sun " * 30])[0]["tokens"] == 9
    write(path / "sentence_bert_config.json", max_seq_length=5, do_lower_case=True)
    write(path / "config_sentence_transformers.json", prompts={"query": "one Very "}, default_prompt_name="query")
    answer = asked(path, ["Sun " * 30, "RAIN"])[0]
    for vector, text in zip(answer["vector"], ["one very sun sun sun", "one very rain"], strict=True):
        assert near(vector, reference(path, text, tokens=5).mean(axis=0))
    write(path / "tokenizer_config.json", model_max_length=10**30, truncation_side="left")
    write(path / "config_sentence_transformers.json")
    (vector,) = asked(path, ["sun sun rain it is"])[0]["vector"]
    assert near(vector, reference(path, "rain it is").mean(axis=0))


def test_long_texts_run_apart_from_others(tmp_path, monkeypatch):
    path = pooled(folder(tmp_path / "net", pad_token_id=1))
    net = forebay.runtimes.load(path)
    shapes, padded = [], []
    run = OnnxRuntime.run

    def noted(self, feed, fetch):
        shapes.append(feed["input_ids"].array.shape)
        padded.extend(feed["input_ids"].array[feed["attention_mask"].array == 0])
        return run(self, feed, fetch)

    monkeypatch.setattr(OnnxRuntime, "run", noted)
    monkeypatch.setattr(encoder, "_RUN_TOKENS", 16)
    asked_texts = ["sun " * 11, "a", "it is", "rain " * 10, "the"]
    answer = net({"input": np.array(asked_texts, object)})
    assert (shapes, padded) == ([(3, 4), (1, 12), (1, 13)], [1, 1])
    assert answer["tokens"].tolist() == [13, 3, 4, 12, 3]
    for text, vector in zip(asked_texts, answer["vector"], strict=True):
        assert near(vector, reference(path, text).mean(axis=0))


@pytest.mark.parametrize("labels", [0, 1, 3])
def test_texts_share_a_run_where_the_network_lets_them(tmp_path, labels):
    sharing = sharing_of(forebay.runtimes.load(folder(tmp_path / "net", SEQUENCES if labels else "TinyModel", labels)))
    assert (sharing.has_rows, sharing.why_not) == (True, "")


def test_texts_share_a_run_although_padding_changes_how_numbers_are_rounded(tmp_path, monkeypatch):
    net = forebay.runtimes.load(folder(tmp_path / "net"))
    run = OnnxRuntime.run

    def rounded(self, feed, fetch):
        (value,) = run(self, feed, fetch)
        return [Value(value.array * (1 + 1e-6 * value.array.shape[1]))]

    monkeypatch.setattr(OnnxRuntime, "run", rounded)
    assert sharing_of(net).why_not == ""


def test_texts_share_no_run_where_the_network_ignores_its_mask(tmp_path, monkeypatch):
    net = forebay.runtimes.load(folder(tmp_path / "net"))
    run = OnnxRuntime.run

    def unmasked(self, feed, fetch):
        mask = np.ones_like(feed["attention_mask"].array)
        return run(self, {**feed, "attention_mask": Value(mask)}, fetch)

    monkeypatch.setattr(OnnxRuntime, "run", unmasked)
    assert sharing_of(net).why_not == "its output 'vector' is another one for a sample that has others beside it"


def without(name):
    return lambda path: (path / name).unlink()


def holding(name, text):
    return lambda path: (path / name).write_text(text)


@pytest.mark.parametrize(
    "made, spoiled, said",
    [
        ({}, without("tokenizer.json"), r"there is no tokenizer.json in it; write it: transformers.AutoTokenizer"),
        ({"network": ""}, None, r"there is no ONNX file in it; make one: optimum-cli export onnx --model"),
        (
            {"architecture": "TinyForTokenClassification"},
            None,
            r"its architecture is TinyForTokenClassification; expected",
        ),
        ({"architecture": SEQUENCES}, None, r"gives last_hidden_state, and no logits; .* --task text-classification"),
        ({"labels": 2}, None, r"gives logits, and no last_hidden_state; .* --task feature-extraction"),
        ({}, holding("config.json", "{"), r"its config.json cannot be read: "),
        (
            {},
            holding("config.json", '{"architectures": "Tiny"}'),
            r"its config.json cannot be read: .*\$.architectures",
        ),
        ({}, holding("tokenizer.json", "{}"), r"its tokenizer.json cannot be read: "),
        (
            {"network": "model_O1.onnx"},
            lambda path: (path / "model_O2.onnx").touch(),
            r"holds several .*: model_O1.onnx, ",
        ),
        (
            {"architecture": SEQUENCES, "labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
            None,
            r"its scores are made by Tanh; expected Identity or Sigmoid",
        ),
    ],
)
def test_what_cannot_be_served_is_said(tmp_path, made, spoiled, said):
    path = folder(tmp_path / "net", **made)
    if spoiled is not None:
        spoiled(path)
    with pytest.raises(ConfigError, match=said):
        forebay.runtimes.load(path)


@pytest.mark.parametrize(
    "mode, after, pooling, said",
    [
        ("max", (), {}, "its pooling is max; expected cls or mean"),
        ("", (), {"pooling_mode": ["cls", "mean"]}, "its pooling is cls and mean; expected cls or mean"),
        ("mean", ("Dense",), {}, "its modules.json names Transformer, Pooling, Dense; expected .* --library sentence_"),
    ],
)
def test_a_pooling_that_is_not_known_is_said(tmp_path, mode, after, pooling, said):
    with pytest.raises(ConfigError, match=said):
        forebay.runtimes.load(pooled(folder(tmp_path / "net"), mode, *after, **pooling))


def test_nothing_outside_of_the_folder_is_read(tmp_path):
    path = pooled(folder(tmp_path / "net"), "cls")
    write(tmp_path / "config.json", pooling_mode="none of these")
    modules = json.loads((path / "modules.json").read_text())
    modules[1]["path"] = "../../1_Pooling"
    (path / "modules.json").write_text(json.dumps(modules))
    assert near(asked(path, ["sun"])[0]["vector"][0], reference(path, "sun")[0])


def test_a_missing_tokenizers_is_said_with_its_extra(tmp_path, monkeypatch):
    path = folder(tmp_path / "net")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'forebay\[onnx,tokenizers\]'$"):
        forebay.runtimes.load(path)


def test_the_file_in_the_folder_can_still_be_served_by_itself(tmp_path):
    net = forebay.runtimes.load(folder(tmp_path / "net") / "model.onnx")
    assert [var.name for var in net.signature().feeds] == ["input_ids", "attention_mask", "token_type_ids"]
    assert net.signature().fetches[0].shape[-1] == encoders.SIZE


def test_a_folder_without_a_configuration_is_served_with_tokens_and_that_is_said(tmp_path):
    path = folder(tmp_path / "net") / "model.onnx"
    said = f"{path} takes tokens, not texts: beside it is a tokenizer.json, but no config.json"
    assert said not in read_model_file(path, Overrides()).warnings
    (tmp_path / "net/config.json").unlink()
    assert said in read_model_file(path, Overrides()).warnings
