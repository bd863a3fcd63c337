# SPDX-License-Identifier: Apache-2.0
"""A user's own service: a trivial method, and one whose calls share runs of a model with those of other threads."""

import numpy as np
from benchmarks.work import batchmodel

from forebay import Batch, Serving, batched_run


class Handler:
    def __init__(self, proto_module_pb2):
        self.pb = proto_module_pb2
        predict = batchmodel.load()

        def score(batch):
            return np.array([found["y"] for found in predict([{"x": row} for row in batch.realize()])])

        self.model = Serving.new(lambda _options: score).batch_size(32).start("model", batch_timeout_ms=1)
        self.model.__enter__()

    def SayHello(self, payload):
        return self.pb.HelloReply(text="hello " + payload.name)

    def Score(self, payload):
        (y,) = batched_run("model", Batch.stack([np.array(payload.x)]))
        return self.pb.Result(y=y)
