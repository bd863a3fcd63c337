# SPDX-License-Identifier: Apache-2.0
"""A reader of film reviews, offered as `paddle_serving_app.reader.IMDBDataset` where that package is not installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_MARKS: Final = re.compile(r"([;,.?!()]|\s)")


class IMDBDataset:
    """Turns `words | label` into the numbers of the words in a vocabulary."""

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}

    def load_resource(self, dictfile: str) -> None:
        """Read a vocabulary: a word a line, numbered from 0."""
        lines = Path(dictfile).read_text(encoding="utf-8").splitlines()
        self._number_of = {line.strip(): number for number, line in enumerate(lines)}

    def get_words_and_label(self, line: str) -> tuple[list[int], list[int]]:
        """Return the numbers of the words before the last `|`, and the label after it.

        Raises:
            ValueError: If the label is not a whole number.
        """
        words, _, label = line.rpartition("|")
        return self.get_words_only(words), [int(label)]

    def get_words_only(self, line: str) -> list[int]:
        """Return the numbers of the words; a word outside the vocabulary gets the number after the last one in it."""
        unknown = len(self._number_of)
        words = _MARKS.split(line.lower().replace("<br />", " ").strip())
        return [self._number_of.get(word, unknown) for word in words if word and word != " "]
