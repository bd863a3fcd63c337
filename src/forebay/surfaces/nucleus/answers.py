# SPDX-License-Identifier: Apache-2.0
"""From a handler's result to what goes over the wire.

A whole answer is `[status, [[name, value], ...], body]`: plain data that crosses the process border in one piece. An
answer that is written bit by bit (a `StreamingResponse`, a `FileResponse`, any response with a way of its own) crosses
it in parts, each a list that begins with its kind:

    ["whole", status, headers, body]    an answer in one piece whose batch-mate streams
    ["head", status, headers]
    ["body", bytes]
    ["end"]
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.responses import Response

from forebay.errors import RunnerFailed
from forebay.types.call import After, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

    from forebay.surfaces.nucleus.coroutines import Coroutines
    from forebay.surfaces.nucleus.payload import BadPayload

Answer = list[Any]
"""`[status, headers, body]`"""

JSON: Final = b"application/json"
TEXT: Final = b"text/plain; charset=utf-8"
BINARY: Final = b"application/octet-stream"

_NO_CONTENT: Final = frozenset({204, 304})


class Streamed:
    """A response that writes itself, with what it wants to know of its request."""

    def __init__(self, response: Response, scope: MutableMapping[str, Any]) -> None:
        self.response = response
        self.scope = scope


def whole(status: int, media_type: bytes, body: bytes) -> Answer:
    """Return an answer of one piece."""
    return [status, [[b"content-type", media_type]], body]


def text(status: int, message: str) -> Answer:
    """Return an answer for a person."""
    return whole(status, TEXT, message.encode(errors="replace"))


def refusal(error: BadPayload) -> Answer:
    """Return the answer to a body that cannot be read."""
    if error.as_json:
        return whole(400, JSON, json.dumps({"error": error.message}, separators=(",", ":")).encode())
    return text(400, error.message)


def http_error(error: Any) -> Answer:
    """Return the answer of an `HTTPException` (Starlette's or FastAPI's): status, detail and headers."""
    body = b"" if error.status_code in _NO_CONTENT else str(error.detail).encode(errors="replace")
    given: Mapping[str, str] = error.headers or {}
    headers = [[name.lower().encode("latin-1"), str(value).encode("latin-1")] for name, value in given.items()]
    if not any(name == b"content-type" for name, _ in headers):
        headers.append([b"content-type", TEXT])
    return [error.status_code, headers, body]


def split_callback(result: Any) -> tuple[Any, Callable[[], object] | None]:
    """Separate `(result, callback)`; anything else is a result as it is."""
    if isinstance(result, tuple):
        pair = cast("tuple[Any, ...]", result)
        if len(pair) == 2 and callable(pair[1]):
            return pair[0], pair[1]
    return cast("Any", result), None


def answer_of(result: Any, scope: Callable[[], MutableMapping[str, Any]]) -> Answer | Streamed:
    """Return the answer a result stands for.

    Raises:
        TypeError, ValueError: If it cannot be written.
    """
    if isinstance(result, Response):
        if type(result).__call__ is not Response.__call__:
            return Streamed(result, scope())
        headers = [list(pair) for pair in result.raw_headers]
        return [result.status_code, headers, bytes(result.body)]
    if isinstance(result, bytes):
        return whole(200, BINARY, result)
    if isinstance(result, str):
        return whole(200, TEXT, result.encode())
    return whole(200, JSON, json.dumps(result).encode())


def steps(
    outcomes: Sequence[Any], coroutines: Coroutines, report: Callable[[BaseException], object]
) -> Iterator[list[Any]]:
    """Yield the parts of a batch in which something streams; streams of one batch take turns.

    Args:
        outcomes: An `Answer` or a `Streamed` for each request, or an `After` around one.
        coroutines: Runs the responses.
        report: Called with what a response raises.
    """
    count = len(outcomes)
    work: dict[int, Callable[[], object]] = {}
    streams: dict[int, Iterator[list[Any]]] = {}
    first: list[Any] = [None] * count
    for index, given in enumerate(outcomes):
        outcome = given
        if type(outcome) is After:
            work[index], outcome = outcome.work, outcome.outcome
        if type(outcome) is Streamed:
            streams[index] = _parts(outcome, coroutines)
        else:
            first[index] = ["whole", *outcome]
    if any(part is not None for part in first):
        yield first
    for index in work.keys() - streams.keys():
        work[index]()
    while streams:
        row: list[Any] = [None] * count
        ended: list[int] = []
        for index, stream in streams.items():
            try:
                row[index] = next(stream, None)
            except Exception as error:  # noqa: BLE001 - what a response raises ends that response only
                report(error)
                row[index] = Failure(RunnerFailed("a streamed response failed"))
            if row[index] is None or type(row[index]) is Failure:
                ended.append(index)
        if any(part is not None for part in row):
            yield row
        for index in ended:
            del streams[index]
            if index in work:
                work[index]()


def _parts(streamed: Streamed, coroutines: Coroutines) -> Iterator[list[Any]]:
    """Drive a response as the ASGI application it is, one message at a time, on a loop that stands still in between."""
    messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue(maxsize=1)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def start() -> asyncio.Task[None]:
        return asyncio.ensure_future(streamed.response(streamed.scope, receive, messages.put))  # pyright: ignore[reportArgumentType]

    async def following() -> MutableMapping[str, Any] | None:
        getting = asyncio.ensure_future(messages.get())
        await asyncio.wait({getting, writing}, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            await writing  # raises what it failed with
            return None
        return getting.result()

    async def stop() -> None:
        writing.cancel()
        await asyncio.wait({writing})

    writing = coroutines.run(start())
    try:
        while (message := coroutines.run(following())) is not None:
            if message["type"] == "http.response.start":
                yield ["head", message["status"], [list(pair) for pair in message.get("headers", ())]]
            elif message["type"] == "http.response.body":
                body = message.get("body", b"")
                if body:
                    yield ["body", bytes(body)]
                if not message.get("more_body", False):
                    yield ["end"]
    finally:
        if not writing.done():
            coroutines.run(stop())
