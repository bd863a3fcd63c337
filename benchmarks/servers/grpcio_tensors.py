# SPDX-License-Identifier: Apache-2.0
"""The same two models behind grpcio's asyncio server, with messages of protobuf as everybody has them there."""

from __future__ import annotations

import argparse
import asyncio

import grpc
import numpy as np

from benchmarks.work import tensors
from forebay.protocols.kserve.messages import SERVICE, messages


async def serve(port: int) -> None:
    said = messages()

    async def infer(asked, _context):
        run = tensors.scores if asked.model_name == "large" else tensors.doubled
        (tensor,) = asked.inputs
        found = run(np.frombuffer(asked.raw_input_contents[0], np.float32).reshape(tuple(tensor.shape))[0])
        answer = said.ModelInferResponse(model_name=asked.model_name, model_version="1", id=asked.id)
        answer.outputs.add(name="output", datatype="FP32", shape=[1, *found.shape])
        answer.raw_output_contents.append(found.tobytes())
        return answer

    method = grpc.unary_unary_rpc_method_handler(
        infer, said.ModelInferRequest.FromString, said.ModelInferResponse.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": method})])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
