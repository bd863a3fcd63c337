# SPDX-License-Identifier: Apache-2.0
"""ModelInfer and ModelStreamInfer at the port: limits, order, what is left behind, and who is told what."""

import asyncio
import errno
import gc
import os
import queue
import random
import socket
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tests.integration.grpc import wire
from tests.integration.kserve.served import KServed, M, ask, infer, number, output, refusal, request, stream
from tests.waiting import PATIENCE_S, eventually

from forebay.protocols.kserve.messages import METHODS, SERVICE
from forebay.server.app import App
from forebay.server.config import GrpcConfig, HttpConfig, Overrides, grpc_like
from forebay.transports import body_reader
from forebay.transports.grpc import model_stream_infer
from forebay.transports.grpc.calls import OpenCall
from forebay.transports.grpc.kserve_port import KServePort


@pytest.fixture(scope="module")
def port():
    with KServed(max_message_bytes=8 << 20) as found:
        yield found


@pytest.fixture
def channel(port):
    return port.connect()


def calls_that_are_kept(port):
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is OpenCall and one._connection.port is port.listener._port]


def streams_that_are_kept():
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is model_stream_infer.InferStream]


class Asking:
    """Requests of a stream, sent when the test says so."""

    def __init__(self, channel):
        self._asked = queue.Queue()
        self.call = stream(channel, iter(self._asked.get, None))

    def send(self, made):
        self._asked.put(made)

    def answer(self):
        return M.ModelStreamInferResponse.FromString(next(self.call))

    def ask(self, made):
        self.send(made)
        return self.answer()

    def close(self):
        self._asked.put(None)
        return list(self.call)


def test_typed_contents_of_any_length_are_read(channel):
    for length in (4, 40_000):  # on the loop, and beside it
        made = M.ModelInferRequest(model_name="mirror", id="typed")
        one = made.inputs.add(name="input", datatype="INT32", shape=[1, length])
        one.contents.int_contents.extend(range(length))
        assert refusal(lambda made=made: infer(channel, made))[0] == "INVALID_ARGUMENT"  # it takes floats
        one.datatype = "FP32"
        one.ClearField("contents")
        one.contents.fp32_contents.extend(range(length))
        assert output(infer(channel, made)).tolist() == [list(range(length))]
        made.inputs[0].datatype = "INT16"
        one.ClearField("contents")
        one.contents.int_contents.extend(index % 100 for index in range(length))
        assert output(infer(channel, made)).tolist() == [[index % 100 for index in range(length)]]


def test_a_call_that_has_to_be_read_beside_the_loop_may_be_called_off(port, channel):
    made = M.ModelInferRequest(model_name="mirror")
    one = made.inputs.add(name="input", datatype="INT16", shape=[1, 1_000_000])
    one.contents.int_contents.extend([1] * 1_000_000)
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(made.SerializeToString())
    call.cancel()
    assert output(infer(channel, request("mirror", np.zeros((1, 4), "f4")))).tolist() == [[0] * 4]
    eventually(lambda: not port.app.find("mirror").endpoint.in_flight)


def test_statuses_are_those_of_the_protocol(channel):
    wrong = request("add", np.zeros((1, 4), "f4"), names=("left",))
    assert refusal(lambda: infer(channel, wrong)) == (
        "INVALID_ARGUMENT",
        "input 'right' is missing; the model takes 'left', 'right'",
    )
    assert refusal(lambda: infer(channel, number("nothing", 1)))[0] == "NOT_FOUND"
    assert refusal(lambda: infer(channel, number("broken", 1))) == (
        "INTERNAL",
        "the model failed; the server's log says why",
    )
    assert refusal(lambda: infer(channel, number("count", 1)))[0] == "INVALID_ARGUMENT"
    large = request("mirror", np.zeros((1, 3 << 20), "f4"))
    assert refusal(lambda: infer(channel, large))[0] == "RESOURCE_EXHAUSTED"
    assert refusal(lambda: infer(channel, b"\xff"))[0] == "INVALID_ARGUMENT"
    assert refusal(lambda: infer(channel, request("slow", np.array([9.0])), timeout=0.1))[0] == "DEADLINE_EXCEEDED"
    late = request("slow", np.array([0.3]), timeout=1000)
    assert refusal(lambda: infer(channel, late))[0] == "DEADLINE_EXCEEDED"
    odd = request("slow", np.array([0.0]), timeout="soon")
    assert "microseconds" in refusal(lambda: infer(channel, odd))[1]
    assert refusal(lambda: ask(channel, "SystemSharedMemoryStatus")) == (
        "UNIMPLEMENTED",
        "shared memory is read and written by a server with --shared-memory only",
    )
    elsewhere = M.ModelInferRequest(model_name="mirror")
    one = elsewhere.inputs.add(name="input", datatype="FP32", shape=[1, 1])
    one.parameters["shared_memory_region"].string_param = "x"
    one.parameters["shared_memory_byte_size"].int64_param = 4
    assert refusal(lambda: infer(channel, elsewhere))[0] == "INVALID_ARGUMENT"


def test_a_call_has_no_more_than_the_longest_time():
    with KServed(overrides=Overrides(worker_kind="thread", max_timeout_ms=100)) as port:
        late = request("slow", np.array([1.0]), timeout=60_000_000)
        assert refusal(lambda: infer(port.connect(), late)) == (
            "DEADLINE_EXCEEDED",
            "timed out after 100 ms while it ran",
        )


def test_a_call_whose_deadline_is_over_is_counted_as_late():
    with KServed() as port:
        with wire.Wire(port) as client:  # it does not call itself off, as others do at their deadline
            for stream_id in range(1, 11, 2):
                message = request("slow", np.array([0.1])).SerializeToString()
                client.send(wire.call(f"/{SERVICE}/ModelInfer", message, stream=stream_id, grpc_timeout="20m"))
                assert client.answer(stream_id).status == 4
        eventually(lambda: not port.endpoint_of("slow").in_flight)
        assert port.endpoint_of("slow").metrics.codes == {"ok": 0, "deadline_exceeded": 5}


def test_overload_is_unavailable():
    with KServed(overrides=Overrides(worker_kind="thread", max_queue=1, max_batch_size=1)) as port:
        channel = port.connect()
        calls = [
            channel.unary_unary(f"/{SERVICE}/ModelInfer").future(
                request("slow", np.array([0.4])).SerializeToString(), timeout=PATIENCE_S
            )
            for _ in range(8)
        ]
        assert {call.code() for call in calls} == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


def test_a_key_is_asked_for():
    with KServed(api_keys=("secret",)) as port:
        channel = port.connect()
        made = request("mirror", np.zeros((1, 1), "f4"))
        code, message = refusal(lambda: infer(channel, made))
        assert (code, "API key missing" in message) == ("UNAUTHENTICATED", True)
        code, message = refusal(lambda: infer(channel, made, metadata=[("x-api-key", "secrets")]))
        assert (code, "API key unknown" in message) == ("UNAUTHENTICATED", True)
        assert infer(channel, made, metadata=[("x-api-key", "secret")]).model_name == "mirror"
        health = health_pb2.HealthCheckRequest(service="mirror").SerializeToString()
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(health, timeout=PATIENCE_S)
        for probe in ("Live", "Ready"):  # as /v2/health/live and /ready over HTTP: who asks for that has no key
            told = channel.unary_unary(f"/{SERVICE}/Server{probe}")(b"", timeout=PATIENCE_S)
            assert getattr(getattr(M, f"Server{probe}Response").FromString(told), probe.lower())
        told = refusal(lambda: channel.unary_unary(f"/{SERVICE}/ServerMetadata")(b"", timeout=PATIENCE_S))
        assert told[0] == "UNAUTHENTICATED"


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_long_tensors_that_take_turns_come_back_as_they_were(tmp_path, speaks_tls):  # F72
    """Beside pings, with and without TLS, one by one and as messages of a stream."""
    files, credentials = {}, None
    if speaks_tls:
        authority = trustme.CA()
        both = tmp_path / "both.pem"
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(both)
        files, credentials = {"certfile": str(both)}, grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with KServed(max_message_bytes=8 << 20, **files) as port:
        options = [("grpc.keepalive_time_ms", 10), ("grpc.max_receive_message_length", -1)]
        channel = port.connect(options, credentials)
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        sent = [np.random.default_rng(seed).random((1, 10_000 * seed + 5)).astype("f4") for seed in range(16)]
        asked = [request("mirror", one).SerializeToString() for one in sent]
        calls = [call.future(one, timeout=PATIENCE_S) for one in asked]
        for one, answer in zip(sent, calls, strict=True):
            assert np.array_equal(output(M.ModelInferResponse.FromString(answer.result())), one)
        asking = Asking(channel)
        for one in sent[::4]:
            assert np.array_equal(output(asking.ask(request("mirror", one)).infer_response), one)
        assert not asking.close()


def test_frames_of_16_kib_are_read_where_their_message_lands(port, monkeypatch):  # F72
    placed, readv = [], os.readv

    def noted(descriptor, rooms):
        placed.append(readv(descriptor, rooms))
        return placed[-1]

    monkeypatch.setattr(body_reader.os, "readv", noted)
    windows = wire.settings((4, 1 << 30)) + wire.frame(wire.WINDOW_UPDATE, (1 << 30).to_bytes(4, "big"))
    with wire.Wire(port, opening=wire.PREFACE + windows) as client:
        for stream_id, size in ((1, 150_528), (3, 150_528), (5, 97_001)):
            values = np.random.default_rng(size).random((1, size), np.float32)
            message = wire.prefixed(request("mirror", values).SerializeToString())
            pieces = [message[at : at + 16_384] for at in range(0, len(message), 16_384)]
            sent = [wire.data(piece, stream=stream_id) for piece in pieces[:-1]]
            sent.insert(len(sent) // 2, wire.frame(wire.PING, bytes(8)))
            sent.append(wire.data(pieces[-1], stream=stream_id, flags=wire.END_STREAM))
            client.send(wire.headers(f"/{SERVICE}/ModelInfer", stream=stream_id), *sent)
            answer = M.ModelInferResponse.FromString(client.answer(stream_id).message)
            assert answer.raw_output_contents[0] == values.tobytes()
    assert sum(placed) > 0


def test_health_knows_the_models_and_reflection_the_service(channel):
    check = channel.unary_unary("/grpc.health.v1.Health/Check")

    def state(name):
        answer = check(health_pb2.HealthCheckRequest(service=name).SerializeToString(), timeout=PATIENCE_S)
        return health_pb2.HealthCheckResponse.FromString(answer).status

    assert {state(name) for name in ("", SERVICE, "add", "count")} == {health_pb2.HealthCheckResponse.SERVING}
    assert refusal(lambda: state("nothing"))[0] == "NOT_FOUND"
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    method = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    (answer,) = method(iter([asked.SerializeToString()]), timeout=PATIENCE_S)
    found = reflection_pb2.ServerReflectionResponse.FromString(answer).file_descriptor_response
    file = descriptor_pb2.FileDescriptorProto.FromString(found.file_descriptor_proto[0])
    assert {method.name for method in file.service[0].method} == set(METHODS)


def test_the_address_of_the_port_is_written_as_clients_take_it(caplog):
    with socket.socket(socket.AF_INET6) as probe:
        if probe.connect_ex(("::1", 9)) == errno.EADDRNOTAVAIL:
            pytest.skip("there is no IPv6 here")
    caplog.set_level("INFO", "forebay")

    async def open_and_close():
        port = KServePort(App([]), HttpConfig(host="::1"), GrpcConfig(port=0))
        address = await port.start()
        await port.stop(0.0)
        return address

    _, number = asyncio.run(open_and_close())
    assert f"gRPC at [::1]:{number}" in caplog.messages


def test_the_port_is_that_of_http_but_for_its_number():
    http = HttpConfig(host="::1", port=1, max_body_bytes=2, certfile="c", keyfile="k", api_keys=("a",), access_log=True)
    found = grpc_like(http, GrpcConfig(port=3, max_streams=4))
    assert (found.host, found.port, found.max_message_bytes, found.max_streams) == ("::1", 3, 2, 4)
    assert (found.certfile, found.keyfile, found.api_keys, found.access_log) == ("c", "k", ("a",), True)


# ---------------------------------------------------------------------------------------------------------------------
# streams


def test_an_error_is_told_before_another_message_comes(channel):
    asking = Asking(channel)
    for index in range(3):
        assert asking.ask(number("picky", 2, id="good")).infer_response.id == "good"
        told = asking.ask(number("nothing", 1, id=f"bad {index}"))
        assert "there is no model 'nothing'" in told.error_message
        assert told.infer_response.id == f"bad {index}"
        assert "expected a ModelInferRequest" in asking.ask(b"\xff").error_message
    assert not asking.close()


def test_a_message_of_a_stream_with_too_many_elements_ends_it_with_an_error():  # F73
    many = number("picky", 2)
    many.inputs[0].shape.extend([1] * 2000)
    with KServed(max_elements=1000) as port:
        asking = Asking(port.connect())
        assert asking.ask(number("picky", 2, id="good")).infer_response.id == "good"
        status, text = refusal(lambda: asking.ask(many))
    assert status == "RESOURCE_EXHAUSTED"
    assert "shape: expected at most 1000 elements" in text


def test_answers_come_in_the_order_of_their_requests():  # F87
    """Of four workers each answers after the next one; an error in between waits as well."""
    with KServed("in_order.py", Overrides(worker_kind="thread", workers=4)) as port:
        asking = Asking(port.connect())
        for value in range(40):
            asking.send(number("later", value, id=str(value)))
            if value % 10 == 9:
                asking.send(number("nothing", 0, id=f"wrong {value}"))
        found = [asking.answer() for _ in range(44)]
        assert not asking.close()
    expected = [name for value in range(40) for name in [str(value), *[f"wrong {value}"] * (value % 10 == 9)]]
    assert [one.infer_response.id for one in found] == expected
    assert [output(one.infer_response).item() for one in found if not one.error_message] == list(range(40))


def test_shared_memory_of_cuda_is_there_as_with_a_triton_without_gpus(channel):  # F88
    assert not ask(channel, "CudaSharedMemoryStatus").regions
    code, text = refusal(lambda: ask(channel, "CudaSharedMemoryStatus", name="a"))
    assert (code, text) == ("NOT_FOUND", "there is no shared memory region 'a' of CUDA")
    code, text = refusal(lambda: ask(channel, "CudaSharedMemoryRegister", name="a", byte_size=1))
    assert (code, "region 'a' of CUDA cannot be registered: this server reads only that of the system" in text) == (
        "INVALID_ARGUMENT",
        True,
    )
    ask(channel, "CudaSharedMemoryUnregister")  # clients that end forget all regions of both kinds
    ask(channel, "CudaSharedMemoryUnregister", name="a")


def test_an_answer_that_is_all_of_it_says_so(channel):
    """A client that wants to know waits for the last answer of every model, not only of one that streams."""
    asking = Asking(channel)
    told = asking.ask(number("picky", 2, triton_enable_empty_final_response=True)).infer_response
    assert told.parameters["triton_final_response"].bool_param is True
    assert output(told).tolist() == [2]
    assert "triton_final_response" not in asking.ask(number("picky", 2)).infer_response.parameters
    assert not asking.close()


def test_an_error_of_a_stream_names_the_request_that_contradicts_itself(channel):
    asking = Asking(channel)
    short = number("picky", 2, id="short")
    short.raw_input_contents[0] = b"too short"
    surplus = number("picky", 2, id="surplus")
    surplus.raw_input_contents.append(b"")
    for made in (short, surplus):
        told = asking.ask(made)
        assert told.error_message
        assert told.infer_response.id == made.id
    assert not asking.close()


def test_classes_are_not_answered_with_numbers(channel):
    made = number("picky", 2)
    made.outputs.add(name="output").parameters["classification"].int64_param = 1
    status, text = refusal(lambda: infer(channel, made))
    assert status == "INVALID_ARGUMENT"
    assert text.startswith("output 'output' is wanted as classes")


def test_what_the_model_raised_is_not_told(channel):
    asking = Asking(channel)
    assert asking.ask(number("broken", 1)).error_message == "the model failed; the server's log says why"
    assert not asking.close()


def test_a_model_that_streams_takes_one_sample_a_request(channel):
    asking = Asking(channel)
    several = request("forever", np.array([1, 2], "i8"), id="several")
    told = asking.ask(several)
    assert told.error_message.endswith("streams what it gives for one sample, and 2 came; send them one by one")
    assert told.infer_response.id == "several"
    assert not asking.close()


def test_a_client_that_takes_nothing_is_not_worked_for(port):
    channel = port.connect()
    asking = Asking(channel)
    asking.send(number("forever", 1))
    asking.answer()
    metrics = port.endpoint_of("forever").metrics
    seen = [0, 0]

    def stands_still():
        seen[:] = [seen[1], metrics.parts]
        return len(set(seen)) == 1

    eventually(stands_still)
    asking.call.cancel()
    eventually(lambda: not port.endpoint_of("forever").in_flight)


def test_only_so_many_requests_of_a_stream_are_inside(port, monkeypatch):
    monkeypatch.setattr(model_stream_infer, "MAX_IN_FLIGHT", 5)
    channel = port.connect()
    seen = []
    endpoint = port.endpoint_of("picky")
    submit = endpoint.submit

    def watched(made):
        submit(made)
        seen.append(endpoint.in_flight)

    monkeypatch.setattr(endpoint, "submit", watched)
    answers = list(stream(channel, (number("picky", 2, id=str(index)) for index in range(40))))
    assert len(answers) == 40
    assert max(seen) <= 5


def test_a_call_that_is_refused_at_once_leaves_nothing_behind(port, channel, monkeypatch):
    infer(channel, number("picky", 2))  # one that is known, and one that has another form
    monkeypatch.setattr(port.endpoint_of("picky"), "accepting", False)
    for asked in (number("picky", 2), number("picky", 2, id="again")):
        with pytest.raises(grpc.RpcError, match="picky"):
            infer(channel, asked)
    eventually(lambda: not calls_that_are_kept(port))


def test_streams_dropped_at_random_leave_nothing_behind(port):
    dice = random.Random(7)
    channel = port.connect()
    shared = port.listener._port
    models = ("count", "forever", "picky", "nothing", "slow")

    def left():
        in_flight = sum(port.endpoint_of(name).in_flight for name in models if name != "nothing")
        return in_flight, shared.calls, len(shared.tasks), shared.byte_budget.held_bytes

    infer(channel, number("picky", 2))
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(40):
        calls = []
        for _ in range(25):
            asked = [
                request("slow", np.array([0.0])) if name == "slow" else number(name, dice.randint(0, 30))
                for name in dice.choices(models, k=dice.randint(1, 3))
            ]
            calls.append(stream(channel, asked))
        for call in calls:
            for _ in range(dice.choice((0, 0, 1, 5))):
                if next(call, None) is None:
                    break
            call.cancel()
    eventually(lambda: left() == (0, 0, 0, 0))
    eventually(lambda: output(infer(channel, number("open", 0))).tolist() == [0])  # generators
    eventually(lambda: not streams_that_are_kept())
    assert threading.active_count() <= threads + 8
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 2
    assert output(infer(channel, request("mirror", np.ones((1, 2), "f4")))).tolist() == [[1, 1]]
    assert not port.surprises


def test_a_defect_while_long_contents_are_read_is_an_answer(monkeypatch):
    def fail(*_given):
        raise MemoryError

    with KServed() as port:
        monkeypatch.setattr(port.kserve._inference, "_tensors", fail)
        made = number("picky", 2)
        made.ClearField("raw_input_contents")
        made.inputs[0].contents.int64_contents.extend(range(20_000))
        assert refusal(lambda: infer(port.connect(), made)) == ("INTERNAL", "the server failed; its log says why")


def test_a_client_that_sends_large_requests_without_waiting_is_slowed_and_not_refused(eventually, monkeypatch):  # F78
    array = np.zeros((1, 800_000), "f4")
    with KServed(max_connection_bytes=24_000_000, max_message_bytes=4_000_000) as port:
        assert port.listener._port is not None
        budget = port.listener._port.byte_budget
        endpoint = port.endpoint_of("mirror")
        submit, inside = endpoint.submit, []
        monkeypatch.setattr(endpoint, "submit", inside.append)
        asking = Asking(port.connect())
        for _ in range(20):
            asking.send(request("mirror", array))
        eventually(lambda: len(inside) > 4 or budget.held_bytes > 4.5 * array.nbytes)
        for _ in range(20):
            eventually(lambda: inside or not asking.call.is_active())
            assert 0 < len(inside) <= 4  # they hold more than half of what a connection may
            port._loop.call_soon_threadsafe(submit, inside.pop(0))
            assert not asking.answer().error_message
        assert not asking.close()


def test_what_waits_in_a_stream_counts(eventually):  # F78: 256 answers of one stream waited uncounted
    array = np.zeros((1, 100_000), "f4")
    with KServed(max_buffered_bytes=6_000_000) as port:
        assert port.listener._port is not None
        budget = port.listener._port.byte_budget
        opening = wire.PREFACE + wire.settings((wire.INITIAL_WINDOW_SIZE, 0))
        with wire.Wire(port, opening=opening) as lazy, wire.Wire(port) as other:
            lazy.send(wire.headers(f"/{SERVICE}/ModelStreamInfer"))
            message = wire.prefixed(request("mirror", array).SerializeToString())
            for count in range(1, 11):
                for at in range(0, len(message), 16_000):
                    lazy.send(wire.data(message[at : at + 16_000]))
                eventually(lambda: budget.unread_bytes >= count * array.nbytes)  # noqa: B023 - it is over by then
                assert budget.held_bytes < (count + 2) * array.nbytes
            for _ in range(10):
                if not lazy.settle().answers[1].is_over:
                    lazy.flood(*(wire.data(message[at : at + 16_000]) for at in range(0, len(message), 16_000)))
            # It holds too much, by what arrives or by what it does not take.
            eventually(lambda: lazy.settle().answers[1].is_over)
            other.send(wire.call(f"/{SERVICE}/ServerLive"))
            assert other.answer().status == 0
        eventually(lambda: budget.held_bytes == 0)
