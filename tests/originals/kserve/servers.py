# SPDX-License-Identifier: Apache-2.0
"""The model `twice` on the Python servers of KServe and MLServer. Run: kserve|mlserver HTTP_PORT GRPC_PORT."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import sys


def on_kserve(http_port, grpc_port):
    from kserve import InferOutput, InferResponse, Model, ModelServer

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
            output = InferOutput("y", list(array.shape), given.datatype)
            output.set_data_from_numpy(array * 2)
            return InferResponse(
                payload.id or "",  # it takes no other
                "twice",
                [output],
                use_binary_outputs=payload.use_binary_outputs,
                requested_outputs=payload.request_outputs,
            )

    ModelServer(http_port=http_port, grpc_port=grpc_port, workers=1, enable_grpc=True).start([Twice()])


def on_mlserver(http_port, grpc_port):
    import asyncio

    from mlserver import MLModel, MLServer, ModelSettings, Settings
    from mlserver.codecs import NumpyCodec
    from mlserver.types import InferenceResponse, MetadataTensor

    class Twice(MLModel):
        async def predict(self, payload):
            array = NumpyCodec.decode_input(payload.inputs[0])
            outputs = [NumpyCodec.encode_output("y", array * 2)]
            return InferenceResponse(model_name=self.name, id=payload.id, outputs=outputs)

    # Settings name a class by a module that can be imported.
    sys.modules["servers"] = sys.modules["__main__"]
    Twice.__module__, Twice.__qualname__ = "servers", "Twice"
    globals()["Twice"] = Twice
    about = ModelSettings(
        name="twice",
        implementation=Twice,
        inputs=[MetadataTensor(name="x", datatype="FP32", shape=[-1, 3])],
        outputs=[MetadataTensor(name="y", datatype="FP32", shape=[-1, 3])],
    )
    settings = Settings(
        host="127.0.0.1", http_port=http_port, grpc_port=grpc_port, metrics_endpoint=None, parallel_workers=0
    )
    asyncio.run(MLServer(settings).start([about]))


if __name__ == "__main__":
    which, http, grpc = sys.argv[1:]
    (on_kserve if which == "kserve" else on_mlserver)(int(http), int(grpc))
