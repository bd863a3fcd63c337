# SPDX-License-Identifier: Apache-2.0
"""A gRPC port in a thread of the test or in a process beside it, with a service that does what it is asked to.

The one place of these tests that knows where the server is.
"""

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import msgspec
import uvloop
from google.protobuf import descriptor_pb2
from tests.waiting import PATIENCE_S

from forebay.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    QueueFull,
    RunnerFailed,
    Unavailable,
)
from forebay.server.config import GrpcConfig
from forebay.transports.grpc.listener import GrpcListener
from forebay.transports.grpc.service import GrpcService
from forebay.transports.grpc.statuses import Status
from forebay.types.call import Request

NAME = "test.Echo"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
ALONE = [*UNLIMITED, ("grpc.use_local_subchannel_pool", 1)]
"""A connection that no other channel shares."""
ERRORS = {
    error.code.name: error
    for error in (InvalidRequest, NotFound, QueueFull, DeadlineExceeded, Unavailable, Cancelled, InternalError)
}
HIDDEN = {"user": RunnerFailed("secret", trace="secret"), "defect": ZeroDivisionError("secret")}


def path(method):
    return f"/{NAME}/{method}"


def error_for(message):
    """The error that `CODE text`, or a name in `HIDDEN`, asks for."""
    name, _, text = message.decode().partition(" ")
    return HIDDEN.get(name) or ERRORS[name](text)


class Echo:
    """What is called, and what it saw of those who called."""

    def __init__(self):
        self.entered = threading.Event()
        self.cancelled = threading.Event()
        self.hanging = 0
        self.yielded = 0

    def service(self):
        """Every kind of method by names that say what happens; `Task...` ones are coroutines."""
        return GrpcService(
            full_name=NAME,
            direct={
                "Echo": lambda message, call: call.reply(message),
                "Twice": self.twice,
                "Later": self.later,
                "Large": lambda message, call: call.reply(bytes(int(message))),
                "Full": lambda message, call: call.reply(b"x" * int(message)),  # zeros take no memory
                "Fail": lambda message, call: call.fail(error_for(message)),
                "Raise": self.throw,
                "Hang": self.hang,
                "Look": self.look,
                "Tell": self.tell,
                "Named": self.named,
            },
            unary={
                "TaskEcho": self.task_echo,
                "TaskRaise": self.task_raise,
                "TaskHang": self.task_hang,
                "TaskLarge": self.task_large,
            },
            streams={
                "Chat": self.chat,
                "Join": self.join,
                "Count": self.count,
                "Repeat": self.repeat,
                "Endless": self.endless,
                "Deaf": self.deaf,
                "StreamRaise": self.stream_raise,
            },
            files=[described()],
        )

    def twice(self, message, call):
        call.reply(message)
        call.reply(b"again")
        call.fail(NotFound("too late"))

    def later(self, message, call):
        """Answers after as many milliseconds as the message says."""
        asyncio.get_running_loop().call_later(int(message) / 1000, call.reply, message)
        self.entered.set()

    def throw(self, message, call):
        raise error_for(message)

    def hang(self, message, call):
        def cancel():
            self.hanging -= 1
            self.cancelled.set()
            call.reply(b"nobody reads this")

        call.on_cancel = cancel
        self.hanging += 1
        self.entered.set()

    def look(self, message, call):
        """Tells what a method can know."""
        seen = {
            "peer": call.peer,
            "left_s": None if call.deadline == float("inf") else call.deadline - time.monotonic(),
            "metadata": list(call.metadata),
            "hanging": self.hanging,
        }
        call.reply(msgspec.json.encode(seen))

    def tell(self, message, call):
        """Says as many bytes before its answer, and after it."""
        call.begin_answer([("before", "b" * int(message))])
        call.end(Status.OK, message=b"told", metadata=[("after", "a" * int(message))])

    def named(self, message, call):
        """Is answered by a request that has a name of its own."""
        request = Request(body=message, reply=print)
        request.id = "ours"
        call.answered_by(SimpleNamespace(name="m", answering=None), request)
        call.reply(b"")

    async def task_echo(self, message, call):
        await asyncio.sleep(0)
        return message

    async def task_raise(self, message, call):
        raise error_for(message)

    async def task_large(self, message, call):
        return bytes(int(message))

    async def task_hang(self, message, call):
        self.hanging += 1
        self.entered.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.hanging -= 1
        return b""

    async def chat(self, messages, call):
        async for message in messages:
            yield message

    async def join(self, messages, call):
        yield b"".join([message async for message in messages])

    async def count(self, messages, call):
        yield b"%d" % sum([len(message) async for message in messages])

    async def repeat(self, messages, call):
        """`COUNT SIZE`: that many messages of that size."""
        count, size = map(int, (await anext(messages)).split())
        for index in range(count):
            yield bytes([index % 256]) * size

    async def endless(self, messages, call):
        self.hanging += 1
        self.entered.set()
        try:
            while True:
                self.yielded += 1
                yield bytes(1000)
        finally:
            self.hanging -= 1
            self.cancelled.set()

    async def deaf(self, messages, call):
        """Takes no message and gives none."""
        self.hanging += 1
        self.entered.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            self.hanging -= 1
            self.cancelled.set()
        yield b""

    async def stream_raise(self, messages, call):
        async for message in messages:
            yield b"one answer"
            raise error_for(message)


def described():
    """The descriptor of the service's file, as reflection tells it."""
    file = descriptor_pb2.FileDescriptorProto(name="test/echo.proto", package="test", syntax="proto3")
    file.message_type.add(name="Text").field.add(name="text", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    file.service.add(name="Echo").method.add(name="Echo", input_type=".test.Text", output_type=".test.Text")
    return file.SerializeToString()


class _Defects(logging.Handler):
    """Takes what the server says of itself, and not of a method that raised."""

    def __init__(self, found):
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record):
        if record.name not in {"forebay.requests", "forebay.refusals"}:
            self._found.append(record.getMessage())


class Port:
    """A port on a loop of its own, open while the context is."""

    def __init__(self, **config):
        self.echo = Echo()
        self.is_ready = True
        self.models = {}
        self.surprises = []
        self.config = GrpcConfig(**config)
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(lambda _loop, told: self.surprises.append(told))
        self._log = _Defects(self.surprises)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._closing = contextlib.ExitStack()

    def run(self, coroutine):
        """Runs a coroutine on the loop of the port."""
        return self.begin(coroutine).result(PATIENCE_S)

    def begin(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def __enter__(self):
        self._thread.start()
        logging.getLogger("forebay").addHandler(self._log)
        try:
            self.listen()
        except BaseException:
            self._end()
            raise
        return self

    def listen(self, port=None):
        """Opens the port, or opens it again."""
        config = self.config if port is None else msgspec.structs.replace(self.config, port=port)
        self.listener = GrpcListener(
            config, [self.echo.service()], lambda: self.is_ready, is_model_ready=self.models.get
        )
        self.host, self.number = self.run(self.listener.start())
        self.endpoint = f"{self.host}:{self.number}"

    def forward(self, seconds):
        """Puts the clock of the port forward: whoever has not moved by the first sweep is late at the second."""

        async def sweep():
            port = self.listener._port
            assert port is not None
            for ahead in (0, seconds):
                port.epoch += ahead
                assert port._timer is not None
                port._timer.cancel()
                port.sweep()

        self.run(sweep())

    def __exit__(self, *_error):
        self._closing.close()
        self.run(self.listener.stop(0.0))
        self._end()

    def _end(self):
        logging.getLogger("forebay").removeHandler(self._log)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def connect(self, options=ALONE, credentials=None):
        """A channel with a connection of its own, closed with the port."""
        if credentials is not None:
            channel = grpc.secure_channel(self.endpoint, credentials, options)
        else:
            channel = grpc.insecure_channel(self.endpoint, options)
        return self._closing.enter_context(channel)


class Apart:
    """The same port in a process of its own, whose memory can be looked at."""

    def __init__(self, **config):
        self._config = config

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.grpc.served", json.dumps(self._config)],
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=PATIENCE_S)
        self.host, self.number = "127.0.0.1", int(line)
        self.endpoint = f"{self.host}:{self.number}"
        return self

    def __exit__(self, *_error):
        self.process.terminate()
        _, self.log = self.process.communicate(timeout=PATIENCE_S)

    def forget_peak(self):
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        self._before = self._peak_mib()

    def grown_mib(self):
        """How far memory has risen at most since `forget_peak`."""
        return self._peak_mib() - self._before

    def _peak_mib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024


def ask(channel, method, message=b"", **more):
    """One unary call in bytes."""
    more.setdefault("timeout", PATIENCE_S)
    call = channel.unary_unary(method if method.startswith("/") else path(method))
    return call(message, **more)


def status_of(call):
    """The status and text a call ends with."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), str(error.details())
    raise AssertionError("the call was answered")


async def serve():
    limits = {"read_timeout_s": 5.0, "write_timeout_s": 1.0, **json.loads(sys.argv[1])}
    listener = GrpcListener(GrpcConfig(**limits), [Echo().service()], is_ready=lambda: True)
    _, port = await listener.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve())
