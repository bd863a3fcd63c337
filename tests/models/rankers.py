# SPDX-License-Identifier: Apache-2.0
"""Models that rank as those did whose answers were recorded."""

import forebay
from forebay.openai import RerankRequest, Score

SCORES = {  # of the documents that Jina's service ranked
    "Deep learning is a subset of machine learning": 0.23231014609336853,
    "Computer vision applies machine learning to images": 0.16026602685451508,
    "Natural language processing uses statistical methods": 0.09401018172502518,
    "Reinforcement learning trains agents through rewards": 0.08509904146194458,
}


class Jina(forebay.Model):
    name = "jina-reranker-v2-base-multilingual"

    def predict(self, batch: list[RerankRequest]) -> list[Score]:
        return [Score(SCORES[one.document], 50 if one.document.startswith("Deep") else 0) for one in batch]


class Vllm(forebay.Model):
    """More of the words of a question are in its answer."""

    name = "bge-reranker-v2-m3"

    def predict(self, batch: list[RerankRequest]) -> list[float]:
        return [float(len({*one.query.strip("?").split()} & {*one.document.split()})) for one in batch]


class Cohere(forebay.Model):
    """Knows the beginnings of the documents of Cohere's example."""

    name = "rerank-v4.0-pro"

    def predict(self, batch: list[RerankRequest]) -> list[float]:
        scores = {"Washington": 0.999071, "Capital punishment": 0.7867867, "Carson City": 0.32713068}
        return [next((scores[name] for name in scores if one.document.startswith(name)), 0.0) for one in batch]
