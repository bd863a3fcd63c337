# SPDX-License-Identifier: Apache-2.0
"""Daily files of what tenants have cost: a line of JSON for each second, tenant and version of a model that ran.

Lines are in order of time, so a reader finds where to begin without reading what is before. What is not a line of ours,
such as one that a crash has cut, is skipped.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from forebay.observe.metrics.tenant_accounts import NOTHING, Amounts, plus
from forebay.types.first_use import known

BEGIN: Final = "costs-"
END: Final = ".jsonl"
SKIPPED_BYTES: Final = 1 << 16
"""Where a file is this long or shorter, it is read from its start."""
MAX_LINE_BYTES: Final = 1 << 14


class TooMuch(Exception):
    """More would have to be read than may be."""


class CostLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tenant has cost in a moment.

    Attributes:
        at: When it was written, in UTC.
        worker_s: Seconds that workers were busy for it.
        rows: Samples that ran.
        prompt_tokens: Tokens of its prompts, where the model counts them.
        completion_tokens: Tokens of its answers.
    """

    at: str
    model: str
    version: str
    tenant: str
    worker_s: float
    rows: int
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def amounts(self) -> Amounts:
        """What can be added up."""
        return self.worker_s, self.rows, self.prompt_tokens, self.completion_tokens


def moment(seconds: float) -> str:
    """Return a moment, in seconds since 1970, as lines have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def file_of(folder: Path, at: str) -> Path:
    """Return the file for the day of a moment."""
    return folder / f"{BEGIN}{at[:10]}{END}"


def lines_since(folder: Path, seconds: float, max_bytes: float = math.inf) -> Iterator[CostLine]:
    """Read the lines of a moment, in seconds since 1970, and of all later ones.

    Raises:
        OSError: If a file cannot be read.
        TooMuch: If that is more than `max_bytes`.
    """
    at = moment(seconds)
    first = file_of(folder, at).name
    for path in sorted(folder.glob(f"{BEGIN}*{END}")):
        if path.name < first:
            continue
        with path.open("rb") as file:
            start = _start(file, at)
            max_bytes -= file.seek(0, 2) - start
            if max_bytes < 0:
                raise TooMuch
            file.seek(start)
            for text in iter(lambda file=file: file.readline(MAX_LINE_BYTES), b""):
                line = _read(text)
                if line is not None and line.at >= at:
                    yield line


def _start(file: BinaryIO, at: str) -> int:
    """Return a place in a file before which all lines are older."""
    low, high = 0, file.seek(0, 2)
    while high - low > SKIPPED_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline(MAX_LINE_BYTES)  # it began before
        line = _read(file.readline(MAX_LINE_BYTES))
        if line is not None and line.at < at:
            low = middle
        else:
            high = middle
    return low


def _read(text: bytes) -> CostLine | None:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return _decoder.decode(text)
    return None


def summed(lines: Iterator[CostLine]) -> list[CostLine]:
    """Add lines up by version of a model and tenant; each sum has the moment of its first line."""
    first: dict[tuple[str, str, str], str] = {}
    sums: dict[tuple[str, str, str], Amounts] = {}
    for line in lines:
        key = line.model, line.version, line.tenant
        first.setdefault(key, line.at)
        sums[key] = plus(sums.get(key, NOTHING), line.amounts)
    return [CostLine(first[key], *key, *amounts) for key, amounts in sums.items()]


_decoder: Final = msgspec.json.Decoder(known(CostLine))
