# SPDX-License-Identifier: Apache-2.0
"""What stands before, between and behind the three networks: pictures in, arrays for a network out, and back.

Pictures are uint8 arrays of shape (height, width, 3), blue first as OpenCV has them. A quad is a float32 array of shape
(4, 2): the corners of a line of text from where its reading starts, then along it and round.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

STRIDE = 32
"""The detector halves a picture five times, so its sides are multiples of this."""

MAX_LINES = 1000
"""A picture of nothing but specks would keep the reader busy for minutes."""

LINE_HEIGHT = 48
MIN_LINE_WIDTH, MAX_LINE_WIDTH = 48, 3200
LINE_WIDTH_STEP = 16
"""Widths are rounded up to multiples of it, so that onnxruntime sees few shapes and keeps its plans for them."""

TURN_WIDTH = 192
BLANK = 0
"""The reader's class for 'no character here'."""
MIN_SPACE = 0.05


class Box(NamedTuple):
    """Where a line of text is, and how sure the detector is of that."""

    quad: np.ndarray
    score: float


class Text(NamedTuple):
    """What a line says, and how sure the reader is of its characters on average."""

    text: str
    score: float


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def decoded(encoded: bytes, max_pixels: int) -> np.ndarray:
    """Decodes a JPEG or PNG file, upright as its EXIF data says.

    Raises:
        ValueError: If it is none of these, or has more pixels than allowed.
    """
    # The size is read first: a small file may unpack to gigabytes.
    size = picture_size(encoded)
    if size is None:
        raise ValueError("expected a JPEG or PNG file as the body; with curl, send it with --data-binary")
    if math.prod(size) > max_pixels:
        raise ValueError(f"the picture has {size[0]} x {size[1]} pixels, {max_pixels} are taken; make it smaller")
    picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    if picture is None:
        raise ValueError("the file starts like a picture and cannot be decoded; it may be cut off")
    return picture


def picture_size(encoded: bytes) -> tuple[int, int] | None:
    """Width and height that a PNG or JPEG file announces; None for anything else."""
    if encoded[:8] == b"\x89PNG\r\n\x1a\n" and len(encoded) >= 24:
        return int.from_bytes(encoded[16:20], "big"), int.from_bytes(encoded[20:24], "big")
    if encoded[:2] != b"\xff\xd8":
        return None
    position = 2
    while position + 9 <= len(encoded) and encoded[position] == 0xFF:
        kind = encoded[position + 1]
        if 0xC0 <= kind <= 0xCF and kind not in {0xC4, 0xC8, 0xCC}:  # a start of frame, of whatever coding
            height = int.from_bytes(encoded[position + 5 : position + 7], "big")
            return int.from_bytes(encoded[position + 7 : position + 9], "big"), height
        position += 1 if kind == 0xFF else 2 + int.from_bytes(encoded[position + 2 : position + 4], "big")
    return None


def encoded_png(picture: np.ndarray) -> bytes:
    done, content = cv2.imencode(".png", picture)
    if not done:
        raise ValueError(f"a picture of shape {picture.shape} cannot be written as PNG")
    return content.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# Finding lines


def detector_input(picture: np.ndarray, longest_side: int) -> np.ndarray:
    """The picture as the detector takes it: shrunk to the longest side, sides rounded to the stride, normalised.

    Returns:
        float32 of shape (1, 3, height, width).
    """
    height, width = picture.shape[:2]
    scale = min(1.0, longest_side / max(height, width))
    size = [max(STRIDE, round(side * scale / STRIDE) * STRIDE) for side in (width, height)]
    return normalised(cv2.resize(picture, size))[np.newaxis]


def normalised(picture: np.ndarray) -> np.ndarray:
    """Values from -1 to 1, channels first."""
    return np.ascontiguousarray(picture.transpose(2, 0, 1), np.float32) / 127.5 - 1.0


def boxes_of(
    heat: np.ndarray, size: tuple[int, int], *, threshold: float = 0.3, min_score: float = 0.5, unclip: float = 1.6
) -> list[Box]:
    """Turns the detector's heat map into boxes (differentiable binarization, Liao et al. 2020).

    The network was trained to show lines thinner than they are, so that neighbours do not touch. Each blob above the
    threshold is wrapped into the smallest rectangle, and that is widened again by as much as it was shrunk.

    Args:
        heat: Shape (height, width), from 0 to 1.
        size: Width and height of the picture that the boxes are for.
        threshold: Pixels above it are text.
        min_score: Blobs whose mean heat is below it are none.
        unclip: Area over perimeter, times this, is the distance by which a rectangle grows on each side.
    """
    blobs = cv2.dilate((heat > threshold).astype(np.uint8), np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(blobs, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    scale = np.array(size, np.float32) / np.array(heat.shape[::-1], np.float32)
    found = []
    for contour in contours[:MAX_LINES]:
        centre, sides, angle = cv2.minAreaRect(contour)
        if min(sides) < 3:
            continue
        score = mean_inside(heat, cv2.boxPoints((centre, sides, angle)))
        grow = 2 * unclip * sides[0] * sides[1] / (2 * (sides[0] + sides[1]))
        grown = (sides[0] + grow, sides[1] + grow)
        if score >= min_score and min(grown) >= 5:
            quad = cv2.boxPoints((centre, grown, angle)) * scale
            found.append(Box(from_reading_start(quad), score))
    return found


def mean_inside(heat: np.ndarray, corners: np.ndarray) -> float:
    left, top = np.maximum(np.floor(corners.min(axis=0)).astype(int), 0)
    right, bottom = np.ceil(corners.max(axis=0)).astype(int) + 1
    part = heat[top:bottom, left:right]
    mask = np.zeros(part.shape, np.uint8)
    cv2.fillConvexPoly(mask, np.round(corners - (left, top)).astype(np.int32), 1)
    return float(cv2.mean(part, mask)[0])


def from_reading_start(corners: np.ndarray) -> np.ndarray:
    """Starts a rectangle's corners where its text would start: lines are long, and lean to the right more than left."""
    sides = np.roll(corners, -1, axis=0) - corners
    lengths = np.hypot(*sides.T)
    is_long = lengths >= lengths.max() / 1.5  # a short word may be about as high as it is wide
    rightwards = np.where(is_long, sides[:, 0] / np.maximum(lengths, 1e-6), -np.inf)
    return np.roll(corners, -int(rightwards.argmax()), axis=0).astype(np.float32)


def straightened(picture: np.ndarray, quad: np.ndarray) -> np.ndarray:
    """Cuts a line out and lays it level."""
    width = max(1, round(max(math.dist(quad[0], quad[1]), math.dist(quad[3], quad[2]))))
    height = max(1, round(max(math.dist(quad[0], quad[3]), math.dist(quad[1], quad[2]))))
    level = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32)
    transform = cv2.getPerspectiveTransform(quad, level)
    return cv2.warpPerspective(picture, transform, (width, height), None, cv2.INTER_CUBIC, cv2.BORDER_REPLICATE)


# ---------------------------------------------------------------------------------------------------------------------
# Reading lines


def classifier_input(line: np.ndarray) -> np.ndarray:
    """The start of a line in the fixed size of the classifier: float32 of shape (3, 48, 192), padded with zeros."""
    return padded(line, min(TURN_WIDTH, scaled_width(line)), TURN_WIDTH)


def reader_width(line: np.ndarray) -> int:
    """How wide the reader's input for this line is; lines of one width share a batch without padding."""
    width = min(max(scaled_width(line), MIN_LINE_WIDTH), MAX_LINE_WIDTH)
    return -(-width // LINE_WIDTH_STEP) * LINE_WIDTH_STEP


def reader_input(line: np.ndarray) -> np.ndarray:
    """A line in the reader's height: float32 of shape (3, 48, `reader_width(line)`)."""
    room = reader_width(line)
    return padded(line, min(scaled_width(line), room), room)


def scaled_width(line: np.ndarray) -> int:
    height, width = line.shape[:2]
    return max(1, math.ceil(LINE_HEIGHT * width / height))


def padded(line: np.ndarray, width: int, room: int) -> np.ndarray:
    array = np.zeros((3, LINE_HEIGHT, room), np.float32)
    array[:, :, :width] = normalised(cv2.resize(line, (width, LINE_HEIGHT)))
    return array


def text_of(scores: np.ndarray, characters: Sequence[str]) -> Text:
    """Reads the network's scores of shape (steps, classes): the best class of each step, repeats and blanks left out.

    A space is read wherever its class, the last, has `MIN_SPACE` somewhere between two characters. It seldom is the
    best one there: to this network a gap between words looks much like the gap between any two characters.
    """
    space = scores.shape[1] - 1
    best = scores.argmax(axis=1)
    is_new = np.append(True, best[1:] != best[:-1])
    kept = np.flatnonzero(is_new & (best != BLANK) & (best != space))
    if not kept.size:
        return Text("", 0.0)
    has_space_after = np.maximum.reduceat(scores[:, space], kept) >= MIN_SPACE
    text = "".join(characters[best[step]] + " " * bool(gap) for step, gap in zip(kept, has_space_after, strict=True))
    return Text(text.rstrip(), float(scores[kept, best[kept]].mean()))


# ---------------------------------------------------------------------------------------------------------------------
# The page


def in_reading_order(quads: Sequence[np.ndarray]) -> list[list[int]]:
    """Groups lines into rows, however the page lies.

    Returns:
        The places of the quads: rows from the top of the page to its bottom, each from the left to the right.
    """
    if not quads:
        return []
    along = np.array([quad[1] - quad[0] for quad in quads])
    direction = along.sum(axis=0)  # long lines tell best how the page lies
    direction /= max(float(np.hypot(*direction)), 1e-6)
    centres = np.array([quad.mean(axis=0) for quad in quads])
    across = centres @ direction
    down = centres @ np.array([-direction[1], direction[0]])
    heights = np.array([math.dist(quad[0], quad[3]) for quad in quads])
    rows: list[list[int]] = []
    for place in (int(index) for index in down.argsort(kind="stable")):
        last = rows[-1][0] if rows else place
        if rows and down[place] - down[last] < 0.5 * min(heights[place], heights[last]):
            rows[-1].append(place)
        else:
            rows.append([place])
    return [sorted(row, key=lambda index: across[index]) for row in rows]


def turned_round(quad: np.ndarray) -> np.ndarray:
    """The same corners for a text that stands on its head."""
    return np.roll(quad, -2, axis=0)


def drawn(picture: np.ndarray, quads: Sequence[np.ndarray]) -> np.ndarray:
    """A copy of the picture with the lines framed, and each frame's number where its reading starts."""
    copy = picture.copy()
    thickness = max(1, round(max(picture.shape[:2]) / 500))
    for number, quad in enumerate(quads, start=1):
        cv2.polylines(copy, [np.round(quad).astype(np.int32)], isClosed=True, color=(40, 40, 230), thickness=thickness)
        corner = tuple(int(value) for value in np.round(quad[0]))
        cv2.circle(copy, corner, 3 * thickness, (40, 160, 40), cv2.FILLED)
        cv2.putText(copy, str(number), corner, cv2.FONT_HERSHEY_SIMPLEX, 0.4 * thickness, (160, 60, 20), thickness)
    return copy
