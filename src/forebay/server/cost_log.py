# SPDX-License-Identifier: Apache-2.0
"""Write once a second what each tenant has cost since the second before, to a file for each day.

What is written is the difference to what was written before, so a server that crashes loses the last second at most. A
write that fails is made up for by the next one; of one that was cut short the whole lines count.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ConfigError, InvalidRequest
from forebay.observe.metrics.cost_files import CostLine, TooMuch, file_of, lines_since, moment, summed
from forebay.observe.metrics.tenant_accounts import Accounts, Amounts, TenantAccount, plus
from forebay.server.links import Links

if TYPE_CHECKING:
    _Line = tuple[TenantAccount, Amounts, bytes]

log = logging.getLogger("forebay")

WRITE_S: Final = 1.0
"""How often it is written."""
MAX_READ_BYTES: Final = 256 << 20
"""What of the files is read for one request: some seconds of a thread."""


class CostLog(Links):
    """The files of a server."""

    def __init__(self, accounts: Accounts, folder: Path) -> None:
        """Have the accounts of an app noted from now on; nothing of it may run yet."""
        self._accounts = accounts
        self._accounts.due = {}
        self._folder = folder
        self._lock = threading.Lock()
        self._failed = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to write; raises a `ConfigError` if the folder cannot be written to."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._append(())
        except OSError as error:
            msg = f"--cost-log: {self._folder} cannot be written: {error.strerror}; name one that this user may write"
            raise ConfigError(msg) from error
        self._task = asyncio.create_task(self._go_on())

    def stop(self) -> None:
        """Write what is left."""
        if self._task is not None:
            self._task.cancel()
            self._note(*self._written(self._taken()))

    def since(self, seconds: float) -> list[CostLine]:
        """Add up what was written since a moment, in seconds since 1970; reads files.

        Raises:
            InvalidRequest: If that is more than a server should spend time on.
        """
        try:
            return summed(lines_since(self._folder, seconds, MAX_READ_BYTES))
        except TooMuch as error:
            msg = f"the costs of this time have more than {MAX_READ_BYTES >> 20} MiB; ask for less time"
            raise InvalidRequest(f"{msg}, or add up the files with: forebay costs FOLDER") from error

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            taken = self._taken()
            if taken:
                writing = asyncio.ensure_future(asyncio.to_thread(self._written, taken))
                writing.add_done_callback(lambda done: self._note(*done.result()))
                await asyncio.shield(writing)

    def _taken(self) -> list[_Line]:
        """Return what is to be written: accounts, what is new there, and lines."""
        due, self._accounts.due = self._accounts.due or {}, {}
        at = moment(time.time())
        found: list[_Line] = []
        for account in due:
            amounts = account.untold()
            account.told = plus(account.told, amounts)
            line = CostLine(at, account.model, account.version, account.tenant, *amounts)
            found.append((account, amounts, msgspec.json.encode(line) + b"\n"))
        return found

    def _written(self, taken: list[_Line]) -> tuple[list[_Line], int, OSError | None]:
        """Write; returns the same, how many lines of it stand in the file, and what went wrong."""
        try:
            return taken, self._append([line for *_, line in taken]), None
        except OSError as error:
            return taken, 0, error

    def _note(self, taken: list[_Line], count: int, error: OSError | None = None) -> None:
        """Note how many lines stand in the file; the rest is due again."""
        assert self._accounts.due is not None
        for account, amounts, _ in taken[count:]:
            account.told = plus(account.told, amounts, -1)
            self._accounts.due[account] = None
        has_failed = count < len(taken)
        if has_failed and not self._failed:
            reason = "it is full" if error is None else error.strerror
            log.error("cannot write costs to %s: %s; keeping them in memory until it works", self._folder, reason)
        elif self._failed and not has_failed:
            log.info("writing costs to %s again", self._folder)
        self._failed = has_failed

    def _append(self, lines: Sequence[bytes]) -> int:
        """Append lines to the file of this day in one write; returns how many of them stand there whole.

        Raises:
            OSError: If nothing can be written.
        """
        path = file_of(self._folder, moment(time.time()))
        with self._lock:
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                size = os.fstat(file).st_size
                is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
                left = os.write(file, b"\n" * is_torn + b"".join(lines)) - is_torn if lines else 0
            finally:
                os.close(file)
        count = 0
        for line in lines:
            left -= len(line)
            if left < 0:
                break
            count += 1
        return count
