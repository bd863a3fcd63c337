# SPDX-License-Identifier: Apache-2.0
"""One small class for all models of a bucket: it answers with what its files hold, in the order of their names."""

import os

import forebay


class Stocked(forebay.Model):
    repository = os.environ.get("FOREBAY_BENCH_BUCKET", "nowhere")

    def load(self, path):
        self.text = "".join(file.read_text() for file in sorted(path.iterdir()))

    def predict(self, batch: list[int]) -> list[str]:
        return [self.text] * len(batch)
