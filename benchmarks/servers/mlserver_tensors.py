# SPDX-License-Identifier: Apache-2.0
"""The models of tensors behind MLServer, in its own process, which is its fastest way here, without metrics."""

import argparse
import asyncio

import numpy as np
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.work import tensors


class Tensors(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = NumpyCodec.decode_input(payload.inputs[0])
        found = given[:, : tensors.SCORES] * 2 if self.name == "large" else given * 2
        output = NumpyCodec.encode_output("output", found.astype(np.float32))
        return InferenceResponse(model_name=self.name, outputs=[output])


async def serve(options: argparse.Namespace) -> None:
    settings = Settings(
        host="127.0.0.1",
        http_port=options.http,
        grpc_port=options.grpc,
        parallel_workers=0,
        debug=False,
        metrics_endpoint=None,
        use_structured_logging=False,
        logging_settings=None,
        grpc_max_message_length=1 << 26,
        load_models_at_startup=False,
    )
    models = [ModelSettings(name=name, implementation=Tensors) for name in ("large", "small")]
    await MLServer(settings).start(models)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--grpc", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
