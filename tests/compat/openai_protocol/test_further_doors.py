# SPDX-License-Identifier: Apache-2.0
"""Clients of other protocols on the same models: Cohere's, and what is sent as Jina's and vLLM's send it."""

import pytest
from tests.compat.openai_protocol.clients import KEY, PYTHON, Client

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with OpenAI's client: make setup")
DOCUMENTS = ["nothing", "rain in Oslo", "rain"]


def post(client, path, **body):
    answer = client.server.client.post(
        path, json={"model": "ranks", **body}, headers={**client.headers, "x-api-key": KEY}
    )
    return answer.status_code, answer.json()


def test_coheres_client_has_documents_ranked(client):
    cohere = Client(client.asker, client.server, {}, library="cohere")
    asked = {"model": "ranks", "query": "rain Oslo", "documents": DOCUMENTS}
    asked["request_options"] = {"additional_headers": client.headers}
    found = cohere.ask("rerank", **asked, top_n=2)["result"]
    assert [(one["index"], one["relevance_score"]) for one in found["results"]] == [(1, 1.0), (2, 0.5)]
    (alone,) = cohere.ask_all(("rerank", asked))
    assert [one["index"] for one in alone["result"]["results"]] == [1, 2, 0]
    wrong = cohere.ask("rerank", **{**asked, "model": "words"})["error"]
    assert (wrong["class"], wrong["body"]["error"]["param"]) == ("NotFoundError", "model")
    wrong = cohere.ask("rerank", **asked, max_tokens_per_doc=5)["error"]
    assert (wrong["class"], wrong["body"]["error"]["param"]) == ("BadRequestError", "max_tokens_per_doc")
    stranger = Client(client.asker, client.server, {}, library="cohere", api_key="wrong")
    assert stranger.ask("rerank", **asked)["error"]["class"] == "UnauthorizedError"


def test_documents_come_back_unless_they_are_not_wanted(client):
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        status, found = post(client, path, query="rain", documents=DOCUMENTS)
        assert (status, [one["index"] for one in found["results"]]) == (200, [1, 2, 0])
        assert found["results"][0] == {"index": 1, "relevance_score": 1.0, "document": {"text": DOCUMENTS[1]}}
        assert found["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
        status, found = post(client, path, query="rain", documents=DOCUMENTS, return_documents=False, top_n=1)
        assert (status, found["results"]) == (200, [{"index": 1, "relevance_score": 1.0}])


def test_texts_are_scored_one_with_each_or_pair_by_pair(client):
    for path in ("/v1/score", "/score"):
        for body, scores in (
            ({"text_1": "rain", "text_2": DOCUMENTS}, [0.0, 1.0, 1.0]),
            ({"text_1": ["rain", "sun"], "text_2": ["rain", "rain"]}, [1.0, 0.0]),
            ({"queries": "rain Oslo", "documents": "rain"}, [0.5]),
        ):
            status, found = post(client, path, **body)
            assert (status, found["object"], [one["score"] for one in found["data"]]) == (200, "list", scores)
            assert {(one["object"], one["index"]) for one in found["data"]} == {
                ("score", index) for index in range(len(scores))
            }
