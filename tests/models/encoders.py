# SPDX-License-Identifier: Apache-2.0
"""Small encoders in folders as libraries of Hugging Face write them, and what they answer to one text at a time."""

from __future__ import annotations

import json

import numpy as np
from tests.models import model_files

_TEXT = "a bad bright cold dark day is it longer night one rain short sun text than that the another very warm"
WORDS = _TEXT.split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SIZE = 8
TOKENS = 16
"""Tokens of a text that the models take."""


def folder(path, architecture="TinyModel", labels=0, network="model.onnx", output="", types=True, **config):
    """Writes an encoder with random weights; with labels one that classifies.

    Args:
        network: Where its ONNX file is; empty for none.
        output: Name of its output, if another one than usual.
        types: Whether it takes types of tokens.
        config: Of the model.
    """
    path.mkdir(parents=True)
    tokenizer(path / "tokenizer.json")
    if network:
        (path / network).parent.mkdir(exist_ok=True)
        save(path / network, labels, output or ("logits" if labels else "last_hidden_state"), types=types)
    names = {str(at): f"L{at}" for at in range(labels)}
    write(path / "config.json", **{"architectures": [architecture], "pad_token_id": 0, "id2label": names, **config})
    write(path / "tokenizer_config.json", model_max_length=TOKENS)
    return path


def pooled(path, mode="mean", *after, **pooling):
    """Adds what sentence-transformers writes of a pooling, and of what comes after it."""
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{name}" if at else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for at, name in enumerate(["Transformer", "Pooling", *after])
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{one}": one.startswith(f"{mode}_") for one in ("cls_token", "mean_tokens", "max_tokens")}
    write(path / "1_Pooling/config.json", **(pooling or {"word_embedding_dimension": SIZE, **flags}))
    return path


def write(path, **values):
    path.write_text(json.dumps(values))


def tokenizer(path):
    """Writes a tokenizer of words; it pads to 12 tokens, as files of sentence-transformers do that are not to."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({one: at for at, one in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_padding(length=12)
    made.save(str(path))


def save(path, labels, output, *, types):
    """Writes a transformer with one layer of attention, which padded tokens would change if no mask hid them."""
    random = np.random.default_rng(5)
    shapes = {"words": (len(SPECIAL) + len(WORDS), SIZE), "kinds": (2, SIZE), "places": (TOKENS, SIZE)}
    shapes |= dict.fromkeys(("q", "k", "v"), (SIZE, SIZE)) | ({"head": (SIZE, labels)} if labels else {})
    constants = [(name, random.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()]
    constants += [("zero", 0), ("one", 1), ("axis", [1]), ("hide", np.float32(-1e9)), ("full", np.float32(1))]
    states = "states" if labels else output
    nodes = [
        ("Sub", ["input_ids", "input_ids"], ["same"]),
        ("Gather", ["words", "input_ids"], ["worded"]),
        ("Gather", ["kinds", "token_type_ids" if types else "same"], ["kinded"]),
        ("Shape", ["input_ids"], ["shape"]),
        ("Gather", ["shape", "one"], ["length"]),
        ("Range", ["zero", "length", "one"], ["range"]),
        ("Gather", ["places", "range"], ["placed"]),
        ("Sum", ["worded", "kinded", "placed"], ["x"]),
        *(("MatMul", ["x", name], [f"{name}x"]) for name in ("q", "k", "v")),
        ("Transpose", ["kx"], ["kt"], {"perm": [0, 2, 1]}),
        ("MatMul", ["qx", "kt"], ["raw"]),
        ("Cast", ["attention_mask"], ["mask"], {"to": 1}),
        ("Sub", ["full", "mask"], ["hidden"]),
        ("Mul", ["hidden", "hide"], ["far"]),
        ("Unsqueeze", ["far", "axis"], ["away"]),
        ("Add", ["raw", "away"], ["looks"]),
        ("Softmax", ["looks"], ["attention"], {"axis": -1}),
        ("MatMul", ["attention", "vx"], ["seen"]),
        ("Add", ["x", "seen"], [states]),
    ]
    if labels:
        nodes += [("Gather", [states, "zero"], ["first"], {"axis": 1}), ("MatMul", ["first", "head"], [output])]
    given = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    shape = ["batch", labels] if labels else ["batch", "sequence", SIZE]
    inputs = [(name, "INT64", ["batch", "sequence"]) for name in given]
    model_files.save(path, nodes, inputs, [(output, "FLOAT", shape)], constants)


def reference(path, *texts, tokens=TOKENS, network="model.onnx"):
    """What onnxruntime and tokenizers say of one text, or of a pair: the states of all tokens, or the logits."""
    import onnxruntime
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(path / "tokenizer.json"))
    words.no_padding()
    words.enable_truncation(tokens)
    said = words.encode(*texts)
    session = onnxruntime.InferenceSession(path / network)
    given = {"input_ids": said.ids, "attention_mask": [1] * len(said.ids), "token_type_ids": said.type_ids}
    feed = {one.name: np.array([given[one.name]]) for one in session.get_inputs()}
    return np.asarray(session.run(None, feed)[0])[0]


def texts(many=12):
    """Texts of unlike length; some are longer than the models take."""
    random = np.random.default_rng(3)
    return [" ".join(random.choice(WORDS, size)) for size in random.integers(0, 20, many)]


def softmax(logits):
    raised = np.exp(logits - logits.max())
    return raised / raised.sum()


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def near(one, two):
    """Tells whether numbers are equal but for rounding."""
    return np.allclose(one, two, rtol=1e-4, atol=1e-5)
