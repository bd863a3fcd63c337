# SPDX-License-Identifier: Apache-2.0
"""Message classes from tables.

A descriptor is a table in the source and lives in a pool of its own. So nothing is generated, any protobuf runtime will
do, and a package that registers the same names in the common pool does not collide with ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES: Final = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}


def classes(
    file: str, package: str, messages: Mapping[str, Mapping[str, tuple[int, str]]], service: str, method: str
) -> Callable[[str], Any]:
    """Describe messages, and a service with one method from `Request` to `Response`.

    Args:
        file: What the description is called.
        package: Where the names are.
        messages: Number and type of each field by its name, by the message's name. A type with a star is repeated, one
            that is the name of a message here is that message.
        service: The service.
        method: Its method.

    Returns:
        A function from the name of a message to its class.
    """
    described = descriptor_pb2.FileDescriptorProto(name=file, package=package, syntax="proto3")
    for name, fields in messages.items():
        message = described.message_type.add(name=name)
        for field, (number, form) in fields.items():
            kind = form.rstrip("*")
            added = message.field.add(name=field, number=number)
            added.label = _Field.LABEL_OPTIONAL if kind == form else _Field.LABEL_REPEATED
            if kind in messages:
                added.type = _Field.TYPE_MESSAGE
                added.type_name = f".{package}.{kind}"
            else:
                added.type = _TYPES[kind]
    described.service.add(name=service).method.add(
        name=method, input_type=f".{package}.Request", output_type=f".{package}.Response"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(described)  # type: ignore[no-untyped-call]
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
