# SPDX-License-Identifier: Apache-2.0
"""A job behind FastAPI without batching: what many people start with."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI

from benchmarks.work import load_counted


def app(job: str) -> FastAPI:
    predict = load_counted(job)
    api = FastAPI()

    @api.post("/")
    async def answer(row: dict[str, Any]) -> dict[str, Any]:
        return predict([row])[0]

    return api


if __name__ == "__main__":
    uvicorn.run(
        app(sys.argv[1]),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        log_level="warning",
        access_log=False,
        loop="uvloop",
        http="httptools",
    )
