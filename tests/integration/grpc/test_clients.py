# SPDX-License-Identifier: Apache-2.0
"""The gRPC port as Google's own client sees it."""

import asyncio
import base64
import concurrent.futures
import itertools
import json
import random
import threading
import time
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.integration.grpc.served import ALONE, ERRORS, HIDDEN, NAME, PATIENCE_S, UNLIMITED, ask, path, status_of
from tests.integration.grpc.wire import ENHANCE_YOUR_CALM, Wire
from tests.ports import free_port
from tests.waiting import eventually

from forebay.errors import ConfigError
from forebay.transports.grpc.health import MAX_NAME

Code = grpc.StatusCode
COMES_BACK = [*ALONE, ("grpc.initial_reconnect_backoff_ms", 50), ("grpc.min_reconnect_backoff_ms", 50)]
ECHOES = ["Echo", "TaskEcho", "Chat", "Join"]
aio: Any = grpc.aio
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


# ---------------------------------------------------------------------------------------------------------------------
# messages


@pytest.mark.parametrize("method", ECHOES)
@pytest.mark.parametrize("size", [0, 1, (64 << 10) + 1, 5_000_000])
def test_a_message_of_any_length_comes_back(port, method, size):
    message = random.Random(size).randbytes(size)
    assert ask(port.connect(), method, message) == message


@pytest.mark.parametrize("method", ["Echo", "Chat"])
def test_twenty_megabytes_come_back(port, method):
    message = random.Random(20).randbytes(20_000_000)
    assert ask(port.connect(), method, message) == message


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("method", ECHOES)
def test_compressed_messages_are_unpacked(port, method, kind):
    message = b"a text that repeats " * 10_000
    channel = port.connect()
    assert ask(channel, method, message, compression=kind) == message
    assert ask(channel, method, b"", compression=kind) == b""


def test_long_messages_are_refused_both_ways(open_port):
    port = open_port(max_message_bytes=100_000)
    channel = port.connect()
    for method in ECHOES:
        assert len(ask(channel, method, bytes(100_000))) == 100_000
        assert status_of(lambda method=method: ask(channel, method, bytes(100_001)))[0] == Code.RESOURCE_EXHAUSTED
    for method in ("Large", "TaskLarge"):
        assert len(ask(channel, method, b"100000")) == 100_000
        code, text = status_of(lambda method=method: ask(channel, method, b"100001"))
        assert code == Code.RESOURCE_EXHAUSTED
        assert text.startswith("answer: expected at most 100000 bytes (--max-body-bytes")
    repeat = channel.unary_stream(path("Repeat"))
    assert status_of(lambda: list(repeat(b"1 100001", timeout=PATIENCE_S)))[0] == Code.RESOURCE_EXHAUSTED
    assert ask(channel, "Echo", b"next") == b"next"


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_messages_are_as_long_as_they_are_once_unpacked(open_port, kind):
    channel = open_port(max_message_bytes=100_000).connect()
    assert len(ask(channel, "Echo", bytes(100_000), compression=kind)) == 100_000
    for size in (100_001, 10_000_000):
        refused = status_of(lambda size=size: ask(channel, "Echo", bytes(size), compression=kind))
        assert refused[0] == Code.RESOURCE_EXHAUSTED
    assert ask(channel, "Echo", b"next") == b"next"


def test_a_call_is_answered_once(port):
    channel = port.connect()
    assert [ask(channel, "Twice", b"%d" % index) for index in range(3)] == [b"0", b"1", b"2"]


# ---------------------------------------------------------------------------------------------------------------------
# streams


def test_server_streaming(port):
    repeat = port.connect().unary_stream(path("Repeat"))
    found = list(repeat(b"300 5000", timeout=PATIENCE_S))
    assert found == [bytes([index % 256]) * 5000 for index in range(300)]
    assert list(repeat(b"0 0", timeout=PATIENCE_S)) == []
    assert list(repeat(b"3 0", timeout=PATIENCE_S)) == [b"", b"", b""]


def test_client_streaming(port):
    join = port.connect().stream_unary(path("Join"))
    parts = [bytes([index % 256]) * 5000 for index in range(300)]
    assert join(iter(parts), timeout=PATIENCE_S) == b"".join(parts)
    assert join(iter([]), timeout=PATIENCE_S) == b""


def test_a_conversation(port):
    async def main():
        async with grpc.aio.insecure_channel(port.endpoint, ALONE) as channel:
            chat = channel.stream_stream(path("Chat"))(timeout=PATIENCE_S)
            for size in (1, 0, 100_000, 2):  # each is answered before the next one is sent
                await chat.write(bytes(size))
                assert await chat.read() == bytes(size)
            await chat.done_writing()
            assert await chat.read() == aio.EOF
            assert await chat.code() == Code.OK

    asyncio.run(main())


def test_what_was_yielded_before_an_error_arrives(port):
    call = port.connect().stream_stream(path("StreamRaise"))(iter([b"NOT_FOUND nothing"]), timeout=PATIENCE_S)
    assert next(call) == b"one answer"
    assert status_of(lambda: next(call)) == (Code.NOT_FOUND, "nothing")


def test_a_method_is_held_up_by_a_client_that_takes_nothing(port, eventually):
    call = port.connect().unary_stream(path("Endless"))(b"", timeout=PATIENCE_S)
    assert len(next(call)) == 1000

    def has_stopped():
        before = port.echo.yielded
        time.sleep(0.1)
        return port.echo.yielded == before

    eventually(has_stopped)
    assert port.echo.yielded < 64_000  # 64 MB
    before = port.echo.yielded
    for _ in range(before):
        next(call)
    eventually(lambda: port.echo.yielded > before)
    call.cancel()
    assert port.echo.cancelled.wait(PATIENCE_S)


def test_a_client_is_held_up_by_a_method_that_takes_nothing(port):
    sent = 0

    def parts():
        nonlocal sent
        for _ in range(1000):
            yield bytes(1 << 20)
            sent += 1

    call = port.connect().stream_stream(path("Deaf"))(parts(), timeout=PATIENCE_S)
    assert port.echo.entered.wait(PATIENCE_S)
    before = -1
    while before != sent:
        before = sent
        time.sleep(0.2)
    assert sent < 100
    call.cancel()
    assert port.echo.cancelled.wait(PATIENCE_S)


# ---------------------------------------------------------------------------------------------------------------------
# errors


@pytest.mark.parametrize("text", ["nothing of that kind", "100 % Ünïcode 漢字 \u2028 \x00\x1f\n\r", ""])
@pytest.mark.parametrize("code", ERRORS)
def test_every_error_is_a_status(shared_port, code, text):
    channel = shared_port.connect()
    for method in ("Fail", "Raise", "TaskRaise", "StreamRaise"):
        call = channel.unary_stream(path(method)) if method == "StreamRaise" else channel.unary_unary(path(method))
        asked = f"{code} {text}".encode()
        found = status_of(lambda call=call, asked=asked: list(call(asked, timeout=PATIENCE_S)))
        assert found == (Code[code], text), method


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("method", ["Raise", "TaskRaise"])
def test_what_failed_inside_is_not_told(port, kind, method):
    channel = port.connect()
    code, text = status_of(lambda: ask(channel, method, kind.encode()))
    assert code == Code.INTERNAL
    assert "log" in text
    assert "secret" not in text
    assert ask(channel, "Echo", b"next") == b"next"


def test_long_error_texts_do_not_break_the_call(port):
    code, _ = status_of(lambda: ask(port.connect(), "Fail", b"NOT_FOUND " + "ü".encode() * 100_000))
    assert code in {Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED}  # the latter is the client's, whose metadata is limited
    assert ask(port.connect(), "Echo", b"next") == b"next"


@pytest.mark.parametrize("method", ["/test.Echo/echo", "/test.Echo/", "/other.Service/Echo", "/test.Echo/Echo/x", "/x"])
@pytest.mark.parametrize("size", [0, 1_000_000])
def test_unknown_methods(port, method, size):
    channel = port.connect()
    assert status_of(lambda: ask(channel, method, bytes(size)))[0] == Code.UNIMPLEMENTED
    assert ask(channel, "Echo", b"next") == b"next"


# ---------------------------------------------------------------------------------------------------------------------
# metadata, deadlines, cancellation


def test_what_a_method_can_know(port):
    metadata = [("one", "1"), ("many", "a"), ("many", "b, c"), ("empty", ""), ("raw-bin", bytes(range(256)))]
    before = time.monotonic()
    seen = msgspec.json.decode(ask(port.connect(), "Look", metadata=metadata, timeout=PATIENCE_S))
    told = {name: [value for key, value in seen["metadata"] if key == name] for name, _ in seen["metadata"]}
    assert told["one"] == ["1"]
    assert told["many"] == ["a", "b, c"]
    assert told["empty"] == [""]
    assert told["raw-bin"] == [base64.b64encode(bytes(range(256))).decode()]
    assert "grpc-python" in told["user-agent"][0]
    assert not any(name.startswith(":") for name in told)
    host, _, number = seen["peer"].rpartition(":")
    assert host == "127.0.0.1"
    assert 0 < int(number) < 1 << 16
    spent = time.monotonic() - before
    assert PATIENCE_S - spent - 0.1 <= seen["left_s"] <= PATIENCE_S * 1.1  # gRPC rounds times up


def test_spaces_around_metadata_are_no_part_of_it(open_port):
    port = open_port(api_keys=("secret",))
    given = [("spaces", "  a  b "), ("tab-bin", b"\t x"), ("empty", " "), ("authorization", " Bearer secret ")]
    seen = msgspec.json.decode(ask(port.connect(), "Look", metadata=given))
    found = dict(seen["metadata"])
    assert (found["spaces"], found["tab-bin"], found["empty"]) == ("a  b", base64.b64encode(b"\t x").decode(), "")


def test_a_client_that_waits_for_ever(port):
    assert msgspec.json.decode(ask(port.connect(), "Look", timeout=None))["left_s"] is None


@pytest.mark.parametrize("method", ["Hang", "TaskHang", "Deaf"])
def test_nobody_works_past_the_deadline(port, method):
    channel = port.connect()
    while not port.echo.entered.is_set():  # a busy machine may let the time pass before it is there
        assert status_of(lambda: ask(channel, method, timeout=0.1))[0] == Code.DEADLINE_EXCEEDED
    assert port.echo.cancelled.wait(PATIENCE_S)
    assert ask(channel, "Echo", b"next") == b"next"


@pytest.mark.parametrize("method", ["Hang", "TaskHang", "Deaf", "Endless"])
def test_nobody_works_for_a_call_that_was_cancelled(port, method):
    channel = port.connect()
    call = channel.unary_stream(path(method))(b"", timeout=PATIENCE_S)
    assert port.echo.entered.wait(PATIENCE_S)
    call.cancel()
    assert port.echo.cancelled.wait(PATIENCE_S)
    assert ask(channel, "Echo", b"next") == b"next"


@pytest.mark.parametrize("method", ["Hang", "TaskHang", "Deaf", "Endless"])
def test_nobody_works_for_a_client_that_is_gone(port, method):
    with grpc.insecure_channel(port.endpoint, ALONE) as channel:
        call = channel.unary_stream(path(method))(b"")
        assert port.echo.entered.wait(PATIENCE_S)
    assert port.echo.cancelled.wait(PATIENCE_S)
    call.cancel()


# ---------------------------------------------------------------------------------------------------------------------
# many at once


def test_answers_of_many_calls_are_never_mixed(port):
    dice = random.Random(1)
    sizes = [dice.choice([0, 1, 100, 5000, 70_000, 300_000]) for _ in range(200)]

    async def one(channel, index):
        message = index.to_bytes(4) * (sizes[index] // 4 + 1)
        method = ECHOES[index % len(ECHOES)]
        assert await channel.unary_unary(path(method))(message, timeout=PATIENCE_S) == message

    async def main():
        async with grpc.aio.insecure_channel(port.endpoint, ALONE) as channel:
            await asyncio.gather(*(one(channel, index) for index in range(200)))

    asyncio.run(main())


def test_many_channels(port):
    channels = [port.connect() for _ in range(20)]
    calls = [
        (b"%d" % index, channel.unary_unary(path("Echo")).future(b"%d" % index, timeout=PATIENCE_S))
        for index, channel in enumerate(channels * 3)
    ]
    assert all(call.result() == message for message, call in calls)
    peers = {msgspec.json.decode(ask(channel, "Look"))["peer"] for channel in channels}
    assert len(peers) == 20


def test_a_quick_call_overtakes_a_slow_one(port):
    channel = port.connect()
    slow = channel.unary_unary(path("Later")).future(b"300", timeout=PATIENCE_S)
    assert port.echo.entered.wait(PATIENCE_S)
    assert ask(channel, "Echo", b"quick") == b"quick"
    assert not slow.done()
    assert slow.result() == b"300"


def test_more_calls_than_allowed_are_refused(open_port):
    port = open_port(max_calls=2)
    channel = port.connect()
    running = []
    for _ in range(2):
        port.echo.entered.clear()
        running.append(channel.unary_unary(path("Hang")).future(b"", timeout=PATIENCE_S))
        assert port.echo.entered.wait(PATIENCE_S)
    assert status_of(lambda: ask(channel, "Echo"))[0] == Code.RESOURCE_EXHAUSTED
    assert status_of(lambda: ask(port.connect(), "Echo"))[0] == Code.RESOURCE_EXHAUSTED
    running[0].cancel()
    assert port.echo.cancelled.wait(PATIENCE_S)
    assert ask(channel, "Echo", b"next") == b"next"
    running[1].cancel()


def test_clients_wait_with_more_streams_than_a_connection_may_have(open_port):
    port = open_port(max_streams=2)
    channel = port.connect()
    calls = [channel.unary_unary(path("Later")).future(b"20", timeout=PATIENCE_S) for _ in range(10)]
    assert [call.result() for call in calls] == [b"20"] * 10


def test_more_connections_than_allowed_are_closed(open_port, eventually):
    port = open_port(max_connections=2)
    first, second = port.connect(), port.connect()
    assert ask(first, "Echo") == ask(second, "Echo") == b""
    with Wire(port) as third:
        assert third.end() in {ENHANCE_YOUR_CALM, None}
    assert ask(first, "Echo", b"1") == b"1"
    second.close()
    eventually(lambda: _is_answered(port))


def _is_answered(port):
    try:
        return ask(port.connect(), "Echo", b"1", timeout=1.0) == b"1"
    except grpc.RpcError:
        return False


# ---------------------------------------------------------------------------------------------------------------------
# keys and TLS


@pytest.mark.parametrize("metadata", [("x-api-key", "k1"), ("x-api-key", "k2"), ("authorization", "Bearer k1")])
def test_a_known_key_opens_the_port(open_port, metadata):
    channel = open_port(api_keys=("k1", "k2")).connect()
    for method in ECHOES:
        assert ask(channel, method, b"1", metadata=[metadata]) == b"1"


@pytest.mark.parametrize(
    "metadata",
    [(), [("x-api-key", "k")], [("x-api-key", "")], [("authorization", "Basic k1")], [("x-api-key-bin", b"k1")]],
)
def test_without_a_known_key_nothing_is_answered_but_health(open_port, metadata):
    channel = open_port(api_keys=("k1",)).connect()
    for method in [*ECHOES, "Hang", "/other.Service/Echo"]:
        code, text = status_of(lambda method=method: ask(channel, method, b"1", metadata=metadata))
        assert code == Code.UNAUTHENTICATED
        assert "X-API-Key" in text
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    assert (
        status_of(lambda: list(stub.ServerReflectionInfo(iter(asked), timeout=PATIENCE_S)))[0] == Code.UNAUTHENTICATED
    )
    assert checked(channel) == SERVING


@pytest.mark.parametrize("files", [("cert.pem", "key.pem"), ("both.pem", None)])
def test_with_a_certificate_the_port_speaks_tls(open_port, authority, tls, files):
    cert, key = (str(tls / name) if name else None for name in files)
    port = open_port(certfile=cert, keyfile=key)
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    channel = port.connect(credentials=credentials)
    for size in (0, 1, 5_000_000):
        assert ask(channel, "Echo", bytes(size)) == bytes(size)
    assert len(list(channel.unary_stream(path("Repeat"))(b"100 10000", timeout=PATIENCE_S))) == 100
    for stranger in (port.connect(), port.connect(credentials=grpc.ssl_channel_credentials())):
        assert status_of(lambda stranger=stranger: ask(stranger, "Echo"))[0] == Code.UNAVAILABLE
    assert ask(channel, "Echo", b"next") == b"next"


def test_tls_files_that_cannot_be_used_are_named(open_port, tls):
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        open_port(certfile=str(tls / "nowhere.pem"))
    with pytest.raises(ConfigError, match=r"key\.pem"):
        open_port(certfile=str(tls / "key.pem"))


# ---------------------------------------------------------------------------------------------------------------------
# health and reflection


def checked(channel, service=""):
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S).status


@pytest.mark.parametrize("service", ["", NAME, "grpc.health.v1.Health"])
def test_health_is_that_of_the_app(port, service):
    channel = port.connect()
    assert checked(channel, service) == SERVING
    port.is_ready = False
    assert checked(channel, service) == NOT_SERVING


def test_all_services_are_listed_with_their_health(port):
    port.models["a-model"] = True  # which is asked for by its name
    stub: Any = health_pb2_grpc.HealthStub(port.connect())
    messages: Any = health_pb2
    for is_ready, status in ((True, SERVING), (False, NOT_SERVING)):
        port.is_ready = is_ready
        listed = stub.List(messages.HealthListRequest(), timeout=PATIENCE_S).statuses
        assert {name: one.status for name, one in listed.items()} == dict.fromkeys(
            ("", NAME, "grpc.health.v1.Health"), status
        )


def test_health_of_unknown_services(port):
    channel = port.connect()
    assert status_of(lambda: checked(channel, "other"))[0] == Code.NOT_FOUND
    with pytest.raises(grpc.RpcError) as raised:
        checked(channel, "x" * (MAX_NAME + 1))
    assert raised.value.code() == Code.INVALID_ARGUMENT


def test_who_watches_an_unknown_service_is_told_when_it_comes(port):
    stub: Any = health_pb2_grpc.HealthStub(port.connect())
    watching = stub.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=PATIENCE_S)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    port.models["other"] = False
    assert next(watching).status == NOT_SERVING
    port.models["other"] = True
    assert next(watching).status == SERVING
    del port.models["other"]
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watching.cancel()


def test_clients_that_heed_the_health_of_an_unknown_service_ask_once(open_port, caplog):
    """Whoever is told that it was all asks again at once."""
    caplog.set_level("INFO", logger="forebay.access")
    port = open_port(access_log=True)
    heeds = json.dumps({"healthCheckConfig": {"serviceName": "other"}, "loadBalancingConfig": [{"round_robin": {}}]})
    channel = port.connect([*COMES_BACK, ("grpc.service_config", heeds)])
    assert status_of(lambda: ask(channel, "Echo"))[0] == Code.UNAVAILABLE
    assert not [record for record in caplog.records if record.name == "forebay.access"]
    port.models["other"] = True
    assert ask(channel, "Echo", b"now", wait_for_ready=True) == b"now"


def test_changes_of_health_are_told(port):
    stub: Any = health_pb2_grpc.HealthStub(port.connect())
    watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert next(watching).status == SERVING
    port.is_ready = False
    assert next(watching).status == NOT_SERVING
    port.is_ready = True
    assert next(watching).status == SERVING
    watching.cancel()


def test_the_service_is_found_by_reflection(port):
    database = ProtoReflectionDescriptorDatabase(port.connect())
    assert {NAME, "grpc.health.v1.Health"} <= set(database.get_services())
    pool = descriptor_pool.DescriptorPool(database)
    method = pool.FindServiceByName(NAME).FindMethodByName("Echo")
    assert method.input_type.fields_by_name["text"].number == 1
    assert [method.name for method in pool.FindServiceByName("grpc.health.v1.Health").methods][:1] == ["Check"]
    with pytest.raises(KeyError):
        pool.FindServiceByName("other.Service")


def test_every_question_of_reflection_is_answered(port):
    Request = reflection_pb2.ServerReflectionRequest
    asked = [
        Request(list_services=""),
        Request(file_containing_symbol=NAME),
        Request(file_by_filename="test/echo.proto"),
        Request(file_by_filename="nowhere.proto"),
        Request(all_extension_numbers_of_type="test.Text"),
        Request(file_containing_extension={"containing_type": "test.Text", "extension_number": 1}),
        Request(list_services=""),
    ]
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(port.connect())
    found = list(stub.ServerReflectionInfo(iter(asked), timeout=PATIENCE_S))
    kinds = [answer.WhichOneof("message_response") for answer in found]
    assert kinds[:4] == [
        "list_services_response",
        "file_descriptor_response",
        "file_descriptor_response",
        "error_response",
    ]
    assert found[3].error_response.error_code == Code.NOT_FOUND.value[0]
    assert len(found) == len(asked)


# ---------------------------------------------------------------------------------------------------------------------
# coming and going


def test_a_client_may_be_there_first(open_port):
    number = free_port()
    with grpc.insecure_channel(f"127.0.0.1:{number}", COMES_BACK) as channel:
        early = channel.unary_unary(path("Echo")).future(b"early", timeout=PATIENCE_S, wait_for_ready=True)
        open_port(port=number)
        assert early.result() == b"early"


def test_stopping_loses_no_call_that_runs(port):
    channel = port.connect()
    running = [channel.unary_unary(path("Later")).future(b"300", timeout=PATIENCE_S) for _ in range(5)]
    large = channel.unary_unary(path("Echo")).future(bytes(5_000_000), timeout=PATIENCE_S)
    ask(channel, "Echo")  # sent after those, so they have arrived
    stopping = port.begin(port.listener.stop(PATIENCE_S))
    assert [call.result() for call in running] == [b"300"] * 5
    assert len(large.result()) == 5_000_000
    stopping.result(PATIENCE_S)
    assert status_of(lambda: ask(channel, "Echo", timeout=PATIENCE_S))[0] == Code.UNAVAILABLE


@pytest.mark.parametrize("method", ["Hang", "TaskHang", "Endless"])
def test_stopping_ends_what_takes_longer_than_its_grace(port, method):
    call = port.connect().unary_stream(path(method))(b"", timeout=PATIENCE_S)
    assert port.echo.entered.wait(PATIENCE_S)
    port.run(port.listener.stop(0.1))
    assert port.echo.cancelled.wait(PATIENCE_S)
    assert status_of(lambda: list(call))[0] in {Code.UNAVAILABLE, Code.CANCELLED}


def test_watching_health_does_not_hold_up_the_end(port):
    stub: Any = health_pb2_grpc.HealthStub(port.connect())
    watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert next(watching).status == SERVING
    began = time.monotonic()
    port.run(port.listener.stop(0.5))
    assert time.monotonic() - began < PATIENCE_S / 2
    assert status_of(lambda: list(watching))[0] in {Code.UNAVAILABLE, Code.CANCELLED}


def test_clients_come_back_to_a_server_that_was_started_again(port):
    channel = port.connect(COMES_BACK)
    for index in itertools.count():
        assert ask(channel, "Echo", b"%d" % index, wait_for_ready=True) == b"%d" % index
        if index == 2:
            break
        port.run(port.listener.stop(1.0))
        port.listen(port.number)


def test_nobody_notices_that_the_server_was_started_again(port, eventually):
    """Calls that it has not begun when it leaves are made again by the client."""
    is_over = threading.Event()
    answered = [0] * 4

    def go_on(client, channel):
        while not is_over.is_set():
            message = b"%d" % answered[client]
            assert ask(channel, ECHOES[answered[client] % 4], message, wait_for_ready=True) == message
            answered[client] += 1

    with concurrent.futures.ThreadPoolExecutor() as threads:
        running = [threads.submit(go_on, client, port.connect(COMES_BACK)) for client in range(4)]
        try:
            for _ in range(3):
                before = list(answered)
                eventually(lambda before=before: all(now > was + 4 for now, was in zip(answered, before, strict=True)))
                port.run(port.listener.stop(PATIENCE_S))
                port.listen(port.number)
        finally:
            is_over.set()
        for one in running:
            one.result()


def test_a_port_that_is_taken_is_named(open_port):
    port = open_port()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port.number} is in use"):
        open_port(port=port.number)
    with pytest.raises(ConfigError, match="0 to 65535"):
        open_port(port=70_000)


@pytest.mark.parametrize(
    "options", [UNLIMITED, [("grpc.http2.max_frame_size", 1 << 20)], [("grpc.keepalive_time_ms", 10)]]
)
def test_clients_with_settings_of_their_own(port, options):
    channel = port.connect([*options, ("grpc.use_local_subchannel_pool", 1)])
    assert len(ask(channel, "Large", b"3000000")) == 3_000_000


def test_the_access_log_lists_every_call(open_port, caplog):
    """F55."""
    caplog.set_level("INFO", logger="forebay.access")
    port = open_port(access_log=True, max_calls=1)
    channel = port.connect()
    assert ask(channel, "Echo", b"12345", metadata=[("x-request-id", "mine")]) == b"12345"
    assert ask(channel, "TaskEcho", b"123") == b"123"
    assert status_of(lambda: ask(channel, "Nothing", b""))[0] is Code.UNIMPLEMENTED
    hanging = channel.unary_unary(path("Hang")).future(b"", timeout=0.05)
    assert hanging.code() in {Code.DEADLINE_EXCEEDED, Code.CANCELLED}

    def found():
        return [(one.path, one.status, one.code, one.bytes) for one in caplog.records if one.name == "forebay.access"]

    eventually(lambda: len(found()) == 4)
    assert found()[:3] == [
        (path("Echo"), 0, "ok", 5),
        (path("TaskEcho"), 0, "ok", 3),
        (path("Nothing"), 12, "unimplemented", 0),
    ]
    assert found()[3][:2] in {(path("Hang"), 4), (path("Hang"), 1)}
    assert caplog.records[0].request_id == "mine"


def test_the_access_log_has_the_name_that_the_client_gave_a_call(open_port, caplog, eventually):
    caplog.set_level("INFO", logger="forebay.access")
    channel = open_port(access_log=True).connect()
    ask(channel, "Named", b"", metadata=[("x-request-id", "mine")])
    ask(channel, "Named", b"")
    eventually(lambda: len(caplog.records) == 2)
    assert [one.request_id for one in caplog.records] == ["mine", "ours"]
