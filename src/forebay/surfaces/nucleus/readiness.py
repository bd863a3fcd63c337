# SPDX-License-Identifier: Apache-2.0
"""The files by which a Nucleus project tells that it is ready."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from forebay.errors import ConfigError

DEFAULT_FOLDER: Final = Path("/run/workspace")
READY_FILE: Final = "api_readiness.txt"

log = logging.getLogger("forebay")


class Readiness:
    """One file for the server and one for each worker, there only while all of them are ready."""

    def __init__(self, folder: Path | None) -> None:
        """Describe the files; without a folder they go to the original's, which need not be writable here."""
        self._folder = folder or DEFAULT_FOLDER
        self._is_asked_for = folder is not None
        self._works = True

    def prepare(self) -> None:
        """Make the folder and remove what an earlier run left behind.

        Raises:
            ConfigError: If the person named the folder and it cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f".{READY_FILE}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            if self._is_asked_for:
                raise ConfigError(f"readiness files cannot be written to {self._folder}: {error.strerror}") from error
            self._works = False
            log.warning(
                "cannot write readiness files: %s: %s; name another folder with --state-dir",
                self._folder,
                error.strerror,
            )
        self.clear()

    def announce(self, pids: Iterable[int]) -> None:
        """Say that the server and these workers are ready."""
        if not self._works:
            return
        try:
            for pid in pids:
                (self._folder / f"proc-{pid}-ready.txt").touch()
            (self._folder / READY_FILE).touch()
        except OSError as error:  # the disk is full, or the folder is gone: the server itself is ready all the same
            log.warning("cannot write readiness files: %s: %s", self._folder, error.strerror)

    def clear(self) -> None:
        """Say that they are not ready, or no longer."""
        with contextlib.suppress(OSError):
            (self._folder / READY_FILE).unlink(missing_ok=True)
            for file in self._folder.glob("proc-*-ready.txt"):
                file.unlink(missing_ok=True)
