# SPDX-License-Identifier: Apache-2.0
"""A user's own service: a trivial method, and one whose calls share runs of a model with those of other threads."""

import numpy as np
from benchmarks.work import iris

from forebay import Batch, Serving, batched_run


class Handler:
    def __init__(self, proto_module_pb2):
        self.pb = proto_module_pb2
        predict = iris.load()

        def classify(batch):
            return np.array([found["class"] for found in predict([{"x": row} for row in batch.realize()])])

        self.model = Serving.new(lambda _options: classify).batch_size(32).start("iris", batch_timeout_ms=1)
        self.model.__enter__()

    def SayHello(self, payload):
        return self.pb.HelloReply(text="hello " + payload.name)

    def Classify(self, payload):
        return self.pb.Species(name=str(batched_run("iris", Batch.stack([np.array(payload.measures)]))[0]))
