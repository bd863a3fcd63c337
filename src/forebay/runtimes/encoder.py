# SPDX-License-Identifier: Apache-2.0
"""Encoders: texts in, and a vector, a score or a label out; a tokenizer and an ONNX file in one folder.

Texts of like length are run together, each padded to the longest of its run. A mask hides that from the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.arrays.numpy_tensors import texts_or_bytes
from forebay.errors import ConfigError
from forebay.runtimes.encoder_folder import FILES, TOKENIZER, EncoderConfig, network_of, read, task_of
from forebay.runtimes.library import RunOptions, library, ordinary
from forebay.runtimes.onnx import OnnxRuntime
from forebay.runtimes.signature import Signature, Value, Var
from forebay.types.failures import words_of
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array

_INPUTS: Final = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
_TEXT: Final = Var("", "", "BYTES", rows=-1, examples=("a", "a text longer than another"), max_characters=1 << 17)
"""What goes in. The tokenizer goes through all characters, however few tokens the model takes."""
_SCORINGS: Final = {"regression": "Identity", "multi_label_classification": "Sigmoid"}
_RUN_TOKENS: Final = 1 << 14
"""Tokens of a run, with those padded: it takes memory for each pair of tokens of a text."""


class Encoder:
    """A model that reads texts."""

    is_shared: bool = True

    def __init__(self, folder: Path, options: RunOptions) -> None:
        """Load tokenizer and network, and run a text to see how long vectors are, or how many labels there are."""
        import numpy as np

        self._np, file = np, network_of(folder)
        tokenizers = library("tokenizers", f"{TOKENIZER} is read by tokenizers", "forebay[onnx,tokenizers]")
        self._tokenizer, problem = caught(tokenizers.Tokenizer.from_file, str(folder / TOKENIZER))
        if problem is not None:
            raise ConfigError(f"its {TOKENIZER} cannot be read: {words_of(problem)[:500]}")
        self._network = OnnxRuntime(file, options)
        self.can_run_on, self.over_samples = self._network.can_run_on, self._network.over_samples
        if unknown := {var.name for var in self._network.signature.feeds} - _INPUTS.keys():
            raise ConfigError(f"{file.name} takes {', '.join(sorted(unknown))}; expected {', '.join(_INPUTS)}")
        self._model, tokenizer, transformer, sentences = (read(folder / name, EncoderConfig) for name in FILES)
        self._task = task_of(folder, self._model, [var.name for var in self._network.signature.fetches])
        limits = [one for one in (tokenizer.model_max_length, self._model.max_position_embeddings) if one and one > 0]
        limit = transformer.max_seq_length or int(min(limits, default=512))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(min(limit, _TEXT.max_characters), direction=tokenizer.truncation_side)
        self._is_lowered = transformer.do_lower_case
        self._prompt = sentences.prompts.get(sentences.default_prompt_name or "") or ""
        scoring = sentences.activation_fn or self._model.sentence_transformers.get("activation_fn")
        scoring = str(scoring or self._model.sbert_ce_default_activation_function or "Sigmoid")
        self.signature = self._signature(scoring.rpartition(".")[2])

    def _signature(self, scoring: str) -> Signature:
        """Return what goes in and comes out, where scores of pairs are made so."""
        width, labels = self._answers(self._tokenizer.encode_batch(["a"])).shape[1], self._model.id2label
        names, outputs, speaks = ["input"], [("vector", "FP32", width), ("tokens", "INT64")], "embeddings"
        if self._task.classifies and width == 1:
            names, outputs, speaks = ["query", "document"], [("score", "FP32"), ("tokens", "INT64")], "rerank"
            if scoring not in {"Identity", "Sigmoid"}:
                raise ConfigError(f"its scores are made by {scoring}; expected Identity or Sigmoid")
        elif self._task.classifies:
            names, outputs, speaks = ["text"], [("label", "BYTES"), ("score", "FP32"), ("scores", "FP32", width)], ""
            scoring = _SCORINGS.get(self._model.problem_type or "", "Softmax")
            self._labels = self._np.array([labels.get(str(at), f"LABEL_{at}") for at in range(width)], object)
        self._scoring = scoring
        feeds = tuple(msgspec.structs.replace(_TEXT, name=name, alias=name) for name in names)
        fetches = tuple(Var(name, name, kind, tuple(axes), rows=-1) for name, kind, *axes in outputs)
        return Signature(feeds, fetches, speaks)

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Read the texts and run the network."""
        columns = [texts_or_bytes(ordinary(var.name, feed[var.name])).ravel().tolist() for var in self.signature.feeds]
        columns[0] = [self._prompt + text for text in columns[0]]
        if self._is_lowered:
            columns = [[text.lower() for text in column] for column in columns]
        encodings = self._tokenizer.encode_batch([*zip(*columns, strict=True)] if len(columns) > 1 else columns[0])
        answers = self._answers(encodings)
        results = self._scores(answers) if self._task.classifies else {"vector": answers}
        results["tokens"] = self._np.array([len(one) for one in encodings], "int64")
        return [Value(results[name]) for name in fetch]

    def _scores(self, scores: Array) -> dict[str, Array]:
        """Return what logits mean."""
        np = self._np
        if self._scoring == "Sigmoid":
            scores = 1 / (1 + np.exp(-scores))
        elif self._scoring == "Softmax":
            raised = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores = raised / raised.sum(axis=1, keepdims=True)
        if scores.shape[1] == 1:
            return {"score": scores[:, 0]}
        return {"label": self._labels[scores.argmax(axis=1)], "score": scores.max(axis=1), "scores": scores}

    def _answers(self, encodings: Sequence[Any]) -> Array:
        """Return a vector, or the logits, for each text."""
        runs: list[list[int]] = []
        for place in sorted(range(len(encodings)), key=lambda place: len(encodings[place])):
            if not runs or (len(runs[-1]) + 1) * len(encodings[place]) > _RUN_TOKENS:
                runs.append([])
            runs[-1].append(place)
        found = self._np.concatenate([self._run([encodings[place] for place in run]) for run in runs])
        return found[self._np.argsort([place for run in runs for place in run])]

    def _run(self, encodings: Sequence[Any]) -> Array:
        """Run the network on texts that are padded to the longest."""
        np = self._np
        shape = len(encodings), max(map(len, encodings))
        padded = {name: np.zeros(shape, "int64") for name in _INPUTS}
        padded["input_ids"] += self._model.pad_token_id or 0
        for row, one in enumerate(encodings):
            for name, attribute in _INPUTS.items():
                padded[name][row, : len(one)] = getattr(one, attribute)
        feed = {var.name: Value(padded[var.name].astype(var.dtype)) for var in self._network.signature.feeds}
        (value,) = self._network.run(feed, [self._task.output])
        found, mask = value.array.astype("float32"), padded["attention_mask"][:, :, None]
        if self._task.pooling == "cls":
            found = found[:, 0]
        elif self._task.pooling == "mean":
            found = ((found * mask).sum(axis=1) / mask.sum(axis=1)).astype("float32")
        lengths = np.linalg.norm(found, axis=1, keepdims=True) if self._task.normalizes else np.float32(1)
        return found / np.maximum(lengths, 1e-12)
