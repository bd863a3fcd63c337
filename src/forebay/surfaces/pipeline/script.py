# SPDX-License-Identifier: Apache-2.0
"""Scripts that build a pipeline and run it: executed up to `run_server()`, which hands the prepared server over.

A script defines its ops, often without an `if __name__ == "__main__"`, and ends in a call that serves for ever. The
server executes it as `__main__` to learn what it builds; so does every worker process, which then takes its own op.
Nothing is forked, and nothing but the path of the script and its arguments travels.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

import msgspec

from forebay.errors import ConfigError, ForebayError, ModelError
from forebay.surfaces import offered_modules
from forebay.surfaces.imported_names import imported_in
from forebay.surfaces.pipeline import shim
from forebay.types.failures import failure_of, text_of, trace_of, words_of
from forebay.workers.user_calls.user_code import caught

OURS: Final = "forebay.surfaces.pipeline"
_ORIGINALS: Final = ("paddle_serving_server", "paddle_serving_server_gpu", "paddle_serving_client.pipeline")


class Script(msgspec.Struct, frozen=True):
    """A script and how it is run.

    Attributes:
        arguments: What follows its name in `sys.argv`.
        folder: What it can import modules from; None is where it lies.
        package: Its package, where it is run as `python -m`.
        started_in: The working directory it begins in; None for that of the process that executes it.
    """

    path: str
    arguments: tuple[str, ...] = ()
    folder: str | None = None
    package: str | None = None
    started_in: str | None = None


def here() -> str | None:
    """Return the working directory; None if it is gone."""
    with suppress(OSError):
        return os.getcwd()  # noqa: PTH109 - as text, and at once
    return None


_STARTED_IN: Final = here()
"""Of this process, as a rule: scripts import this before they go anywhere else."""


class _Handed(BaseException):
    """Ends a script the moment its server is ready to run; the script's own `except Exception` does not catch it."""


class _Capture:
    """A script that is being executed, and the server it hands over."""

    def __init__(self) -> None:
        self.server: Any = None


_captures: list[_Capture] = []


def is_pipeline(path: Path) -> bool:
    """Tell whether a Python file imports the names of a pipeline; nothing of it is run."""
    return any(map(_is_ours, imported_in(path)))


def capture(script: Script) -> Any:
    """Execute a script as `__main__` and return the server it was about to run.

    Its module stays in place as `__main__`, so that objects of its classes can travel to processes that did the same.

    Raises:
        ConfigError: If it ends without running a server, or what it builds is wrong.
        ModelError: If it raises; its traceback, without the frames of the server, is in `trace`.
    """
    shim.install()
    path = Path(script.path)
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a Python script: {error}") from error
    module = ModuleType("__main__")
    module.__file__ = str(path)
    module.__package__ = script.package
    sys.modules["__main__"] = module
    folder = script.folder or str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.argv = [str(path), *script.arguments]
    if script.started_in is not None:
        with suppress(OSError):  # it is gone, and the script may do without
            os.chdir(script.started_in)
    found = _Capture()
    _captures.append(found)
    try:
        _, error = caught(exec, code, vars(module))
    finally:
        _captures.pop()
    if error is not None and not (found.server is not None and isinstance(error, _Handed | SystemExit)):
        _refuse(path, error)
    if found.server is None:
        raise ConfigError(f"{path} ended without a call of run_server() or run_service(); call it at its end")
    return found.server


def _refuse(path: Path, error: BaseException) -> NoReturn:
    """Say why a script did not come to its server."""
    if isinstance(error, SystemExit):
        msg = f"{path} ended with status {words_of(error) or 0} before it ran a server; see what it wrote above"
        raise ConfigError(msg) from error
    if isinstance(error, ForebayError):
        raise failure_of(error).error
    if isinstance(error, ImportError):
        raise ConfigError(not_imported(error)) from error
    raise ModelError(f"{path} raised {text_of(error)}", trace=trace_of(error, skip=1)) from error


def hand_over(server: Any) -> None:
    """End the script that is being captured, and hand over its server; in any other script, do nothing."""
    if _captures:
        _captures[-1].server = server
        raise _Handed


def running() -> Script:
    """Return the script this process was started with.

    Raises:
        ConfigError: If there is none, as at an interactive prompt.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise ConfigError(
            "ops in processes of their own need the script that defines them as a file, and this program has none; "
            "run it as `python script.py`, or set dag.is_thread_op to true"
        )
    path = Path(file).resolve()
    spec = main.__spec__
    if spec is None:
        return Script(str(path), tuple(sys.argv[1:]), started_in=_STARTED_IN)
    return Script(str(path), tuple(sys.argv[1:]), _STARTED_IN, spec.parent, _STARTED_IN)  # python -m


def not_imported(error: ImportError) -> str:
    """Return the sentence for an import that failed: where it is and what to do."""
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if not one.filename.startswith(("<frozen", offered_modules.__file__))
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    told = f"{where}{words_of(error)}"
    package, _ = caught(lambda: (error.name or "").partition(".")[0])
    if not isinstance(error, ModuleNotFoundError) or not package:
        return told
    return f"{told}; install what the project needs into this environment: {sys.executable} -m pip install ..."


def _is_ours(name: str) -> bool:
    return any(name == known or name.startswith(known + ".") for known in (OURS, *_ORIGINALS))
