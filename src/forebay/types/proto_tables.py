# SPDX-License-Identifier: Apache-2.0
"""Messages of protobuf made from a table, in a pool of their own: no generated code, and no clash with anybody's.

A message is a line of fields: `1 string name, 3 int64* shape, 4 map:Value parameters`. Behind a type a star repeats it,
and `|NAME` puts the field into a oneof. A type is one of protobuf's, a message of the same file, `.Name` for one within
this message, or another one by its full name; `!` before it says that it is an enumeration. Maps are from texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from forebay.errors import ValidationError

_WELL_KNOWN: Final = {"google.protobuf.Any": "any_pb2", "google.protobuf.Int64Value": "wrappers_pb2"}
"""Messages of protobuf's own that tables may name, and the modules that have their files."""

_FIRST_EXTENSION: Final = 20_000
_END_OF_EXTENSIONS: Final = 1 << 29


class ProtoMethod(msgspec.Struct, frozen=True):
    """A method of a service: the messages it takes and gives, and whether both are streams, or only what it gives."""

    takes: str
    gives: str
    is_streamed: bool = False
    is_answer_streamed: bool = False


class ProtoTable(msgspec.Struct, frozen=True, eq=False):
    """A file of messages.

    Attributes:
        file: What it is called.
        package: The package of all that is in it.
        messages: Their fields, by name; of one within another, `Outer.Inner`, behind the outer one.
        enums: The numbers of enumerations, by name; as in `messages`.
        services: Methods by name, by the name of their service.
        imports: Files that it takes messages from.
        syntax: Of the file; in one of proto2 every field tells whether it is there.
        extensions: Which message each of these extends, by a field `ext` of its own, and the field's number.
    """

    file: str
    package: str
    messages: Mapping[str, str]
    enums: Mapping[str, Mapping[str, int]] = {}
    services: Mapping[str, Mapping[str, ProtoMethod]] = {}
    imports: Sequence[ProtoTable] = ()
    syntax: str = "proto3"
    extensions: Mapping[str, tuple[str, int]] = {}

    def classes(self) -> Any:
        """Return the message classes as attributes, those within a message as attributes of it.

        They are made at the first call, which imports protobuf.
        """
        return _classes(self)

    def parsed(self, kind: str, data: bytes) -> Any:
        """Read a message; raises a `ValidationError` if it is none of this kind."""
        from google.protobuf.message import DecodeError

        try:
            return getattr(_classes(self), kind).FromString(data)
        except DecodeError as error:
            raise ValidationError(f"expected a {kind}: {error}") from None

    def described(self) -> list[bytes]:
        """Return the descriptors of the file and of all that it imports, serialized; each after those it imports."""
        found: dict[bytes, None] = {}
        for table in self.imports:
            found |= dict.fromkeys(table.described())
        found |= dict.fromkeys(_well_known(self).values())
        return [*found, _file(self).SerializeToString()]


@cache
def _classes(table: ProtoTable) -> Any:
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClassesForFiles

    pool: Any = DescriptorPool()
    for described in table.described():
        pool.AddSerializedFile(described)
    prefix = f"{table.package}."
    found = GetMessageClassesForFiles([table.file], pool)
    return SimpleNamespace(**{name.removeprefix(prefix): made for name, made in found.items()})


def _well_known(table: ProtoTable) -> dict[str, bytes]:
    """Return the serialized files of protobuf's own messages that a table names, by the names of the files."""
    import importlib

    text = " ".join(table.messages.values())
    found: dict[str, bytes] = {}
    for name, module in _WELL_KNOWN.items():
        if name in text:
            file = importlib.import_module(f"google.protobuf.{module}").DESCRIPTOR
            found[file.name] = file.serialized_pb
    return found


def _file(table: ProtoTable) -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto(name=table.file, package=table.package, syntax=table.syntax)
    file.dependency.extend([*(one.file for one in table.imports), *_well_known(table)])
    extended = {name for name, _ in table.extensions.values()}
    for path, layout in table.messages.items():
        message, name = _outer(file, path, "message_type")
        message.name = name
        for line in filter(None, layout.split(", ")):
            _add_field(table.package, message, f".{table.package}.{path}", line)
        if path in extended:
            message.extension_range.add(start=_FIRST_EXTENSION, end=_END_OF_EXTENSIONS)
        if path in table.extensions:
            other, number = table.extensions[path]
            field = message.extension.add(name="ext", number=number, extendee=f".{table.package}.{other}")
            field.label, field.type, field.type_name = (
                field.LABEL_OPTIONAL,
                field.TYPE_MESSAGE,
                f".{table.package}.{path}",
            )
    for path, numbers in table.enums.items():
        values, name = _outer(file, path, "enum_type")
        values.name = name
        for value, number in numbers.items():
            values.value.add(name=value, number=number)
    for name, methods in table.services.items():
        service = file.service.add(name=name)
        for called, told in methods.items():
            method = service.method.add(name=called)
            method.input_type, method.output_type = (f".{table.package}.{one}" for one in (told.takes, told.gives))
            if told.is_streamed:
                method.client_streaming = True
            if told.is_streamed or told.is_answer_streamed:
                method.server_streaming = True
    return file


def _outer(file: Any, path: str, kind: str) -> tuple[Any, str]:
    """Make room for a message or an enumeration, in the file or within a message; returns it and its own name."""
    outer, _, inner = path.partition(".")
    if not inner:
        return getattr(file, kind).add(), outer
    message = next(one for one in file.message_type if one.name == outer)
    return getattr(message, "nested_type" if kind == "message_type" else kind).add(), inner


def _add_field(package: str, message: Any, path: str, line: str) -> None:
    number, kind, name = line.split()
    kind, _, oneof = kind.partition("|")
    field = message.field.add(name=name, number=int(number))
    word = kind.rstrip("*")
    is_map = word.startswith("map:")
    field.label = field.LABEL_REPEATED if kind.endswith("*") or is_map else field.LABEL_OPTIONAL
    if is_map:
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        inner = f"{path}.{entry.name}"
        _add_field(package, entry, inner, "1 string key")
        _add_field(package, entry, path, f"2 {word.removeprefix('map:')} value")
        field.type, field.type_name = field.TYPE_MESSAGE, inner
    else:
        field.type, named = _type(package, path, word, field)
        if named:
            field.type_name = named
    if oneof:
        names = [one.name for one in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
            names.append(oneof)
        field.oneof_index = names.index(oneof)


def _type(package: str, path: str, word: str, field: Any) -> tuple[int, str]:
    """Return what descriptors call a type: its kind, and its full name if it has one."""
    kind = field.TYPE_ENUM if word.startswith("!") else field.TYPE_MESSAGE
    word = word.removeprefix("!")
    if word.startswith("."):
        return kind, f"{path}{word}"
    if "." in word and word[0].islower():
        return kind, f".{word}"
    if word[0].isupper():
        return kind, f".{package}.{word}"
    return field.Type.Value(f"TYPE_{word.upper()}"), ""
