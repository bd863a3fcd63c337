# SPDX-License-Identifier: Apache-2.0
"""Names the species of an iris flower from four measures of it, over a gRPC service of its own."""

import grpc
import joblib


class Handler:
    def __init__(self, config, proto_module_pb2):
        self.pb = proto_module_pb2
        self.model = joblib.load(config["model_file"])

    def Classify(self, payload, context):
        row = [payload.sepal_length, payload.sepal_width, payload.petal_length, payload.petal_width]
        if min(row) <= 0:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "all four measures are needed, in centimetres")
        (scores,) = self.model.predict_proba([row])
        best = int(scores.argmax())
        return self.pb.Species(name=str(self.model.classes_[best]), score=scores[best])
