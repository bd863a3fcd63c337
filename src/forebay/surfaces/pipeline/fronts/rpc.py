# SPDX-License-Identifier: Apache-2.0
"""The gRPC services of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from forebay.errors import ForebayError, InvalidRequest
from forebay.remote_servers.servers import PARENT
from forebay.surfaces.pipeline.protocol import sniff
from forebay.surfaces.pipeline.protocol.messages import METHOD, SERVICE, Request
from forebay.transports.grpc.service import Call, GrpcService

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
            peer=_peer(call),
            respond=respond,
            parent=_parent(call),
            tenant=call.tenant,
        )

    methods = {SERVICE: {METHOD: run}}
    wanted = request_class.DESCRIPTOR, response_class.DESCRIPTOR
    for described in request_class.DESCRIPTOR.file.services_by_name.values():
        for method in described.methods:
            if (method.input_type, method.output_type) == wanted:
                methods.setdefault(described.full_name, {})[method.name] = run
    files = _files(request_class, response_class)
    queue = inference.endpoint
    return [
        GrpcService(full_name=name, direct=found, queues=dict.fromkeys(found, queue), files=files)
        for name, found in methods.items()
    ]


def _peer(call: Call) -> str:
    """Return who calls in the words of gRPC."""
    return f"ipv6:{call.peer}" if call.peer.startswith("[") else f"ipv4:{call.peer}"


def _parent(call: Call) -> str:
    """Return the caller's `traceparent`."""
    return next((value for name, value in call.metadata if name == PARENT and isinstance(value, str)), "")


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the request is no {kind.DESCRIPTOR.full_name} message: {error}") from error


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
