# SPDX-License-Identifier: Apache-2.0
"""The models of tensors behind Triton, by PyTriton: its Python backend, one instance, batches of 64, 2 ms wait."""

import argparse

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.work import tensors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--grpc", type=int, required=True)
    options = parser.parse_args()
    config = TritonConfig(
        http_address="127.0.0.1", http_port=options.http, grpc_port=options.grpc, allow_metrics=False, log_verbose=0
    )
    shapes = {"large": (tensors.ELEMENTS, tensors.SCORES), "small": (4, 4)}
    with Triton(config=config) as triton:
        for name, (given, answered) in shapes.items():
            run = (lambda rows: rows[:, : tensors.SCORES] * 2) if name == "large" else tensors.doubled

            @batch
            def infer(input, run=run):
                return {"output": run(input)}

            triton.bind(
                model_name=name,
                infer_func=infer,
                inputs=[Tensor(name="input", dtype=np.float32, shape=(given,))],
                outputs=[Tensor(name="output", dtype=np.float32, shape=(answered,))],
                config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=2000)),
            )
        triton.serve()


if __name__ == "__main__":
    main()
