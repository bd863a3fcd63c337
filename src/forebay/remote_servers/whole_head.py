# SPDX-License-Identifier: Apache-2.0
"""Answers whose head came whole: for the standard library a head ends where its connection does, too."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from io import BufferedIOBase


class WholeHeadResponse(http.client.HTTPResponse):
    """An answer that is none if the connection ended in its head: it would be one without a body, and a good one."""

    def begin(self) -> None:
        """Read the head.

        Raises:
            IncompleteRead: If the connection ended in the middle of it.
            HTTPException: If there is none.
        """
        this: Any = self
        file = this.fp
        this.fp = _Lines(file)  # a head is only read by lines
        try:
            super().begin()
        finally:
            if not self.isclosed():  # as what is not HTTP is at once
                this.fp = file


class _Lines:
    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._has_begun = False

    def readline(self, limit: int) -> bytes:
        line = self._file.readline(limit)
        if self._has_begun and not line.endswith(b"\n") and len(line) < limit:
            raise http.client.IncompleteRead(line)
        self._has_begun = True
        return line

    def close(self) -> None:
        self._file.close()
