# SPDX-License-Identifier: Apache-2.0
"""Models behind the original's model servers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from forebay.errors import RunnerFailed
from forebay.remote_servers.grpc_calls import GrpcCalls
from forebay.remote_servers.http_calls import HttpCalls
from forebay.remote_servers.servers import ServerAddress, Servers, Unreachable
from forebay.runtimes.signature import Feed, Signature, Value, Var
from forebay.surfaces.pipeline.predictors.general_calls import (
    PATH,
    GeneralRequest,
    GeneralResponse,
    GeneralTensor,
    described,
    pack,
    unpack,
)
from forebay.types.first_use import known


class GeneralModelBackend:
    """A model that several servers have."""

    def __init__(self, endpoints: Sequence[ServerAddress], timeout_s: float) -> None:
        """Describe them; a call may take `timeout_s` in all.

        Raises:
            ConfigError: If one is asked over gRPC, and grpcio is not installed.
        """
        faces = [_Grpc(endpoint) if endpoint.scheme.startswith("grpc") else _Http(endpoint) for endpoint in endpoints]
        self._servers = Servers[_Http | _Grpc](endpoints, faces, timeout_s)

    def signature(self) -> Signature | None:
        """Return None: these servers do not say what they take."""
        return None

    def run(self, feed: Feed, fetch: Sequence[Var], id: int) -> Sequence[Value]:
        """Ask a server."""
        tensors = self._tensors(feed, fetch, id)
        by_name = {name: tensor for tensor in tensors for name in (tensor.name, tensor.alias_name) if name}
        values: list[Value] = []
        for at, var in enumerate(fetch):
            tensor = by_name.get(var.alias) or by_name.get(var.name)
            if tensor is None and not by_name and at < len(tensors):
                tensor = tensors[at]
            if tensor is None:
                raise RunnerFailed(f"the model server gave {', '.join(by_name) or 'nothing'}, and not {var.alias}")
            values.append(unpack(tensor, described(var)))
        return values

    def _tensors(self, feed: Feed, fetch: Sequence[Var], id: int) -> list[GeneralTensor]:
        response = self._servers.ask(lambda face, deadline: face.infer(feed, fetch, id, deadline))
        if response.err_no:
            raise RunnerFailed(f"the model server answers {response.err_no}: {response.err_msg}")
        return [tensor for output in response.outputs for tensor in output.tensor]

    def close(self) -> None:
        """Hang up."""
        for face in self._servers.connections:
            face.calls.close()


class _Http:
    def __init__(self, endpoint: ServerAddress) -> None:
        self.calls = HttpCalls(endpoint)

    def infer(self, feed: Feed, fetch: Sequence[Var], log_id: int, deadline: float) -> GeneralResponse:
        request = GeneralRequest([pack(var, value) for var, value in feed], [var.alias for var in fetch], log_id)
        body = msgspec.json.encode(request)
        answer = self.calls.call("POST", PATH, deadline, body, {"Content-Type": "application/json"})
        if answer.status in {502, 503}:
            raise Unreachable(f"it answers {answer.status}")
        try:
            response = msgspec.json.decode(answer.body, type=known(GeneralResponse))
        except (msgspec.DecodeError, RecursionError):
            response = None
        if response is None or (answer.status >= 400 and not response.err_no):
            said = answer.body[:200].decode(errors="replace")
            raise RunnerFailed(f"the model server {self.calls.endpoint.address} answers HTTP {answer.status}: {said}")
        return response


class _Grpc:
    def __init__(self, endpoint: ServerAddress) -> None:
        self.calls = GrpcCalls(endpoint)
        from forebay.surfaces.pipeline.predictors import rpc_tensors

        self._codec = rpc_tensors

    def infer(self, feed: Feed, fetch: Sequence[Var], log_id: int, deadline: float) -> GeneralResponse:
        request = self._codec.encode_request(feed, fetch, log_id)
        return self._codec.decode_response(self.calls.call(self._codec.PATH, request, deadline))
