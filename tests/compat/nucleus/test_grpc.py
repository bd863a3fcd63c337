# SPDX-License-Identifier: Apache-2.0
"""Handlers over gRPC: section 3 of the specification."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.compat.nucleus.conftest import write_project
from tests.integration.grpc import wire
from tests.integration.grpc.served import Port
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

from forebay.errors import ConfigError, ModelError
from forebay.server.config import HttpConfig
from forebay.surfaces.contract import Options
from forebay.surfaces.nucleus.config import read_config
from forebay.surfaces.nucleus.proto import compiled
from forebay.surfaces.nucleus.rpc_runner import RpcRunner
from forebay.surfaces.nucleus.surface import NucleusSurface
from forebay.workers.runner import WorkerContext

PROTO = """
    syntax = "proto3";
    package inference;  // as KServe's own, which the server speaks elsewhere
    import "protos/common.proto";
    import "near.proto";
    import "google/protobuf/timestamp.proto";

    enum Colour { RED = 0; BLUE = 1; }
    message Ask {
      int32 number = 1;
      common.Text text = 2;
      google.protobuf.Timestamp at = 3;
      Colour colour = 4;
      bytes blob = 5;
      near.Near near = 6;
    }
    message Answer { string text = 1; bytes blob = 2; int32 number = 3; }

    service Anything {
      rpc Alpha (Ask) returns (Answer);
      rpc Beta (Ask) returns (Answer);
      rpc Bare (Ask) returns (Answer);
      rpc Awaited (Ask) returns (Answer);
      rpc Blob (Ask) returns (Answer);
      rpc Wrong (Ask) returns (Answer);
      rpc Context (Ask) returns (Answer);
      rpc Join (stream Ask) returns (Answer);
      rpc Count (Ask) returns (stream Answer);
      rpc Endless (Ask) returns (stream Answer);
      rpc Echo (stream Ask) returns (stream Answer);
    }
"""
COMMON = 'syntax = "proto3"; package common; message Text { string text = 1; }'
NEAR = 'syntax = "proto3"; package near; message Near { int32 number = 1; }'
HANDLER = """
    import threading, time
    import grpc
    from google.protobuf.timestamp_pb2 import Timestamp
    import protos.my_svc_pb2
    from protos import common_pb2

    class Handler:
        def __init__(self, proto_module_pb2, config):
            self.pb, self.config = proto_module_pb2, config
            self.closed = 0
            self.seen = 0
            self.running = self.most = 0

        def Alpha(self, payload, context):
            same = protos.my_svc_pb2 is self.pb and isinstance(payload, self.pb.Ask)
            same = same and isinstance(payload.at, Timestamp)
            year, kind = payload.at.ToDatetime().year, common_pb2.Text
            text = f"alpha {payload.text.text} {year} {same} {isinstance(payload.text, kind)} {self.pb.BLUE}"
            return self.pb.Answer(text=text, number=self.config["n"])

        def Beta(self, payload):
            self.running += 1
            self.most = max(self.most, self.running)
            time.sleep(payload.number / 1000)
            self.running -= 1
            return self.pb.Answer(text="beta", number=self.most)

        def Bare(self):
            return self.pb.Answer(text="bare", number=self.closed)

        async def Awaited(self, payload):
            import asyncio
            await asyncio.sleep(0)
            return self.pb.Answer(number=payload.number)

        def Blob(self, payload):
            return self.pb.Answer(blob=payload.blob[::-1])

        def Wrong(self, payload):
            if payload.number == 3:
                raise ValueError("boom")
            return [None, "text", self.pb.Ask()][payload.number]

        def Context(self, payload, context):
            told = dict(context.invocation_metadata())
            if payload.number == 0:
                context.abort(grpc.StatusCode.NOT_FOUND, "nf")
            if payload.number == 1:
                context.set_code(grpc.StatusCode.ALREADY_EXISTS)
                context.set_details("it is there")
                return self.pb.Answer()
            if payload.number == 2:
                context.set_code(grpc.StatusCode.DATA_LOSS)
                return None
            context.send_initial_metadata([("first", "1"), ("raw-bin", b"\\0\\xff")])
            asked = "x-asked" in [one.key for one in context.invocation_metadata()]
            context.set_trailing_metadata((("last", told["x-asked"]), ("key", str(asked))))
            left = context.time_remaining()
            assert context.peer().startswith("ipv4:127.0.0.1:"), context.peer()
            assert context.is_active()
            return self.pb.Answer(text="none" if left is None else "some", number=0 if left is None else int(left))

        def Join(self, payload, context):
            found = []
            for one in payload:
                found.append(str(one.number))
                self.seen = len(found)
                if one.number == 99:
                    context.abort(grpc.StatusCode.OUT_OF_RANGE, "99")
            return self.pb.Answer(text=" ".join(found))

        def Count(self, payload):
            try:
                for number in range(payload.number):
                    if number == 4:
                        raise ValueError("boom")
                    yield self.pb.Answer(number=number)
            finally:
                self.closed += 1

        def Endless(self, payload, context):
            context.send_initial_metadata([("first", "1")])
            context.add_callback(self.over)
            try:
                while True:
                    yield self.pb.Answer(number=payload.number)
            finally:
                self.closed += 1

        def over(self):
            self.closed += 10

        def Echo(self, payload):
            for one in payload:
                yield self.pb.Answer(number=one.number)
"""
UNLIMITED = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10000),
]


class Stub:
    """A client of the service that a project's file describes."""

    def __init__(self, server):
        self.service = compiled(read_config(server.folder / "nucleus.yaml")[0])
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.port}", UNLIMITED)
        pool = descriptor_pool.DescriptorPool()
        for file in self.service.files:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
        self.kinds, self.calls = {}, {}
        for rpc in self.service.rpcs:
            takes, gives = (
                message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in (rpc.takes, rpc.gives)
            )
            self.kinds[takes.DESCRIPTOR.name] = takes
            sides = ["stream" if many else "unary" for many in (rpc.is_asked_in_parts, rpc.answers_in_parts)]
            call = getattr(self.channel, "_".join(sides))(
                f"/{self.service.full_name}/{rpc.name}",
                request_serializer=takes.SerializeToString,
                response_deserializer=gives.FromString,
            )
            self.calls[rpc.name] = call

    def __getattr__(self, name) -> Any:
        return self.calls[name]

    def ask(self, number=0, **more):
        return self.kinds["Ask"](number=number, **more)


@pytest.fixture(scope="module")
def server(serve):
    config = {
        "protobuf_path": "protos/my-svc.proto",
        "config": {"n": 7},
        "server_side_batching": {"max_batch_size": 4, "batch_interval_seconds": 0.1},
    }
    files = {"protos/my-svc.proto": PROTO, "protos/common.proto": COMMON, "protos/near.proto": NEAR}
    stale = {"my_svc_pb2.py": "raise RuntimeError('stale')", "protos/my_svc_pb2.py": "raise RuntimeError('stale')"}
    return serve(HANDLER, config, **files, **stale)


@pytest.fixture(scope="module")
def stub(server):
    stub = Stub(server)
    yield stub
    stub.channel.close()


def status_of(call, *arguments, **more):
    def run():
        result = call(*arguments, **more)
        return list(result) if hasattr(result, "__next__") else result

    with pytest.raises(grpc.RpcError) as caught:
        run()
    return caught.value.code(), caught.value.details()


# What is served


def test_the_port_speaks_grpc_only_and_is_described(server, stub):
    # N14, N61, N64: a package that forebay's own protocol has as well
    assert httpx.get(server.url.replace("grpc", "http"), timeout=PATIENCE_S).status_code == 400
    described = ProtoReflectionDescriptorDatabase(stub.channel)
    assert "inference.Anything" in described.get_services()
    assert described.FindFileContainingSymbol("inference.Anything").name == "protos/my-svc.proto"
    health: Any = health_pb2_grpc.HealthStub(stub.channel)
    assert health.Check(health_pb2.HealthCheckRequest(service="inference.Anything")).status == 1


def test_long_messages(stub):
    # N61
    blob = bytes(range(256)) * (50 * 4096)
    assert stub.Blob(stub.ask(blob=blob), timeout=PATIENCE_S).blob == blob[::-1]


def test_messages_of_imported_files_and_the_module(stub):
    # N24, N62, N63, N66, N67: any order of arguments; stale modules in the project are not used
    asked = stub.ask(text={"text": "hi"}, at={"seconds": 1_000_000_000}, near={"number": 1})
    answer = stub.Alpha(asked)
    assert (answer.text, answer.number) == ("alpha hi 2001 True True 1", 7)


def test_nothing_is_written_to_the_project(server):
    # N62
    found = {
        str(file.relative_to(server.folder)) for file in server.folder.rglob("*") if "__pycache__" not in str(file)
    }
    assert found == {
        "handler.py", "nucleus.yaml", "my_svc_pb2.py", "protos", "protos/my_svc_pb2.py",
        "protos/my-svc.proto", "protos/common.proto", "protos/near.proto",
    }  # fmt: skip


def test_each_rpc_reaches_its_own_method(stub):
    # N67, N68: also one that wants nothing, and a coroutine
    assert stub.Beta(stub.ask()).text == "beta"
    assert stub.Bare(stub.ask()).text == "bare"
    assert stub.Awaited(stub.ask(5)).number == 5


# Streams


def test_a_stream_of_requests_is_consumed_as_it_comes(stub):
    # N69
    assert stub.Join(stub.ask(number) for number in range(100, 200)).text == " ".join(map(str, range(100, 200)))
    assert stub.Join(iter([])).text == ""
    assert status_of(stub.Join, iter([stub.ask(1), stub.ask(99), stub.ask(2)])) == (grpc.StatusCode.OUT_OF_RANGE, "99")


def test_each_item_is_sent_when_it_is_yielded_and_taken_when_it_comes(stub):
    # N69, N70: the next question is asked once the answer to the last one is here
    turn = threading.Semaphore(1)

    def asking():
        for number in range(30):
            assert turn.acquire(timeout=PATIENCE_S)
            yield stub.ask(number)

    numbers = []
    for answer in stub.Echo(asking(), timeout=PATIENCE_S):
        numbers.append(answer.number)
        turn.release()
    assert numbers == list(range(30))
    assert [answer.number for answer in stub.Count(stub.ask(4))] == [0, 1, 2, 3]


def test_many_messages_each_way(stub):
    # N70
    assert [one.number for one in stub.Echo(stub.ask(n) for n in range(3000))] == list(range(3000))


def test_a_stream_that_nobody_waits_for_ends_and_frees_its_thread(stub):
    # N74: there is one thread; its callbacks are called as well
    closed = stub.Bare(stub.ask()).number
    answers = stub.Endless(stub.ask(1))
    assert dict(answers.initial_metadata())["first"] == "1"
    assert next(answers).number == 1
    answers.cancel()
    assert stub.Bare(stub.ask(), timeout=PATIENCE_S).number == closed + 11
    assert status_of(stub.Endless, stub.ask(1), timeout=0.2)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert stub.Bare(stub.ask(), timeout=PATIENCE_S).number == closed + 22


def test_a_method_that_waits_for_a_client_that_leaves_is_freed(stub):
    # N74
    silence = threading.Event()

    def asking():
        yield stub.ask(1)
        silence.wait(PATIENCE_S)

    answers = stub.Echo(asking())
    assert next(answers).number == 1
    answers.cancel()
    assert stub.Bare(stub.ask(), timeout=PATIENCE_S).text == "bare"
    silence.set()


# Failures


def test_what_a_method_raises_is_internal_and_logged(server, stub):
    # N71
    assert status_of(stub.Wrong, stub.ask(3)) == (grpc.StatusCode.INTERNAL, "internal server error")
    assert status_of(stub.Count, stub.ask(9)) == (grpc.StatusCode.INTERNAL, "internal server error")
    eventually(lambda: sum("ValueError: boom" in line.get("exc_info", "") for line in server.logged) >= 2)


def test_the_items_before_a_failure_have_been_sent(stub):
    # N71
    answers = stub.Count(stub.ask(9))
    assert [next(answers).number for _ in range(4)] == [0, 1, 2, 3]
    assert status_of(next, answers)[0] is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("number", range(3))
def test_what_is_no_message_of_the_method_is_refused(stub, number):
    # N73: None, a text, a message of another type
    assert status_of(stub.Wrong, stub.ask(number)) == (grpc.StatusCode.INTERNAL, "Failed to serialize response!")


def test_a_request_that_cannot_be_read(stub):
    call = stub.channel.unary_unary("/inference.Anything/Beta", request_serializer=bytes)
    assert status_of(call, b"\xff\xff") == (grpc.StatusCode.INTERNAL, "Exception deserializing request!")


def test_context(stub):
    # N72
    assert status_of(stub.Context, stub.ask(0)) == (grpc.StatusCode.NOT_FOUND, "nf")
    assert status_of(stub.Context, stub.ask(1)) == (grpc.StatusCode.ALREADY_EXISTS, "it is there")
    assert status_of(stub.Context, stub.ask(2))[0] is grpc.StatusCode.DATA_LOSS
    answer, call = stub.Context.with_call(stub.ask(3), metadata=[("x-asked", "back")])
    assert answer.text == "none"
    before = dict(call.initial_metadata())
    assert (before["first"], before["raw-bin"]) == ("1", b"\0\xff")
    assert dict(call.trailing_metadata()) == {"last": "back", "key": "True"}
    answer = stub.Context(stub.ask(3), metadata=[("x-asked", "back")], timeout=1000)
    assert answer.text == "some"
    assert 900 < answer.number <= 1020


# Workers


def test_one_thread_runs_one_call_at_a_time(stub, parallel):
    # N75
    answers = parallel(lambda _: stub.Beta(stub.ask(20), timeout=PATIENCE_S), range(6))
    assert max(answer.number for answer in answers) == 1


TWO = """
    import pathlib, threading, time

    class Handler:
        def __init__(self, module_proto_pb2):
            self.pb = module_proto_pb2
            self.both = threading.Barrier(2)

        def Meet(self, payload):
            self.both.wait(60)
            return self.pb.Answer(text="met")

        def Hold(self, payload):
            self.both.wait(60)
            yield self.pb.Answer(text="held")
            while payload.number and not pathlib.Path("go").exists():
                time.sleep(0.01)

        def Again(self, payload):
            return [self.pb.Answer(text="a"), self.pb.Answer(text="b")]
"""
SMALL = """
    syntax = "proto3";
    message Ask { int32 number = 1; }
    message Answer { string text = 1; }
    service Small {
      rpc Meet (Ask) returns (Answer);
      rpc Hold (Ask) returns (stream Answer);
      rpc Again (Ask) returns (stream Answer);
    }
"""


@pytest.fixture(scope="module")
def two(serve):
    config = {"protobuf_path": "service.proto", "threads_per_process": 2, "max_concurrency": 2}
    return serve(TWO, config, **{"service.proto": SMALL})


def test_two_threads_run_two_calls_and_more_than_the_limit_are_refused(two):
    # N31, N58, N64, N70, N75, N76, N95: another spelling of the argument, no package, a file called service.proto
    assert (two.state / "api_readiness.txt").exists()
    stub = Stub(two)
    assert [answer.text for answer in stub.Again(stub.ask())] == ["a", "b"]
    with ThreadPoolExecutor(1) as threads:
        held = stub.Hold(stub.ask(), timeout=PATIENCE_S)
        met = threads.submit(stub.Meet, stub.ask(), timeout=PATIENCE_S)
        assert next(held).text == "held"
        assert met.result().text == "met"
        assert list(held) == []
    stub.channel.close()


def test_a_client_that_has_its_answer_may_ask_again_at_once(two):
    # N95: what it has been told is over counts no longer, although a worker may still be busy with its end
    stub = Stub(two)

    def ask(_):
        return [[answer.text for answer in stub.Again(stub.ask())] for _ in range(100)]

    with ThreadPoolExecutor(2) as threads:
        for each in threads.map(ask, range(2)):
            assert each == 100 * [["a", "b"]]
    stub.channel.close()


def test_too_many_calls_are_unavailable(two):
    # N95
    stub = Stub(two)
    held = [stub.Hold(stub.ask(1), timeout=PATIENCE_S) for _ in range(2)]
    assert [next(one).text for one in held] == ["held", "held"]
    assert status_of(stub.Meet, stub.ask())[0] is grpc.StatusCode.UNAVAILABLE
    assert status_of(stub.Again, stub.ask())[0] is grpc.StatusCode.UNAVAILABLE
    (two.folder / "go").touch()
    for one in held:
        assert list(one) == []
    eventually(lambda: next(stub.Again(stub.ask(), wait_for_ready=True)).text == "a")
    stub.channel.close()


def test_calls_that_are_late_or_called_off_leave_their_thread_to_others(stub):
    # N74: of each kind, while the one thread is taken or the client says nothing
    silence = threading.Event()

    def quiet():
        yield stub.ask(1)
        silence.wait(PATIENCE_S)

    late = grpc.StatusCode.DEADLINE_EXCEEDED
    for call in (stub.Join, stub.Echo):
        assert status_of(call, quiet(), timeout=0.2)[0] is late
    held = stub.Echo(quiet())
    assert next(held).number == 1
    assert status_of(stub.Beta, stub.ask(), timeout=0.1)[0] is late
    waiting = [stub.Beta.future(stub.ask()), stub.Count(stub.ask(2)), stub.Join.future(iter([stub.ask()]))]
    for one in waiting:
        one.cancel()
    held.cancel()
    assert stub.Bare(stub.ask(), timeout=PATIENCE_S).text == "bare"
    silence.set()


LATE = """
    import time

    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2

        def Meet(self, context):
            while context.is_active():
                time.sleep(0.001)
            return self.pb.Answer()

        def Hold(self, context):
            yield self.pb.Answer(text="held")
            self.Meet(context)

        def Again(self):
            return []
"""


class Built(Port):
    """The port of a project in this process, which sees what its endpoint counts."""

    def __init__(self, folder):
        super().__init__()
        http, given = HttpConfig(port=0), frozenset({"port"})
        options = Options(http=http, given=given, state_dir=folder / "state")
        self.project = NucleusSurface().build(str(folder), options)
        self.app: Any = self.project.app

    def listen(self, port=None):
        self.run(self.app.start())
        (self.listener,) = self.project.listeners
        self.host, self.number = self.run(self.listener.start())

    def __exit__(self, *error):
        self.run(self.app.drain(0.0))
        super().__exit__(*error)


def test_calls_whose_deadline_is_over_are_counted_as_late(tmp_path):
    # N74: of clients that do not call themselves off, as others do at their deadline
    folder = write_project(tmp_path, LATE, {"protobuf_path": "late.proto"}, **{"late.proto": SMALL})
    with Built(folder) as port, wire.Wire(port) as client:
        for stream, method in enumerate(("Meet", "Hold")):
            client.send(wire.call(f"/Small/{method}", stream=2 * stream + 1, grpc_timeout="20m"))
            assert client.answer(2 * stream + 1).status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        endpoint = port.app.endpoint
        eventually(lambda: not endpoint.in_flight)
        del endpoint.metrics.codes["ok"]  # what was asked of the handler itself, at the start
        assert endpoint.metrics.codes == {"deadline_exceeded": 2}


DYING = """
    import os, pathlib, signal, time

    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2
            while not pathlib.Path("go").exists():
                time.sleep(0.01)

        def Meet(self, payload):
            return self.pb.Answer(text="met")

        def Hold(self, payload):
            yield self.pb.Answer(text="held")
            os.kill(os.getpid(), signal.SIGKILL)

        def Again(self, payload):
            return []
"""


def test_health_follows_the_handler_and_a_stream_ends_with_its_worker(serve):
    # N60, N61, N76: not serving while it is constructed; whoever has a stream is told when it dies
    port = free_port()
    options = ["--grpc-port", str(port)]  # F104: it was ignored
    server = serve(DYING, {"protobuf_path": "dying.proto"}, *options, wait=False, **{"dying.proto": SMALL})
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    health: Any = health_pb2_grpc.HealthStub(channel)
    asked = health_pb2.HealthCheckRequest(service="Small")
    assert health.Check(asked, wait_for_ready=True, timeout=PATIENCE_S).status == 2
    watched = health.Watch(asked, timeout=PATIENCE_S)
    assert next(watched).status == 2
    (server.folder / "go").touch()
    assert next(watched).status == 1
    server.wait_ready()
    stub = Stub(server)
    assert stub.Meet(stub.ask()).text == "met"
    held = stub.Hold(stub.ask(), timeout=PATIENCE_S)
    assert next(held).text == "held"
    assert status_of(next, held)[0] is grpc.StatusCode.UNAVAILABLE
    assert server.process.wait(PATIENCE_S) == 128 + 9
    for one in (channel, stub.channel):
        one.close()


# What is refused at the start


@pytest.fixture
def refusal(tmp_path):
    def run(proto, **files):
        config = {"protobuf_path": "svc.proto"}
        write_project(tmp_path / "project", "class Handler: pass", config, **{"svc.proto": proto}, **files)
        with pytest.raises(ConfigError) as caught:
            compiled(read_config(tmp_path / "project" / "nucleus.yaml")[0])
        return caught.value.message.replace(str(tmp_path / "project"), "HERE")

    return run


EMPTY = 'syntax = "proto3";\nmessage M {}\n'
ONE = "service A { rpc X (M) returns (M); }\n"


def test_a_file_without_a_service(refusal):
    # N65
    assert refusal(EMPTY).startswith("HERE/svc.proto: there is no service in it; define one, such as: service ")


def test_a_file_with_two_services(refusal):
    # N65
    assert refusal(EMPTY + ONE + ONE.replace("A", "B")) == (
        "HERE/svc.proto:4: there are 2 services in it: A (line 3), B (line 4); a project has exactly one, so put all "
        "methods into one, or the other services into files that are not served"
    )


def test_a_broken_file(refusal):
    # N62
    assert refusal(EMPTY + "servise A {}\n") == (
        'HERE/svc.proto cannot be compiled: svc.proto:3:1: Expected top-level statement (e.g. "message").'
    )


def test_an_unknown_import(refusal):
    # N63
    text = refusal('syntax = "proto3";\nimport "other.proto";\nmessage M {}\n' + ONE)
    assert 'svc.proto:2:1: Import "other.proto" was not found or had errors.' in text
    assert text.endswith("; put other.proto into HERE, from where imports are looked up")


def test_an_import_that_lies_elsewhere(refusal):
    # N63
    proto = 'syntax = "proto3";\nimport "common.proto";\nmessage M {}\n' + ONE
    assert refusal(proto, **{"below/common.proto": COMMON}).endswith('did you mean import "below/common.proto"?')


@pytest.mark.parametrize(
    "handler, said",
    [
        ("def __init__(self, config): pass", '"proto_module_pb2" is a required argument, but was not provided'),
        (
            "def __init__(self, proto_module_pb2): pass",
            "method X hasn't been defined in the Handler class; define one called X to match the RPC method from the",
        ),
        (
            "def __init__(self, proto_module_pb2): pass\n    def X(self, payload, headers): pass",
            'argument "headers" cannot be used when the grpc protocol is enabled',
        ),
        (
            "def __init__(self, proto_module_pb2): pass\n    def X(self, a, b): pass",
            'arguments "a" and "b" cannot be used when the grpc protocol is enabled',
        ),
    ],
)
def test_a_handler_that_does_not_fit_the_service(tmp_path, monkeypatch, handler, said):
    # N66, N67
    config, proto = {"protobuf_path": "fits.proto"}, (EMPTY + ONE).replace("message", "package fits;\nmessage")
    folder = write_project(tmp_path / "project", f"class Handler:\n    {handler}\n", config, **{"fits.proto": proto})
    monkeypatch.chdir(folder)
    service = compiled(read_config(folder / "nucleus.yaml")[0])
    runner = RpcRunner(folder / "handler.py", config="{}", requirements="requirements.txt", service=service)
    with pytest.raises(ModelError) as caught:
        runner.open(WorkerContext())
    assert said in caught.value.message


def test_a_broken_file_ends_the_start(serve):
    # N62, N65
    server = serve(TWO, {"protobuf_path": "svc.proto"}, wait=False, **{"svc.proto": EMPTY + "servise A {}\n"})
    assert server.process.wait(PATIENCE_S) != 0
    assert "svc.proto:3:1: " in server.err.read_text()
    assert "Traceback" not in server.err.read_text()
