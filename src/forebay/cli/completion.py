# SPDX-License-Identifier: Apache-2.0
"""`forebay completion SHELL`: print what makes a shell complete commands, flags and their values."""

from __future__ import annotations

import argparse
import sys
from typing import Any

DESCRIPTION = """\
Print a script that makes a shell complete forebay's commands, flags and values when Tab is pressed.

  bash   add to ~/.bashrc:  eval "$(forebay completion bash)"
  zsh    add to ~/.zshrc:   eval "$(forebay completion zsh)"
  fish   run once:          forebay completion fish > ~/.config/fish/completions/forebay.fish
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "completion", help="print a script that makes bash, zsh or fish complete commands", description=DESCRIPTION
    )
    parser.add_argument("shell", metavar="SHELL", choices=["bash", "zsh", "fish"], help="bash, zsh or fish")
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Print the script."""
    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["forebay"], shell=parsed.shell) + "\n")
    return 0
