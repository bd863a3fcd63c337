# SPDX-License-Identifier: Apache-2.0
"""What fronts tell of OpenTelemetry's metrics is added up, and has the buckets that it should have. Issue 48"""

import msgspec
import pytest

from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
from forebay.observe.metrics.gen_ai_families import BOUNDS, DURATION, TO_FIRST, histogram_of
from forebay.owners.front_counts import MAX_CODES, ClientCounts, FrontCounts

KIND = DURATION, "chat", ""


def told(gen_ai):
    sent = msgspec.msgpack.encode(FrontCounts(1, [("words", "1", ClientCounts())]))
    raw = msgspec.msgpack.decode(sent)
    raw["models"][0][2]["gen_ai"] = gen_ai
    ((_, _, counts),) = msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=FrontCounts).models
    return counts


def test_they_are_added_to_what_there_is():
    metrics = EndpointMetrics()
    histogram_of(metrics.gen_ai, KIND).observe(0.03)
    shown = metrics.with_clients(metrics)
    buckets = [0, 0, 2, 1, *[0] * (len(BOUNDS[DURATION]) - 3)]
    told({KIND: (buckets, 0.2), (TO_FIRST, "chat", ""): ([1, *[0] * len(BOUNDS[TO_FIRST])], 0.0005)}).add_to(shown)
    assert (shown.gen_ai[KIND].counts[:4], shown.gen_ai[KIND].total) == ([0, 0, 3, 1], pytest.approx(0.23))
    assert shown.gen_ai[TO_FIRST, "chat", ""].count == 1
    assert (metrics.gen_ai[KIND].count, [*metrics.gen_ai]) == (1, [KIND])  # what a front counts is not the owner's


@pytest.mark.parametrize(
    "gen_ai",
    [
        {KIND: ([1, 2], 0.1)},
        {("forebay_request_seconds", "chat", ""): ([1], 0.1)},
        {(DURATION, "chat", str(number)): ([0] * (len(BOUNDS[DURATION]) + 1), 0.0) for number in range(MAX_CODES + 1)},
    ],
    ids=["other buckets", "another family", "too many"],
)
def test_others_cannot_be_read(gen_ai):
    with pytest.raises(msgspec.ValidationError):
        told(gen_ai)
