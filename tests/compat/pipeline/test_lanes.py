# SPDX-License-Identifier: Apache-2.0
"""Plain requests take the fast lane and all others the slow one: both answer the same, whatever is asked."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest
from tests.compat.pipeline.conftest import post
from tests.waiting import PATIENCE_S

from forebay.surfaces.pipeline import Op, RequestOp
from forebay.surfaces.pipeline.protocol.messages import Request

SCRIPT = """
import os
import time
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Work(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (values,) = input_dicts.values()
        if values.get("wish") == "raise":
            raise ValueError("it was asked to")
        if values.get("wish") == "refuse":
            return None, False, 71, "sold out"
        if values.get("wish") == "late":
            time.sleep(0.6)
        if values.get("wish") == "number":
            return {"n": 5}, False, None, ""
        return {"x": values.get("x", "none") * int(values.get("times", 1))}, False, None, ""

read = RequestOp()
server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[Work(name="work", input_ops=[read])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""

FAST, SLOW = "/svc/prediction", "/svc/predicti%6Fn"


def pairs(**values: str) -> bytes:
    return json.dumps({"key": list(values), "value": list(values.values())}).encode()


CASES = {
    "plain": (pairs(x="hello"), {}),
    "no body": (b"", {}),
    "a large answer": (pairs(x="0123456789", times="20000"), {}),
    "a large request": (pairs(x="y" * 100_000), {}),
    "a form's type": (pairs(x="a"), {"content-type": "application/x-www-form-urlencoded", "accept": "text/html"}),
    "bad JSON": (b'{"key": [', {}),
    "no object": (b"[1]", {}),
    "lengths that differ": (b'{"key": ["x", "y"], "value": ["1"]}', {}),
    "a number for a text": (pairs(wish="number"), {}),
    "an exception": (pairs(wish="raise"), {}),
    "a product error": (pairs(wish="refuse"), {}),
    "too little time": (pairs(wish="late"), {"x-request-timeout-ms": "50"}),
    "no time": (pairs(x="a"), {"x-request-timeout-ms": "soon"}),
    "too long": (pairs(x="y" * 400_000), {}),
}


@pytest.fixture
def server(pipeline):
    return pipeline(SCRIPT, {"max_message_bytes": 300_000}, "--http-port", "0")


def told(response: httpx.Response) -> tuple[int, str | None, object]:
    """What both lanes must agree on.

    The number of a request stands in the text of an error, and so does where it was when its time was over, which for
    the second one depends on whether the first has let go of its worker.
    """
    text = response.text
    for number in range(100):
        text = text.replace(f"data_id={number} ", "data_id=N ")
    text = re.sub(r"timed out after \d{1,5} ms [^\"]*", "timed out after N ms", text)
    found = json.loads(text)
    if response.status_code == 413:  # one of them knows the length, and says it
        found["error"] = found["message"] = ""
    return response.status_code, response.headers.get("content-type"), found


def test_both_lanes_answer_the_same(server):  # P19-P23, P43, P61, P90, P92
    for case, (body, headers) in CASES.items():
        fast, slow = (server.client.post(path, content=body, headers=headers) for path in (FAST, SLOW))
        assert told(fast) == told(slow), case
        assert "x-request-id" in fast.headers, case
    assert post(server, x="still here")["value"] == ["still here"]


def test_who_needs_a_key_needs_it_on_both_lanes(pipeline):
    server = pipeline(SCRIPT, None, "--http-port", "0", "--api-key", "sesame")
    for path in (FAST, SLOW):
        refused = server.client.post(path, content=pairs(x="a"))
        assert (refused.status_code, refused.json()["code"]) == (401, 16)
        assert refused.headers["www-authenticate"] == "Bearer"
        allowed = server.client.post(path, content=pairs(x="a"), headers={"x-api-key": "sesame"})
        assert allowed.json()["value"] == ["a"]


def test_a_key_s_tenant_pays_for_each_op_and_a_header_names_its_children(pipeline, tmp_path):
    (tmp_path / "one.txt").write_text("sesame")
    keys = ("--api-key-file", f"one={tmp_path}/one.txt", "--tenant-header", "x-gateway-inference-fairness-id")
    server = pipeline(SCRIPT, None, "--http-port", "0", *keys)
    named = {"x-api-key": "sesame", "x-gateway-inference-fairness-id": "child"}
    for path in (FAST, SLOW):
        assert server.client.post(path, content=pairs(x="a"), headers=named).json()["value"] == ["a"]
        bad = server.client.post(
            path, content=pairs(x="a"), headers={**named, "x-gateway-inference-fairness-id": "x" * 129}
        )
        assert bad.json()["code"] == 3
        assert "has 129 bytes" in bad.text
    page = server.client.get("/metrics", headers=named).text
    rows = re.findall(r'^forebay_tenant_worker_seconds_total{endpoint="([^"]*)",tenant="one".*', page, re.MULTILINE)
    assert rows == ["svc/work"], page
    assert "child" not in page


def test_many_paths_are_forgotten_again(server):
    for number in range(1100):
        assert server.client.post(f"/svc/method{number}", content=pairs(x="a")).status_code == 200
    assert post(server, x="b")["value"] == ["b"]


def in_flight(server) -> str:
    """The line of the metrics that says how many requests the graph has."""
    page = server.client.get("/metrics").text
    return next((line for line in page.splitlines() if line.startswith("forebay_in_flight{")), "")


def test_a_client_that_goes_away_leaves_nothing_behind(server, eventually):  # P98
    for _ in range(20):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}{FAST}", content=pairs(wish="late"), timeout=httpx.Timeout(60, read=0.05))
    eventually(lambda: server.client.get("/models").json()["models"][0]["in_flight"] == 0)
    assert post(server, x="b")["value"] == ["b"]


@pytest.mark.parametrize("length", [1, 100_000])
def test_a_defect_in_writing_an_answer_leaves_no_client_waiting(hosted, length, monkeypatch):  # G8
    class Long(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            return {"x": "y" * length}, False, None, ""

    async def use(service):
        def broken(*_):
            raise LookupError("a defect")

        monkeypatch.setattr(service, "_restored", broken)
        asked = Request(key=["x"], value=["a"])
        return await asyncio.wait_for(service.answer(asked, deadline=float("inf"), peer=""), PATIENCE_S)

    answer = hosted(Long(name="long", input_ops=[RequestOp()]), use)
    assert answer.err_no == 10000
    assert "a defect" not in answer.err_msg
