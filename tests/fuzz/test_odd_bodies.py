# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in a body, or in an answer of a model, the answer is one of the protocol, and nobody else's.

Every eleventh of the bodies that `make fuzz` sends, and every answer at some of the doors.
"""

import itertools
import json

import pytest
from tests.attacks import doors
from tests.attacks.crowds import put
from tests.fuzz.door_odd_bodies import DOORS, JSON, OPTIONS, fault, requests
from tests.models.odd_answers import ANSWERS, PLAIN
from tests.waiting import eventually

STEP = 11
DOORS_AN_ANSWER = 2


def headers_of(named):
    return [f"{name}: {value}" for name, value in named.items()]


def is_idle(server):
    models = server.client.get("/models").json()["models"]
    return not any(one["in_flight"] or one["waiting"] for one in models)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.target)
def test_no_body_is_the_servers_fault(launch, door):
    server, wrong = launch("crowded.py", *OPTIONS), []
    with server.connect() as wire:
        for sent in itertools.islice(requests(door), 0, None, STEP):
            answer = wire.ask("POST", door.target + sent.query, sent.body, headers=headers_of(sent.headers))
            said = fault(door, sent.spot, answer.status, answer.headers.get("content-type", ""), answer.body)
            wrong += [(sent.spot, said, answer.status, answer.body[:300], sent.body[:300])] if said else []
    assert not wrong, "\n".join(map(str, wrong[:20]))
    eventually(lambda: is_idle(server))
    assert "Traceback" not in server.log, server.log[-2000:]


@pytest.mark.parametrize("name", ["tools", "tool_choice", "metadata"])
def test_what_a_response_repeats_is_utf8(launch, name):
    server, seed = launch("crowded.py", *OPTIONS), doors.RESPONSE
    spoiled = put(seed, (name, 0, "zz") if name == "tools" else (name, "zz"), "SPOILED")
    with server.connect() as wire:
        body = json.dumps(spoiled).encode().replace(b"SPOILED", b"\xff")
        answer = wire.ask("POST", "/v1/responses", body, headers=headers_of(JSON))
    assert (answer.status, answer.error["param"], "UTF-8" in answer.error["message"]) == (400, name, True)


def chat(number):
    return json.dumps({"model": "talker", "max_tokens": 9, "messages": [{"role": "user", "content": str(number)}]})


def tensor(number):
    return json.dumps({"inputs": [{"name": "input", "datatype": "INT64", "shape": [1], "data": [number]}]})


def rows(number):
    return json.dumps({"instances": [number]})


ORIGIN = "http://page.example"
ASKED = [
    *((f"/models/{model}", str, {}) for model in ("anything", "declared", "raw", "film")),
    *(("/models/anything", str, more) for more in ({"accept": "application/msgpack"}, {"origin": ORIGIN})),
    *((f"/v2/models/{model}/infer", tensor, {}) for model in ("anything", "declared")),
    *((f"/v1/models/{model}:predict", rows, {}) for model in ("anything", "declared")),
    ("/v1/chat/completions", chat, {}),
    ("/v1/messages", chat, {}),
    ("/v1/responses", lambda number: json.dumps({"model": "talker", "input": str(number)}), {}),
]


def test_no_answer_of_a_model_is_anybody_elses(launch):
    server = launch("odd_answers.py", "--worker-kind", "process", "--cors-origin", ORIGIN)
    asked = itertools.cycle(ASKED)
    with server.connect() as wire, server.connect() as neighbour:
        for number in range(len(ANSWERS)):
            for target, body, more in itertools.islice(asked, DOORS_AN_ANSWER):
                headers = headers_of(JSON | more)
                wire.send(wire.request("POST", target, body(number).encode(), headers=headers))
                neighbour.send(neighbour.request("POST", target, body(PLAIN).encode(), headers=headers))
                answer, beside = wire.read(), neighbour.read()
                shown = f"{target}, {number}: {answer}, {beside}"
                assert beside.status == 200, shown
                assert answer.status in {200, 201, 299, 300, 303, 400, 404, 418, 500, 503, 599}, shown
                assert "evil" not in answer.headers, shown
                if answer.headers["content-type"] == "application/json":
                    json.loads(answer.body.decode())
    eventually(lambda: is_idle(server))
    logged = {one["message"].partition(":")[0] for one in server.records}
    assert logged == {"BadOutcome", "RunnerFailed"}, logged
    assert "cannot be sent to the server" not in server.log  # each result is written, or refused by itself
