# SPDX-License-Identifier: Apache-2.0
"""The client that `benchmarks.kserve` has for long bodies copies nothing: what it sends must arrive all the same."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from benchmarks.bodyflood import GrpcClient, HttpClient, run

REQUESTS = 4
ANSWER = random.Random(1).randbytes(5000)
BODY = random.Random(2).randbytes(602_000)


@contextlib.contextmanager
def served(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """Have one connection talked to in a thread; whatever that raises, the test does."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with listener.accept()[0] as sock:
                talk(sock)
                while sock.recv(1 << 16):  # the client has begun to ask again
                    pass
        except BaseException as error:
            raised.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(20)
    assert not raised, raised


def ask(*clients: Any) -> None:
    try:
        run(list(clients), lambda: all(len(client.times) >= REQUESTS for client in clients))
    finally:
        for client in clients:
            client.sock.close()


def test_a_body_over_http_arrives_byte_for_byte():
    found = []

    def talk(sock):
        file = sock.makefile("rb")
        for _ in range(REQUESTS):
            lines = list(iter(file.readline, b"\r\n"))
            length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
            found.append((lines[0], b"x-of: mine\r\n" in lines, file.read(length)))
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)

    with served(talk) as port:
        ask(HttpClient(port, "/infer", BODY, ANSWER, ["x-of: mine"]))
    assert found == [(b"POST /infer HTTP/1.1\r\n", True, BODY)] * REQUESTS


def test_messages_over_grpc_arrive_byte_for_byte_within_what_the_port_takes():
    found = []

    def talk(sock):
        config = h2.config.H2Configuration(client_side=False)
        connection = h2.connection.H2Connection(config)
        connection.local_settings = h2.settings.Settings(
            client=False, initial_values={h2.settings.SettingCodes.MAX_FRAME_SIZE: 50_000}
        )
        connection.initiate_connection()
        connection.max_inbound_frame_size = 50_000
        messages: dict[int, bytes] = {}
        while len(found) < REQUESTS:
            sock.sendall(connection.data_to_send())
            data = sock.recv(1 << 16)
            if not data:
                return
            for event in connection.receive_data(data):  # raises at a frame too long, and at one beyond a window
                if isinstance(event, h2.events.DataReceived):
                    messages[event.stream_id] = messages.get(event.stream_id, b"") + event.data
                    connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    found.append(messages.pop(event.stream_id))
                    connection.send_headers(event.stream_id, [(":status", "200")])
                    connection.send_data(event.stream_id, ANSWER)
                    connection.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
        sock.sendall(connection.data_to_send())

    with served(talk) as port:
        ask(GrpcClient(port, "/S/M", BODY, ANSWER, 1 << 20))
    assert found == [b"\0" + len(BODY).to_bytes(4, "big") + BODY] * REQUESTS


def test_a_wrong_answer_is_an_error():
    def talk(sock):
        sock.makefile("rb").read(len(BODY))
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong")

    with served(talk) as port:
        client = HttpClient(port, "/infer", BODY, ANSWER, [])
        with pytest.raises(ConnectionError, match="a wrong answer"):
            ask(client)
