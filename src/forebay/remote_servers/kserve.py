# SPDX-License-Identifier: Apache-2.0
"""Models behind servers of the KServe v2 protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar
from urllib.parse import unquote

import msgspec

from forebay.arrays.numpy_tensors import from_array, to_array
from forebay.errors import ConfigError, InvalidRequest, RunnerFailed, ValidationError
from forebay.protocols.kserve import rest_client, rpc
from forebay.protocols.kserve.infer_calls import InferRequest, InferResponse, ModelMetadata, TensorMetadata
from forebay.protocols.kserve.rest import LENGTH_HEADER
from forebay.remote_servers.grpc_calls import GrpcCalls
from forebay.remote_servers.http_calls import HttpAnswer, HttpCalls
from forebay.remote_servers.servers import ServerAddress, Servers, Unreachable
from forebay.runtimes.signature import Feed, Signature, Value, Var
from forebay.types.datatypes import DATATYPES

_BUSY: Final = frozenset({502, 503})
_PATH: Final = re.compile(r"(?:(?:v2/)?models/)?(?:(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?)?(?:/infer)?")

_Decoded = TypeVar("_Decoded")


class KServeBackend:
    """A model that several servers have."""

    def __init__(self, endpoints: Sequence[ServerAddress], name: str, timeout_s: float) -> None:
        """Describe them.

        Args:
            endpoints: Where they are. The path names the model: `iris`, `v2/models/iris/versions/2`.
            name: The model where a path names none.
            timeout_s: How long a call may take in all.

        Raises:
            ConfigError: If a path names no model, or a library is missing.
        """
        models = [_model(endpoint, name) for endpoint in endpoints]
        self._servers = Servers[_Grpc | _Http](
            endpoints,
            [
                _Grpc(endpoint, *model) if endpoint.scheme.startswith("grpc") else _Http(endpoint, *model)
                for endpoint, model in zip(endpoints, models, strict=True)
            ],
            timeout_s,
        )

    def signature(self) -> Signature | None:
        """Ask a server what the model takes and gives."""
        about = self._servers.ask(lambda face, deadline: face.metadata(deadline))
        if not about.inputs or not about.outputs:
            return None
        return Signature(tuple(map(_var, about.inputs)), tuple(map(_var, about.outputs)))

    def run(self, feed: Feed, fetch: Sequence[Var], id: int) -> Sequence[Value]:
        """Ask a server."""
        inputs = [
            from_array(var.name, _without_lod(var, value).array, var.datatype if var.datatype == "BF16" else None)
            for var, value in feed
        ]
        request = InferRequest(model="", id=str(id), inputs=inputs, outputs=[var.name for var in fetch])
        response = self._servers.ask(lambda face, deadline: face.infer(request, deadline))
        found = {tensor.name: tensor for tensor in response.outputs}
        missing = [var.name for var in fetch if var.name not in found]
        if missing:
            raise RunnerFailed(f"the model server gave {', '.join(found) or 'nothing'}, and not {', '.join(missing)}")
        try:
            # A copy, since user code may write into what it gets.
            return [Value(to_array(found[var.name]).copy()) for var in fetch]
        except ValidationError as problem:
            raise RunnerFailed(problem.message) from problem

    def close(self) -> None:
        """Hang up."""
        for face in self._servers.connections:
            face.calls.close()


class _Grpc:
    def __init__(self, endpoint: ServerAddress, model: str, version: str) -> None:
        self.calls = GrpcCalls(endpoint)
        self._model, self._version = model, version

    def metadata(self, deadline: float) -> ModelMetadata:
        request = rpc.encode_metadata_request(self._model, self._version)
        return _read(lambda: rpc.decode_metadata(self.calls.call(rpc.METADATA, request, deadline)))

    def infer(self, request: InferRequest, deadline: float) -> InferResponse:
        data = rpc.encode_request(msgspec.structs.replace(request, model=self._model, version=self._version))
        return _read(lambda: rpc.decode_response(self.calls.call(rpc.INFER, data, deadline)))


class _Http:
    def __init__(self, endpoint: ServerAddress, model: str, version: str) -> None:
        self.calls = HttpCalls(endpoint)
        self._path = rest_client.model_path(model, version)
        self._takes_binary: bool | None = None

    def metadata(self, deadline: float) -> ModelMetadata:
        answer = self._accepted(self.calls.call("GET", self._path, deadline))
        return _read(lambda: rest_client.decode_metadata(answer.body))

    def infer(self, request: InferRequest, deadline: float) -> InferResponse:
        # Binary tensors are an extension that no server announces: one that refuses them is asked in JSON from then on.
        if self._takes_binary is not False:
            answer = self._post(request, deadline, binary=True)
            if self._takes_binary or answer.status < 400 or answer.status in _BUSY:
                self._takes_binary = self._takes_binary or answer.status < 400 or None
                return self._response(answer)
        answer = self._post(request, deadline, binary=False)
        if answer.status < 400:
            self._takes_binary = False
        return self._response(answer)

    def _post(self, request: InferRequest, deadline: float, *, binary: bool) -> HttpAnswer:
        try:
            body, headers = rest_client.encode_request(request, binary=binary)
        except ValidationError as problem:
            raise RunnerFailed(f"this server does not accept binary tensors, and {problem.message}") from problem
        return self.calls.call("POST", f"{self._path}/infer", deadline, body, headers)

    def _response(self, answer: HttpAnswer) -> InferResponse:
        body, length = self._accepted(answer).body, answer.headers.get(LENGTH_HEADER)
        return _read(lambda: rest_client.decode_response(body, length))

    def _accepted(self, answer: HttpAnswer) -> HttpAnswer:
        if answer.status < 400:
            return answer
        said = rest_client.error_text(answer.body)
        if answer.status in _BUSY:
            raise Unreachable(f"it answers {answer.status}: {said}")
        text = f"the model server {self.calls.endpoint.address} refuses the call: {said} (HTTP {answer.status})"
        raise RunnerFailed(text)


def _read(decode: Callable[[], _Decoded]) -> _Decoded:
    try:
        return decode()
    except ValidationError as problem:
        raise RunnerFailed(f"the model server's answer cannot be read: {problem.message}") from problem


def _model(endpoint: ServerAddress, name: str) -> tuple[str, str]:
    """Return the name and version of the model an endpoint's path names."""
    found = _PATH.fullmatch(endpoint.path)
    if found is None:
        raise ConfigError(
            f"endpoint {endpoint.address}: expected the path NAME or NAME/versions/VERSION, perhaps behind v2/models/, "
            f"got '{endpoint.path}'"
        )
    return unquote(found["name"] or name), unquote(found["version"] or "")


def _var(about: TensorMetadata) -> Var:
    datatype = about.datatype if about.datatype in DATATYPES else None
    return Var(about.name, about.name, datatype, about.shape, type=about.datatype)


def _without_lod(var: Var, value: Value) -> Value:
    if value.lod is not None and len(value.lod) > 2:
        text = f"'{var.alias}' has {len(value.lod) - 1} sequences, and the KServe protocol has no offsets for them"
        raise InvalidRequest(text)
    return value
