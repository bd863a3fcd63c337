# SPDX-License-Identifier: Apache-2.0
"""The gRPC services of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from forebay.errors import ForebayError, InvalidRequest
from forebay.surfaces.pipeline.protocol import sniff
from forebay.surfaces.pipeline.protocol.messages import METHOD, SERVICE, Request
from forebay.transports.grpc.service import Call, GrpcService, described, parent_in, peer_of

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.dag.predictions import Prediction, Predictions


def services(inference: Predictions) -> list[GrpcService]:
    """Return the gRPC services: the usual one, and those the user's schema calls the same thing."""
    request_class, response_class = inference.request_class, inference.response_class

    def parse(data: bytes) -> Any:
        return sniff.request_of(data) if request_class is Request else _parsed(request_class, data)

    def run(data: bytes, call: Call) -> None:
        def respond(found: Any, asked: Prediction | None) -> None:
            if asked is not None:
                call.answered_by(inference.endpoint, asked)
            if isinstance(found, ForebayError):
                call.fail(found)
            else:
                call.reply(found.SerializeToString())

        call.on_cancel = inference.submit(
            lambda: parse(data),
            is_quick=len(data) <= sniff.LARGE_BYTES,
            deadline=call.deadline,
            peer=peer_of(call),
            respond=respond,
            parent=parent_in(call.metadata),
            tenant=call.tenant,
        )

    methods = {SERVICE: {METHOD: run}}
    wanted = request_class.DESCRIPTOR, response_class.DESCRIPTOR
    for service in request_class.DESCRIPTOR.file.services_by_name.values():
        for method in service.methods:
            if (method.input_type, method.output_type) == wanted:
                methods.setdefault(service.full_name, {})[method.name] = run
    files = described(kind.DESCRIPTOR.file for kind in (request_class, response_class))
    queue = inference.endpoint
    return [
        GrpcService(full_name=name, direct=found, queues=dict.fromkeys(found, queue), files=files)
        for name, found in methods.items()
    ]


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"expected a {kind.DESCRIPTOR.full_name} message: {error}") from error
