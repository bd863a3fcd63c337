# SPDX-License-Identifier: Apache-2.0
"""A handler in the Open Inference Protocol, at its socket."""

import httpx
import pytest

HANDLER = """
    from fastapi import HTTPException

    class Handler:
        def handle_post(self, payload):
            if "bad" in payload:
                raise HTTPException(status_code=418, detail="no tea")
            return {"sum": [sum(row) for row in payload["x"]], "label": payload["name"][0] + "!", "more": {"a": 1}}
"""
BATCHED = """
    class Handler:
        def handle_post(self, payload):
            return [{"n": len(payload), "x": one["x"]} for one in payload]
"""
X = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}
NAME = {"name": "name", "datatype": "BYTES", "shape": [1], "data": ["Ada"]}


def infer(server, *inputs):
    (about,) = httpx.post(f"{server.url}/v2/repository/index").json()  # T10: no body
    return httpx.post(f"{server.url}/v2/models/{about['name']}/infer", json={"inputs": inputs})


def outputs(answer):
    assert answer.status_code == 200, answer.text
    return {one["name"]: (one["datatype"], one["shape"], one["data"]) for one in answer.json()["outputs"]}


@pytest.fixture(scope="module")
def server(serve):
    return serve(HANDLER)


def test_a_post_gets_lists_by_name_and_its_fields_are_outputs(server):
    assert httpx.get(f"{server.url}/v2/health/ready").json() == {"ready": True}
    assert outputs(infer(server, X, NAME)) == {
        "sum": ("FP64", [2], [6.0, 15.0]),
        "label": ("BYTES", [], ["Ada!"]),
        "more": ("BYTES", [], ['{"a":1}']),
    }


def test_what_the_handler_refuses_is_told_in_the_protocols_form(server):
    answer = infer(server, {**X, "name": "bad"})
    assert (answer.status_code, answer.json()) == (400, {"error": "no tea"})
    answer = infer(server, {**X, "shape": [7]})
    assert (answer.status_code, "7 elements, and 6 came" in answer.json()["error"]) == (400, True)
    assert infer(server, NAME).status_code == 500


def test_calls_are_in_the_batches_of_posts(serve):
    server = serve(BATCHED, {"server_side_batching": {"max_batch_size": 1, "batch_interval_seconds": 1}})
    assert outputs(infer(server, X)) == {"n": ("INT64", [], [1]), "x": ("FP64", [2, 3], [1, 2, 3, 4, 5, 6])}
