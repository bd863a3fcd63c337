# SPDX-License-Identifier: Apache-2.0
"""What servings tell about themselves."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from tests.serving import zoo
from tests.serving.conftest import cat
from tests.waiting import eventually

import forebay
from forebay import Batch, Serving, ServingCrashed
from forebay.observe.spans import listening
from forebay.server.app import App
from forebay.server.config import HttpConfig
from forebay.transports.http.asgi import asgi_app


def fn(options):
    def run(batch):
        rows = batch.pad(4 - batch.size).realize()
        if rows.max() == 13:
            raise ValueError("thirteen")
        return rows

    return run


def test_numbers_by_key_after_a_known_script():
    # S71, S72
    with Serving.new(fn).start("told", batch_size=4, batch_timeout_ms=1, batch_keys=["a", "b"]) as process:
        process.batched_run(cat(1, 2, 3).key("a"))
        process.batched_run(cat(1, 2, 3, 4).key("a"))
        with pytest.raises(ServingCrashed):
            process.batched_run(cat(13).key("b"))
        told = process.statistics()
        a, b = told.by_key["a"], told.by_key["b"]
        assert (a.rows, a.batches, a.crashes, a.mean_batch_size, a.padding_share) == (7, 2, 0, 3.5, 1 / 8)
        assert (b.rows, b.batches, b.crashes) == (1, 1, 1)
        assert a.mean_queue_ms > 0
        assert a.mean_execute_ms > 0
        assert (told.name, told.partitions, told.waiting_rows, told.in_flight) == ("told", 1, 0, 0)


def test_spans_carry_info_and_metadata():
    # S71
    seen = []
    serving = Serving.new(fn).client_preprocessing(lambda rows: (cat(*rows), "info"))
    with listening(seen.append):
        serving.run([1, 2])
        with pytest.raises(ValueError, match="thirteen"):
            serving.run([13])
    serving.run([3])
    names = [span.name for span in seen]
    assert names == [
        "serving.preprocessing",
        "serving.execute",
        "serving.postprocessing",
        "serving.preprocessing",
        "serving.execute",
    ]
    assert seen[0].attributes["info"] == "info"
    assert seen[1].attributes["metadata"] == "server_info"
    assert seen[1].attributes["batch_size"] == 2
    assert (seen[2].attributes["info"], seen[2].attributes["metadata"]) == ("info", "server_info")
    assert isinstance(seen[4].error, ValueError)
    assert all(span.seconds >= 0 for span in seen)


def test_a_listener_that_fails_fails_nobody(caplog):
    # S71
    def broken(span):
        raise KeyError(span.name)

    with listening(broken):
        assert Serving.new(fn).run(cat(1)).tolist() == [1]
    assert "a listener to spans failed" in caplog.text


def test_a_server_in_the_same_program_shows_started_servings():
    # S72
    transport = httpx.ASGITransport(asgi_app(App([]), HttpConfig()))

    async def pages():
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            one = (await client.get("/models/shown")).status_code
            return (await client.get("/models")).json()["models"], (await client.get("/metrics")).text, one

    with Serving.new(fn).start("shown", batch_size=4, batch_timeout_ms=1) as process:
        forebay.batched_run("shown", Batch.concatenate([np.arange(3)]))
        models, metrics, status = asyncio.run(pages())
        assert status == 200
        assert [one["name"] for one in models] == ["shown"]
        assert models[0]["batching"]["mean_batch_size"] == 3
        assert 'forebay_serving_rows_total{key="default",serving="shown"} 3.0' in metrics
        assert 'forebay_serving_padding_rows_total{key="default",serving="shown"} 1.0' in metrics
        assert 'forebay_serving_batch_size_count{key="default",serving="shown"} 1.0' in metrics
        assert process.describe()["waiting"] == 0
    models, metrics, status = asyncio.run(pages())
    assert status == 404
    assert models == []
    assert 'serving="shown"' not in metrics


def test_servings_that_share_a_gauge_in_their_processes_have_a_series_each():
    transport = httpx.ASGITransport(asgi_app(App([]), HttpConfig()))

    async def told():
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            page = (await client.get("/metrics")).text
        return {line for line in page.splitlines() if line.startswith("zoo_largest{")}

    expected = {'zoo_largest{serving="one",worker="0"} -5.0', 'zoo_largest{serving="two",worker="0"} 3.0'}
    options = {"worker_kind": "process", "batch_timeout_ms": 1}
    with zoo.gauged.start("one", **options) as one, zoo.gauged.start("two", **options) as two:

        def is_told():  # what a process counts is heard when it answers
            one.batched_run(cat(-5))
            two.batched_run(cat(3))
            return asyncio.run(told()) == expected

        eventually(is_told)
