# SPDX-License-Identifier: Apache-2.0
"""The latency of the five designs over the load, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP = 300, 240, 46, 46
GAP = 96
COLOURS = {"S": "#777777", "A": "#0072b2", "B": "#cc79a7", "C": "#d55e00", "D": "#009e73"}
"""Distinct for colour-blind readers as well."""

Line = Sequence[tuple[float, float]]


def picture(title: str, panels: Mapping[str, Mapping[str, Line]]) -> str:
    """Draw panels side by side.

    Args:
        title: What all of them show.
        panels: By their title, the lines by design: loads and milliseconds.

    Returns:
        An SVG document.
    """
    width = LEFT + len(panels) * (WIDTH + GAP)
    style = "text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 44}" role="img">',
        f"<title>{title}</title><style>{style}</style>",
        f'<rect width="{width}" height="{TOP + HEIGHT + 44}" fill="#fff"/>',
    ]
    for number, (name, lines) in enumerate(panels.items()):
        parts += _panel(LEFT + number * (WIDTH + GAP), name, lines)
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: float, name: str, lines: Mapping[str, Line]) -> list[str]:
    step = 10
    top_ms = step * (int(max(ms for line in lines.values() for _, ms in line) / step) + 1)

    def x(load: float) -> float:
        return left + load * WIDTH

    def y(ms: float) -> float:
        return TOP + HEIGHT * (1 - ms / top_ms)

    parts = [f'<text x="{left}" y="{TOP - 18}" font-weight="bold">{name}</text>']
    for ms in range(0, top_ms + 1, step):
        parts.append(f'<path class="grid" d="M{left} {y(ms):.1f}h{WIDTH}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms}</text>')
    parts += [
        f'<text x="{x(load):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{load:g}</text>'
        for load in (0, 0.2, 0.4, 0.6, 0.8, 1)
    ]
    parts.append(f'<text x="{x(0.5):.1f}" y="{TOP + HEIGHT + 36}" text-anchor="middle">load</text>')
    labels: list[tuple[float, str]] = []
    for design, line in lines.items():
        points = " ".join(f"{x(load):.1f},{y(ms):.1f}" for load, ms in line)
        dashed = ' stroke-dasharray="5 4"' if design == "S" else ""
        parts.append(f'<polyline class="line" stroke="{COLOURS[design]}"{dashed} points="{points}"/>')
        labels.append((y(line[-1][1]), design))
    return parts + _labels(x(lines["S"][-1][0]) + 6, labels)


def _labels(x: float, labels: list[tuple[float, str]]) -> list[str]:
    """Write a design at the end of its line, and none over another one."""
    parts: list[str] = []
    below = 0.0
    for y, design in sorted(labels):
        below = max(y + 4, below + 13)
        parts.append(f'<text x="{x:.1f}" y="{below:.1f}" style="fill:{COLOURS[design]}">{design}</text>')
    return parts
