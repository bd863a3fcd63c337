# SPDX-License-Identifier: Apache-2.0
"""Models behind a server of TensorFlow Serving's gRPC services."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forebay.arrays.numpy_tensors import from_array, to_array
from forebay.errors import DeadlineExceeded, RunnerFailed, Unavailable, ValidationError
from forebay.protocols.tfserving.messages import MODELS, PREDICTION, SERVING
from forebay.remote_servers.grpc_calls import GrpcCalls
from forebay.remote_servers.servers import ServerAddress, Unreachable
from forebay.types.tensor_proto import put, tensor_of

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array


class TfServingCalls:
    """Calls to one server, for any number of threads."""

    def __init__(self, address: ServerAddress, timeout_s: float) -> None:
        """Describe it; nothing is connected before the first call.

        Raises:
            ConfigError: If grpcio is not installed.
        """
        self._calls = GrpcCalls(address)
        self._timeout_s = timeout_s

    def predict(self, model: str, version: int, signature: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run a signature of a version of a model.

        Raises:
            CallRefused: With the server's words; NOT_FOUND if it has no such model, or not any more.
            Unavailable: If nobody answers, or not in time.
        """
        request = SERVING.classes().PredictRequest()
        request.model_spec.name, request.model_spec.signature_name = model, signature
        request.model_spec.version.value = version
        for name, array in arrays.items():
            put(request.inputs[name], from_array(name, array))
        answer = SERVING.parsed("PredictResponse", self._call(f"/{PREDICTION}/Predict", request))
        try:
            return {name: to_array(tensor_of(name, proto)) for name, proto in answer.outputs.items()}
        except ValidationError as problem:
            raise RunnerFailed(f"the model server's answer cannot be read: {problem.message}") from problem

    def reload(self, models: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        """Have exactly these models loaded: for each the folder of its versions, and which of these.

        Raises:
            CallRefused: With the server's words.
            Unavailable: If nobody answers, or not in time.
        """
        request = SERVING.classes().ReloadConfigRequest()
        listed = request.config.model_config_list
        listed.SetInParent()
        for name, (folder, versions) in models.items():
            one = listed.config.add(name=name, base_path=folder, model_platform="tensorflow")
            one.model_version_policy.specific.versions.extend(versions)
        answer = SERVING.parsed("ReloadConfigResponse", self._call(f"/{MODELS}/HandleReloadConfigRequest", request))
        if answer.status.error_code:
            raise RunnerFailed(f"the model server cannot load what is wanted: {answer.status.error_message}")

    def close(self) -> None:
        """Hang up."""
        self._calls.close()

    def _call(self, method: str, request: Any) -> bytes:
        address = self._calls.endpoint.address
        try:
            return self._calls.call(method, request.SerializeToString(), time.monotonic() + self._timeout_s)
        except Unreachable as problem:
            raise Unavailable(f"TensorFlow Serving at {address} cannot be asked: {problem}") from problem
        except TimeoutError:
            raise DeadlineExceeded(
                f"TensorFlow Serving at {address} gave no answer within {self._timeout_s:g} s"
            ) from None
