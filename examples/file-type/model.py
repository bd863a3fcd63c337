# SPDX-License-Identifier: Apache-2.0
"""Tells the type of a file from its bytes, with the ONNX model that ships inside the magika wheel.

The wheel is only a container here: its model and its tables are read from disk and run through onnxruntime,
so nothing of magika is imported and it may be installed with ``--no-deps``.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import onnxruntime

from forebay import Model

MODEL_VERSION = "standard_v3_3"
"""Pinned, because `features` has to cut files the way this very version was trained."""


class Settings(msgspec.Struct):
    """The part of the model's own ``config.min.json`` that decides how files are cut and answers are trusted."""

    beg_size: int
    end_size: int
    block_size: int
    padding_token: int
    min_file_size_for_dl: int
    medium_confidence_threshold: float
    target_labels_space: list[str]
    thresholds: dict[str, float]
    overwrite_map: dict[str, str]


class ContentType(msgspec.Struct):
    """What the wheel's table knows about one label; the table leaves out what it does not know."""

    is_text: bool
    mime_type: str | None = None
    group: str | None = None
    description: str | None = None


class Guess(NamedTuple):
    """A label before anyone asked whether its score is high enough to be told."""

    label: str
    score: float


class Answer(msgspec.Struct):
    """What the client gets."""

    label: str
    description: str
    mime_type: str
    group: str
    score: float


def magika_folder() -> Path:
    """Where the wheel is installed, found without running any of its code."""
    spec = importlib.util.find_spec("magika")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the file-type example needs the magika wheel: pip install --no-deps magika==1.0.3")
    return Path(spec.submodule_search_locations[0])


def guess_without_model(content: bytes, settings: Settings) -> Guess | None:
    """Answers the files that are too short for the model to say anything about; None for all others."""
    if not content:
        return Guess("empty", 1.0)
    block = content[: settings.block_size]
    if len(block.lstrip()) >= settings.min_file_size_for_dl:
        return None
    return Guess("txt" if is_utf8(block) else "unknown", 1.0)


def is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def features(content: bytes, settings: Settings) -> np.ndarray:
    """One row for the model: the file's head, then its tail, both without the white space around the file.

    The head starts at the left edge of the row and the tail ends at its right edge, so that a short file is padded
    in the middle. Only one block at each end of the file is looked at, however long the white space in it.
    """
    head = content[: settings.block_size].lstrip()[: settings.beg_size]
    tail = content[-settings.block_size :].rstrip()[-settings.end_size :]
    row = np.full(settings.beg_size + settings.end_size, settings.padding_token, dtype=np.int32)
    row[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    row[len(row) - len(tail) :] = np.frombuffer(tail, dtype=np.uint8)
    return row


class FileType(Model):
    """Raw bytes in, the type of the file they are out."""

    name = "file-type"
    max_batch_size = 32

    def load(self) -> None:
        folder = magika_folder()
        model = folder / "models" / MODEL_VERSION
        self.settings = msgspec.json.decode((model / "config.min.json").read_bytes(), type=Settings)
        table = (folder / "config" / "content_types_kb.min.json").read_bytes()
        self.content_types = msgspec.json.decode(table, type=dict[str, ContentType])
        self.session = onnxruntime.InferenceSession(model / "model.onnx", providers=["CPUExecutionProvider"])

    def preprocess(self, sample: bytes) -> np.ndarray | Guess:
        """The model's row for this file, or at once the answer where no model is needed."""
        guess = guess_without_model(sample, self.settings)
        return features(sample, self.settings) if guess is None else guess

    def predict(self, batch: list[np.ndarray | Guess]) -> list[Guess]:
        """One run for all rows of the batch; what is already answered keeps its place in the list."""
        answered = [sample for sample in batch if isinstance(sample, Guess)]
        rows = [sample for sample in batch if not isinstance(sample, Guess)]
        if not rows:
            return answered
        by_model = iter(self.guess(np.stack(rows)))
        return [sample if isinstance(sample, Guess) else next(by_model) for sample in batch]

    def guess(self, rows: np.ndarray) -> list[Guess]:
        """The best label of each row with its score."""
        (scores,) = self.session.run(["target_label"], {"bytes": rows})
        labels = self.settings.target_labels_space
        best = scores.argmax(axis=1)
        return [Guess(labels[index], float(line[index])) for line, index in zip(scores, best, strict=True)]

    def postprocess(self, result: Guess) -> Answer:
        label = self.trusted_label(result)
        content_type = self.content_types[label]
        default_mime_type = "text/plain" if content_type.is_text else "application/octet-stream"
        return Answer(
            label=label,
            description=content_type.description or label,
            mime_type=content_type.mime_type or default_mime_type,
            group=content_type.group or "unknown",
            score=result.score,
        )

    def trusted_label(self, guess: Guess) -> str:
        """The guessed label, or where its score is too low for that label, just whether the file is text."""
        label = self.settings.overwrite_map.get(guess.label, guess.label)
        if guess.score >= self.settings.thresholds.get(guess.label, self.settings.medium_confidence_threshold):
            return label
        return "txt" if self.content_types[label].is_text else "unknown"
