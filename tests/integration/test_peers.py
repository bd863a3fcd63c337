# SPDX-License-Identifier: Apache-2.0
"""What users of other model servers report as broken, each as a named test through the front door.

The rows come from the issue trackers of Ray Serve, LitServe, MLServer, BentoML, Triton and TorchServe.
"""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.waiting import PATIENCE_S, timeouts


@pytest.fixture(scope="module")
def peers(launch):
    return launch("peers.py", "--worker-kind", "process")


def ask(server, model, sample, **more):
    return httpx.post(f"{server.url}/models/{model}", json=sample, timeout=PATIENCE_S, **more)


def metric(server, name, model):
    page = httpx.get(f"{server.url}/metrics").text
    return sum(float(value) for value in re.findall(rf'^{name}{{endpoint="{model}"[^}}]*}} (\S+)$', page, re.MULTILINE))


def test_one_bad_request_in_a_batch_does_not_fail_the_others(peers):
    """LitServe 340, Ray 59194."""
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda sample: ask(peers, "picky", sample), [1, 7, 2, 3]))
    assert [answer.status_code for answer in answers] == [200, 500, 200, 200]
    assert [answers[index].json() for index in (0, 2, 3)] == [[1, 4], [2, 4], [3, 4]]


def test_clients_that_give_up_leave_nothing_behind(peers, tmp_path):
    """Ray 50046 and 41057, TorchServe 1815."""
    for number in range(20):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{peers.url}/models/long", json=[5, str(tmp_path / str(number))], timeout=0.02)
    assert ask(peers, "long", [0, str(tmp_path / "last")]).json() == "finished"
    assert metric(peers, "forebay_in_flight", "long") == 0


def test_work_nobody_waits_for_is_stopped(peers, tmp_path, eventually):
    """Triton 3581, 6101 and 7086, TorchServe 2814, OpenLLM 801."""
    note = tmp_path / "note"
    for timeout_s in timeouts(0.1):
        answer = ask(peers, "long", [600, str(note)], headers={"x-request-timeout-ms": str(int(timeout_s * 1000))})
        assert answer.status_code == 504
        if note.exists():
            break
    assert eventually(note.read_text, "the note") == "stopped"


def test_a_killed_worker_is_noticed_at_once_and_its_requests_are_answered(peers, tmp_path, eventually):
    """MLServer 1431, Triton 5381, infinity 544, TorchServe 2357."""
    first = ask(peers, "mortal", "").json()
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(ask, peers, "mortal", str(tmp_path / "until"))
        eventually(lambda: metric(peers, "forebay_in_flight", "mortal") == 1, "the request")
        os.kill(first, signal.SIGKILL)
        eventually(lambda: httpx.get(f"{peers.url}/readyz").status_code == 503, "readiness telling the truth")
        (tmp_path / "until").touch()
        answer = under_way.result()
    assert answer.status_code == 200
    assert answer.json() != first
    eventually(lambda: httpx.get(f"{peers.url}/readyz").status_code == 200, "readiness coming back")
    assert metric(peers, "forebay_worker_restarts_total", "mortal") == 1


def test_each_client_gets_its_own_rows(peers):
    """MLServer 1306, 903, 514, 1718 and 1911."""
    asked = [list(range(start, start + count)) for start, count in ((0, 3), (100, 1), (200, 5), (300, 2))] * 5
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda rows: ask(peers, "rows", rows).json(), asked))
    assert [[row for row, _ in answer] for answer in answers] == asked


def test_sizes_count_rows_and_not_requests(peers):
    """BentoML 3859 and 3710."""
    answer = ask(peers, "rows", list(range(20))).json()
    assert [row for row, _ in answer] == list(range(20))
    assert max(size for _, size in answer) == 8


def test_batches_of_one_work(peers):
    """BentoML 4856 and 4670, mosec 338."""
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda sample: ask(peers, "single", sample).json(), range(8))) == {1}


def test_the_batch_sizes_that_happen_can_be_seen(peers):
    """mosec 338: batching silently did not happen."""
    ask(peers, "single", 1)
    assert httpx.get(f"{peers.url}/models/single").json()["batching"]["mean_batch_size"] == 1.0


def test_every_part_of_the_latency_is_measured(peers):
    """Ray 32711: only the model's time was."""
    ask(peers, "single", 1)
    page = httpx.get(f"{peers.url}/metrics").text
    for name in ("request_seconds", "queue_seconds", "model_seconds", "batch_size"):
        assert re.search(rf'^forebay_{name}_count{{endpoint="single",version="1"}} [1-9]', page, re.MULTILINE), name
