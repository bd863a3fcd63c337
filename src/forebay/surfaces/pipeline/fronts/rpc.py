# SPDX-License-Identifier: Apache-2.0
"""What both ports of a pipeline have in common, and its gRPC services."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from google.protobuf.message import DecodeError

from forebay.errors import InvalidRequest
from forebay.protocols.pipeline import sniff
from forebay.protocols.pipeline.messages import METHOD, SERVICE, Request
from forebay.surfaces.pipeline.codes import CustomExceptionCode
from forebay.transports.grpc.service import GrpcService

if TYPE_CHECKING:
    from forebay.transports.grpc.service import Context


class Inference(Protocol):
    """The graph behind the ports.

    Attributes:
        request_class: The message a request is: the usual one, or the user's own.
        response_class: The message an answer is.
        name: What requests may name the service as; without a name any is accepted.
    """

    request_class: Any
    response_class: Any
    name: str

    async def infer(self, request: Any, *, timeout_s: float | None, peer: str) -> Any:
        """Answer a request; what went wrong in the graph stands in the answer.

        Raises:
            ForebayError: For faults of the transport only: too many requests, no time left, not ready.
        """
        ...


async def answer(inference: Inference, request: Any, *, timeout_s: float | None, peer: str) -> Any:
    """Answer a request, or say that the service it names is another one."""
    refusal = wrong_name(inference, request)
    return refusal or await inference.infer(request, timeout_s=timeout_s, peer=peer)


def wrong_name(inference: Inference, request: Any) -> Any:
    """Return the answer to a request that names another service; None if it does not."""
    asked = getattr(request, "name", "")
    if not asked or not inference.name or asked == inference.name:
        return None
    response = inference.response_class()
    response.err_no = CustomExceptionCode.NO_SERVICE.value
    response.err_msg = f"service name error: this server serves {inference.name!r}, not {asked[:100]!r}"
    return response


def services(inference: Inference) -> list[GrpcService]:
    """Return the gRPC services: the usual one, and those the user's schema calls the same thing."""
    request_class, response_class = inference.request_class, inference.response_class

    async def run(data: bytes, context: Context) -> bytes:
        request = sniff.request_of(data) if request_class is Request else _parsed(request_class, data)
        response = await answer(inference, request, timeout_s=context.time_remaining(), peer=context.peer())
        return response.SerializeToString()

    methods = {SERVICE: {METHOD: run}}
    wanted = request_class.DESCRIPTOR, response_class.DESCRIPTOR
    for described in request_class.DESCRIPTOR.file.services_by_name.values():
        for method in described.methods:
            if (method.input_type, method.output_type) == wanted:
                methods.setdefault(described.full_name, {})[method.name] = run
    files = _files(request_class, response_class)
    return [GrpcService(full_name=name, methods=found, files=files) for name, found in methods.items()]


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        msg = f"the request is no {kind.DESCRIPTOR.full_name} message: {error}"
        raise InvalidRequest(msg) from error


def _files(*kinds: Any) -> list[bytes]:
    """Return the descriptors of the files the messages are in, each after those it imports."""
    files: dict[str, bytes] = {}

    def add(file: Any) -> None:
        if file.name not in files:
            for needed in file.dependencies:
                add(needed)
            files[file.name] = file.serialized_pb

    for kind in kinds:
        add(kind.DESCRIPTOR.file)
    return list(files.values())
