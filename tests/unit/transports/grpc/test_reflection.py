# SPDX-License-Identifier: Apache-2.0
"""Server reflection speaks both versions of its protocol."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from forebay.transports.grpc.health import MESSAGES, Health
from forebay.transports.grpc.reflection import TABLES, Reflection

messages: Any = reflection_pb2
HEALTH = "grpc.health.v1.Health"


@pytest.fixture(params=["v1alpha", "v1"])
def ask(request):
    services = Reflection([Health([], lambda: True).service()]).services()
    name = f"grpc.reflection.{request.param}.ServerReflection"
    (service,) = [service for service in services if service.full_name == name]

    async def answer(question):
        async def asked():
            yield messages.ServerReflectionRequest(**question).SerializeToString()

        method: Any = service.streams["ServerReflectionInfo"]
        (found,) = [answer async for answer in method(asked(), None)]
        return messages.ServerReflectionResponse.FromString(found)

    return lambda **question: asyncio.run(answer(question))


@pytest.mark.parametrize("table, original", [(MESSAGES, health_pb2), (TABLES[0], reflection_pb2)])
def test_our_descriptors_are_those_of_the_packages(table, original):  # issue 48
    found = descriptor_pb2.FileDescriptorProto.FromString(original.DESCRIPTOR.serialized_pb)
    found.ClearField("options")  # names that compilers use
    assert table.described() == [found.SerializeToString()]


def test_the_packages_are_not_needed():  # issue 48
    absent = "import sys; sys.modules.update(grpc_health=None, grpc_reflection=None)"
    ours = "forebay.transports.grpc"
    subprocess.run([sys.executable, "-c", f"{absent}; import {ours}.health, {ours}.reflection"], check=True)


def test_all_services_are_listed(ask):
    listed = ask(list_services="").list_services_response.service
    assert [service.name for service in listed] == [
        HEALTH,
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    ]


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_both_versions_are_described(ask, version):
    symbol = f"grpc.reflection.{version}.ServerReflection"
    (data,) = ask(file_containing_symbol=symbol).file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(data)
    assert file.package == f"grpc.reflection.{version}"
    (method,) = file.service[0].method
    assert method.input_type == f".grpc.reflection.{version}.ServerReflectionRequest"


def test_methods_are_symbols(ask):
    by_service = ask(file_containing_symbol=HEALTH).file_descriptor_response
    assert ask(file_containing_symbol=f"{HEALTH}.Check").file_descriptor_response == by_service


@pytest.mark.parametrize("symbol", ["", ".", "Check", f"{HEALTH}.Chek", f"{HEALTH}.", f".{HEALTH}", "other.Service.Do"])
def test_unknown_symbols_are_not_found(ask, symbol):
    assert ask(file_containing_symbol=symbol).error_response.error_code == 5


def test_files_are_found_by_name(ask):
    by_symbol = ask(file_containing_symbol=HEALTH).file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(by_symbol[0])
    assert ask(file_by_filename=file.name).file_descriptor_response.file_descriptor_proto == by_symbol


@pytest.mark.parametrize(
    "question,code",
    [
        ({"file_by_filename": "none.proto"}, 5),
        ({"file_containing_symbol": "none.None"}, 5),
        ({"all_extension_numbers_of_type": "none.None"}, 5),
        ({"file_containing_extension": {"containing_type": "none.None", "extension_number": 1}}, 5),
        ({}, 3),
    ],
)
def test_what_does_not_exist_is_not_found(ask, question, code):
    answer = ask(host="here", **question)
    assert answer.error_response.error_code == code
    assert answer.original_request.host == answer.valid_host == "here"


def test_messages_without_extensions_have_none(ask):
    found = ask(all_extension_numbers_of_type="grpc.health.v1.HealthCheckRequest").all_extension_numbers_response
    assert (found.base_type_name, list(found.extension_number)) == ("grpc.health.v1.HealthCheckRequest", [])
