# SPDX-License-Identifier: Apache-2.0
"""`forebay nucleus`: container files for a nucleus.yaml project, and what it depends on."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay._version import __version__
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.surfaces.nucleus.project_settings import NucleusConfig

DASHES = "-" * 40


def add_parser(commands: Any) -> None:
    """Add the command and those below it."""
    parser = commands.add_parser(
        "nucleus",
        help="write container files for a nucleus.yaml project",
        description="Write the Dockerfiles of a nucleus.yaml project as its original names them, or install its "
        "dependencies. For the other container files: forebay generate FOLDER. To serve it without a container: "
        "forebay serve FOLDER",
    )
    below = parser.add_subparsers(dest="nucleus_command", metavar="COMMAND", required=True)

    for name, run, what in (
        ("generate", _generate, "write the Dockerfiles of a project into the current folder"),
        ("prepare", _prepare, "install the dependencies of a project for this Python"),
    ):
        command = below.add_parser(name, help=what)
        told = "its configuration, or its folder (nucleus.yaml)"
        command.add_argument("config", nargs="?", default="nucleus.yaml", metavar="CONFIG", help=told)
        command.set_defaults(run=run, parser=command)

    execute = below.add_parser("exec", help="run a command with the folder and the variables of a project")
    execute.add_argument("--config", default="nucleus.yaml", metavar="CONFIG", help="its configuration (nucleus.yaml)")
    execute.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command to run")
    execute.set_defaults(run=_execute, parser=execute)

    version = below.add_parser("version", help="print the version")
    version.set_defaults(run=_version, parser=version)


def _generate(parsed: argparse.Namespace) -> int:
    from forebay.surfaces.nucleus.handler_image import defaulted, generate

    config = _read(parsed.config)
    files, warnings = generate(config, Path.cwd())
    _warn(warnings)
    sys.stdout.write(f"{DASHES}\n{defaulted(config)}{DASHES}\n")
    for name, text in files.items():
        try:
            Path(name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{Path(name).absolute()} cannot be written: {error.strerror}") from error
        sys.stdout.write(f"✓ generated {name}\n")
    return 0


def _prepare(parsed: argparse.Namespace) -> int:
    from forebay.surfaces.nucleus.handler_image import prepare

    prepare(_read(parsed.config, serving=True), lambda line: print(f"forebay: {line}", file=sys.stderr, flush=True))
    return 0


def _execute(parsed: argparse.Namespace) -> int:
    from forebay.surfaces.nucleus.handler_image import execute

    words = parsed.words[1:] if parsed.words[:1] == ["--"] else parsed.words
    if not words:
        parsed.parser.error("expected a command: forebay nucleus exec -- COMMAND ...")
    status = execute(_read(parsed.config, tell=False), words)
    return status if status >= 0 else 128 - status


def _version(_parsed: argparse.Namespace) -> int:
    sys.stdout.write(f"nucleus cli: {__version__}\n")
    return 0


def _read(given: str, *, serving: bool = False, tell: bool = True) -> NucleusConfig:
    from forebay.surfaces.nucleus.config import read_config

    path = Path(given)
    is_folder = os.path.isdir(path)  # noqa: PTH112 - one that nobody can look at is told where it is read
    config, warnings = read_config(path / "nucleus.yaml" if is_folder else path, serving=serving)
    if tell:
        _warn(warnings)
    return config


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        sys.stderr.write(f"forebay: warning: {warning}\n")
