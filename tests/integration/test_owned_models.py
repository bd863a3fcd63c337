# SPDX-License-Identifier: Apache-2.0
"""A front tells of the models of its owner what the owner tells, and answers as it does, in every protocol."""

import functools
import json
import re
import struct

import grpc
import numpy as np
import pytest
from tests.integration.kserve.served import request
from tests.waiting import eventually

from forebay.protocols.kserve.messages import SERVICE

MODELS = [
    "methods.py",
    "tensors.py:Doubled",
    "tensors.py:People",
    "tensors.py:Words",
    "streams.py:Generated",
    "requests.py:Pictures",
    "spoken.py:Spoken",
    "streamed_graphs.py:numbers",
    "owned.py:Slow",
]


@pytest.fixture(scope="module")
def pair(launch, models, tmp_path_factory):
    """A front and its owner, which has models of all kinds; each from a file."""
    folder = tmp_path_factory.mktemp("pair")
    named = {"tensors.py:Words": {"name": "texts"}}
    wanted = [{"target": str(models / one), **named.get(one, {})} for one in MODELS]
    twice = {"target": str(models / "owned.py:Clip")}
    wanted += [{**twice, "version": "1", "weight": 3}, {**twice, "version": "2", "weight": 1}]
    (folder / "owner.yaml").write_text(json.dumps({"models": wanted, "attach": "unix:s"}))
    (folder / "front.yaml").write_text(json.dumps({"models": [{"owner": "unix:s"}]}))
    owner = launch(None, "--config", str(folder / "owner.yaml"), "--grpc-port", "0")
    return launch(None, "--config", str(folder / "front.yaml"), "--grpc-port", "0"), owner


def pages(server):
    names = [one["name"] for one in server.client.get("/models").json()["models"]]
    paths = [f"/v2/models/{name}{page}" for name in names for page in ("", "/config", "/ready", "/versions/1")]
    return ["/openapi.json", *paths]


def test_everything_is_described_as_the_owner_does(pair):
    front, owner = pair
    assert len(pages(owner)) > 20
    different = [page for page in pages(owner) if front.client.get(page).content != owner.client.get(page).content]
    assert different == []
    assert sorted(pages(front)) == sorted(pages(owner))


ASKED = [
    ("POST", "/models/words/embed", {"json": "abc"}),
    ("POST", "/models/words/rows", {"json": [1, 2, 3]}),
    ("POST", "/models/words/rows", {"json": []}),
    ("POST", "/models/words/embed", {"json": "raise"}),
    ("POST", "/models/words/embed", {"json": 5}),
    ("GET", "/models/words/vocabulary?prefix=a", {}),
    ("GET", "/models/words/by/either?prefix=q", {}),
    ("POST", "/models/clip/versions/2/none", {"json": 1}),
    ("POST", "/models/pictures?label=b&size=2", {"json": {"image": "AAAA"}}),
    ("POST", "/models/doubled", {"json": [1, 2, 3]}),
    ("POST", "/models/doubled", {"json": [1, 2]}),
    ("POST", "/models/generated", {"json": {"length": 40}}),
    ("POST", "/models/numbers", {"json": 5}),
    ("POST", "/models/pictures", {"files": {"image": b"1234"}, "data": {"label": "few"}}),
    ("POST", "/models/none", {"json": 1}),
    ("POST", "/v1/models/doubled:predict", {"json": {"instances": [[1, 2, 3], [4, 5, 6]]}}),
    ("POST", "/v1/models/texts:predict", {"json": {"instances": ["a"]}}),
]


@pytest.mark.parametrize("method, path, more", ASKED)
def test_a_request_is_answered_as_by_the_owner(pair, method, path, more):
    ours, theirs = (
        server.client.request(method, path, headers={"x-request-id": "of-the-test", "via": "a proxy"}, **more)
        for server in pair
    )
    alike = ("content-type", "x-request-id", "allow", "retry-after")
    assert (ours.status_code, ours.text.replace("true", "false")) == (
        theirs.status_code,
        theirs.text.replace("true", "false"),  # whether a file lies on the disk
    )
    assert [ours.headers.get(name) for name in alike] == [theirs.headers.get(name) for name in alike]


def test_the_context_of_a_request_travels(pair):
    answers = [server.client.post("/models/words/made", json=1, headers={"x-tag": "of the client"}) for server in pair]
    assert [one.json()[1] for one in answers] == ["of the client"] * 2
    assert answers[0].json()[0] == answers[1].json()[0], "another worker"


@pytest.mark.parametrize("rows", [1, 4, 11, 300])
def test_tensors_are_cut_by_the_owner(pair, rows):
    data = struct.pack(f"<{3 * rows}f", *range(3 * rows))
    head = {
        "inputs": [
            {"name": "input", "datatype": "FP32", "shape": [rows, 3], "parameters": {"binary_data_size": len(data)}}
        ],
        "outputs": [{"name": "output", "parameters": {"binary_data": True}}],
    }
    text = json.dumps(head).encode()
    headers = {"inference-header-content-length": str(len(text)), "content-type": "application/octet-stream"}
    ours, theirs = (
        server.client.post("/v2/models/doubled/infer", content=text + data, headers=headers) for server in pair
    )
    assert ours.status_code == 200, ours.text
    assert ours.content == theirs.content
    assert ours.content.endswith(struct.pack(f"<{3 * rows}f", *range(0, 6 * rows, 2)))


def whole_stream(stream, message):
    return list(stream(iter([message])))


@pytest.mark.parametrize(
    "method, rows, width", [("ModelInfer", 6, 3), ("ModelInfer", 2, 2), ("ModelStreamInfer", 6, 3)]
)
def test_tensors_over_grpc_are_answered_as_by_the_owner(pair, method, rows, width):
    asked = request("doubled", np.arange(rows * width, dtype=np.float32).reshape(rows, width), id="7")
    answers = []
    for server in pair:
        (address,) = {found for line in server.lines for found in re.findall(r"gRPC.*?(127\.0\.0\.1:\d+)", line)}
        with grpc.insecure_channel(address) as channel:
            if method == "ModelInfer":
                call = channel.unary_unary(f"/{SERVICE}/{method}").with_call
            else:
                call = functools.partial(whole_stream, channel.stream_stream(f"/{SERVICE}/{method}"))
            try:
                answers.append(call(asked.SerializeToString())[0])
            except grpc.RpcError as error:
                answers.append((error.code(), error.details()))
    assert answers[0] == answers[1]
    assert isinstance(answers[0], bytes) == (width == 3)


def test_versions_have_the_weights_of_the_owner(pair):
    front, _ = pair
    told = [
        [(one["version"], one["weight"]) for one in server.client.get("/models/clip").json()["versions"]]
        for server in pair
    ]
    assert sorted(told[0]) == sorted(told[1]) == [("1", 3), ("2", 1)]
    for version in ("1", "2"):
        assert front.client.post(f"/models/clip/versions/{version}", json=1.0).status_code == 200


def test_a_stream_arrives_part_by_part(pair, tmp_path):
    front, _ = pair
    with front.client.stream("POST", "/models/slow", json=[str(tmp_path / "gate"), 5000]) as answer:
        lines = answer.iter_lines()
        assert next(lines) == 'data: "part 0"'
        (tmp_path / "gate").touch()
        assert [line for line in lines if line][-1] == 'data: "part 4999"'


def test_a_client_that_leaves_a_stream_frees_its_worker(pair, tmp_path):
    front, owner = pair
    with front.client.stream("POST", "/models/slow", json=[str(tmp_path / "gate"), 600_000]) as answer:
        assert next(answer.iter_lines()) == 'data: "part 0"'
    (tmp_path / "gate").touch()
    eventually(lambda: owner.client.get("/models/slow").json()["in_flight"] == 0)
    workers = owner.client.get("/models/slow").json()["workers"]
    eventually(lambda: owner.client.get("/models/slow").json()["workers"]["idle"] == workers["slots"])


def test_a_client_that_does_not_read_holds_the_owner_up_and_not_its_memory(pair, tmp_path):
    front, owner = pair
    (tmp_path / "gate").touch()
    with front.connect() as client:
        body = json.dumps([str(tmp_path / "gate"), 10_000_000]).encode()
        client.send(client.request("POST", "/models/slow", body))
        client.read_head()
        parts = []

        def stands():
            parts.append(owner.metric("forebay_stream_parts_total", model="slow"))
            return len(parts) > 3 and len(set(parts[-3:])) == 1

        eventually(stands)
    eventually(lambda: owner.client.get("/models/slow").json()["in_flight"] == 0)
