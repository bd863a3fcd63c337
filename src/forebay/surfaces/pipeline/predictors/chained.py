# SPDX-License-Identifier: Apache-2.0
"""Another pipeline server as a model (`client_type` pipeline_grpc)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.errors import DeadlineExceeded, InvalidRequest, RunnerFailed, ValidationError
from forebay.remote_servers.grpc_calls import GrpcCalls
from forebay.remote_servers.servers import ServerAddress, Servers
from forebay.runtimes.signature import one_feed
from forebay.surfaces.pipeline.codes import CustomExceptionCode
from forebay.surfaces.pipeline.predictors.model_client import Predictor

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.predictors.model_settings import PredictorSettings

_PROFILE: Final = "pipeline.profile"
"""Where a pipeline puts the times it took."""


class ChainedClient(Predictor):
    """Asks the same pipeline on several servers. Texts and arrays go as texts, as its own clients send them."""

    takes_text = True
    is_shared = True

    def __init__(self, settings: PredictorSettings) -> None:
        """Describe the servers; raises ConfigError if an endpoint is none, or grpcio is not installed."""
        endpoints = [ServerAddress.parse(text, "grpc", "server_endpoints") for text in settings.server_endpoints or ()]
        self._servers = Servers(endpoints, [GrpcCalls(endpoint) for endpoint in endpoints], settings.timeout_s)
        self._pack_tensors = settings.pack_tensors
        self._wanted = settings.wanted

    def ask(self, feed: Any, fetch: Sequence[str] | None, batch: bool, log_id: int) -> dict[str, Any]:
        """Ask a server; samples of a list are asked about one by one.

        Returns:
            The texts of each key in a list, one for each sample; tensors put together along the first axis.
        """
        samples = cast("Any", feed) if isinstance(feed, (list, tuple)) else [one_feed(feed, batch=batch)[0]]
        answers = [self._ask(sample, log_id) for sample in cast("Sequence[Mapping[str, Any]]", samples)]
        wanted = fetch or self._wanted or [name for name in answers[0] if name != _PROFILE]
        missing = [name for name in wanted if any(name not in answer for answer in answers)]
        if missing:
            text = f"the pipeline gave {', '.join(answers[0]) or 'nothing'}, and not {', '.join(missing)}"
            raise InvalidRequest(text)
        return {name: _joined([answer[name] for answer in answers]) for name in wanted}

    def close(self) -> None:
        """Hang up."""
        for calls in self._servers.connections:
            calls.close()

    def _ask(self, sample: Mapping[str, Any], log_id: int) -> dict[str, Any]:
        from google.protobuf.message import DecodeError

        from forebay.surfaces.pipeline.fronts.pipeline_client import request_of
        from forebay.surfaces.pipeline.protocol import tensors
        from forebay.surfaces.pipeline.protocol.messages import PATH, Response

        try:
            request = request_of(sample, as_tensors=self._pack_tensors, as_npy=False, log_id=log_id)
        except TypeError as problem:
            raise ValidationError(str(problem)) from problem
        data = request.SerializeToString()
        answer = self._servers.ask(lambda calls, deadline: calls.call(PATH, data, deadline))
        try:
            response = Response.FromString(answer)
            arrays = tensors.unpack_all(response.tensors)
        except (DecodeError, InvalidRequest) as problem:
            raise RunnerFailed(f"the pipeline's answer cannot be read: {problem}") from problem
        if response.err_no:
            kind = DeadlineExceeded if response.err_no == CustomExceptionCode.TIMEOUT.value else RunnerFailed
            raise kind(f"the pipeline that was asked answers {response.err_no}: {response.err_msg}")
        return {name: [text] for name, text in zip(response.key, response.value, strict=False)} | arrays


def _joined(values: Sequence[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, list) for value in values):
        return [text for value in values for text in value]
    import numpy as np

    return np.concatenate(values)
