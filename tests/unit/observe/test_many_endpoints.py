# SPDX-License-Identifier: Apache-2.0
"""A page of metrics is bounded, and written a slice at a time: nobody waits for a scrape."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import prometheus_client.openmetrics.parser as openmetrics_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.metrics_page import whole_page

from forebay.batching.queue import BatchConfig
from forebay.errors import QueueFull
from forebay.observe.metrics import exposition
from forebay.observe.metrics.author_metrics import MetricStore
from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
from forebay.observe.metrics.exposition import (
    LEFT_OUT,
    LOOKED_AT,
    MAX_ENDPOINTS,
    SLICE,
    Exposition,
    Reading,
    pieces,
)
from forebay.protocols.native import Contract
from forebay.protocols.openapi import Described, document, written
from forebay.server.app import App
from forebay.server.config import HttpConfig
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import ManualPool
from forebay.transports.http.asgi import asgi_app
from forebay.types.element_limits import at_once

PLAIN = "text/plain"


class One:
    """An endpoint of which only the numbers exist."""

    def __init__(self, number, calls=0):
        self.name = f"model {number:05}"
        self.metrics = EndpointMetrics()
        self.call(calls)

    def call(self, times=1):
        if times:
            self.metrics.codes["ok"] += times
            self.metrics.request_s.observe(0.01, times)


class Counted(Exposition):
    """Counts how many endpoints are read."""

    reads = 0

    def __init__(self, ones):
        def read(one):
            self.reads += 1
            return Reading(one.name, "1", one.metrics, 0, 0, 1, 0)

        super().__init__(lambda: ones, read)

    def turns(self):
        """Return what is read in each turn, and the pieces."""
        turns, found = self.write(), []
        while True:
            before = self.reads
            try:
                next(turns)
            except StopIteration as end:
                return [*found, self.reads - before], list(pieces(end.value, PLAIN))
            found.append(self.reads - before)

    def shown(self):
        text = b"".join(pieces(at_once(self.write()), PLAIN)).decode()
        families = {family.name: family.samples for family in text_string_to_metric_families(text)}
        names = {sample.labels["endpoint"] for sample in families["forebay_requests"]}
        return names, families[LEFT_OUT][0].value


def test_a_turn_of_the_loop_writes_a_few_endpoints():  # F71: 300 models stopped the loop for 0.3 s
    turns, text = Counted([One(number, calls=1) for number in range(300)]).turns()
    assert sum(turns) == 300
    assert max(turns) <= SLICE
    assert len(text) > 10


def test_ten_thousand_endpoints_make_a_bounded_page():  # F71
    counted = Counted([One(number, calls=1) for number in range(10_000)])
    turns, text = counted.turns()
    assert sum(turns) == MAX_ENDPOINTS
    assert max(turns) <= SLICE
    assert len(turns) >= 10_000 // LOOKED_AT + MAX_ENDPOINTS // SLICE
    assert sum(map(len, text)) < 8_000 * MAX_ENDPOINTS
    assert max(map(len, text)) < 2_500_000


def test_the_busiest_are_shown_and_stay(monkeypatch):  # F71
    monkeypatch.setattr(exposition, "MAX_ENDPOINTS", 3)
    ones = [One(number) for number in range(5)]
    counted = Counted(ones)
    assert counted.shown() == ({one.name for one in ones[:3]}, 2)
    ones[4].call()
    ones[3].call(5)
    assert counted.shown() == ({ones[0].name, ones[3].name, ones[4].name}, 2)
    ones[2].call(100)
    ones[1].call(50)
    assert counted.shown() == ({ones[2].name, ones[3].name, ones[4].name}, 2)  # the last place is the busiest's
    ones[1].call(5_000)
    assert counted.shown() == ({ones[2].name, ones[3].name, ones[4].name}, 2)  # nobody who was shown makes room
    del ones[3]
    assert counted.shown() == ({one.name for one in ones[1:]}, 1)


def test_what_was_never_counted_is_left_out():  # F71
    page = b"".join(pieces(at_once(Counted([One(0)]).write()), PLAIN))
    assert b"_bucket" not in page
    assert b'forebay_requests_total{code="ok",endpoint="model 00000",version="1"} 0.0' in page
    assert page.count(b"\n") < 44


def test_the_text_of_what_did_not_change_is_kept(monkeypatch):  # F71
    ones = [One(number, calls=1) for number in range(20)]
    counted = Counted(ones)
    written = []
    plain = exposition.histogram_text
    monkeypatch.setattr(exposition, "histogram_text", lambda name, *more: written.append(name) or plain(name, *more))
    first = b"".join(pieces(at_once(counted.write()), PLAIN))
    assert written == ["forebay_request_seconds"] * 20
    assert b"".join(pieces(at_once(counted.write()), PLAIN)) == first
    ones[7].call()
    assert b"".join(pieces(at_once(counted.write()), PLAIN)) != first
    assert len(written) == 21


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_the_page_can_be_read_whatever_an_endpoint_is_called(accept):
    one = One(0, calls=3)
    one.name = 'a "b" \\ c\nd'
    one.metrics.failed(QueueFull("full"))
    exposition = Exposition(
        lambda: [one], lambda one: Reading(one.name, "1", one.metrics, 1, 2, 3, 4, True), MetricStore()
    )
    page, media_type = whole_page(exposition, accept)
    assert media_type.startswith(accept.partition(";")[0])
    read = (
        openmetrics_parser.text_string_to_metric_families if "openmetrics" in accept else text_string_to_metric_families
    )
    families = {family.name: family for family in read(page.decode())}
    samples = {
        (one.name, one.labels.get("code") or one.labels.get("le")): one for one in families["forebay_requests"].samples
    }
    assert samples["forebay_requests_total", "ok"].value == 3
    assert samples["forebay_requests_total", "ok"].labels["endpoint"] == one.name
    assert families["forebay_request_seconds"].type == "histogram"
    assert "python_info" in families


class Raw:
    raw = True
    has_media = False
    in_pieces = False
    openai = ""

    def __init__(self):
        self.described = 0

    def json_schema(self, ref_template):
        self.described += 1
        return {"type": "string", "format": "binary"}, {}


def served(name, raw):
    endpoint = Endpoint(EndpointConfig(name=name), BatchConfig(), ManualPool())
    return Served(endpoint, Contract(), Described(name=name, input=raw, output=raw))


def test_the_document_is_made_once_for_each_change_of_the_app():  # F71
    raw = Raw()
    app = App([served(name, raw) for name in "abc"])

    async def main():
        transport = httpx.ASGITransport(asgi_app(app, HttpConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            first, second = await asyncio.gather(client.get("/openapi.json"), client.get("/openapi.json"))
            assert first.content == second.content
            assert raw.described == 6
            app.put(served("d", raw))
            assert "/models/d" in (await client.get("/openapi.json")).json()["paths"]
            assert raw.described == 14
            page = await client.get("/metrics")
            assert page.headers["content-length"] == str(len(page.content))
            assert 'forebay_requests_total{code="ok",endpoint="d",version="1"} 0.0' in page.text

    asyncio.run(main())


def test_the_written_document_is_the_document():
    described = [Described(name=name, input=Raw(), output=Raw(), description='"x" é') for name in ("a", 'b "c"')]
    assert msgspec.json.decode(written("t", "1", described, api_key=True)) == document(
        "t", "1", described, api_key=True
    )
