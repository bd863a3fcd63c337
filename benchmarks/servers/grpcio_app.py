# SPDX-License-Identifier: Apache-2.0
"""The service of jobs/user_grpc on plain grpcio: `python -m benchmarks.servers.grpcio_app PORT asyncio|threads`."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from benchmarks.work import batchmodel

sys.path.append(str(Path(__file__).resolve().parent.parent / "jobs" / "user_grpc"))
pb, stubs = grpc.protos_and_services("greeter.proto")  # pyright: ignore[reportAttributeAccessIssue]
THREADS = 32


class Plain(stubs.GreeterServicer):
    def __init__(self) -> None:
        self.predict = batchmodel.load()
        self.turn = threading.Lock()  # the model has one set of buffers, and the server one core

    def SayHello(self, request: Any, context: Any) -> Any:
        return pb.HelloReply(text="hello " + request.name)

    def Score(self, request: Any, context: Any) -> Any:
        with self.turn:
            return pb.Result(y=self.predict([{"x": request.x}])[0]["y"])


class Awaited(Plain):
    async def SayHello(self, request: Any, context: Any) -> Any:
        return pb.HelloReply(text="hello " + request.name)

    async def Score(self, request: Any, context: Any) -> Any:
        return super().Score(request, context)


async def serve_asyncio(address: str) -> None:
    server = grpc.aio.server()
    stubs.add_GreeterServicer_to_server(Awaited(), server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


def serve_threads(address: str) -> None:
    server = grpc.server(ThreadPoolExecutor(THREADS))
    stubs.add_GreeterServicer_to_server(Plain(), server)
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    where = f"127.0.0.1:{sys.argv[1]}"
    if sys.argv[2] == "threads":
        serve_threads(where)
    else:
        asyncio.run(serve_asyncio(where))
