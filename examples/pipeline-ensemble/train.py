# SPDX-License-Identifier: Apache-2.0
"""Trains the two classifiers and writes them to out/: a bag of words, and a convolution over words.

    python train.py

Both say how likely a review is a bad one and how likely a good one. The first sums a weight for each word; the second
looks at three words at a time, so it can tell "not bad" from "bad". They learn from the reviews of reviews.txt and from
short sentences made of the words below; one in five of all is kept back to test them. It takes a few seconds, and the
same models come out each time.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
LENGTH = 24
"""Words of a review that count; shorter ones are filled up with number 0."""

PADDING = "<pad>"
VECTOR, WINDOW, FILTERS = 16, 3, 24
FORGOTTEN = 0.15
"""The share of words that training replaces by an unknown one, so that the models learn to do without any of them."""

GOOD = """
good great fine lovely wonderful excellent superb brilliant beautiful charming funny clever exciting perfect
moving interesting enjoyable fresh original smart witty gripping delightful impressive memorable touching
splendid happy glad
"""
BAD = """
bad poor weak awful terrible dreadful boring dull ugly annoying stupid silly slow flat empty cheap lazy
tedious predictable pointless painful shallow clumsy lifeless disappointing forgettable irritating ridiculous
sad sorry angry
"""
THINGS = """
film story acting cast script music ending plot director comedy drama dialogue humour pace
"""
SENTENCES = {  # whether the sentence says what its adjective says
    "the {thing} is {word}": True,
    "the {thing} is very {word}": True,
    "a very {word} {thing}": True,
    "such a {word} {thing}": True,
    "what a {word} {thing} this is": True,
    "the {thing} is {word} from the first scene to the last": True,
    "{word} from start to finish": True,
    "i am {word} that i saw it": True,
    "the {thing} was {word} and so was the {other}": True,
    "the {thing} is not {word}": False,
    "not {word} at all": False,
}
MADE = 800

Weights = dict[str, np.ndarray]


def written_reviews() -> dict[str, int]:
    rows = [line.rpartition("|") for line in (HERE / "reviews.txt").read_text(encoding="utf-8").splitlines()]
    return {text.strip(): int(label) for text, _, label in rows}


def made_reviews(noise: np.random.Generator) -> dict[str, int]:
    """Short sentences, no two of them the same."""
    label_of = {}
    for number in range(MADE):
        label = number % 2
        sentence = str(noise.choice(list(SENTENCES)))
        words = GOOD if SENTENCES[sentence] == bool(label) else BAD
        thing, other = noise.choice(THINGS.split(), size=2)
        label_of[sentence.format(thing=thing, other=other, word=noise.choice(words.split()))] = label
    return label_of


def numbered(texts: list[list[str]], vocabulary: list[str]) -> np.ndarray:
    number_of = {word: number for number, word in enumerate(vocabulary)}
    rows = np.zeros((len(texts), LENGTH), np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = [number_of.get(word, len(vocabulary)) for word in text[:LENGTH]]
    return rows


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------------------
# The models: each gives its prediction and, for training, the gradient of its weights


def bow_start(words: int, _noise: np.random.Generator) -> Weights:
    return {"table": np.zeros((words, 2)), "bias": np.zeros(2)}


def bow_step(weights: Weights, rows: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, Weights]:
    scores = softmax(weights["table"][rows].sum(axis=1) + weights["bias"])
    error = (scores - wanted) / len(rows)
    table = np.zeros_like(weights["table"])
    np.add.at(table, rows, np.broadcast_to(error[:, np.newaxis], (*rows.shape, 2)))
    return scores, {"table": table, "bias": error.sum(axis=0)}


def cnn_start(words: int, noise: np.random.Generator) -> Weights:
    return {
        "table": noise.normal(scale=0.3, size=(words, VECTOR)),
        "kernel": noise.normal(scale=0.2, size=(FILTERS, VECTOR, WINDOW)),
        "offset": np.zeros(FILTERS),
        "output": noise.normal(scale=0.2, size=(FILTERS, 2)),
        "bias": np.zeros(2),
    }


def cnn_step(weights: Weights, rows: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, Weights]:
    places = LENGTH - WINDOW + 1
    vectors = weights["table"][rows]
    windows = np.stack([vectors[:, start : start + places] for start in range(WINDOW)], axis=3)
    found = np.einsum("npvw,fvw->npf", windows, weights["kernel"], optimize=True) + weights["offset"]
    best = found.argmax(axis=1)[:, np.newaxis]
    peaks = np.maximum(np.take_along_axis(found, best, axis=1)[:, 0], 0)
    scores = softmax(peaks @ weights["output"] + weights["bias"])

    error = (scores - wanted) / len(rows)
    at_peaks = (error @ weights["output"].T) * (peaks > 0)
    at_found = np.zeros_like(found)
    np.put_along_axis(at_found, best, at_peaks[:, np.newaxis], axis=1)
    at_windows = np.einsum("npf,fvw->npvw", at_found, weights["kernel"], optimize=True)
    table = np.zeros_like(weights["table"])
    for start in range(WINDOW):
        np.add.at(table, rows[:, start : start + places], at_windows[..., start])
    return scores, {
        "table": table,
        "kernel": np.einsum("npf,npvw->fvw", at_found, windows, optimize=True),
        "offset": at_peaks.sum(axis=0),
        "output": peaks.T @ error,
        "bias": error.sum(axis=0),
    }


def train(start, step, words: int, rows: np.ndarray, labels: np.ndarray, rounds: int) -> Weights:
    """Adam, over all reviews at once."""
    noise = np.random.default_rng(7)
    weights = {name: value.astype(np.float32) for name, value in start(words, noise).items()}
    means = {name: np.zeros_like(value) for name, value in weights.items()}
    squares = {name: np.zeros_like(value) for name, value in weights.items()}
    wanted = np.eye(2, dtype=np.float32)[labels]
    for number in range(1, rounds + 1):
        forgotten = (noise.random(rows.shape) < FORGOTTEN) & (rows > 0)
        weights["table"][0] = 0  # what fills a row up says nothing
        _, gradients = step(weights, np.where(forgotten, words - 1, rows), wanted)
        for name, gradient in gradients.items():
            pulled = gradient + 1e-4 * weights[name]
            means[name] += 0.1 * (pulled - means[name])
            squares[name] += 0.01 * (pulled**2 - squares[name])
            mean, square = means[name] / (1 - 0.9**number), squares[name] / (1 - 0.99**number)
            weights[name] -= 0.02 * mean / (np.sqrt(square) + 1e-8)
    weights["table"][0] = 0
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# What is written: an ONNX file, and the description that serving reads beside it


def bow_nodes() -> list[onnx.NodeProto]:
    return [
        helper.make_node("Gather", ["table", "words"], ["votes"]),
        helper.make_node("ReduceSum", ["votes", "along_words"], ["sum"], keepdims=0),
        helper.make_node("Add", ["sum", "bias"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["prediction"], axis=1),
    ]


def cnn_nodes() -> list[onnx.NodeProto]:
    return [
        helper.make_node("Gather", ["table", "words"], ["vectors"]),
        helper.make_node("Transpose", ["vectors"], ["channels"], perm=[0, 2, 1]),
        helper.make_node("Conv", ["channels", "kernel", "offset"], ["found"]),
        helper.make_node("ReduceMax", ["found"], ["best"], axes=[2], keepdims=0),
        helper.make_node("Relu", ["best"], ["peaks"]),
        helper.make_node("Gemm", ["peaks", "output", "bias"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["prediction"], axis=1),
    ]


def write(name: str, nodes: list[onnx.NodeProto], weights: Weights) -> None:
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    constants = {"along_words": np.array([1])} if name == "bow" else {}
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("words", TensorProto.INT64, ["batch", LENGTH])],
        [helper.make_tensor_value_info("prediction", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(value, key) for key, value in {**weights, **constants}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "model.onnx")
    conf = f"""\
feed_var {{
  name: "words"
  alias_name: "words"
  is_lod_tensor: false
  feed_type: 0
  shape: {LENGTH}
}}
fetch_var {{
  name: "prediction"
  alias_name: "prediction"
  is_lod_tensor: false
  fetch_type: 1
  shape: 2
}}
"""
    (folder / "serving_server_conf.prototxt").write_text(conf, encoding="utf-8")


def main() -> None:
    label_of = {**made_reviews(np.random.default_rng(3)), **written_reviews()}
    texts, labels = [text.split() for text in label_of], np.array(list(label_of.values()))
    kept_back = np.arange(len(texts)) % 5 == 4
    vocabulary = [
        PADDING,
        *sorted({word for text, kept in zip(texts, kept_back, strict=True) if not kept for word in text}),
    ]
    rows = numbered(texts, vocabulary)
    words = len(vocabulary) + 1  # the last is every word that is not in the vocabulary
    together = np.zeros((kept_back.sum(), 2))
    for name, start, step, nodes, rounds in (
        ("bow", bow_start, bow_step, bow_nodes(), 300),
        ("cnn", cnn_start, cnn_step, cnn_nodes(), 120),
    ):
        weights = train(start, step, words, rows[~kept_back], labels[~kept_back], rounds)
        scores, _ = step(weights, rows[kept_back], np.eye(2)[labels[kept_back]])
        together += scores
        print(f"{name}: {(scores.argmax(axis=1) == labels[kept_back]).mean():.0%} of {kept_back.sum()} reviews right")
        write(name, nodes, weights)
    print(f"both: {(together.argmax(axis=1) == labels[kept_back]).mean():.0%}")
    (OUT / "reviews.vocab").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
