# SPDX-License-Identifier: Apache-2.0
"""`forebay.testing.client(Model)`: a model served in this process, without a socket, and its client.

Requests are bodies and headers, as any client sends them. They are decoded, validated, queued, batched, run by workers
and encoded exactly as by a server, by the same code; only the bytes move in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import unquote
from weakref import WeakSet

import msgspec

from forebay.errors import InvalidRequest
from forebay.surfaces.embedding.mounted import Mounted
from forebay.testing.answers import Answer
from forebay.types.file import File
from forebay.workers.processes.loop_thread import LoopThread

if TYPE_CHECKING:
    from forebay.surfaces.embedding.targets import Target

DRAIN_S: Final = 5.0
_MAX_TRACES: Final = 1000
_END: Final = object()


def client(*targets: Target, **settings: Any) -> _Opening:
    """Serve models in this process for a test, and return who calls them.

        with forebay.testing.client(Shout) as shout:
            assert shout.call("hello") == "HELLO"
            assert shout.ask(3).status == 422

        async with forebay.testing.client(Shout) as shout:
            assert await shout.call("hello") == "HELLO"

    With `with` it is a `Client`, whose server runs in a thread; with `async with` an `AsyncClient` on its loop.

    Args:
        *targets: Model classes and composed functions, or one path of what `forebay serve` takes.
        **settings: As for `forebay.asgi`: options of `forebay serve` by their names in Python. Classes run in threads
            if `worker_kind` says nothing else.

    Raises:
        ConfigError: If a target or a setting is wrong.
    """
    return _Opening(Mounted(targets, settings, DRAIN_S, "forebay.testing.client"))


class AsyncClient:
    """Calls the models of one test, on its loop."""

    def __init__(self, served: Mounted) -> None:
        self._served = served
        self._traces = _Traces()
        self._streams: WeakSet[_Exchange] = WeakSet()

    async def request(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send any request.

        Args:
            method: Such as GET.
            target: Path, with a query if there is one.
            body: As it is sent.
            headers: By name.
        """
        async with _Exchange(self._served, method, target, body, headers or {}) as exchange:
            pieces = [piece async for piece in exchange]
        return self._answer(exchange, b"".join(pieces))

    async def ask(
        self,
        sample: Any,
        *,
        model: str | None = None,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        path: str = "",
    ) -> Answer:
        """Send a sample and return the answer, whatever it is.

        Args:
            sample: What `predict` takes one of; a list of them where the model is `batchable`. Bytes are sent as they
                are where the model takes bytes; everything else becomes JSON.
            model: The name of the model; may be left out if there is one.
            query: What follows the `?`.
            headers: By name; `x-request-timeout-ms` for example.
            path: Of a further method, such as "/embed".
        """
        return await self.request("POST", *self._written(sample, model, query, path), _with_type(headers))

    async def ask_all(self, samples: Iterable[Any], *, model: str | None = None, path: str = "") -> list[Answer]:
        """Send samples at once, so that they meet in batches; returns their answers in order."""
        return await asyncio.gather(*(self.ask(sample, model=model, path=path) for sample in samples))

    async def call(
        self, sample: Any, *, model: str | None = None, headers: Mapping[str, str] | None = None, path: str = ""
    ) -> Any:
        """Send a sample and return the result.

        Raises:
            CallFailed: If the answer is an error; the model's traceback stands below it.
        """
        return (await self.ask(sample, model=model, headers=headers, path=path)).value

    async def call_all(self, samples: Iterable[Any], *, model: str | None = None, path: str = "") -> list[Any]:
        """Send samples at once, so that they meet in batches; returns their results in order.

        Raises:
            CallFailed: If one of them failed.
        """
        return [answer.value for answer in await self.ask_all(samples, model=model, path=path)]

    async def stream(
        self, sample: Any, *, model: str | None = None, headers: Mapping[str, str] | None = None, path: str = ""
    ) -> AsyncGenerator[Any]:
        """Send a sample and give the parts of the answer as they come; a caller that stops listening counts as gone.

        Raises:
            CallFailed: If the answer, or its last part, is an error.
            RuntimeError: If the answer is not a stream, or the client was closed before it had ended.
        """
        target, body = self._written(sample, model, "", path)
        rest = b""
        async with _Exchange(self._served, "POST", target, body, _with_type(headers)) as exchange:
            self._streams.add(exchange)
            async for piece in exchange:
                rest += piece
                if exchange.is_stream:
                    *events, rest = rest.split(b"\n\n")
                    for event in events:
                        yield self._answer(exchange, event).part(event)
        if not exchange.is_stream:
            _ = self._answer(exchange, rest).value  # raises if it is an error
            media = exchange.headers.get("content-type", "empty")
            raise RuntimeError(f"expected a stream, got {media}; a model streams if it yields. `call` reads both")

    def describe(self, model: str | None = None) -> dict[str, Any]:
        """Return what `/models/NAME` tells, such as the sizes of the batches there were."""
        app = self._served.app
        return app.describe(self._name(model))

    def _name(self, model: str | None) -> str:
        app = self._served.app
        if model is not None:
            return app.find(model).endpoint.name
        if app.only is None:
            raise InvalidRequest(f"say which model is meant: model= one of {', '.join(app.served)}")
        return app.only.endpoint.name

    def _written(self, sample: Any, model: str | None, query: str, path: str) -> tuple[str, bytes]:
        name = self._name(model)
        target = f"/models/{name}{path}" + (f"?{query}" if query else "")
        contract = self._served.app.find(name).contracts.get(path)
        if contract is not None and contract.raw_input and isinstance(sample, bytes | bytearray):
            return target, bytes(sample)
        return target, msgspec.json.encode(sample, enc_hook=_plain)

    def _answer(self, exchange: _Exchange, body: bytes) -> Answer:
        trace = self._traces.of(exchange.headers.get("x-request-id", ""))
        return Answer(status=exchange.status, headers=exchange.headers, body=body, trace=trace)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._traces.listening())
            await stack.enter_async_context(self._served.lifespan())
            stack.push_async_callback(self._hang_up)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _hang_up(self) -> None:
        """Be gone from the streams that nobody may ever read on, so that the server does not wait for them."""
        for exchange in list(self._streams):
            await exchange.hang_up()


class Client:
    """Calls the models of one test, whose server runs in a thread; its methods are those of `AsyncClient`."""

    def __init__(self, inner: AsyncClient) -> None:
        self._inner = inner
        self._stopped: asyncio.Event | None = None
        self._thread = LoopThread("forebay-testing", self._live)

    def request(self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        """Send any request."""
        return self._thread.run(self._inner.request(method, target, body, headers))

    def ask(
        self,
        sample: Any,
        *,
        model: str | None = None,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        path: str = "",
    ) -> Answer:
        """Send a sample and return the answer, whatever it is."""
        return self._thread.run(self._inner.ask(sample, model=model, query=query, headers=headers, path=path))

    def ask_all(self, samples: Iterable[Any], *, model: str | None = None, path: str = "") -> list[Answer]:
        """Send samples at once, so that they meet in batches; returns their answers in order."""
        return self._thread.run(self._inner.ask_all(samples, model=model, path=path))

    def call(
        self, sample: Any, *, model: str | None = None, headers: Mapping[str, str] | None = None, path: str = ""
    ) -> Any:
        """Send a sample and return the result.

        Raises:
            CallFailed: If the answer is an error; the model's traceback stands below it.
        """
        return self._thread.run(self._inner.call(sample, model=model, headers=headers, path=path))

    def call_all(self, samples: Iterable[Any], *, model: str | None = None, path: str = "") -> list[Any]:
        """Send samples at once, so that they meet in batches; returns their results in order.

        Raises:
            CallFailed: If one of them failed.
        """
        return self._thread.run(self._inner.call_all(samples, model=model, path=path))

    def stream(
        self, sample: Any, *, model: str | None = None, headers: Mapping[str, str] | None = None, path: str = ""
    ) -> Iterator[Any]:
        """Send a sample and give the parts of the answer as they come; a caller that stops listening counts as gone.

        Raises:
            CallFailed: If the answer, or its last part, is an error.
            RuntimeError: If the answer is not a stream, or the client was closed before it had ended.
        """
        parts = self._inner.stream(sample, model=model, headers=headers, path=path)
        try:
            while (part := self._thread.run(_next_or_end(parts))) is not _END:
                yield part
        finally:
            if self._thread.is_running:  # its loop closes them where it ends
                self._thread.run(parts.aclose())

    def describe(self, model: str | None = None) -> dict[str, Any]:
        """Return what `/models/NAME` tells, such as the sizes of the batches there were."""

        async def describe() -> dict[str, Any]:
            return self._inner.describe(model)

        return self._thread.run(describe())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stopped is not None:
            self._thread.call(self._stopped.set)
        self._thread.join()

    async def _live(self, is_up: Callable[[], None]) -> None:
        self._stopped = asyncio.Event()
        async with self._inner:
            is_up()
            await self._stopped.wait()


class _Opening:
    """Becomes one client or the other, by how it is entered."""

    def __init__(self, served: Mounted) -> None:
        self._served = served
        self._open: Any = None

    def __enter__(self) -> Client:
        self._open = Client(AsyncClient(self._served))
        return self._open.__enter__()

    def __exit__(self, *error: object) -> None:
        self._open.__exit__(*error)

    async def __aenter__(self) -> AsyncClient:
        self._open = AsyncClient(self._served)
        return await self._open.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self._open.__aexit__(*error)


class _Exchange:
    """One request and its answer, over ASGI."""

    def __init__(self, served: Mounted, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> None:
        path, _, query = target.partition("?")
        named = {"host": "testing", "content-length": str(len(body)), **headers}
        self._served = served
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
            "server": ("testing", 80),
            "client": ("testing", 1),
        }
        self._received = [{"type": "http.request", "body": body, "more_body": False}]
        self._gone = asyncio.Event()
        self._sent: asyncio.Queue[Any] = asyncio.Queue(16)
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        self._running = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.hang_up()

    @property
    def is_stream(self) -> bool:
        """Whether the answer has begun and comes in parts."""
        return self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return the next piece of the body."""
        while (message := await self._sent.get()) is not _END:
            if message["type"] == "http.response.body":
                return b"" if self._scope["method"] == "HEAD" else message.get("body", b"")
            self.status = message["status"]
            self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        if self._gone.is_set():
            raise RuntimeError("it is closed: a stream is read within the `with` of its client only")
        await self._running
        raise StopAsyncIteration

    async def hang_up(self) -> None:
        """Be gone: nobody wants more of the answer, and who reads it hears so."""
        self._gone.set()
        while not self._sent.empty():
            self._sent.get_nowait()  # whoever waited for room goes on
        await asyncio.wait([self._running])
        await self._sent.put(_END)

    async def _run(self) -> None:
        try:
            await self._served(self._scope, self._receive, self._send)
        finally:
            await self._send(_END)

    async def _send(self, message: Any) -> None:
        if not self._gone.is_set():
            await self._sent.put(message)

    async def _receive(self) -> Any:
        if self._received:
            return self._received.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}


class _Traces(logging.Handler):
    """Keeps the tracebacks that the server logs, by the requests they concern."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._found: OrderedDict[str, str] = OrderedDict()

    def of(self, request_id: str) -> str:
        """Return the traceback of a request; empty if its model is not to blame."""
        return self._found.get(request_id, "")

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Listen in the block."""
        log = logging.getLogger("forebay.requests")
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)
            self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the log."""
        for request_id in getattr(record, "request_ids", ()):
            self._found[request_id] = getattr(record, "trace", "")
            if len(self._found) > _MAX_TRACES:
                self._found.popitem(last=False)


async def _next_or_end(parts: AsyncIterator[Any]) -> Any:
    """Return the next part, or `_END`: a StopAsyncIteration does not pass through a future."""
    return await anext(parts, _END)


def _with_type(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {"content-type": "application/json", **{name.lower(): value for name, value in (headers or {}).items()}}


def _plain(value: Any) -> Any:
    """Write what msgspec does not know: pydantic models, arrays, files."""
    if isinstance(value, File):
        return value.in_base64()
    for name in ("model_dump", "tolist"):
        if hasattr(value, name):
            return getattr(value, name)(mode="json") if name == "model_dump" else getattr(value, name)()
    raise InvalidRequest(f"a {type(value).__name__} cannot be sent as JSON")
