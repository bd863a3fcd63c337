# SPDX-License-Identifier: Apache-2.0
"""Models that take bodies as they arrive. A path in a body is a file that the test makes, or waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from forebay import Cancelled, Context, Model, endpoint


async def file_named_by(body: AsyncIterator[bytes]) -> Path:
    """Take the first piece, which is a path, and make a file beside it that says so."""
    path = Path((await anext(body)).decode())
    path.with_suffix(".begun").touch()
    return path


async def seen(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC110, ASYNC240 - another process makes it
        await asyncio.sleep(0.005)


class Echo(Model):
    async def predict(self, body: AsyncIterator[bytes]) -> AsyncIterator[str]:
        async for piece in body:
            yield piece.decode()

    @endpoint("/size")
    async def size(self, body: AsyncIterator[bytes], context: Context) -> list[str | int]:
        return [context.headers["x-name"], sum([len(piece) async for piece in body])]


class Waiting(Model):
    """Takes the first piece, which names a file, and the others once there is this file."""

    async def predict(self, body: AsyncIterator[bytes]) -> int:
        await seen(await file_named_by(body))
        return sum([len(piece) async for piece in body])


class Hanging(Waiting):
    timeout_ms = 300


class Begun(Model):
    """Says a word at once, and the size at the end."""

    async def predict(self, body: AsyncIterator[bytes]) -> AsyncIterator[str | int]:
        await file_named_by(body)
        yield "begun"
        yield sum([len(piece) async for piece in body])


class Early(Model):
    async def predict(self, body: AsyncIterator[bytes]) -> str:
        return (await anext(body)).decode()

    def postprocess(self, result: str) -> str:
        return result.upper()


class Told(Model):
    """Writes how its body ended into the file that the first piece names."""

    async def predict(self, body: AsyncIterator[bytes]) -> None:
        path = await file_named_by(body)
        try:
            async for _ in body:
                pass
        except Cancelled as error:
            path.write_text(str(error))
            raise


class Blocking(Model):
    async def predict(self, body: AsyncIterator[bytes]) -> int:
        return sum(len(piece) for piece in body)  # type: ignore[attr-defined]


class Threaded(Model):
    def predict(self, body: Iterator[bytes]) -> int:
        return sum(map(len, body))

    @endpoint("/parts")
    def parts(self, body: Iterator[bytes]) -> Iterator[str]:
        for piece in body:
            yield piece.decode()
