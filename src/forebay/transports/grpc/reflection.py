# SPDX-License-Identifier: Apache-2.0
"""Server reflection: clients ask which services there are, and for their descriptors.

Its two versions differ only in their package, so the messages of one serve for both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2

from forebay.errors import InvalidRequest
from forebay.transports.grpc.service import Call, GrpcService, described
from forebay.transports.grpc.statuses import Status

VERSIONS: Final = ("v1alpha", "v1")

_messages: Final[Any] = reflection_pb2


class Reflection:
    """Answers ServerReflectionInfo."""

    def __init__(self, services: Sequence[GrpcService]) -> None:
        """Describe services.

        Args:
            services: Those of the port, beside this one.
        """
        self._files = {version: _file(version) for version in VERSIONS}
        self._names = sorted([service.full_name for service in services] + [_name(version) for version in VERSIONS])
        self._pool: Any = descriptor_pool.DescriptorPool()
        files = [file for service in services for file in service.files] + list(self._files.values())
        for file in dict.fromkeys(files):
            self._pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))

    def services(self) -> list[GrpcService]:
        """Return what a port is given: the service in both its versions."""
        return [
            GrpcService(full_name=_name(version), streams={"ServerReflectionInfo": self._answer}, files=[file])
            for version, file in self._files.items()
        ]

    async def _answer(self, messages: AsyncIterator[bytes], _call: Call) -> AsyncIterator[bytes]:
        async for data in messages:
            try:
                request = _messages.ServerReflectionRequest.FromString(data)
            except DecodeError as error:
                raise InvalidRequest(f"the request is no message of server reflection: {error}") from error
            try:
                found = self._find(request)
            except KeyError:
                found = {"error_response": _error(Status.NOT_FOUND, "not found")}
            answer = _messages.ServerReflectionResponse(valid_host=request.host, original_request=request, **found)
            yield answer.SerializeToString()

    def _find(self, request: Any) -> dict[str, Any]:
        """Return what was asked for, by its name in an answer; raises KeyError if there is no such thing."""
        pool = self._pool
        asked = request.WhichOneof("message_request")
        if asked == "list_services":
            listed = [_messages.ServiceResponse(name=name) for name in self._names]
            return {"list_services_response": _messages.ListServiceResponse(service=listed)}
        if asked == "file_by_filename":
            return _described(pool.FindFileByName(request.file_by_filename))
        if asked == "file_containing_symbol":
            return _described(self._file_containing(request.file_containing_symbol))
        if asked == "file_containing_extension":
            wanted = request.file_containing_extension
            kind = pool.FindMessageTypeByName(wanted.containing_type)
            return _described(pool.FindExtensionByNumber(kind, wanted.extension_number).file)
        if asked == "all_extension_numbers_of_type":
            kind = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
            numbers = sorted(extension.number for extension in pool.FindAllExtensions(kind))
            found = _messages.ExtensionNumberResponse(base_type_name=kind.full_name, extension_number=numbers)
            return {"all_extension_numbers_response": found}
        return {"error_response": _error(Status.INVALID_ARGUMENT, "nothing was asked for")}

    def _file_containing(self, symbol: str) -> Any:
        """Return the file that declares a type, a field, a service or a method; raises KeyError if there is none."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:  # it does not look for methods
            service, _, name = symbol.rpartition(".")
            return self._pool.FindServiceByName(service).methods_by_name[name].containing_service.file


def _name(version: str) -> str:
    return f"grpc.reflection.{version}.ServerReflection"


def _file(version: str) -> bytes:
    """Return the file that describes a version: the same messages in another package."""
    file = descriptor_pb2.FileDescriptorProto()
    v1alpha = descriptor_pb2.FileDescriptorProto.FromString(_messages.DESCRIPTOR.serialized_pb)
    text_format.Parse(str(v1alpha).replace("v1alpha", version), file)
    return file.SerializeToString()


def _described(file: Any) -> dict[str, Any]:
    """Return a file, then all it imports."""
    files = described([file])[::-1]
    return {"file_descriptor_response": _messages.FileDescriptorResponse(file_descriptor_proto=files)}


def _error(status: Status, text: str) -> Any:
    return _messages.ErrorResponse(error_code=int(status), error_message=text)
