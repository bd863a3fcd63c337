# SPDX-License-Identifier: Apache-2.0
"""One small class for all models of a bucket."""

import os

import forebay


class Stocked(forebay.Model):
    repository = os.environ.get("FOREBAY_BENCH_BUCKET", "nowhere")

    def load(self, path):
        self.text = (path / "text").read_text()

    def predict(self, batch: list[int]) -> list[str]:
        return [self.text] * len(batch)
