# SPDX-License-Identifier: Apache-2.0
"""The gRPC port: health, reflection, limits, deadlines, keys, TLS, and how it opens and closes."""

import asyncio
import socket
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.compat.pipeline.fronts import PATIENCE_S, Echo, Fronts, status_of

from forebay.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    QueueFull,
    RunnerFailed,
    Unavailable,
)
from forebay.server.config import GrpcConfig
from forebay.surfaces.pipeline.protocol.messages import SERVICE, Request
from forebay.transports.grpc.listener import GrpcListener

Code = grpc.StatusCode
ASKED = Request(key=["x"], value=["1"])
REFLECTION = "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def module_fronts():
    with Fronts(Echo(), rpc=GrpcConfig(max_message_bytes=1 << 20)) as fronts:
        yield fronts


@pytest.fixture
def fronts(module_fronts):
    module_fronts.inference.behave = module_fronts.inference.echo
    module_fronts.inference.entered.clear()
    module_fronts.inference.cancelled.clear()
    module_fronts.is_ready = True
    return module_fronts


def check(fronts, service=""):
    stub: Any = health_pb2_grpc.HealthStub(fronts.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S).status


@pytest.mark.parametrize("service", ["", SERVICE, "grpc.health.v1.Health"])
def test_health_is_that_of_the_app(fronts, service):  # P18, P106
    assert check(fronts, service) == SERVING
    fronts.is_ready = False
    assert check(fronts, service) == NOT_SERVING


def test_health_of_unknown_services(fronts):
    assert status_of(lambda: check(fronts, "other"))[0] == Code.NOT_FOUND
    stub: Any = health_pb2_grpc.HealthStub(fronts.channel)
    watching = stub.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=PATIENCE_S)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_changes_of_health_are_told(fronts):  # P18
    stub: Any = health_pb2_grpc.HealthStub(fronts.channel)
    watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert next(watching).status == SERVING
    fronts.is_ready = False
    assert next(watching).status == NOT_SERVING
    watching.cancel()


def test_the_service_is_found_by_reflection(fronts):  # P18
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(fronts.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, described = stub.ServerReflectionInfo(iter(asked), timeout=PATIENCE_S)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", *REFLECTION}
    (data,) = described.file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(data)
    assert [method.name for method in file.service[0].method] == ["inference"]


@pytest.mark.parametrize(
    "error,code",
    [
        (QueueFull("too many"), Code.RESOURCE_EXHAUSTED),
        (DeadlineExceeded("too late"), Code.DEADLINE_EXCEEDED),
        (Unavailable("loading"), Code.UNAVAILABLE),
        (InvalidRequest("odd"), Code.INVALID_ARGUMENT),
        (NotFound("nothing"), Code.NOT_FOUND),
    ],
)
def test_faults_are_statuses(fronts, error, code):  # P27
    fronts.inference.fail(error)
    assert status_of(lambda: fronts.call(ASKED)) == (code, error.message)


@pytest.mark.parametrize("error", [RunnerFailed("secret", trace="secret"), ZeroDivisionError("secret")])
def test_what_failed_inside_is_not_told(fronts, error):
    fronts.inference.fail(error)
    code, text = status_of(lambda: fronts.call(ASKED))
    assert code == Code.INTERNAL
    assert "secret" not in text
    fronts.inference.behave = fronts.inference.echo
    assert fronts.call(ASKED).err_no == 0


def test_what_is_no_message_is_refused(fronts):
    assert status_of(lambda: fronts.call(b"\xff\xff"))[0] == Code.INVALID_ARGUMENT
    assert status_of(lambda: fronts.method("/other.Service/inference")(b""))[0] == Code.UNIMPLEMENTED


def test_long_messages_are_refused_both_ways(fronts):  # P16
    long = "x" * (1 << 20)
    assert status_of(lambda: fronts.call(Request(value=[long])))[0] == Code.RESOURCE_EXHAUSTED

    async def behave(request):
        return fronts.inference.response_class(value=[long])

    fronts.inference.behave = behave
    assert status_of(lambda: fronts.call(ASKED))[0] == Code.RESOURCE_EXHAUSTED
    fronts.inference.behave = fronts.inference.echo
    assert fronts.call(ASKED).err_no == 0


def test_the_time_a_client_gives(fronts):  # P90
    fronts.call(ASKED, timeout=PATIENCE_S)
    assert 0 < fronts.inference.timeouts[-1] <= PATIENCE_S * 1.1  # gRPC rounds times up
    fronts.method()(ASKED.SerializeToString())
    assert fronts.inference.timeouts[-1] is None
    assert fronts.inference.peers[-1].startswith("ipv4:127.0.0.1:")


def test_nobody_works_for_a_call_that_was_cancelled(fronts):  # P98
    fronts.inference.behave = fronts.inference.hang
    call = fronts.method().future(b"")
    assert fronts.inference.entered.wait(PATIENCE_S)
    call.cancel()
    assert fronts.inference.cancelled.wait(PATIENCE_S)


def test_nobody_works_past_the_deadline(fronts):  # P90
    fronts.inference.behave = fronts.inference.hang
    while not fronts.inference.entered.is_set():  # a busy machine may let the time pass before it is there
        assert status_of(lambda: fronts.call(ASKED, timeout=0.2))[0] == Code.DEADLINE_EXCEEDED
    assert fronts.inference.cancelled.wait(PATIENCE_S)


def test_calls_at_a_time_are_limited():
    with Fronts(Echo(), rpc=GrpcConfig(max_calls=1)) as fronts, grpc.insecure_channel(fronts.endpoint) as other:
        fronts.inference.behave = fronts.inference.hang
        hanging = fronts.method().future(b"")
        assert fronts.inference.entered.wait(PATIENCE_S)
        second = fronts.method(channel=other)
        assert status_of(lambda: second(b"", timeout=PATIENCE_S))[0] == Code.RESOURCE_EXHAUSTED
        hanging.cancel()


def test_keys():
    with Fronts(Echo(), rpc=GrpcConfig(api_keys=("sesame",))) as fronts:
        assert status_of(lambda: fronts.call(ASKED))[0] == Code.UNAUTHENTICATED
        assert status_of(lambda: fronts.call(ASKED, metadata=[("x-api-key", "wrong")]))[0] == Code.UNAUTHENTICATED
        for pair in (("x-api-key", "sesame"), ("authorization", "Bearer sesame")):
            assert fronts.call(ASKED, metadata=[pair]).err_no == 0
        assert check(fronts) == SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(fronts.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflecting = stub.ServerReflectionInfo(iter([asked]), timeout=PATIENCE_S)
        assert status_of(lambda: next(reflecting))[0] == Code.UNAUTHENTICATED


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    chain, key, both = folder / "chain.pem", folder / "key.pem", folder / "both.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    certificate.private_key_and_cert_chain_pem.write_to_path(both)
    return authority.cert_pem.bytes(), str(chain), str(key), str(both)


@pytest.mark.parametrize("in_one_file", [False, True])
def test_tls(tls_files, in_one_file):
    root, chain, key, both = tls_files
    files = {"certfile": both} if in_one_file else {"certfile": chain, "keyfile": key}
    with Fronts(Echo(), rpc=GrpcConfig(**files)) as fronts:
        credentials = grpc.ssl_channel_credentials(root)
        with grpc.secure_channel(f"localhost:{fronts.grpc_port}", credentials) as channel:
            assert fronts.method(channel=channel)(b"", timeout=PATIENCE_S) == b""


def start(config):
    async def run():
        listener = GrpcListener(config, [], lambda: True)
        try:
            return await listener.start()
        finally:
            await listener.stop(0.0)

    return asyncio.run(run())


def test_tls_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match=r"the TLS file .*none.pem: No such file"):
        start(GrpcConfig(certfile=str(tmp_path / "none.pem")))


@pytest.mark.parametrize("listens", [True, False])
def test_a_port_in_use_is_named(listens):  # P119
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use"):
            start(GrpcConfig(port=port))


def test_two_servers_do_not_share_a_port():  # P119
    with Fronts(Echo()) as fronts, pytest.raises(ConfigError, match="is in use"):
        start(GrpcConfig(port=fronts.grpc_port))


@pytest.mark.parametrize(
    "config,says",
    [
        (GrpcConfig(port=70_000), "expected a port from 0 to 65535, got 70000"),
        (GrpcConfig(host="192.0.2.1"), "expected an address of this machine"),
    ],
)
def test_addresses_that_cannot_be_had(config, says):
    with pytest.raises(ConfigError, match=says):
        start(config)


def test_ipv6():
    host, port = start(GrpcConfig(host="::1"))
    assert (host, port > 0) == ("::1", True)


def is_refused(host, port):
    try:
        socket.create_connection((host, port)).close()
    except ConnectionError:
        return True
    return False


def test_open_calls_are_answered_while_it_stops(eventually):  # P96
    with Fronts(Echo()) as fronts:
        release = asyncio.Event()

        async def behave(request):
            fronts.inference.entered.set()
            await release.wait()
            return fronts.inference.response_class(err_msg="late")

        fronts.inference.behave = behave
        call = fronts.method().future(b"")
        assert fronts.inference.entered.wait(PATIENCE_S)
        stopping = asyncio.run_coroutine_threadsafe(fronts.stop_grpc(PATIENCE_S), fronts._loop)
        host, port = fronts.endpoint.rsplit(":", 1)
        eventually(lambda: is_refused(host, int(port)))  # who came before the port was closed is answered, too
        with grpc.insecure_channel(fronts.endpoint) as later:
            method = fronts.method(channel=later)
            assert status_of(lambda: method(b"", timeout=PATIENCE_S))[0] == Code.UNAVAILABLE
        fronts._loop.call_soon_threadsafe(release.set)
        assert call.result(PATIENCE_S) == fronts.inference.response_class(err_msg="late").SerializeToString()
        stopping.result(PATIENCE_S)


def test_calls_that_do_not_end_are_ended():
    with Fronts(Echo()) as fronts:
        fronts.inference.behave = fronts.inference.hang
        call = fronts.method().future(b"")
        assert fronts.inference.entered.wait(PATIENCE_S)
        fronts.run(fronts.stop_grpc(0.05))
        assert status_of(lambda: call.result(PATIENCE_S))[0] in {Code.UNAVAILABLE, Code.CANCELLED}
        assert fronts.inference.cancelled.wait(PATIENCE_S)


def test_stopping_may_be_hurried():
    with Fronts(Echo()) as fronts:
        fronts.inference.behave = fronts.inference.hang
        call = fronts.method().future(b"")  # one that nobody refers to is cancelled
        assert fronts.inference.entered.wait(PATIENCE_S)
        stopping = asyncio.run_coroutine_threadsafe(fronts.stop_grpc(PATIENCE_S), fronts._loop)
        fronts.run(asyncio.sleep(0.05))
        stopping.cancel()
        assert fronts.inference.cancelled.wait(PATIENCE_S)
        assert status_of(lambda: call.result(PATIENCE_S))[0] in {Code.UNAVAILABLE, Code.CANCELLED}


def test_messages_of_500_concurrent_calls_are_not_mixed(fronts):  # P13
    async def behave(request):
        await asyncio.sleep(int(request.value[0]) % 7 / 500)
        return fronts.inference.response_class(value=request.value)

    fronts.inference.behave = behave
    calls = [fronts.method().future(Request(value=[str(n)]).SerializeToString()) for n in range(500)]
    found = [fronts.inference.response_class.FromString(call.result(PATIENCE_S)).value[0] for call in calls]
    assert found == [str(n) for n in range(500)]
