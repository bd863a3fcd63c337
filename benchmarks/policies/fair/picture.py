# SPDX-License-Identifier: Apache-2.0
"""Draw what tenants and deadlines change, simulated with the queue of the server, as a picture.

From the repository, `.venv/bin/python -m benchmarks.policies.fair.picture` takes a minute on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.policies.fair.deadlines import BATCH_S, TIMES
from benchmarks.policies.fair.main import CAPACITY_1, A, B
from benchmarks.policies.fair.simulation import Load, Simulation

OFFERED = (0.5, 0.8, 1.0, 1.3, 2.0, 3.0, 5.0, 10.0)
"""Rows that arrive, in times of what one worker can carry; the charts have these at equal distances."""

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 50, 46, 70
BEFORE, AFTER = "#0072b2", "#d55e00"
"""Distinct for colour-blind readers as well."""


def answered(seconds: float, seed: int, *, shared: bool) -> list[float]:
    """Return for each load of a flood the percentage of a light tenant's requests that are answered."""
    found: list[float] = []
    for offered in OFFERED:
        loads = [Load("flood", offered * CAPACITY_1), Load("light", 0.05 * CAPACITY_1)]
        simulation = Simulation(loads, a=A, b=B, slots=1, seconds=seconds, shared=shared, seed=seed)
        light = simulation.run()["light"]
        found.append(100 * light.answered / (light.answered + light.refused))
    return found


def in_time(seconds: float, seed: int, *, kept: bool) -> list[float]:
    """Return for each load the percentage of what the worker could answer in time that is answered in time."""
    times_s = tuple(BATCH_S * time for time in TIMES)
    found: list[float] = []
    for offered in OFFERED:
        loads = [Load("all", offered * CAPACITY_1, times_s=times_s)]
        simulation = Simulation(loads, a=A, b=B, slots=1, seconds=seconds, shared=False, seed=seed, kept=kept)
        outcome = simulation.run()["all"]
        came = outcome.in_time + outcome.late + outcome.refused
        found.append(100 * outcome.in_time / min(came, CAPACITY_1 * 0.8 * seconds))
    return found


def picture(panels: Mapping[str, tuple[str, Mapping[str, Sequence[float]]]]) -> str:
    """Draw charts side by side: by their titles, the name of the loads, and two lines of percentages by their names."""
    width, height = LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 80
    style = "text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{' / '.join(panels)}</title><style>{style}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, (title, (loads, lines)) in enumerate(panels.items()):
        parts += _panel(LEFT + number * (WIDTH + GAP), title, loads, lines)
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: float, title: str, loads: str, lines: Mapping[str, Sequence[float]]) -> list[str]:
    bottom = TOP + HEIGHT
    step = WIDTH / (len(OFFERED) - 1)

    def y(percent: float) -> float:
        return bottom - min(percent, 100.0) / 100 * HEIGHT

    parts = [f'<text x="{left}" y="{TOP - 18}" font-weight="bold">{title}</text>']
    for percent in range(0, 101, 20):
        parts.append(f'<path class="grid" d="M{left} {y(percent):.1f}h{WIDTH}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent}</text>')
    for place, offered in enumerate(OFFERED):
        x = left + place * step
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{offered:g}</text>')
    parts.append(f'<text x="{left + WIDTH / 2:.1f}" y="{bottom + 36}" text-anchor="middle">{loads}</text>')
    for number, (name, line) in enumerate(lines.items()):
        colour, dashes = (AFTER, "") if number else (BEFORE, ' stroke-dasharray="5 4"')
        points = " ".join(f"{left + place * step:.1f},{y(percent):.1f}" for place, percent in enumerate(line))
        x, height = left + number * WIDTH / 2, bottom + 60
        parts.append(f'<polyline class="line" stroke="{colour}"{dashes} points="{points}"/>')
        parts.append(f'<path class="line" stroke="{colour}"{dashes} d="M{x} {height - 4}h24"/>')
        parts.append(f'<text x="{x + 30}" y="{height}">{name}</text>')
    return parts


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--seed", type=int, default=1)
    default = Path(__file__).parents[3] / "docs/explanation/fair-shares.svg"
    parser.add_argument("--picture", type=Path, default=default)
    parsed = parser.parse_args()
    seconds, seed = parsed.seconds, parsed.seed
    light = {
        "one line for all": answered(seconds, seed, shared=False),
        "tenants": answered(seconds, seed, shared=True),
    }
    due = {
        "timeouts only": in_time(seconds, seed, kept=False),
        "deadlines kept": in_time(seconds, seed, kept=True),
    }
    for name, line in {**light, **due}.items():
        print(f"{name}: {', '.join(f'{percent:.1f}' for percent in line)}")
    panels = {
        "Answers for a light tenant, %": ("load of the other tenant", light),
        "Answered in time, % of what is possible": ("load of all", due),
    }
    parsed.picture.write_text(picture(panels))


if __name__ == "__main__":
    main()
