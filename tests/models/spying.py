# SPDX-License-Identifier: Apache-2.0
"""A model that keeps a secret, and one that looks for it in all memory that it shares with anybody."""

import contextlib
from pathlib import Path

from forebay import Model

MARK = 32
"""How long the beginning of a text is by which it is found again."""


class Trusted(Model):
    def predict(self, batch: list[str]) -> list[int]:
        return [len(text) for text in batch]


class Spy(Model):
    def predict(self, batch: list[str]) -> list[int]:
        """How often each text is found, whose beginning is told backwards: else it would find what it was asked."""
        marks = [text[MARK - 1 :: -1].encode() for text in batch]
        memories = [*shared()]
        return [sum(memory.count(mark) for memory in memories) for mark in marks]


def shared():
    """What is in the shared memory of this process, mapped or only open."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split()
        if access.endswith("s"):
            begin, end = (int(one, 16) for one in span.split("-"))
            with Path("/proc/self/mem").open("rb") as memory:
                memory.seek(begin)
                yield memory.read(end - begin)
    for link in [*Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(FileNotFoundError):  # that of the folder
            if "memfd:" in str(link.readlink()):
                yield link.read_bytes()
