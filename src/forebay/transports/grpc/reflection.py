# SPDX-License-Identifier: Apache-2.0
"""Server reflection: clients ask which services there are, and for their descriptors.

Its two versions differ only in their package, so the messages of one serve for both.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool

from forebay.transports.grpc.service import Call, GrpcService, described
from forebay.transports.grpc.statuses import Status
from forebay.types.proto_tables import ProtoMethod, ProtoTable

VERSIONS: Final = ("v1alpha", "v1")

TABLES: Final = [
    ProtoTable(
        file=f"grpc_reflection/{version}/reflection.proto",
        package=f"grpc.reflection.{version}",
        messages={
            "ServerReflectionRequest": (
                "1 string host, 3 string|message_request file_by_filename, "
                "4 string|message_request file_containing_symbol, "
                "5 ExtensionRequest|message_request file_containing_extension, "
                "6 string|message_request all_extension_numbers_of_type, 7 string|message_request list_services"
            ),
            "ExtensionRequest": "1 string containing_type, 2 int32 extension_number",
            "ServerReflectionResponse": (
                "1 string valid_host, 2 ServerReflectionRequest original_request, "
                "4 FileDescriptorResponse|message_response file_descriptor_response, "
                "5 ExtensionNumberResponse|message_response all_extension_numbers_response, "
                "6 ListServiceResponse|message_response list_services_response, "
                "7 ErrorResponse|message_response error_response"
            ),
            "FileDescriptorResponse": "1 bytes* file_descriptor_proto",
            "ExtensionNumberResponse": "1 string base_type_name, 2 int32* extension_number",
            "ListServiceResponse": "1 ServiceResponse* service",
            "ServiceResponse": "1 string name",
            "ErrorResponse": "1 int32 error_code, 2 string error_message",
        },
        services={
            "ServerReflection": {
                "ServerReflectionInfo": ProtoMethod(
                    "ServerReflectionRequest", "ServerReflectionResponse", is_streamed=True
                )
            }
        },
    )
    for version in VERSIONS
]

_messages: Final[Any] = TABLES[0].classes()


class Reflection:
    """Answers ServerReflectionInfo."""

    def __init__(self, services: Sequence[GrpcService]) -> None:
        """Describe services.

        Args:
            services: Those of the port, beside this one.
        """
        self._files = {_name(table): table.described() for table in TABLES}
        self._names = sorted([service.full_name for service in services] + [*self._files])
        self._pool: Any = descriptor_pool.DescriptorPool()
        files = [file for service in services for file in service.files]
        for file in dict.fromkeys([*files, *itertools.chain(*self._files.values())]):
            self._pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))

    def services(self) -> list[GrpcService]:
        """Return what a port is given: the service in both its versions."""
        return [
            GrpcService(full_name=name, streams={"ServerReflectionInfo": self._answer}, files=files)
            for name, files in self._files.items()
        ]

    async def _answer(self, messages: AsyncIterator[bytes], _call: Call) -> AsyncIterator[bytes]:
        async for data in messages:
            request = TABLES[0].parsed("ServerReflectionRequest", data)
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


def _name(table: ProtoTable) -> str:
    return f"{table.package}.ServerReflection"


def _described(file: Any) -> dict[str, Any]:
    """Return a file, then all it imports."""
    files = described([file])[::-1]
    return {"file_descriptor_response": _messages.FileDescriptorResponse(file_descriptor_proto=files)}


def _error(status: Status, text: str) -> Any:
    return _messages.ErrorResponse(error_code=int(status), error_message=text)
