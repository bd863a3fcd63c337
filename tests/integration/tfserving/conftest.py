# SPDX-License-Identifier: Apache-2.0
import re

import pytest
from tests.waiting import PATIENCE_S

from forebay.protocols.tfserving.messages import SERVING

M = SERVING.classes()


class Client:
    """Asks a server over gRPC, with the same messages."""

    def __init__(self, server):
        grpc = pytest.importorskip("grpc")
        (address,) = re.findall(r"gRPC at ([\d.:]+)", server.log)
        self.address = address
        self.channel = grpc.insecure_channel(address)

    def call(self, method, request, gives=None):
        service = "ModelService" if method in {"GetModelStatus", "HandleReloadConfigRequest"} else "PredictionService"
        ask = self.channel.unary_unary(f"/tensorflow.serving.{service}/{method}")
        data = request if isinstance(request, bytes) else request.SerializeToString()
        kind = gives or type(request).__name__.replace("Request", "Response")
        return getattr(M, kind).FromString(ask(data, timeout=PATIENCE_S))

    def close(self):
        self.channel.close()


@pytest.fixture(scope="module")
def server(launch):
    return launch("tfserving.py", "--worker-kind", "thread", "--grpc-port", "0")


@pytest.fixture(scope="module")
def client(server):
    found = Client(server)
    yield found
    found.close()
