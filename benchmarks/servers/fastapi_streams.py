# SPDX-License-Identifier: Apache-2.0
"""FastAPI streams the numbers up to the one it is sent: a bare `StreamingResponse`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Annotated

import uvicorn
from fastapi import Body, FastAPI
from fastapi.responses import StreamingResponse

api = FastAPI()


async def numbers(length: int) -> AsyncIterator[bytes]:
    for number in range(1, length + 1):
        yield b"data: %d\n\n" % number


@api.post("/")
async def stream(length: Annotated[int, Body()]) -> StreamingResponse:
    return StreamingResponse(numbers(length), media_type="text/event-stream")


if __name__ == "__main__":
    uvicorn.run(
        api,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
        loop="uvloop",
        http="httptools",
    )
