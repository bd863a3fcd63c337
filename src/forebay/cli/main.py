# SPDX-License-Identifier: Apache-2.0
"""The `forebay` command."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from forebay._version import __version__
from forebay.errors import ConfigError, ModelError
from forebay.observe.logs.log import tell
from forebay.types.did_you_mean import either, nearest
from forebay.types.served_file import stand_in_for_main

USAGE_ERROR = 2

EPILOG = """\
examples:
  forebay init my-model                       write a small project with a test
  forebay serve model.py                      serve every forebay.Model in model.py on http://127.0.0.1:8080
  forebay serve model.py:Iris --workers 4     serve one of them, in four worker processes
  forebay serve my-project/                   serve a project of another server, such as one with a nucleus.yaml
  forebay serve --attach unix:workers.socket  serve models that run in other environments
  forebay worker model.py --connect unix:workers.socket
  forebay check model.py                      check a target and load nothing
  forebay check ocr.py --draw                 draw a graph of models
  forebay generate my-project/                write a Dockerfile, a Compose file and Kubernetes manifests for it
  forebay call http://127.0.0.1:8080/models/iris '{"length": 5.1}'
  forebay bench http://127.0.0.1:8080/models/iris '{"length": 5.1}' --clients 32
  forebay costs http://127.0.0.1:8080 --since 1h --by tenant,model
  forebay explain-refusal REQUEST_ID http://127.0.0.1:8080
"""


_USUAL: Final = {
    **dict.fromkeys(("run", "start", "up", "launch"), "serve"),
    **dict.fromkeys(("new", "create"), "init"),
    **dict.fromkeys(("build", "containerize", "dockerize"), "generate"),
    **dict.fromkeys(("validate", "lint"), "check"),
    **dict.fromkeys(("predict", "infer", "request"), "call"),
    "-p": "--port",
    "-w": "--workers",
}
"""What other servers and tools call commands and flags of ours."""
_TARGETS: Final = (".py", ".yaml", ".yml", ".json", ".onnx", ".pt2", ".skops", ".tflite", ".ubj", ".pbtxt")


class Parser(argparse.ArgumentParser):
    """An argument parser that says what was probably meant.

    It takes no beginning of a flag for the flag: `--timeout 5` would be milliseconds, and `--key` a file.
    """

    def __init__(self, **more: Any) -> None:
        if "\n" in f"{more.get('description')}{more.get('epilog')}":  # it has its own lines
            more["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(**more)
        self.allow_abbrev = False

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong and end with status 2."""
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        known = [option for action in self._actions for option in action.option_strings]
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0].split("=")[0]
        hint = None
        if choice is not None:
            choices = re.findall(r"[\w-]+", choice[2])
            message = message.replace(choice[0], f"expected {either(choices)}, got '{choice[1]}'")
            hint = _USUAL.get(choice[1]) or nearest(choice[1], choices)
            if choice[1].partition(":")[0].endswith(_TARGETS):
                hint = f"{self.prog} serve {choice[1]}"
        elif unknown in _USUAL:
            hint = _USUAL[unknown]
        elif unknown.startswith("-"):
            hint = nearest(unknown, known)
        elif message.startswith("unrecognized arguments: ") and "--config" in known:
            message += "; give one TARGET, or several in the file of --config"
        did_you_mean = f"; did you mean {hint}?" if hint else f"; see {self.prog} --help"
        tell(message if "; did you mean " in message else message + did_you_mean, is_error=True)
        raise SystemExit(USAGE_ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 when something the person wrote is wrong, 1 when a model fails."""
    _open_standard_files()
    from forebay.cli.ovms import translated

    if arguments is None:  # this is the program, and no call of it
        stand_in_for_main()
    parser, names = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may stand next
        import argcomplete

        argcomplete.autocomplete(parser)
    whole = list(sys.argv[1:] if arguments is None else arguments)
    if whole[:1] == ["help"]:
        whole = [*whole[1:2], "--help"]
    given, rest = _split(whole)
    try:
        given, warnings = translated(given)
    except ConfigError as error:
        tell(error.message, is_error=True)
        return USAGE_ERROR
    tell(*(f"warning: {warning}" for warning in warnings))
    is_early = given[:1] and given[0].startswith("-") and given[0] not in {"-h", "--help", "-V", "--version"}
    if is_early and (name := next((one for one in given if one in names), None)):
        parser.error(f"{given[0]} stands before the command; write forebay {name} first, and its options after it")
    options, unknown = parser.parse_known_args(given)
    if options.command is None:
        parser.print_help()
        return USAGE_ERROR
    if unknown:
        options.parser.error("unrecognized arguments: " + " ".join(unknown))
    options.given = whole
    if rest:
        options.arguments = rest
    try:
        status: int = options.run(options)
        with contextlib.suppress(ValueError):  # somebody's code has closed it
            sys.stdout.flush()
        return status
    except (ConfigError, ModelError) as error:
        trace = error.trace.rstrip("\n")
        tell(f"{error.message}\n{trace}" if trace else error.message, is_error=True)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    except FileNotFoundError:
        if not _is_folder_gone():
            raise
        tell("the folder this command was started in is gone; go to another one and start it there", is_error=True)
        return USAGE_ERROR
    except BrokenPipeError:  # ends as programs do that SIGPIPE ends
        if not _stop_printing():
            raise
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130


def commands_of() -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command by its name."""
    return _parser()[1]


def _parser() -> tuple[Parser, Mapping[str, argparse.ArgumentParser]]:
    from forebay.cli import (
        analyse,
        batching,
        bench,
        call_model,
        check,
        cluster,
        completion,
        costs,
        explain_refusal,
        generate,
        init,
        nucleus,
        pipeline,
        serve,
        trace,
        worker,
    )

    parser = Parser(
        prog="forebay", description="Serve Python models and model files over HTTP and gRPC.", epilog=EPILOG
    )
    parser.add_argument("-V", "--version", action="version", version=f"forebay {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    every = (
        init,
        serve,
        check,
        generate,
        call_model,
        bench,
        worker,
        cluster,
        nucleus,
        batching,
        pipeline,
        trace,
        costs,
        explain_refusal,
        analyse,
        completion,
    )
    for command in every:
        command.add_parser(commands)
    return parser, commands.choices


def _is_folder_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _stop_printing() -> bool:
    """Print nothing from now on if nobody reads it any more; tells whether that is so."""
    stdout = select.poll()
    stdout.register(1, 0)
    if not stdout.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return True


def _open_standard_files() -> None:
    """Open descriptors 0, 1 and 2 where they are closed: else the next file or socket gets what libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    stdout = cast("io.TextIOWrapper", sys.stdout)
    if isinstance(sys.stdout, io.TextIOWrapper) and stdout.errors == "strict":
        stdout.reconfigure(errors="backslashreplace")  # as stderr has it, for drawings and for names of any script


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate what follows `--`: it is for the target of `serve`, `check` and `generate`, not for them."""
    if arguments[:1] not in (["serve"], ["check"], ["generate"]) or "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
