# SPDX-License-Identifier: Apache-2.0
"""One class for all models of a bucket; the variable says of which."""

import os
from pathlib import Path

import forebay


class Greeting(forebay.Model):
    """Says what its file says."""

    repository = os.environ.get("FOREBAY_TEST_BUCKET", "nowhere")

    def load(self, path: Path):
        self.text = (path / "text.txt").read_text()
        self.place = path

    def predict(self, batch: list[str]) -> list[str]:
        return [f"{self.text} {name}" for name in batch]

    @forebay.endpoint("/where")
    def where(self, batch: list[str]) -> list[str]:
        return ["/".join(self.place.parts[-2:]) for _ in batch]
