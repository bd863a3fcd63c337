# SPDX-License-Identifier: Apache-2.0
"""What a project wants installed, as commands in its folder: an image runs them line by line, `prepare` here."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from forebay.errors import ConfigError

_BESIDE = re.compile(
    r"^\s*([./]|-[ecrf]\b|--(editable|constraint|requirement|find-links)\b|file:)|@ *file:", re.MULTILINE
)
"""What in a requirements.txt names other files of the project."""


class InstallStep(msgspec.Struct, frozen=True):
    """Something to install.

    Attributes:
        name: shell, conda or pip.
        commands: What does it, in the project's folder.
        needs: Whether it needs more of the project than this file.
    """

    name: str
    file: str
    commands: tuple[tuple[str, ...], ...]
    needs: bool
    text: str


def steps(
    folder: Path, files: tuple[str, str, str], pip: tuple[str, ...] = ("pip",), pins: str = ""
) -> list[InstallStep]:
    """Return the installation steps of a project in their order; a file that is not there makes no step.

    Args:
        files: For a shell, for conda, for pip.
        pins: Text of the file for pip, if that is not there yet.

    Raises:
        ConfigError: If a file lies outside the project, where no image could have it, or cannot be read.
    """
    shell, conda, requirements = files
    add_channel = ("conda", "config", "--append", "channels", "conda-forge")
    commands: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
        "shell": (shell, (("bash", "-e", shell),)),
        "conda": (conda, (add_channel, ("conda", "install", "-y", "--file", conda))),
        "pip": (requirements, ((*pip, "--no-cache-dir", "install", "-r", requirements),)),
    }
    found: list[InstallStep] = []
    for name, (file, run) in commands.items():
        path = Path(os.path.normpath(folder / file))
        if not path.is_relative_to(os.path.normpath(folder)):
            raise ConfigError(f"dependencies.{name}: {file} is outside of the project, {folder}")
        is_there = path.is_file()
        if is_there or (name == "pip" and pins):
            try:
                text = path.read_text(encoding="utf-8", errors="replace") if is_there else pins
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
            needs = name == "shell" or (name == "pip" and bool(_BESIDE.search(text)))
            found.append(InstallStep(name, file, run, needs, text))
    if not any(step.name == "pip" for step in found) and (folder / "setup.py").is_file():
        found.append(InstallStep("pip", "setup.py", ((*pip, "--no-cache-dir", "install", "."),), needs=True, text=""))
    return found
