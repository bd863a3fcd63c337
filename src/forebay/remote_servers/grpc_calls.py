# SPDX-License-Identifier: Apache-2.0
"""Unary gRPC calls of bytes to one server."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from forebay.errors import RunnerFailed
from forebay.remote_servers.servers import CONNECT_S, MAX_ANSWER_BYTES, PARENT, ServerAddress, Unreachable, parent
from forebay.runtimes.library import library

_OPTIONS: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # A server that comes back is found at once: the rotation decides who is asked and how often.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # With it the kernel hangs up where nothing is acknowledged for 20 s. Else a link that swallows everything, or a
    # host that has vanished, holds its connection for a quarter of an hour, and each turn of that server costs a call
    # its time. The pings themselves are of no use here, and servers put up with no more of them.
    ("grpc.keepalive_time_ms", 300_000),
    # Else channels to the same address share their back-off.
    ("grpc.use_local_subchannel_pool", 1),
]
_LOOK_S: Final = 0.02
_WATCH_S: Final = 0.25
"""How long grpc's own thread takes for one look at a channel, and how long it watches on when nobody wants it to."""


class CallRefused(RunnerFailed):
    """A server refuses a call.

    Attributes:
        code_name: The name of its status.
    """

    code_name = ""


class GrpcCalls:
    """Calls to one server, for any number of threads."""

    def __init__(self, endpoint: ServerAddress) -> None:
        """Describe it; nothing is connected before the first call.

        Raises:
            ConfigError: If grpcio is not installed.
        """
        self.endpoint = endpoint
        self._grpc = library("grpc", f"{endpoint.address} is asked over gRPC", "forebay[grpc]")
        if endpoint.scheme == "grpcs":
            credentials = self._grpc.ssl_channel_credentials()
            self._channel = self._grpc.secure_channel(endpoint.address, credentials, _OPTIONS)
        else:
            self._channel = self._grpc.insecure_channel(endpoint.address, _OPTIONS)
        self._calls: dict[str, Any] = {}
        self._is_connected = False
        self._watched_until = 0.0
        self._closable_at = 0.0

    def call(self, method: str, request: bytes, deadline: float) -> bytes:
        """Make a call.

        Args:
            method: Its full name, with a slash at the beginning.
            deadline: When to give up, by the monotonic clock.

        Raises:
            Unreachable: If the server lets nobody in or goes away.
            TimeoutError: If it does not answer in time.
            CallRefused: With the server's words if it refuses the call.
        """
        if not self._is_connected:
            self._connect(deadline)
        if method not in self._calls:
            self._calls[method] = self._channel.unary_unary(method)
        try:
            timeout_s = max(0.001, deadline - time.monotonic())
            metadata = [(PARENT, parent.get())] if parent.get() else None
            return self._calls[method](request, timeout=timeout_s, metadata=metadata)
        except self._grpc.RpcError as problem:
            code, text = problem.code(), problem.details()
        if code is self._grpc.StatusCode.UNAVAILABLE:
            self._is_connected = False
            raise Unreachable(text)
        if code is self._grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError
        text = f"the model server {self.endpoint.address} refuses the call: {text} ({code.name})"
        refused = CallRefused(text)
        refused.code_name = code.name
        raise refused

    def close(self) -> None:
        """Hang up."""
        time.sleep(max(0.0, self._closable_at - time.monotonic()))
        self._channel.close()

    def _connect(self, deadline: float) -> None:
        """Wait until the connection stands, so that a silent server takes no more than its share of the deadline."""
        states = self._grpc.ChannelConnectivity
        began = time.monotonic()
        settled = threading.Event()
        found: list[Any] = []

        def watch(state: Any) -> None:
            if state in {states.READY, states.TRANSIENT_FAILURE, states.SHUTDOWN}:
                found.append(state)
                settled.set()

        self._channel.subscribe(watch, try_to_connect=True)
        try:
            settled.wait(max(0.001, min(CONNECT_S, deadline - time.monotonic())))
        finally:
            self._channel.unsubscribe(watch)
            # The thread with which grpc watches ends with a traceback if it looks at a channel that is closed, and it
            # looks once more where it was asked to connect while it still watched.
            self._closable_at = time.monotonic() + (_WATCH_S if began < self._watched_until else _LOOK_S)
            self._watched_until = began + _WATCH_S
        if not found or found[0] is states.SHUTDOWN:
            raise Unreachable("it does not answer")
        # Where there is none the call fails at once, and only that is told why.
        self._is_connected = found[0] is states.READY
