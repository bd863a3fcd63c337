# SPDX-License-Identifier: Apache-2.0
"""A TLS connection that several threads use: what `ssl.SSLSocket` does not promise."""

import socket
import ssl
import threading

import pytest
import trustme
from tests.waiting import eventually

from forebay.workers.wire.heartbeat import MISSED, Heartbeat
from forebay.workers.wire.tls_socket import TlsSocket


@pytest.fixture
def ends():
    """A client's end, and that of a server which speaks TLS by other means."""
    authority = trustme.CA()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_context)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    ours, theirs = socket.socketpair()
    found = []
    shaking = threading.Thread(target=lambda: found.append(server_context.wrap_socket(theirs, server_side=True)))
    shaking.start()
    client = TlsSocket(ours, context, "localhost")
    shaking.join()
    yield client, found[0]
    client.close()
    found[0].close()


def test_reading_without_waiting_takes_all_that_has_come(ends):
    client, server = ends
    buffer = memoryview(bytearray(1 << 18))
    with pytest.raises(BlockingIOError):
        client.recv_into(buffer, 0, socket.MSG_DONTWAIT)
    server.sendall(b"a")
    assert client.recv_into(buffer) == 1
    server.sendall(b"b" * 50_000)  # several records, of which none may stay behind
    count = client.recv_into(buffer)
    while count < 50_000:
        count += client.recv_into(buffer[count:])
    server.close()
    assert client.recv_into(buffer) == 0


def test_one_thread_reads_while_others_write(ends):
    client, server = ends
    size, parts = 100_000, 20
    lock = threading.Lock()

    def write(letter):
        for _ in range(parts):
            with lock:
                client.sendall(letter * size)

    def echo():
        left = 2 * parts * size
        while left:
            data = server.recv(1 << 16)
            server.sendall(data)
            left -= len(data)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    threads.append(threading.Thread(target=echo))
    for thread in threads:
        thread.start()
    buffer, counts = memoryview(bytearray(1 << 18)), {b"a": 0, b"b": 0}
    while sum(counts.values()) < 2 * parts * size:
        data = bytes(buffer[: client.recv_into(buffer)])
        for letter in counts:
            counts[letter] += data.count(letter)
    for thread in threads:
        thread.join()
    assert counts == {b"a": parts * size, b"b": parts * size}


def test_a_reader_does_not_wait_for_writers_whose_bytes_nobody_takes(ends):
    client, server = ends
    size, read = 8 << 20, []
    writers = [threading.Thread(target=client.sendall, args=(letter * size,)) for letter in (b"a", b"b")]
    reader = threading.Thread(target=lambda: read.append(client.recv_into(memoryview(bytearray(1 << 18)))))
    for thread in writers:
        thread.start()
    eventually(client._on_wire.locked, "a writer waits")
    server.sendall(b"hello")
    reader.start()
    eventually(lambda: read == [5], "what came is read")
    left = 2 * size
    while left:
        left -= len(server.recv(1 << 16))
    for thread in [*writers, reader]:
        thread.join()


def test_a_heartbeat_counts_what_was_missed_in_a_row():
    heartbeat = Heartbeat()
    for _ in range(3):
        assert all(heartbeat.tick() for _ in range(MISSED - 1))
        heartbeat.heard()
    assert [heartbeat.tick() for _ in range(MISSED)] == [True] * (MISSED - 1) + [False]
