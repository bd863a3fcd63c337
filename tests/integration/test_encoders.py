# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face encoders, served without code and asked over all protocols."""

from __future__ import annotations

import base64
import json

import httpx
import numpy as np
import pytest
from tests.generated import generate
from tests.models.encoders import folder, near, pooled, reference, sigmoid, softmax, texts
from tests.waiting import PATIENCE_S

pytest.importorskip("tokenizers")
THREE = "idle: wait\n    max_wait_ms: 60000\n    max_batch_size: 3"
"""Three samples that come together run together, or not before a minute is over."""
SEQUENCES = "TinyForSequenceClassification"


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory):
    """Serves an encoder of each kind, and a repository with one."""
    path = tmp_path_factory.mktemp("encoders")
    pooled(folder(path / "mini-v1.5", network="onnx/model.onnx"), "mean", "Normalize")
    folder(path / "ranker", SEQUENCES, 1)
    folder(path / "labels", SEQUENCES, 3)
    pooled(folder(path / "stored/first/7", network="onnx/model.onnx"), "cls")
    (path / "forebay.yaml").write_text(
        "models:\n"
        f"  - target: mini-v1.5\n    worker_kind: process\n    {THREE}\n"
        f"  - target: ranker\n    worker_kind: thread\n    {THREE}\n"
        f"  - target: labels\n    worker_kind: thread\n    {THREE}\n"
        "  - target: stored\n    worker_kind: thread\n"
    )
    return path, launch(path / "forebay.yaml")


def ask(server, path, body):
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    return answer.status_code, answer.json()


def vector_of(path, text):
    wanted = reference(path, text, network="onnx/model.onnx").mean(axis=0)
    return wanted / np.linalg.norm(wanted)


def test_texts_become_vectors_in_one_batch(server):
    path, running = server
    asked = texts(3)
    for form in ("float", "base64"):
        status, answer = ask(running, "/v1/embeddings", {"model": "mini-v1.5", "input": asked, "encoding_format": form})
        assert status == 200
        for text, found in zip(asked, answer["data"], strict=True):
            vector = found["embedding"]
            read = np.frombuffer(base64.b64decode(vector), "<f4") if form == "base64" else vector
            assert near(read, vector_of(path / "mini-v1.5", text))
        tokens = [len(reference(path / "mini-v1.5", text, network="onnx/model.onnx")) for text in asked]
        assert answer["usage"]["prompt_tokens"] == sum(tokens)
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    (batches,) = [line for line in lines if line.startswith("forebay_batch_size_count") and '"mini-v1.5"' in line]
    assert float(batches.split()[-1]) == 2


def test_what_an_encoder_does_not_take_is_said(server):
    _, running = server
    status, answer = ask(running, "/v1/embeddings", {"model": "mini-v1.5", "input": [[1, 2], [3], [4]]})
    assert status == 400
    assert "this model takes texts only" in answer["error"]["message"]
    long = "a " * 70_000
    status, answer = ask(running, "/v1/embeddings", {"model": "mini-v1.5", "input": ["a", long, "b", "c"]})
    assert (status, answer["error"]["param"]) == (400, "input[1]")
    assert "up to 131,072 characters of UTF-8 each, got 140,000 characters" in answer["error"]["message"]
    status, answer = ask(running, "/models/first", {"input": long})
    assert (status, answer["error"]["detail"]["path"]) == (422, "$.input")


def test_one_label_ranks_documents(server):
    path, running = server
    documents = texts(3)
    wanted = [sigmoid(reference(path / "ranker", "sun", one))[0] for one in documents]
    status, answer = ask(running, "/v1/rerank", {"model": "ranker", "query": "sun", "documents": documents})
    assert status == 200
    assert [one["index"] for one in answer["results"]] == list(np.argsort(wanted)[::-1])
    assert near([one["relevance_score"] for one in answer["results"]], sorted(wanted, reverse=True))
    _, answer = ask(running, "/score", {"model": "ranker", "text_1": "sun", "text_2": documents})
    assert near([one["score"] for one in answer["data"]], wanted)


def test_labels_have_scores(server, at_once):
    path, running = server
    asked = texts(3)
    answers = at_once(*[lambda text=text: ask(running, "/models/labels", {"text": text}) for text in asked])
    for text, (status, answer) in zip(asked, answers, strict=True):
        wanted = softmax(reference(path / "labels", text))
        assert (status, answer["label"]) == (200, f"L{wanted.argmax()}")
        assert near(answer["score"], wanted.max())
        assert near(answer["scores"], wanted)


def test_tensors_of_texts_are_taken(server):
    path, running = server
    asked = texts(3)
    tensor = {"datatype": "BYTES", "shape": [3]}
    status, answer = ask(
        running, "/v2/models/mini-v1.5/infer", {"inputs": [{"name": "input", "data": asked, **tensor}]}
    )
    assert status == 200
    found = {one["name"]: one for one in answer["outputs"]}
    assert (found["vector"]["datatype"], found["vector"]["shape"], found["tokens"]["shape"]) == ("FP32", [3, 8], [3])
    wanted = [vector_of(path / "mini-v1.5", text) for text in asked]
    assert near(np.reshape(found["vector"]["data"], (3, 8)), wanted)
    pairs = [{"name": "query", "data": ["sun"] * 3, **tensor}, {"name": "document", "data": asked, **tensor}]
    _, answer = ask(running, "/v2/models/ranker/infer", {"inputs": pairs})
    (score, _tokens) = answer["outputs"]
    assert near(score["data"], [sigmoid(reference(path / "ranker", "sun", one))[0] for one in asked])
    _, answer = ask(running, "/v2/models/labels/infer", {"inputs": [{"name": "text", "data": asked, **tensor}]})
    label = next(one for one in answer["outputs"] if one["name"] == "label")
    assert label["data"] == [f"L{reference(path / 'labels', one).argmax()}" for one in asked]


def test_bytes_that_are_no_text_are_refused(server):
    _, running = server
    data = len(b"\xff").to_bytes(4, "little") + b"\xff"
    told = {"name": "input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [told]}).encode()
    answer = httpx.post(
        f"{running.url}/v2/models/first/infer",
        content=head + data,
        headers={"inference-header-content-length": str(len(head))},
    )
    assert answer.status_code == 400
    assert "up to 131,072 characters of UTF-8 each, got 1 bytes" in answer.json()["error"]


def test_a_repository_has_encoders(server):
    path, running = server
    status, answer = ask(running, "/models/first", {"input": "a cold day"})
    place = path / "stored/first/7"
    assert status == 200
    assert near(answer["vector"], reference(place, "a cold day", network="onnx/model.onnx")[0])
    assert answer["tokens"] == 5
    assert httpx.get(f"{running.url}/v2/models/first/versions/7").status_code == 200


def test_an_image_of_an_encoder_has_its_tokenizer_and_its_name(tmp_path):
    folder(tmp_path / "mini-v1.5")
    made = generate(tmp_path, "mini-v1.5")
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "deploy/Dockerfile").read_text()
    assert "forebay[onnx,openvino,tokenizers]" in text
    assert text.splitlines()[-1] == 'CMD ["forebay", "serve", ".", "--name", "mini-v1.5"]'
