# SPDX-License-Identifier: Apache-2.0
"""Makes the three pictures of the demo, and beside each the text that is on it.

Every run makes the same pictures: what is random comes from a seed. The letters are those of the fonts inside OpenCV.

    python examples/ocr/pictures/make.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

HERE = Path(__file__).resolve().parent


class Line(NamedTuple):
    """A line of print; a tab divides it into a left and a right part."""

    text: str
    size: int = 30
    font: str = "sans"
    weight: int = 400


RECEIPT = [
    Line("Harbour Street Bakery", 42, weight=700),
    Line("14 Harbour Street, Kiel", 28),
    Line("Tel. 0431 555 0187", 28),
    Line("Receipt 20871\t14.09.2026", 28),
    Line("2 x Rye bread\t7,80", 32),
    Line("1 x Poppy seed roll\t1,35", 32),
    Line("3 x Apple turnover\t8,70", 32),
    Line("1 x Coffee, large\t3,90", 32),
    Line("Subtotal\t21,75", 32),
    Line("VAT 7 %\t1,42", 32),
    Line("TOTAL EUR\t21,75", 40, weight=700),
    Line("Paid by card\t**** 4921", 28),
    Line("Thank you for your visit!", 30, "italic"),
]

NOTICE = [
    Line("WATER SHUT-OFF", 66, weight=800),
    Line("Thursday, 22 October 2026", 42, weight=600),
    Line("from 8:30 to 13:00", 42, weight=600),
    Line("Work on the main pipe in Mill Lane requires", 30, "uni"),
    Line("us to close the supply of houses 3 to 27.", 30, "uni"),
    Line("Please keep taps closed during this time.", 30, "uni"),
    Line("Drinking water is available at the depot.", 30, "uni"),
    Line("Questions? Call 0800 723 4411", 36, weight=600),
    Line("City Waterworks, Department 5", 28, "italic"),
]

LABEL = [
    Line("FRAGILE - THIS SIDE UP", 50, weight=800),
    Line("To: Dr. Maria Lindqvist", 38),
    Line("Institute of Hydrology", 38),
    Line("Canal Road 118, Building C", 38),
    Line("SE-752 36 Uppsala", 38, weight=600),
    Line("Order number: FB-2026-004817", 32, "uni"),
    Line("Weight: 12.4 kg\tParcel 2 of 5", 32, "uni"),
    Line("Contents: flow sensors, cables", 32, "uni"),
]


def page(lines: Sequence[Line], width: int, paper: tuple[int, int, int], ink: tuple[int, int, int]) -> np.ndarray:
    """Lines of print on a sheet."""
    margin = 50
    sheet = np.full((2 * margin + sum(round(line.size * 1.75) for line in lines), width, 3), paper, np.uint8)
    bottom = margin
    for line in lines:
        bottom += round(line.size * 1.75)
        baseline = bottom - round(line.size * 0.5)
        face = cv2.FontFace(line.font)
        left, _, right = line.text.partition("\t")
        cv2.putText(sheet, left, (margin, baseline), ink, face, line.size, line.weight)
        if right:
            end = (width - margin, baseline)
            cv2.putText(sheet, right, end, ink, face, line.size, line.weight, cv2.PUT_TEXT_ALIGN_RIGHT)
    return sheet


def laid_on(table: np.ndarray, sheet: np.ndarray, corners: Sequence[tuple[float, float]]) -> np.ndarray:
    """The sheet on the table, its corners where they are asked for, with a soft shadow below it."""
    height, width = sheet.shape[:2]
    size = table.shape[1::-1]
    flat = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32)
    transform = cv2.getPerspectiveTransform(flat, np.array(corners, np.float32))
    laid = cv2.warpPerspective(sheet, transform, size, flags=cv2.INTER_AREA).astype(np.float32)
    cover = cv2.warpPerspective(np.ones((height, width), np.float32), transform, size)[..., np.newaxis]
    below = cv2.GaussianBlur(np.roll(cover, (14, 10), axis=(0, 1)), (0, 0), 9)[..., np.newaxis]
    return (table * (1 - 0.55 * below)) * (1 - cover) + laid * cover


def wood(width: int, height: int, noise: np.random.Generator) -> np.ndarray:
    """Boards with a grain along them."""
    grain = cv2.resize(noise.normal(size=(height // 3, 12)), (width, height), interpolation=cv2.INTER_CUBIC)
    boards = np.sin(np.arange(height) / 26)[:, np.newaxis] * 4
    return np.clip(np.array((62, 96, 138)) + (9 * grain + boards)[..., np.newaxis], 0, 255)


def wall(width: int, height: int, noise: np.random.Generator) -> np.ndarray:
    """Rough plaster."""
    rough = cv2.GaussianBlur(noise.normal(size=(height, width)), (0, 0), 2) * 45
    return np.clip(np.array((150, 158, 160)) + rough[..., np.newaxis], 0, 255)


def photographed(
    scene: np.ndarray, noise: np.random.Generator, *, shade: float, blur: float, grain: float
) -> np.ndarray:
    """The scene with light from one side, the edge of somebody's shadow, a soft lens and a noisy sensor."""
    height, width = scene.shape[:2]
    down, across = np.mgrid[0:height, 0:width] / (height, width)[0]
    light = 1.05 - 0.25 * across
    shadow = 1 / (1 + np.exp(-(across + 0.45 * down - 0.75) * 18))
    lit = scene * (light * (1 - shade * shadow))[..., np.newaxis]
    lit = cv2.GaussianBlur(lit, (0, 0), blur)
    return np.clip(lit + noise.normal(scale=grain, size=lit.shape), 0, 255).astype(np.uint8)


def write(path: Path, picture: np.ndarray, lines: Sequence[Line]) -> None:
    cv2.imwrite(str(path.with_suffix(".jpg")), picture, [cv2.IMWRITE_JPEG_QUALITY, 80])
    text = "".join(line.text.replace("\t", " ") + "\n" for line in lines)
    path.with_suffix(".txt").write_text(text, encoding="utf-8")


def make(folder: Path) -> None:
    noise = np.random.default_rng(20260914)
    receipt = page(RECEIPT, 620, (236, 243, 246), (52, 48, 46))
    scene = laid_on(wood(900, 1080, noise), receipt, [(196, 60), (790, 132), (684, 1010), (86, 938)])
    write(folder / "receipt", photographed(scene, noise, shade=0.45, blur=0.7, grain=6), RECEIPT)

    notice = page(NOTICE, 820, (210, 238, 246), (60, 30, 20))
    scene = laid_on(wall(1100, 860, noise), notice, [(130, 120), (985, 60), (1010, 770), (150, 720)])
    write(folder / "notice", photographed(scene, noise, shade=0.35, blur=0.9, grain=9), NOTICE)

    label = page(LABEL, 800, (228, 232, 232), (30, 30, 30))
    scene = laid_on(wood(1100, 900, noise), label, [(960, 800), (110, 720), (150, 120), (1010, 190)])
    write(folder / "label", photographed(scene, noise, shade=0.4, blur=0.8, grain=9), LABEL)


if __name__ == "__main__":
    make(HERE)
