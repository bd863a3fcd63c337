# SPDX-License-Identifier: Apache-2.0
"""A server of the KServe v2 protocol that is not ours: doubles numbers, gives back texts. Run: HTTP_PORT GRPC_PORT."""

# pyright: reportMissingImports=false

import sys

from kserve import InferOutput, InferResponse, Model, ModelServer
from kserve.errors import InvalidInput


class Twice(Model):
    def __init__(self):
        super().__init__("twice")
        self.ready = True

    async def get_input_types(self):
        return [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]

    async def get_output_types(self):
        return [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}]

    async def predict(self, payload, headers=None, response_headers=None):
        (given,) = payload.inputs
        array = given.as_numpy()
        if array.size and array.dtype.kind == "f" and array.flat[0] == -1:
            raise InvalidInput("it does not like -1")
        output = InferOutput("y", list(array.shape), given.datatype)
        output.set_data_from_numpy(array if array.dtype.kind in "OSU" else (array * 2).astype(array.dtype))
        return InferResponse(
            payload.id,
            "twice",
            [output],
            use_binary_outputs=payload.use_binary_outputs,
            requested_outputs=payload.request_outputs,
        )


ModelServer(http_port=int(sys.argv[1]), grpc_port=int(sys.argv[2]), workers=1, enable_grpc=True).start([Twice()])
