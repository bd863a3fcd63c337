# SPDX-License-Identifier: Apache-2.0
"""Calls of an `async def predict` run side by side on one loop, in a worker process as on the server's own."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

CALLS = 4
KINDS = {"inline": ("--workers", str(CALLS)), "process": ("--threads", str(CALLS))}


@pytest.fixture(scope="module", params=KINDS)
def server(request, launch):
    return launch("side_by_side.py", "--worker-kind", request.param, *KINDS[request.param])


@pytest.fixture
def ask(server):
    yield from asking(server)


def asking(server):
    executor = ThreadPoolExecutor(2 * CALLS)

    def begin(sample, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return executor.submit(server.client.post, "/models/meets", json=sample, headers=headers)

    yield begin
    executor.shutdown(wait=False)  # some wait until the server ends


def told(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_calls_meet_on_the_loop_that_loaded_the_model_and_fail_alone(ask):
    stays = ask("stay", x_request_timeout_ms="100000000")
    failing = [ask("fail") for _ in range(3)]
    meeting = [ask(f"meet {CALLS - 1}") for _ in range(CALLS - 1)]
    assert [one.result().status_code for one in failing] == [500] * 3
    assert len({told(one.result())["pid"] for one in meeting}) == 1
    assert not stays.done(), "others are answered before it"
    told(ask("release").result())
    told(stays.result())


def test_what_a_call_prints_is_told_with_its_own_request(server, ask, eventually):
    names = [f"{number}-of-them" for number in range(3 * CALLS)]
    for one in [ask(f"say {name}", x_request_id=name) for name in names]:
        told(one.result())
    for name in names:
        line = eventually(lambda name=name: re.search(rf'.*"said {name}".*', server.log))
        assert f'"request_ids":["{name}"]' in line[0]


def test_a_call_that_nobody_waits_for_is_cancelled_and_its_neighbours_go_on(ask, eventually):
    late = [ask("stay", x_request_timeout_ms="50") for _ in range(2)]
    meeting = [ask(f"meet {CALLS}") for _ in range(CALLS)]
    assert [one.result().status_code for one in late] == [504, 504]
    for one in meeting:
        told(one.result())
    eventually(lambda: told(ask("tell").result())["staying"] == 0)
    assert told(ask("tell").result())["cancelled"] <= 2, "one that had not begun is not run"


def test_calls_of_a_process_that_dies_are_run_again_by_the_next_one(serve, tmp_path, eventually):
    server = serve("side_by_side.py:Meets", *KINDS["process"], env={"MARK": str(tmp_path / "mark")})
    asks = asking(server)
    ask = next(asks)
    first = told(ask("tell").result())["pid"]
    staying = [ask("stay") for _ in range(2)]
    eventually(lambda: told(ask("tell").result())["staying"] == 2)
    ending = ask("exit")
    second = {told(one.result())["pid"] for one in (*staying, ending)}
    assert len(second) == 1
    assert first not in second
    assert server.metric("forebay_worker_restarts_total") == 1
    assert next(asks, None) is None


def test_bodies_and_methods_stay_apart(server):
    bodies = [bytes([number]) * size for number, size in enumerate((1, 70_000, 300_000) * 8)]

    def ask(body):
        paths = ("/models/echoes", "/models/echoes/length")
        same, length = (server.client.post(path, content=body) for path in paths)
        return same.content == body, length.json() == len(body)

    with ThreadPoolExecutor(8) as executor:
        assert set(executor.map(ask, bodies)) == {(True, True)}
