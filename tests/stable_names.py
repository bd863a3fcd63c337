# SPDX-License-Identifier: Apache-2.0
"""Writes stable_names.txt, all names that `docs/reference/stability.md` promises: `python -m tests.stable_names`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import forebay
import forebay.testing
from forebay.cli.main import commands_of
from forebay.server.config import SECTIONS
from forebay.types.settings import declared

PAGE = Path(__file__).with_suffix(".txt")
METRICS = Path(__file__).parents[1] / "docs/reference/metrics.md"


def stable_names() -> str:
    """One name in each line."""
    names = [f"forebay.{name}" for name in forebay.__all__]
    names += [f"forebay.testing.{name}" for name in forebay.testing.__all__]
    for command, parser in commands_of().items():
        names += [f"{command} {flag}" for flag in flags_of(parser)]
    for struct in SECTIONS:
        for setting in declared(struct).values():
            names += [f"{struct.__name__}: {setting.key}", *([setting.variable] if setting.variable else [])]
    names += set(re.findall(r"\b(?:forebay|gen_ai|error)_[a-z_]*[a-z]\b", METRICS.read_text()))
    return "".join(f"{name}\n" for name in sorted(set(names)))


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """The flags of a command and of those below it."""
    found = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [f"{name} {flag}" for name, below in action.choices.items() for flag in flags_of(below)]
    return found


if __name__ == "__main__":
    PAGE.write_text(stable_names())
