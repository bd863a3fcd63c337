# SPDX-License-Identifier: Apache-2.0
"""Whether a file can be written that a command writes only once it has worked for long. Nothing is written here."""

from __future__ import annotations

import os
from pathlib import Path

from forebay.errors import ConfigError


def require_writable(flag: str, file: Path) -> None:
    """Refuse a file that cannot be written, by a `ConfigError` that names its flag and why."""
    folder = file.absolute().parent
    why = ""
    if not folder.is_dir():
        why = f"there is no folder {folder}"
    elif file.is_dir():
        why = "it is a folder"
    elif not os.access(file if file.exists() else folder, os.W_OK):
        why = "permission denied"
    if why:
        raise ConfigError(f"{flag} {file} cannot be written: {why}")
