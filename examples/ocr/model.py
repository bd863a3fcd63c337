# SPDX-License-Identifier: Apache-2.0
"""Reads the text in a photograph: three networks and what stands between them, as one endpoint.

The networks are the ONNX files of the rapidocr-onnxruntime wheel (PP-OCR: a detector, a classifier of orientation and
a reader). The wheel is only a container: nothing of its code is imported, and it may be installed with ``--no-deps``.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import cv2
import msgspec
import numpy as np
import onnxruntime
import vision
from vision import Box, Text

from forebay import InvalidRequest, Media, Model, compose, node

LONGEST_SIDE = 960
"""The detector sees pictures no larger than this; lines are cut out of the picture as it came."""

MAX_PIXELS = 40_000_000
TURNED = 0.9
"""How sure the classifier must be that a line stands on its head."""

MIN_SCORE = 0.5
"""What the reader is less sure of is no text but a pattern that looks like one."""

LARGE = {"worker_kind": "thread", "workers": 2}
"""How the two large networks are run. A run keeps one core busy, and two go on at a time: a second core does more for a
second picture than for the same one. Batches, on a CPU, do nothing for convolutions."""

cv2.setNumThreads(1)  # the threads that run the nodes are parallel enough


class Line(NamedTuple):
    """A line cut out of the picture, upright, and whether it had to be turned for that."""

    pixels: np.ndarray
    was_turned: bool


class PrintedLine(msgspec.Struct):
    """A line of text: what it says, how sure the reader is, and its corners (x, y) from where its reading starts."""

    text: str
    score: float
    corners: list[tuple[float, float]]


class Page(msgspec.Struct):
    """Everything that could be read, in reading order; in `text`, lines side by side stand in one row."""

    text: str
    lines: list[PrintedLine]


def model_file(name: str) -> Path:
    """Where the wheel is installed, found without running any of its code."""
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        cure = "pip install --no-deps --ignore-requires-python rapidocr-onnxruntime==1.4.4"
        raise RuntimeError(f"the OCR example needs the models of the rapidocr-onnxruntime wheel: {cure}")
    return Path(spec.submodule_search_locations[0]) / "models" / name


def session_of(name: str) -> onnxruntime.InferenceSession:
    """A network that computes in the thread that calls it and in no other."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model_file(name), options, providers=["CPUExecutionProvider"])


class Detect(Model):
    """Finds lines of text. Pictures differ in size, so each is a run of its own."""

    max_batch_size = 1

    def load(self) -> None:
        self.session = session_of("ch_PP-OCRv4_det_infer.onnx")

    def predict(self, batch: list[np.ndarray]) -> list[list[Box]]:
        return [self.boxes(picture) for picture in batch]

    def boxes(self, picture: np.ndarray) -> list[Box]:
        (heat,) = self.session.run(None, {"x": vision.detector_input(picture, LONGEST_SIDE)})
        height, width = picture.shape[:2]
        return vision.boxes_of(heat[0, 0], (width, height))


class Turn(Model):
    """Puts lines on their feet. They are small, so the lines of all pictures at hand go through in one run."""

    max_batch_size = 16

    def load(self) -> None:
        self.session = session_of("ch_ppocr_mobile_v2.0_cls_infer.onnx")

    def predict(self, batch: list[np.ndarray]) -> list[Line]:
        (scores,) = self.session.run(None, {"x": np.stack([vision.classifier_input(line) for line in batch])})
        is_turned = scores[:, 1] > TURNED
        return [
            Line(cv2.rotate(line, cv2.ROTATE_180), True) if turned else Line(line, False)
            for line, turned in zip(batch, is_turned, strict=True)
        ]


class Read(Model):
    """Reads lines. Those of one width may share a run: none is padded for another's sake.

    On a CPU a line costs the same in a batch as alone, and a larger batch would only keep the second worker waiting.
    """

    max_batch_size = 4

    def load(self) -> None:
        self.session = session_of("ch_PP-OCRv4_rec_infer.onnx")
        characters = self.session.get_modelmeta().custom_metadata_map["character"].split("\n")
        self.characters = ["", *characters, " "]

    @staticmethod
    def batch_key(line: Line) -> int:
        return vision.reader_width(line.pixels)

    def predict(self, batch: list[Line]) -> list[Text]:
        (scores,) = self.session.run(None, {"x": np.stack([vision.reader_input(line.pixels) for line in batch])})
        return [vision.text_of(steps, self.characters) for steps in scores]


@node
def decode(image: bytes) -> np.ndarray:
    try:
        return vision.decoded(image, MAX_PIXELS)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


@node
def crop(picture: np.ndarray, boxes: list[Box]) -> list[np.ndarray]:
    return [vision.straightened(picture, box.quad) for box in boxes]


@node
def layout(boxes: list[Box], lines: list[Line], texts: list[Text]) -> Page:
    """Puts the lines in the order in which a person would read them."""
    found = [
        (vision.turned_round(box.quad) if line.was_turned else box.quad, text)
        for box, line, text in zip(boxes, lines, texts, strict=True)
        if text.score >= MIN_SCORE
    ]
    rows = vision.in_reading_order([quad for quad, _ in found])
    return Page(
        text="\n".join(" ".join(found[place][1].text for place in row) for row in rows),
        lines=[
            PrintedLine(
                found[place][1].text, round(found[place][1].score, 4), found[place][0].astype(float).round(1).tolist()
            )
            for row in rows
            for place in row
        ],
    )


@node
def answer(picture: np.ndarray, page: Page, *, draw: bool) -> Page | Media:
    """The page, or if asked for the picture with its lines framed."""
    if not draw:
        return page
    quads = [np.array(line.corners, np.float32) for line in page.lines]
    return Media(vision.encoded_png(vision.drawn(picture, quads)), "image/png")


detect = node(Detect, **LARGE)
turn = node(Turn, worker_kind="thread")
read = node(Read, **LARGE)


@compose
def ocr(image: bytes, *, draw: bool = False) -> Page | Media:
    picture = decode(image)
    boxes = detect(picture)
    lines = turn.map(crop(picture, boxes))
    page = layout(boxes, lines, read.map(lines))
    return answer(picture, page, draw=draw)
