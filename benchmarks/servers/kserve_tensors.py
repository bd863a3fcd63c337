# SPDX-License-Identifier: Apache-2.0
"""The models of tensors behind KServe's Python server: one worker, no latency log."""

import argparse
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--http", type=int, required=True)
parser.add_argument("--grpc", type=int, required=True)
options = parser.parse_args()
del sys.argv[1:]  # kserve reads it as soon as it is imported

import numpy as np  # noqa: E402
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer  # noqa: E402

from benchmarks.work import tensors  # noqa: E402


class Tensors(Model):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    async def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        given = payload.inputs[0].as_numpy()
        found = (given[:, : tensors.SCORES] * 2 if self.name == "large" else given * 2).astype(np.float32)
        output = InferOutput("output", list(found.shape), "FP32")
        output.set_data_from_numpy(found, binary_data=True)
        return InferResponse(payload.id or "", self.name, [output])


if __name__ == "__main__":
    ModelServer(
        http_port=options.http, grpc_port=options.grpc, workers=1, enable_latency_logging=False, access_log_format=None
    ).start([Tensors("large"), Tensors("small")])
