# SPDX-License-Identifier: Apache-2.0
"""`forebay check TARGET`: say what would be served, or what is wrong; loads no model and opens no port."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.cli.serve import USAGE, add_options, options_of
from forebay.errors import ConfigError
from forebay.types.did_you_mean import either

if TYPE_CHECKING:
    from forebay.graph.drawing.draw import Form
    from forebay.surfaces.contract import Project

_FORMS: Final[dict[str, Form]] = {".svg": "svg", ".mmd": "mermaid", ".md": "mermaid", ".txt": "text"}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "check",
        help="check a target without serving it",
        description="Print the models that `forebay serve` would serve with the same TARGET and options, or the error. "
        "Python files are imported, and model files and those of TLS are read; no other model is loaded, and no port "
        "is opened.",
        usage=USAGE,
    )
    add_options(parser)
    parser.add_argument("--settings", action="store_true", help="print every setting in force and its source")
    group = parser.add_argument_group("drawing")
    group.add_argument(
        "--draw",
        nargs="?",
        const="text",
        choices=["text", "mermaid", "svg"],
        help="print the graph of the target instead: as text (the default), Mermaid or SVG",
    )
    group.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="output file of the drawing; its ending (.svg, .mmd, .txt) sets the format",
    )
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Build the project and print its summary or its settings, or draw its graphs."""
    from forebay.surfaces.lookup import build
    from forebay.surfaces.project_server import require_ports

    options = options_of(parsed)
    project = build(options.target, options)
    require_ports(project)
    for warning in [*options.warnings, *project.warnings]:
        sys.stderr.write(f"forebay: warning: {warning}\n")
    if problems := [*project.problems, *project.look()]:
        raise ConfigError("\n".join(problems))
    output: Path | None = parsed.output
    if parsed.settings:
        from forebay.cli.settings_in_force import lines_of

        sys.stdout.writelines(line + "\n" for line in lines_of(options, project.app.served))
        return 0
    if parsed.draw is None and output is None:
        sys.stdout.writelines(line + "\n" for line in project.summary)
        return 0
    form: Form = parsed.draw or _form_of(output)
    drawing = _drawing(parsed.target, project, form)
    if output is None:
        sys.stdout.write(drawing)
        return 0
    try:
        output.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error
    return 0


def _form_of(output: Path | None) -> Form:
    form = "text" if output is None else _FORMS.get(output.suffix)
    if form is None:
        raise ConfigError(f"{output}: expected the ending {either(_FORMS)}; for other files add --draw FORMAT")
    return form


def _drawing(target: str, project: Project, form: Form) -> str:
    from forebay.graph.drawing.draw import draw

    graphs = project.graphs
    if not graphs:
        raise ConfigError(f"{target} has no graph to draw; a function with @forebay.compose has one")
    if len(graphs) == 1:
        return draw(graphs[0], form)
    if form != "text":
        names = ", ".join(graph.spec.name for graph in graphs)
        raise ConfigError(f"{target} has {len(graphs)} graphs ({names}); name one to draw: FILE:NAME")
    return "\n".join(f"{graph.spec.name}\n\n{draw(graph, form)}" for graph in graphs)
