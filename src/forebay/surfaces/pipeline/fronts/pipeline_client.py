# SPDX-License-Identifier: Apache-2.0
"""Clients of a pipeline over gRPC: `PipelineClient` for threads, `AsyncPipelineClient` for coroutines.

    with PipelineClient() as client:
        client.connect(["localhost:9993"])
        result = client.predict({"x": "0.1, 0.2"}, fetch=["price"])
        result.err_no, result.value      # the answer as it came
        result["price"]                  # read into an array or another Python value

What comes from a server is read, never evaluated.
"""

from __future__ import annotations

import functools
import itertools
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, Self, cast

import grpc

from forebay.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    ForebayError,
    InternalError,
    InvalidRequest,
    NotFound,
    QueueFull,
    Unavailable,
)
from forebay.surfaces.pipeline.codes import to_v03
from forebay.surfaces.pipeline.protocol import literal, tensors
from forebay.surfaces.pipeline.protocol.array_texts import array_text
from forebay.surfaces.pipeline.protocol.messages import PATH, Request, Response

PROFILE_KEY: Final = "pipeline.profile"
TIMEOUT_S: Final = 60.0
MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024

_AGAIN: Final = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.1s",
"maxBackoff": "2s", "backoffMultiplier": 2, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}"""

_OPTIONS: Final = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),  # a server that was restarted is found again soon
    # A call that is refused beyond a limit or for want of room is made again when the server says so
    # (grpc-retry-pushback-ms), within its time; gRPC keeps no messages of more than 256 KiB for that.
    ("grpc.service_config", _AGAIN),
]
_ERRORS: Final[Mapping[grpc.StatusCode, type[ForebayError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNIMPLEMENTED: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
}

Metadata = Sequence[tuple[str, str]]


class ClientResult(Mapping[str, Any]):
    """An answer, in the form of every version.

    Its attributes are those of the message: `err_no`, `err_msg`, `key`, `value`, `tensors`. As a mapping it has the
    values by their names, read into arrays and other Python values, those of `fetch` only; and `ecode`, the number v0.3
    has for `err_no`, with `error_info` where it is not 0.
    """

    def __init__(self, message: Any, fetch: Sequence[str] | None = None) -> None:
        self.message = message
        self._fetch = fetch
        self._read: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies are asked for, which have no message yet
            raise AttributeError(name)
        return getattr(self.message, name)

    def __getitem__(self, name: str) -> Any:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __repr__(self) -> str:
        return repr(self.message)

    def _values(self) -> dict[str, Any]:
        if self._read is None:
            message = self.message
            values: dict[str, Any] = {"ecode": to_v03(message.err_no)}
            if message.err_no:
                values["error_info"] = message.err_msg
            found: dict[str, Any] = {
                name: literal.parse(text, "literal") for name, text in zip(message.key, message.value, strict=False)
            }
            found |= tensors.unpack_all(message.tensors)
            wanted = found if self._fetch is None else [name for name in self._fetch if name in found]
            self._read = values | {name: found[name] for name in wanted if name != PROFILE_KEY}
        return self._read


class PredictFuture(Future[ClientResult]):
    """An answer that is on its way; see `concurrent.futures.Future`."""

    call: Any = None

    def cancel(self) -> bool:
        """Give up on the answer, and tell the server so; returns whether it was not there yet."""
        is_cancelled = super().cancel()
        if is_cancelled and self.call is not None:
            self.call.cancel()
        return is_cancelled


class _Client:
    """What both clients know of the servers that they take in turns."""

    def __init__(
        self,
        *,
        timeout: float | None = TIMEOUT_S,
        metadata: Metadata = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._timeout = timeout
        self._metadata = list(metadata)
        self._credentials = credentials
        self._channels: list[Any] = []
        self._methods: list[Any] = []
        self._turn = itertools.count()

    def _open(self, kind: Any, endpoints: Sequence[str]) -> None:
        """Make channels, as `grpc` or as `grpc.aio`."""
        for endpoint in endpoints:
            if self._credentials is None:
                channel = kind.insecure_channel(endpoint, _OPTIONS)
            else:
                channel = kind.secure_channel(endpoint, self._credentials, _OPTIONS)
            self._channels.append(channel)
            self._methods.append(_method(channel))

    def _let_go(self) -> list[Any]:
        """Return the channels, which are to be closed."""
        self._methods = []
        channels, self._channels = self._channels, []
        return channels

    def _begin(
        self, feed_dict: Mapping[str, Any], fetch: Sequence[str] | None, timeout_s: float | None, **form: Any
    ) -> tuple[Any, _Deadline, list[Any]]:
        """Return a request, when it is given up, and whom to ask in which order; see `request_of` for the form."""
        if fetch is not None and not isinstance(fetch, list | tuple):
            raise TypeError(f"fetch must be a list of names, not {type(fetch).__name__}")
        request = request_of(feed_dict, **form)
        return request, _Deadline(self._timeout if timeout_s is None else timeout_s), _order(self._methods, self._turn)


class PipelineClient(_Client):
    """Calls pipelines from any number of threads.

    Args:
        timeout: Seconds a prediction has unless it says otherwise; None waits for ever.
        metadata: What every call says beside its message, for example `[("x-api-key", "...")]`.
        credentials: Of a TLS channel, from `grpc.ssl_channel_credentials()`.
    """

    def connect(self, endpoints: Sequence[str]) -> None:
        """Take these servers in turns: `host:port`, with a name, an IPv4 or an `[IPv6]` address.

        Connections are made when they are needed. A server that is not reachable is skipped.

        Raises:
            TypeError, ValueError: If these are not endpoints.
        """
        _check_endpoints(endpoints)
        self.close()
        self._open(grpc, endpoints)

    def predict(  # noqa: PLR0913, PLR0917 - the original's
        self,
        feed_dict: Mapping[str, Any],
        fetch: Sequence[str] | None = None,
        asyn: bool = False,
        pack_tensor_format: bool = False,
        use_tensor_bytes: bool = False,
        profile: bool = False,
        log_id: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """Ask for a prediction.

        Args:
            feed_dict: Texts and arrays by name. `logid` and `clientip` become those of the request.
            fetch: What the result has as a mapping; None takes everything.
            asyn: Return a `PredictFuture` at once.
            pack_tensor_format: Send tensors; otherwise arrays travel as text.
            use_tensor_bytes: Send the tensors as `.npy` bytes, which is the quickest.
            profile: Print the times the server took.
            log_id: The request's id in the server's logs, if `feed_dict` has none.
            timeout: Seconds until it is given up; None takes the client's.

        Returns:
            A `ClientResult`. It also says what went wrong in the pipeline.

        Raises:
            TypeError: If the arguments cannot be sent.
            ForebayError: If no server answered: Unavailable, DeadlineExceeded, QueueFull, InvalidRequest, ...
        """
        form = {"as_tensors": pack_tensor_format, "as_npy": use_tensor_bytes, "profile": profile, "log_id": log_id}
        request, deadline, order = self._begin(feed_dict, fetch, timeout, **form)
        if asyn:
            future = PredictFuture()
            self._attempt(future, request, fetch, deadline, order)
            return future
        while True:
            method = order.pop(0)
            try:
                return _result(method(request, timeout=deadline.left_s(), metadata=self._metadata), fetch)
            except grpc.RpcError as error:
                if not (order and _is_elsewhere(error)):
                    raise _error(error) from error

    def _attempt(
        self,
        future: PredictFuture,
        request: Any,
        fetch: Sequence[str] | None,
        deadline: _Deadline,
        order: list[Any],
    ) -> None:
        """Ask the first of these servers, and the others if it is not reachable."""
        call = future.call = order[0].future(request, timeout=deadline.left_s(), metadata=self._metadata)

        def ended(call: Any) -> None:
            if future.cancelled():
                return
            try:
                error = call.exception()
                if error is None:
                    future.set_result(_result(call.result(), fetch))
                elif len(order) > 1 and _is_elsewhere(error):
                    self._attempt(future, request, fetch, deadline, order[1:])
                else:
                    future.set_exception(_error(error))
            except Exception as failure:  # noqa: BLE001 - raised here it would be lost, and with it the answer
                if not future.done():
                    future.set_exception(failure)

        call.add_done_callback(ended)

    def close(self) -> None:
        """Close all connections; `connect` opens new ones."""
        for channel in self._let_go():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class AsyncPipelineClient(_Client):
    """Calls pipelines from coroutines of one loop; its arguments are those of `PipelineClient`."""

    async def connect(self, endpoints: Sequence[str]) -> None:
        """Take these servers in turns; see `PipelineClient.connect`."""
        _check_endpoints(endpoints)
        await self.close()
        self._open(grpc.aio, endpoints)

    async def predict(
        self,
        feed_dict: Mapping[str, Any],
        fetch: Sequence[str] | None = None,
        *,
        pack_tensor_format: bool = False,
        use_tensor_bytes: bool = False,
        profile: bool = False,
        log_id: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 - the server is told of it
    ) -> ClientResult:
        """Ask for a prediction; see `PipelineClient.predict`."""
        form = {"as_tensors": pack_tensor_format, "as_npy": use_tensor_bytes, "profile": profile, "log_id": log_id}
        request, deadline, order = self._begin(feed_dict, fetch, timeout, **form)
        while True:
            method = order.pop(0)
            try:
                return _result(await method(request, timeout=deadline.left_s(), metadata=self._metadata), fetch)
            except grpc.RpcError as error:
                if not (order and _is_elsewhere(error)):
                    raise _error(error) from error

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._let_go():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


def request_of(feed_dict: Any, *, as_tensors: bool, as_npy: bool, profile: bool = False, log_id: int = 0) -> Any:
    """Return the request for a dict of texts and arrays, which is not changed.

    Raises:
        TypeError: If a value can be sent neither as text nor as a tensor.
    """
    if not isinstance(feed_dict, Mapping):
        raise TypeError(f"feed must be a dict of names and values, not {type(feed_dict).__name__}")
    feed = cast("Mapping[str, Any]", feed_dict)
    address = feed.get("clientip")
    request = Request(
        logid=log_id or int(feed.get("logid", 0)), clientip=own_address() if address is None else str(address)
    )
    for name, value in feed.items():
        if name in {"logid", "clientip"}:
            continue
        if not as_tensors:
            request.key.append(name)
            request.value.append(_text(name, value))
        elif not (name.endswith(".lod") and name.removesuffix(".lod") in feed):
            tensors.pack(request.tensors.add(), name, value, lod=feed.get(f"{name}.lod"), as_npy=as_npy)
    if profile:
        request.key.append(PROFILE_KEY)
        request.value.append("1")
    return request


@functools.cache
def own_address() -> str:
    """Return the address this machine uses for outgoing traffic; sends nothing, and asks no name server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address that documents use and nobody has
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    import numpy as np

    if isinstance(value, np.ndarray | list):
        return array_text(value)
    raise TypeError(f"only str and np.ndarray type is supported: '{name}' is {type(value).__name__}")


class _Deadline:
    """When an answer is given up, of any of the servers."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        return None if self._at is None else max(self._at - time.monotonic(), 0.0)


def _check_endpoints(endpoints: Any) -> None:
    if isinstance(endpoints, str) or not isinstance(endpoints, Sequence):
        raise TypeError(f"endpoints must be a list of 'host:port', not {type(endpoints).__name__}")
    if not endpoints:
        raise ValueError("endpoints is empty; name at least one 'host:port'")


def _method(channel: Any) -> Any:
    return channel.unary_unary(
        PATH, request_serializer=Request.SerializeToString, response_deserializer=Response.FromString
    )


def _order(methods: list[Any], turn: Iterator[int]) -> list[Any]:
    """Return whom to ask, and whom next if they are not there."""
    if not methods:
        raise Unavailable("this client is not connected; call connect(['host:port']) first")
    first = next(turn) % len(methods)
    return methods[first:] + methods[:first]


def _result(message: Any, fetch: Sequence[str] | None) -> ClientResult:
    for name, text in zip(message.key, message.value, strict=False):
        if name == PROFILE_KEY and text:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
            sys.stdout.flush()
    return ClientResult(message, fetch)


def _is_elsewhere(error: Any) -> bool:
    """Tell whether it makes sense to try another server."""
    return error.code() == grpc.StatusCode.UNAVAILABLE


def _error(error: Any) -> ForebayError:
    found = _ERRORS.get(error.code(), InternalError)(f"{error.code().name}: {error.details()}")
    fields: dict[str, str | bytes] = dict(error.trailing_metadata() or ())
    after_ms = str(fields.get("grpc-retry-pushback-ms", ""))[:12]
    if isinstance(found, CapacityError) and after_ms.isdecimal():
        found.retry_at = time.monotonic() + int(after_ms) / 1000
    return found
