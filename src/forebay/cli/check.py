# SPDX-License-Identifier: Apache-2.0
"""`forebay check TARGET`: say what would be served, or what is wrong; loads no model and opens no port."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from forebay.cli.serve import add_options, options_of


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "check",
        help="validate a target and print what would be served",
        description="Validate a model file or a project and print what `forebay serve` would serve. "
        "The file is imported, no model is loaded and no port is opened.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Build the project and print its summary."""
    from forebay.surfaces import build

    project = build(parsed.target, options_of(parsed))
    for warning in project.warnings:
        sys.stderr.write(f"forebay: warning: {warning}\n")
    for line in project.summary:
        sys.stdout.write(line + "\n")
    return 0
