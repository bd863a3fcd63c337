# SPDX-License-Identifier: Apache-2.0
"""First steps with the model as one would take them in a notebook: no server, no class, one value to call."""

# %% The function of a batch, and what makes batches of sentences.
import numpy as np
from model import load_session, load_tokenizer, vectors

from forebay import Batch, Pad, Serving

tokenizer, session = load_tokenizer(), load_session()
pad = Pad(("length",))


def tokenize(sentences: list[str]) -> tuple[Batch, None]:
    padded = pad([encoding.ids for encoding in tokenizer.encode_batch(sentences)])
    return Batch.concatenate([{"ids": padded.array, "mask": padded.mask()}]), None


def embed(batch: Batch) -> np.ndarray:
    rows = batch.realize()
    return vectors(session, rows["ids"], rows["mask"])


serving = Serving.new(lambda _options: embed).client_preprocessing(tokenize).batch_size(32)

# %% Run it here and now.
SENTENCES = [
    "A cat sits on the mat.",
    "The weather is lovely today.",
    "A kitten is resting on a rug.",
    "Stocks fell sharply on Monday.",
    "It is so sunny outside!",
    "The market lost four percent at the start of the week.",
]


def nearest_pairs(found: np.ndarray) -> list[tuple[str, str, float]]:
    """Each sentence with the one most like it, and how like: 1 is the same direction, 0 has nothing in common."""
    alike = found @ found.T
    np.fill_diagonal(alike, -1)
    return [
        (sentence, SENTENCES[other], float(alike[row, other]))
        for row, (sentence, other) in enumerate(zip(SENTENCES, alike.argmax(axis=1), strict=True))
    ]


if __name__ == "__main__":
    for sentence, other, score in nearest_pairs(serving.run(SENTENCES)):
        print(f"{score:.2f}  {sentence:<56} {other}")
