# SPDX-License-Identifier: Apache-2.0
"""The gRPC face of the KServe v2 protocol in a thread of the test, for the models of a file."""

import contextlib
import os
import uuid
from pathlib import Path

import grpc
import numpy as np
from tests.conftest import MODELS
from tests.integration.grpc.served import Port
from tests.waiting import PATIENCE_S

from forebay.protocols.kserve.messages import SERVICE, messages
from forebay.server.app import App
from forebay.server.config import Overrides
from forebay.surfaces.native.target_models import serve_target
from forebay.transports.grpc.kserve import KServe
from forebay.transports.grpc.listener import GrpcListener

M = messages()


class KServed(Port):
    """A port with models behind it."""

    def __init__(self, target="tensors_rpc.py", overrides=None, services_of=None, **config):
        super().__init__(**config)
        overrides = overrides or Overrides(worker_kind="thread")
        self.app = App(serve_target(str(MODELS / target), overrides).served)
        self.kserve = KServe(self.app)
        self._services_of = services_of

    def listen(self, port=None):
        """Brings up the models, and opens the port."""
        self.run(self.app.start())
        is_ready = lambda: not self.app.problems()  # noqa: E731
        services = self._services_of(self.app) if self._services_of else [self.kserve.service()]
        self.listener = GrpcListener(self.config, services, is_ready, is_model_ready=self.kserve.is_model_ready)
        self.host, self.number = self.run(self.listener.start())
        self.endpoint = f"{self.host}:{self.number}"

    def __exit__(self, *error):
        self._closing.close()
        self.run(self.listener.stop(0.0))
        self.run(self.app.drain(0.0))
        self._end()

    def endpoint_of(self, model):
        return self.app.find(model).endpoint


def request(model, *arrays, names=("input",), id="", datatype=None, **parameters):
    """A ModelInferRequest with raw contents."""
    made = M.ModelInferRequest(model_name=model, id=id)
    for name, array in zip(names, arrays, strict=True):
        kind = datatype or {"f4": "FP32", "f8": "FP64", "i8": "INT64", "|S1": "BYTES"}[array.dtype.str.lstrip("<")]
        made.inputs.add(name=name, datatype=kind, shape=array.shape)
        made.raw_input_contents.append(array.tobytes())
    for key, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(made.parameters[key], field, value)
    return made


def number(model, value, **more):
    """A request to a model that takes a whole number."""
    return request(model, np.array([value], "i8"), **more)


def infer(channel, made, **more):
    """One call of ModelInfer."""
    more.setdefault("timeout", PATIENCE_S)
    data = made if isinstance(made, bytes) else made.SerializeToString()
    return M.ModelInferResponse.FromString(channel.unary_unary(f"/{SERVICE}/ModelInfer")(data, **more))


def output(answer):
    """The only output of an answer as an array."""
    (about,) = answer.outputs
    kind = {"FP32": "f4", "FP64": "f8", "INT64": "i8"}[about.datatype]
    return np.frombuffer(answer.raw_output_contents[0], kind).reshape(tuple(about.shape))


def stream(channel, requests, **more):
    """Answers of ModelStreamInfer, as they come."""
    return channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(
        (one if isinstance(one, bytes) else one.SerializeToString() for one in requests), **more
    )


def ask(channel, method, **fields):
    """One of the small methods."""
    given = getattr(M, f"{method}Request")(**fields)
    data = channel.unary_unary(f"/{SERVICE}/{method}")(given.SerializeToString(), timeout=PATIENCE_S)
    return getattr(M, f"{method}Response").FromString(data)


def refusal(call):
    """Status and text of a call that fails."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name, str(error.details())
    raise AssertionError("the call was answered")


@contextlib.contextmanager
def region(data):
    """System shared memory that holds these bytes; gives its key."""
    key = f"/forebay-test-{os.getpid()}-{uuid.uuid4().hex}"
    file = Path(f"/dev/shm{key}")
    file.write_bytes(data)
    try:
        yield key
    finally:
        file.unlink()
