# SPDX-License-Identifier: Apache-2.0
"""tritonclient.grpc.aio: `python coroutines.py ADDRESS`."""

import asyncio
import sys

import numpy as np
import tritonclient.grpc.aio as triton  # pyright: ignore[reportMissingImports]


def tensor(name, array, datatype):
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


async def main():
    async with triton.InferenceServerClient(sys.argv[1]) as client:
        assert await client.is_server_ready()

        async def add(value):
            left = np.full((1, 4), value, "f4")
            result = await client.infer("add", [tensor("left", left, "FP32"), tensor("right", left, "FP32")])
            return result.as_numpy("sum")[0, 0]

        assert await asyncio.gather(*map(add, range(50))) == [2 * value for value in range(50)]

        async def asked():
            for length in (2, 3):
                yield {
                    "model_name": "count",
                    "inputs": [tensor("input", np.array([length]), "INT64")],
                    "request_id": str(length),
                }

        found = {"2": [], "3": []}
        async for result, error in client.stream_infer(asked()):
            assert error is None, error
            found[result.get_response().id].append(result.as_numpy("output").item())
        assert found == {"2": [0, 1], "3": [0, 1, 2]}


asyncio.run(main())
