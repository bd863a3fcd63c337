# SPDX-License-Identifier: Apache-2.0
"""What is told of requests that one server hands on to another: nothing twice, and in one trace."""

import re
import uuid

import pytest
from tests.integration.test_otel import PARENT, collecting
from tests.waiting import eventually

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")


@pytest.fixture(scope="module")
def collector():
    with collecting("http/protobuf") as made:
        yield made


@pytest.fixture(scope="module")
def owner(launch, collector, tmp_path_factory):
    path = f"{tmp_path_factory.mktemp('owner')}/s"
    environment = {**collector[1], "OTEL_SERVICE_NAME": "owner"}
    made = launch("owned.py", "--attach", f"unix:{path}", "--otel", env=environment)
    vars(made)["path"] = path
    return made


@pytest.fixture(scope="module")
def front(launch, owner, collector):
    """A server that makes spans of its own."""
    environment = {**collector[1], "OTEL_SERVICE_NAME": "front"}
    return launch(None, "--owner", f"unix:{owner.path}", "--otel", env=environment)


@pytest.fixture(scope="module")
def silent(launch, owner):
    """A server that makes none."""
    return launch(None, "--owner", f"unix:{owner.path}")


def spans_of(collector, trace, count):
    """Return the spans of a trace by service and name, once there are so many."""

    def found():
        return {(service, span.name): span for service, span in collector[0] if span.trace_id.hex() == trace}

    eventually(lambda: len(found()) >= count)
    return found()


ABOVE = ("owner", "handed on /models/clip")
BELOW = [("owner", f"{what} clip") for what in ("queue", "batch", "model")]


def test_one_trace_spans_client_front_and_owner(front, collector):
    trace = uuid.uuid4().hex
    answer = front.call("clip", 1.5, traceparent=f"00-{trace}-{PARENT}-01")
    spans = spans_of(collector, trace, 5)
    assert set(spans) == {("front", "POST /models/clip"), ABOVE, *BELOW}
    first, handed = spans["front", "POST /models/clip"], spans[ABOVE]
    assert first.parent_span_id.hex() == PARENT
    assert handed.parent_span_id == first.span_id
    assert {spans[one].parent_span_id for one in BELOW[:2]} == {handed.span_id}
    ids = {one.value.string_value for span in (first, handed) for one in span.attributes if one.key.endswith("_id")}
    assert ids == {answer.headers["x-request-id"]}


def test_a_trace_that_no_client_began_is_one_as_well(front, collector):
    answer = front.call("clip", 1.5, x_request_id=(name := uuid.uuid4().hex))
    assert answer.status_code == 200

    def traces():
        named = (span for _, span in collector[0] if any(one.value.string_value == name for one in span.attributes))
        return [span.trace_id.hex() for span in named]

    eventually(lambda: len(traces()) == 2)
    (trace,) = set(traces())
    spans = spans_of(collector, trace, 5)
    assert spans[ABOVE].parent_span_id == spans["front", "POST /models/clip"].span_id


def test_a_front_without_traces_hands_its_client_s_on(silent, collector):
    trace = uuid.uuid4().hex
    assert silent.call("clip", 1.5, traceparent=f"00-{trace}-{PARENT}-01").status_code == 200
    spans = spans_of(collector, trace, 4)
    assert set(spans) == {ABOVE, *BELOW}
    assert spans[ABOVE].parent_span_id.hex() == PARENT


def test_a_client_that_wants_no_trace_has_none_anywhere(front, collector):
    wanted, unwanted = uuid.uuid4().hex, uuid.uuid4().hex
    assert front.call("clip", 1.5, traceparent=f"00-{unwanted}-{PARENT}-00").status_code == 200
    assert front.call("clip", 1.5, traceparent=f"00-{wanted}-{PARENT}-01").status_code == 200
    spans_of(collector, wanted, 5)
    assert unwanted not in {span.trace_id.hex() for _, span in collector[0]}


def test_a_failure_is_one_in_both(front, collector):
    trace = uuid.uuid4().hex
    assert front.call("fails", "break", traceparent=f"00-{trace}-{PARENT}-01").status_code == 500
    spans = spans_of(collector, trace, 5)
    assert (
        spans["owner", "handed on /models/fails"].status.code == spans["front", "POST /models/fails"].status.code == 2
    )


@pytest.mark.parametrize("traceparent", ["nonsense", "0" * 5000, "00-\u00e9"])
def test_what_is_no_trace_hurts_nobody(front, silent, traceparent):
    for server in (front, silent):
        assert server.call("clip", 1.5, traceparent=traceparent.encode("latin-1")).status_code == 200


def test_a_divided_server_makes_one_trace(serve, collector):
    server = serve("owned.py", "--fronts", "2", "--otel", env=collector[1])
    trace = uuid.uuid4().hex
    assert server.call("clip", 1.5, traceparent=f"00-{trace}-{PARENT}-01").status_code == 200
    spans = spans_of(collector, trace, 5)
    assert {name for _, name in spans} == {"POST /models/clip", ABOVE[1], *(name for _, name in BELOW)}


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def counted(server, model):
    """Return the series of a model: their values, by name and code or bucket."""
    found = {}
    for line in server.client.get("/metrics").text.splitlines():
        if f'endpoint="{model}"' in line:
            name, _, rest = line.partition("{")
            which = re.search(r'(?:code|le)="([^"]*)"', rest)
            found[name, which[1] if which else ""] = float(line.rpartition(" ")[2])
    return found


OWNERS = {"forebay_waiting_requests", "forebay_running_requests", "forebay_waiting_samples", "forebay_workers",
          "forebay_worker_restarts_total", "forebay_queue_seconds_count", "forebay_model_seconds_count",
          "forebay_batch_size_count"}  # fmt: skip


def test_nothing_is_counted_twice(serve, tmp_path):
    """Requests count where their clients are, batches and workers where these are."""
    address = f"unix:{tmp_path}/s"
    owner = serve("owned.py", "--attach", address)
    front = serve(None, "--owner", address)
    for _ in range(5):
        assert front.call("fails", "a").status_code == 200
    for _ in range(3):
        assert owner.call("fails", "a").status_code == 200
    assert [front.call("fails", sample).status_code for sample in ("break", "refuse", "break")] == [500, 400, 500]
    assert owner.call("fails", "break").status_code == 500
    ours, theirs = counted(front, "fails"), counted(owner, "fails")
    requests = {code: count for (name, code), count in ours.items() if name == "forebay_requests_total"}
    assert requests == {"ok": 5, "internal": 2, "invalid_argument": 1}
    requests = {code: count for (name, code), count in theirs.items() if name == "forebay_requests_total"}
    assert requests == {"ok": 3, "internal": 1}
    assert (ours["forebay_request_seconds_count", ""], theirs["forebay_request_seconds_count", ""]) == (8, 4)
    assert theirs["forebay_batch_size_count", ""] == theirs["forebay_model_seconds_count", ""] == 12
    assert {name for name, _ in theirs} >= OWNERS
    assert not OWNERS & {name for name, _ in ours}
    buckets = [count for (name, _), count in theirs.items() if name == "forebay_request_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 4


def test_parts_of_a_stream_count_at_the_owner(serve, tmp_path):
    address = f"unix:{tmp_path}/s"
    owner = serve("owned.py", "--attach", address)
    front = serve(None, "--owner", address)
    gate = tmp_path / "gate"
    gate.touch()
    for server in (front, front, owner):
        assert server.call("slow", [str(gate), 4]).status_code == 200
    assert ("forebay_stream_parts_total", "") not in counted(front, "slow")
    assert counted(owner, "slow")["forebay_stream_parts_total", ""] == 12
