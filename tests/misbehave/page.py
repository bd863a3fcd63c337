# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/misbehaving-models.md: `python -m tests.misbehave.page`."""

from __future__ import annotations

from pathlib import Path

from tests.misbehave.catalogue import WAYS, Way
from tests.misbehave.who import KINDS, LETTERS, PLACE_OF_HOOK, PLACES, who, why_not

PAGE = Path(__file__).parents[2] / "docs/reference/misbehaving-models.md"
INTRO = """\
# Misbehaving models

What happens to a request, to the others of its batch and to the worker when user code misbehaves. `tests/misbehave`
tries each cell, with another request in the same batch (where there are batches) and two later ones. Requests that a
cell does not name are answered, and lost workers are replaced. `python -m tests.misbehave.page` writes this page.

Each cell says who is hurt for each kind of worker, in this order: inline, thread, process, attached. A single entry
holds for all possible kinds.

"""
SECTIONS = {
    "raise": "Raising",
    "return": "Returning",
    "hang": "Hanging",
    "exit": "Ending the process",
    "fork": "Forking",
    "print": "Printing",
    "keep": "Keeping",
    "mutate": "Changing what belongs to others",
    "thread": "Threads",
}
LEFT_OUT = {"another hook"}


def page() -> str:
    lines = [INTRO + "| | who is hurt |", "|---|---|", *(f"| `{one}` | {text} |" for one, text in LETTERS.items()), ""]
    for kind, title in SECTIONS.items():
        ways = [way for way in WAYS if way.kind == kind and not way.hook]
        lines += [f"## {title}", "", f"| the code | {' | '.join(PLACES)} |", "|---|" + "---|" * len(PLACES)]
        lines += [f"| {way.text} | {' | '.join(_cell(way, place) for place in PLACES)} |" for way in ways]
        lines.append("")
    lines += ["## Hooks of models", "", f"| the code | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    for way in WAYS:
        if way.hook:
            place = PLACE_OF_HOOK[way.hook]
            lines.append(f"| {way.text} | {' | '.join(f'`{who(way, kind, place)}`' for kind in KINDS)} |")
    reasons = sorted(
        {why_not(way, kind, place) for way in WAYS for kind in KINDS for place in (*PLACES, "key", "load")}
    )
    lines += ["", "Not possible:", ""]
    lines += [f"- {reason}" for reason in reasons if reason and reason not in LEFT_OUT]
    return "\n".join(lines) + "\n"


def _cell(way: Way, place: str) -> str:
    found = [who(way, kind, place) for kind in KINDS]
    possible = set(found) - {"x"}
    if not possible:
        return ""
    return f"`{possible.pop()}`" if len(possible) == 1 else f"`{' '.join(found)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
