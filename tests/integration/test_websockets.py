# SPDX-License-Identifier: Apache-2.0
"""WebSockets over a real port, with a real client: in one process, behind fronts with keys, and over TLS."""

import asyncio
import contextlib
import json
import socket

import msgspec
import pytest
import trustme
from tests.conftest import MODELS
from tests.test_docs import blocks, run_here
from tests.waiting import PATIENCE_S, eventually
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect

LIMIT = 200_000
HANDSHAKE = (
    *("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"),
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)
NAMES = ("Echo", "Typed", "Upper", "Doubles", "Count", "Diary", "Narrow")
KINDS = {
    "thread": {"worker_kind": "thread"},
    "fronts": {"worker_kind": "process", "fronts": 2},
}
KEY = {"authorization": "Bearer k1"}


@pytest.fixture(scope="module", params=KINDS)
def server(request, launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sockets")
    models = [{"target": f"{MODELS / 'zoo.py'}:{name}"} for name in NAMES]
    (folder / "forebay.yaml").write_text(
        json.dumps({"models": models, "http": {"max_body_bytes": LIMIT}, **KINDS[request.param]})
    )
    options = ["--config", str(folder / "forebay.yaml")]
    if request.param == "fronts":
        options += ["--api-key", "k1"]
    found = launch(None, *options)
    found.client.headers.update(KEY)
    return found


def opened(server, model, headers=KEY, **more):
    """A socket to a model."""
    url = f"{server.url.replace('http', 'ws', 1)}/models/{model}"
    more = {"open_timeout": PATIENCE_S, "close_timeout": PATIENCE_S, "max_size": None, **more}
    more["max_queue"] = (
        None  # with a full queue the library reads no close either, and waits for all of `close_timeout`
    )
    return connect(url, additional_headers=headers, **more)


def asked(server, model, sample):
    with opened(server, model) as client:
        client.send(sample)
        return client.recv(PATIENCE_S)


def test_messages_are_samples_and_answers_come_in_order(server):
    with opened(server, "echo") as client:
        for number in range(200):
            client.send(json.dumps({"number": number}))
        assert [json.loads(client.recv(PATIENCE_S))["number"] for _ in range(200)] == [*range(200)]
        client.send(msgspec.msgpack.encode({"a": [1, "2"]}))
        assert json.loads(client.recv(PATIENCE_S)) == {"a": [1, "2"]}
        client.send(iter(["[1,", "", '"', "é", '"]']))  # in fragments
        assert json.loads(client.recv(PATIENCE_S)) == [1, "é"]
        assert client.ping().wait(PATIENCE_S)
    with opened(server, "echo", {**KEY, "accept": "application/msgpack"}) as client:
        client.send("[1.5]")
        assert client.recv(PATIENCE_S) == msgspec.msgpack.encode([1.5])
    assert asked(server, "upper", b"abc\xff") == b"ABC\xff"
    assert asked(server, "doubles", "[1, 2, 3]") == "[2,4,6]"
    shape = {"name": "a", "points": [{"x": 1, "y": 2}]}
    assert json.loads(asked(server, "typed", json.dumps(shape))) == {"name": "a", "corners": 1}
    large = json.dumps("x" * 150_000)
    assert asked(server, "echo", large) == large


def test_an_error_is_an_answer_and_the_next_message_has_its_own(server):
    with opened(server, "typed") as client:
        client.send('{"name": "a", "points": [{"x": 1}]}')
        error = json.loads(client.recv(PATIENCE_S))["error"]
        assert (error["code"], error["detail"]["path"]) == ("invalid_argument", "$.points[0].y")
        assert error["request_id"]
        client.send('{"name": "a", "points": []}')
        assert json.loads(client.recv(PATIENCE_S))["corners"] == 0


def test_a_stream_is_a_message_for_each_part_and_an_empty_text(server):
    with opened(server, "count") as client:
        for sample in (3, 0, -1):
            client.send(str(sample))
        told = [client.recv(PATIENCE_S) for _ in range(9)]
        assert told[:5] == ["0", "1", "2", "", ""]
        assert told[5:7] == ["0", "1"]
        assert json.loads(told[7])["error"]["code"] == "internal"
        assert told[8] == ""


def test_a_client_that_ends_a_stream_cancels_it(server):
    for is_killed in (False, True):
        with opened(server, "count") as client:
            client.send("-2")
            assert len(client.recv(PATIENCE_S)) > 100_000
            if is_killed:
                client.socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: server.client.get("/models/count").json()["in_flight"] == 0)
    assert server.call("count", 1).text == "data: 0\n\n"


def test_a_client_that_does_not_read_does_not_hold_up_others(server):
    if "k1" in server.command:
        pytest.skip("the connection is the same one without fronts")
    before = server.metric("forebay_stream_parts_total", endpoint="count")
    with server.connect("authorization: Bearer k1\r\n") as wire:
        wire.send(wire.head("GET", "/models/count", *HANDSHAKE))
        assert wire.read_head().status == 101
        wire.send(Frame(Opcode.TEXT, b"-2").serialize(mask=True))
        eventually(lambda: server.metric("forebay_stream_parts_total", endpoint="count") > before)
        assert server.call("count", 1).text == "data: 0\n\n"
        written = server.metric("forebay_stream_parts_total", endpoint="count") - before
        assert written < 1000, "parts of 100 KB"


def test_what_is_too_large_or_no_text_closes_it(server):
    for data, code in ((b"\xff", 1007), (b"1" * (LIMIT + 1), 1009)):
        with opened(server, "echo") as client:
            with contextlib.suppress(ConnectionClosed):
                client.send(data, text=True)
            with pytest.raises(ConnectionClosed) as caught:
                client.recv(PATIENCE_S)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == code


def test_who_may_not_ask_is_refused_before_anything_is_opened(server):
    refused = [({**KEY, "origin": "http://page.example"}, 403)]
    if "k1" in server.command:
        refused += [({}, 401), ({"x-api-key": "k2"}, 401)]
    for headers, status in refused:
        with pytest.raises(InvalidStatus) as caught, opened(server, "echo", headers):
            pass
        assert caught.value.response.status_code == status
    assert asked(server, "echo", "1") == "1"


def test_a_socket_over_tls_is_the_same(launch, tmp_path):
    # With the client on a loop: that of threads reads and writes one TLS connection at the same time, and may hang.
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    server = launch("zoo.py", "--worker-kind", "thread", "--certfile", str(tmp_path / "both.pem"), ca=authority)
    url = f"{server.url.replace('http', 'ws', 1)}/models"

    async def ask():
        async with connect_async(f"{url}/echo", ssl=server.trust, open_timeout=PATIENCE_S) as client:
            for number in range(200):
                await client.send(str(number))
            assert [int(await client.recv()) for _ in range(200)] == [*range(200)]
            large = json.dumps("x" * 150_000)
            await client.send(large)
            assert await client.recv() == large
        async with connect_async(f"{url}/count", ssl=server.trust, open_timeout=PATIENCE_S) as client:
            await client.send("3")
            assert [await client.recv() for _ in range(4)] == ["0", "1", "2", ""]

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


def test_the_client_shown_works_as_shown(launch, tmp_path):
    shown = blocks("docs/how-to/streams.md")
    (tmp_path / "count.py").write_text(shown["count.py"])
    server = launch(tmp_path / "count.py", "--worker-kind", "thread")
    text = shown["talk.py"].replace("ws://127.0.0.1:8080", server.url.replace("http", "ws"))
    (tmp_path / "talk.py").write_text(text)
    assert run_here(tmp_path, "talk.py") == "0\n1\n0\n1\n2\n"


def test_a_server_that_stops_answers_and_goes_away(serve, tmp_path):
    server = serve("zoo.py", "--worker-kind", "thread")
    until = tmp_path / "until"
    with opened(server, "diary") as busy, opened(server, "echo") as idle:
        busy.send(json.dumps({"name": "a", "until": str(until)}))
        eventually(lambda: server.client.get("/models/diary").json()["in_flight"] == 1)
        server.signal()
        with pytest.raises(ConnectionClosed) as caught:
            idle.recv(PATIENCE_S)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1001
        until.touch()
        assert json.loads(busy.recv(PATIENCE_S)) == ["a"]
        with pytest.raises(ConnectionClosed):
            busy.recv(PATIENCE_S)
    assert server.wait() == 0
