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
import contextlib
import functools
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.responses import Response

from forebay.errors import RunnerFailed
from forebay.types.call import After, Failure
from forebay.types.failures import without_frames
from forebay.types.user_exceptions import answered
from forebay.workers.user_calls.cancel import is_cancelled
from forebay.workers.user_calls.coroutines import ASK_S, Coroutines
from forebay.workers.user_calls.user_code import aclose

if TYPE_CHECKING:
    from forebay.surfaces.nucleus.handler_payload import BadPayload

Answer = list[Any]
"""`[status, headers, body]`"""

_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_IN_A_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_STATUSES: Final = range(200, 600)
"""What can end a request."""

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
    """Return the answer of an `HTTPException` (Starlette's or FastAPI's): status, detail and headers.

    Raises:
        ValueError: If it cannot be written.
    """
    body = b"" if error.status_code in _NO_CONTENT else str(error.detail).encode(errors="replace")
    given: Mapping[str, str] = error.headers or {}
    headers = [[_encoded(name, name).lower(), _encoded(name, str(value))] for name, value in given.items()]
    if not any(name == b"content-type" for name, _ in headers):
        headers.append([b"content-type", TEXT])
    return [*_head(error.status_code, headers), body]


def split_callback(result: Any) -> tuple[Any, Callable[[], object] | None]:
    """Separate `(result, callback)`; anything else is a result as it is."""
    if isinstance(result, tuple):
        pair = cast("tuple[Any, ...]", result)
        if len(pair) == 2 and callable(pair[1]):
            return pair[0], pair[1]
    return cast("Any", result), None


def answer_of(result: Any, scope: Callable[[], MutableMapping[str, Any]]) -> Answer | Streamed:
    """Return the answer that a result stands for.

    Raises:
        TypeError, ValueError: If it cannot be written.
    """
    if isinstance(result, Response):
        if type(result).__call__ is not Response.__call__:
            return Streamed(result, scope())
        return [*_head(result.status_code, result.raw_headers), bytes(result.body)]
    if isinstance(result, bytes):
        return whole(200, BINARY, bytes(result))  # of a subclass, too
    if isinstance(result, str):
        return whole(200, TEXT, result.encode())
    return whole(200, JSON, json.dumps(result).encode())


def _head(status: Any, headers: Iterable[Sequence[Any]]) -> list[Any]:
    """Return status and headers as plain data.

    Raises:
        ValueError: If HTTP has no way to write them, naming what is wrong.
    """
    if not isinstance(status, int) or status not in _STATUSES:
        msg = f"the response has status {status!r}; one from {_STATUSES[0]} to {_STATUSES[-1]} can be written"
        raise ValueError(msg)
    plain = [[bytes(name), bytes(value)] for name, value in headers]
    for name, value in plain:
        shown = name.decode("latin-1")
        if not _NAME.fullmatch(name):
            raise ValueError(f"the response has a header named {shown!r}; that cannot be the name of one")
        if _NOT_IN_A_VALUE.search(value):
            msg = f"the response's header {shown} is {value!r}; line breaks and control characters cannot be written"
            raise ValueError(msg)
    return [int(status), plain]


def _encoded(name: str, text: str) -> bytes:
    """Return a header's name or value as it travels."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError(f"the response's header {name!r} has characters that latin-1 has not: {text!r}") from None


def steps(
    outcomes: Sequence[Any], coroutines: Coroutines, report: Callable[[BaseException], object]
) -> Iterator[list[Any]]:
    """Yield the parts of a batch in which something streams; streams of one batch take turns.

    Args:
        outcomes: An `Answer` or a `Streamed` for each request, or an `After` around one.
    """

    def failed(error: BaseException) -> Failure:  # what a response raises ends that response only
        report(error)
        without_frames(error)  # tasks that it went through keep it, and are kept by their frames
        return Failure(RunnerFailed("a streamed response failed"))

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
            row[index] = answered(functools.partial(next, stream, None), failed)
            if row[index] is None or type(row[index]) is Failure:
                ended.append(index)
        if any(part is not None for part in row):
            yield row
        for index in ended:
            del streams[index]
            if index in work:
                work[index]()


def _let_go(error: BaseException) -> None:
    """Take from the frames of what ended a response all that they hold, and then the frames."""
    traceback.clear_frames(error.__traceback__)
    without_frames(error)


def _parts(streamed: Streamed, coroutines: Coroutines) -> Iterator[list[Any]]:
    """Drive a response as an ASGI application, one message at a time, on a loop that stands still in between."""
    messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue(maxsize=1)
    requests = iter([{"type": "http.request", "body": b"", "more_body": False}])
    is_over = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        if (request := next(requests, None)) is not None:
            return request
        while not (is_over.is_set() or is_cancelled()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), ASK_S)
        return {"type": "http.disconnect"}

    async def start() -> asyncio.Task[None]:
        return asyncio.ensure_future(streamed.response(streamed.scope, receive, messages.put))  # pyright: ignore[reportArgumentType]

    async def following(writing: asyncio.Task[None]) -> MutableMapping[str, Any] | None:
        getting = asyncio.ensure_future(messages.get())
        await asyncio.wait({getting, writing}, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            await writing  # raises what it failed with
            return None
        return getting.result()

    async def stop(writing: asyncio.Task[None]) -> None:
        is_over.set()
        await asyncio.sleep(0)  # who listens hears of it before it is cancelled
        writing.cancel()
        await asyncio.wait({writing})
        # What it iterates over may hold a lock: that is closed now, and not whenever somebody collects garbage.
        answered(writing.result, _let_go)
        await aclose(getattr(streamed.response, "body_iterator", None))

    writing = coroutines.run(start())
    try:
        while (message := coroutines.run(following(writing))) is not None:
            if message["type"] == "http.response.start":
                yield ["head", *_head(message["status"], message.get("headers", ()))]
            elif message["type"] == "http.response.body":
                body = message.get("body", b"")
                if body:
                    yield ["body", bytes(body)]
                if not message.get("more_body", False):
                    is_over.set()
                    yield ["end"]
    finally:
        if not writing.done():
            coroutines.run(stop(writing))
        del writing  # what ended it may come of what ends this frame, and refer to the frame
