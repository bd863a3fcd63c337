# SPDX-License-Identifier: Apache-2.0
"""Draws how long answers took: bars for a terminal, and a picture of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0, 99.9)
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_WIDTH: Final = 44
_ROWS: Final = 16


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the value that so many percent of sorted values do not exceed."""
    return ordered[min(max(math.ceil(len(ordered) * percent / 100) - 1, 0), len(ordered) - 1)]


def spelled(seconds: float) -> str:
    """Return a time in a unit that suits it."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def histogram(took: Sequence[float], rows: int = _ROWS) -> list[tuple[float, float, int]]:
    """Count times in steps that grow evenly, from the least to the 99.9th percentile; the last step takes the rest."""
    ordered = sorted(took)
    lowest, highest = max(ordered[0], 1e-6), max(percentile(ordered, 99.9), ordered[0] * 1.01, 2e-6)
    step = (highest / lowest) ** (1 / rows)
    bounds = [lowest * step**number for number in range(rows + 1)]
    counts = [0] * rows
    for value in ordered:
        number = math.log(max(value, lowest) / lowest) / math.log(step) if step > 1 else 0
        counts[min(int(number), rows - 1)] += 1
    return [(bounds[number], bounds[number + 1], counts[number]) for number in range(rows)]


def bars(took: Sequence[float]) -> list[str]:
    """Draw times for a terminal, a line for each step."""
    steps = histogram(took)
    most = max(count for *_, count in steps)
    lines: list[str] = []
    for lowest, _, count in steps:
        eighths = round(count / most * _WIDTH * 8)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        if count and not bar:
            bar = "▏"
        lines.append(f"{spelled(lowest):>8} {bar:<{_WIDTH}} {count or '':>8}".rstrip())
    return lines


def svg(title: str, took: Sequence[float], ended: Sequence[float], seconds: float) -> str:
    """Draw times as a picture: how they are distributed, and how they changed during the run."""
    look = 'width="920" height="340" viewBox="0 0 920 340" font-family="sans-serif" font-size="12" fill="#222"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {look}>',
        f"<title>{escape(title)}</title>",
        '<rect width="920" height="340" fill="#fff"/>',
        f'<text x="20" y="24" font-size="15">{escape(title)}</text>',
        *_spread(took, 60, 50, 370, 240),
        *_course(took, ended, seconds, 520, 50, 370, 240),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _spread(took: Sequence[float], x: int, y: int, width: int, height: int) -> list[str]:
    steps = histogram(took, 40)
    most = max(count for *_, count in steps)
    wide = width / len(steps)
    parts = [f'<text x="{x}" y="{y - 6}">answers by their time, {most} at most</text>']
    for number, (_, _, count) in enumerate(steps):
        high = count / most * height
        parts.append(
            f'<rect x="{x + number * wide:.1f}" y="{y + height - high:.1f}" width="{wide - 1:.1f}" '
            f'height="{high:.1f}" fill="#4477aa"/>'
        )
    below = y + height + 16
    labels = [
        f'<text x="{x + number * wide:.1f}" y="{below}" text-anchor="middle">{spelled(steps[number][0])}</text>'
        for number in (0, 10, 20, 30, 39)
    ]
    return [*parts, *labels, _frame(x, y, width, height)]


def _course(
    took: Sequence[float], ended: Sequence[float], seconds: float, x: int, y: int, width: int, height: int
) -> list[str]:
    slices = 40
    found: list[list[float]] = [[] for _ in range(slices)]
    for time_s, at_s in zip(took, ended, strict=True):
        found[min(int(at_s / seconds * slices), slices - 1)].append(time_s)
    curves: dict[float, list[tuple[float, float]]] = {50.0: [], 99.0: []}
    for number, times in enumerate(found):
        if times:
            ordered = sorted(times)
            for percent, points in curves.items():
                points.append(((number + 0.5) / slices, max(percentile(ordered, percent), 1e-6)))
    values = [value for points in curves.values() for _, value in points]
    lowest, highest = min(values) / 1.1, max(values) * 1.1
    parts = [f'<text x="{x}" y="{y - 6}">over the run: 99 of 100 (red), half (blue)</text>']
    for percent, points in curves.items():
        line = " ".join(
            f"{x + at * width:.1f},{y + height - math.log(value / lowest) / math.log(highest / lowest) * height:.1f}"
            for at, value in points
        )
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{"#4477aa" if percent == 50.0 else "#cc3311"}" '
            'stroke-width="1.5"/>'
        )
    for part in (0.0, 0.5, 1.0):
        value = lowest * (highest / lowest) ** part
        parts.append(
            f'<text x="{x - 6}" y="{y + height - part * height + 4:.1f}" text-anchor="end">{spelled(value)}</text>'
        )
        parts.append(
            f'<text x="{x + part * width:.1f}" y="{y + height + 16}" text-anchor="middle">{seconds * part:.3g} s</text>'
        )
    return [*parts, _frame(x, y, width, height)]


def _frame(x: int, y: int, width: int, height: int) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#999"/>'
