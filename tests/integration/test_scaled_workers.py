# SPDX-License-Identifier: Apache-2.0
"""Workers come with the load and leave after it, over HTTP; requests wait for the first one, or are told how long."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor


def workers(server):
    return server.metric("forebay_workers"), server.metric("forebay_workers_wanted")


def lines(server):
    return [line["message"] for line in server.records if line["message"].startswith("scaling 'sleepy'")]


def test_workers_come_with_the_load_are_replaced_when_killed_and_leave_one_by_one(serve, eventually, tmp_path):
    server = serve("single.py", "--workers", "1:3", "--max-batch-size", "1", "--scale-down-s", "0.3")
    assert workers(server) == (1, 1)
    _, first = server.call("sleepy", 0.0).json()
    go = tmp_path / "go"
    with ThreadPoolExecutor(8) as executor:
        calls = [executor.submit(server.call, "sleepy", str(go)) for _ in range(8)]
        eventually(lambda: workers(server) == (3, 3))
        os.kill(first, signal.SIGKILL)
        eventually(lambda: server.metric("forebay_worker_restarts_total") == 1 and workers(server) == (3, 3))
        assert server.client.get("/models/sleepy").json()["workers"]["slots"] == 3
        go.touch()
        answers = [call.result() for call in calls]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()[1] for answer in answers}) > 1
    eventually(lambda: workers(server) == (1, 1))
    assert lines(server)[-2:] == ["scaling 'sleepy' to 2 workers from 3", "scaling 'sleepy' to 1 workers from 2"]
    assert server.metric("forebay_worker_restarts_total") == 1  # those that left are no loss
    assert server.call("sleepy", 0.0).status_code == 200


def test_without_workers_a_request_waits_for_one_or_is_told_how_long_that_takes(serve, eventually):
    server = serve("single.py", "--workers", "0:2", "--scale-down-s", "0.2")
    eventually(lambda: workers(server) == (0, 0))
    assert server.client.get("/readyz").status_code == 200
    assert server.client.get("/v2/models/sleepy/ready").status_code == 200
    assert server.client.get("/models/sleepy").json()["ready"]
    hurried = server.call("sleepy", 0.0, x_request_timeout_ms="5")
    assert (hurried.status_code, int(hurried.headers["retry-after"]) >= 1) == (503, True)
    assert hurried.json()["error"]["detail"] == {"retry_after_s": int(hurried.headers["retry-after"])}
    assert "'sleepy' has no worker; one is being started, which takes about" in hurried.json()["error"]["message"]
    # The worker comes all the same, for whoever tries again, and leaves when nobody does.
    eventually(lambda: lines(server)[-1] == "scaling 'sleepy' to 0 workers from 1" and len(lines(server)) == 2)
    answer = server.call("sleepy", 0.0)
    assert answer.status_code == 200
    eventually(lambda: workers(server) == (0, 0))
    assert server.call("sleepy", 0.0).json()[1] != answer.json()[1]
