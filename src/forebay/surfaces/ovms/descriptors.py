# SPDX-License-Identifier: Apache-2.0
"""The messages of a `graph.pbtxt`, as a table: what MediaPipe's own files say of a graph, as far as graphs say it.

They live in a pool of their own, so that MediaPipe itself, or any version of protobuf, may be installed beside us.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGE: Final = "mediapipe"
_ANY: Final = "google.protobuf.Any"
_EXTENSIBLE: Final = frozenset({"MediaPipeOptions", "CalculatorOptions"})
_FIRST_EXTENSION: Final = 20_000
_END_OF_EXTENSIONS: Final = 536_870_912

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {"string": _Field.TYPE_STRING, "bool": _Field.TYPE_BOOL, "int32": _Field.TYPE_INT32}

# Number and type of each field. A star is repeated; a map has texts on both sides. Nothing is required here: what is
# missing is told with its line.
_MESSAGES: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "MediaPipeOptions": {},
    "CalculatorOptions": {"merge_fields": (1, "bool")},
    "InputStreamHandlerConfig": {"input_stream_handler": (1, "string"), "options": (3, "MediaPipeOptions")},
    "OutputStreamHandlerConfig": {
        "output_stream_handler": (1, "string"),
        "input_side_packet": (2, "string*"),
        "options": (3, "MediaPipeOptions"),
    },
    "InputStreamInfo": {"tag_index": (1, "string"), "back_edge": (2, "bool")},
    "ExecutorConfig": {"name": (1, "string"), "type": (2, "string"), "options": (3, "MediaPipeOptions")},
    "ThreadPoolExecutorOptions": {
        "num_threads": (1, "int32"),
        "stack_size": (2, "int32"),
        "nice_priority_level": (3, "int32"),
        "thread_name_prefix": (5, "string"),
    },
    "SyncSet": {"tag_index": (1, "string*")},
    "SyncSetInputStreamHandlerOptions": {"sync_set": (1, "SyncSet*")},
    "Node": {
        "name": (1, "string"),
        "calculator": (2, "string"),
        "input_stream": (3, "string*"),
        "output_stream": (4, "string*"),
        "input_side_packet": (5, "string*"),
        "output_side_packet": (6, "string*"),
        "options": (7, "CalculatorOptions"),
        "node_options": (8, f"{_ANY}*"),
        "source_layer": (9, "int32"),
        "buffer_size_hint": (10, "int32"),
        "input_stream_handler": (11, "InputStreamHandlerConfig"),
        "output_stream_handler": (12, "OutputStreamHandlerConfig"),
        "input_stream_info": (13, "InputStreamInfo*"),
        "executor": (14, "string"),
        "max_in_flight": (16, "int32"),
    },
    "CalculatorGraphConfig": {
        "node": (1, "Node*"),
        "num_threads": (8, "int32"),
        "input_stream": (10, "string*"),
        "max_queue_size": (11, "int32"),
        "input_stream_handler": (12, "InputStreamHandlerConfig"),
        "output_stream_handler": (13, "OutputStreamHandlerConfig"),
        "executor": (14, "ExecutorConfig*"),
        "output_stream": (15, "string*"),
        "input_side_packet": (16, "string*"),
        "output_side_packet": (17, "string*"),
        "package": (19, "string"),
        "type": (20, "string"),
        "report_deadlock": (21, "bool"),
        "options": (1001, "MediaPipeOptions"),
    },
    "PythonExecutorCalculatorOptions": {"handler_path": (1, "string")},
    "PyTensorOvTensorConverterCalculatorOptions": {"tag_to_output_tensor_names": (1, "map")},
    "OpenVINOModelServerSessionCalculatorOptions": {
        "servable_name": (1, "string"),
        "servable_version": (2, "string"),
        "service_url": (3, "string"),
        "server_config": (4, "string"),
        "log_level": (5, "string"),
    },
    "OpenVINOInferenceCalculatorOptions": {
        "tag_to_input_tensor_names": (1, "map"),
        "tag_to_output_tensor_names": (2, "map"),
        "input_order_list": (3, "string*"),
        "output_order_list": (4, "string*"),
    },
}

_EXTENSIONS: Final[Mapping[str, tuple[str, int]]] = {
    "SyncSetInputStreamHandlerOptions": ("MediaPipeOptions", 155_816_273),
    "ThreadPoolExecutorOptions": ("MediaPipeOptions", 157_116_819),
    "PythonExecutorCalculatorOptions": ("CalculatorOptions", 1_125_000),
    "PyTensorOvTensorConverterCalculatorOptions": ("CalculatorOptions", 1_125_001),
    "OpenVINOModelServerSessionCalculatorOptions": ("CalculatorOptions", 1_125_002),
    "OpenVINOInferenceCalculatorOptions": ("CalculatorOptions", 1_125_003),
}
"""What each message extends, so that it may stand as `[mediapipe.NAME.ext]`; nobody reads the numbers from a text."""

OPTIONS: Final = tuple(name for name in _EXTENSIONS if name.endswith("CalculatorOptions"))
"""The options of calculators there are."""


@cache
def pool() -> descriptor_pool.DescriptorPool:
    """Return the pool with all messages."""
    described = descriptor_pb2.FileDescriptorProto(name="forebay/graph.proto", package=_PACKAGE, syntax="proto2")
    described.dependency.append("google/protobuf/any.proto")
    for name, fields in _MESSAGES.items():
        _describe(described.message_type.add(name=name), name, fields)
    found = descriptor_pool.DescriptorPool()
    anything = descriptor_pb2.FileDescriptorProto()
    any_pb2.DESCRIPTOR.CopyToProto(anything)
    found.Add(anything)  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it
    found.Add(described)  # pyright: ignore[reportAttributeAccessIssue]
    return found


def message(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def extension(name: str) -> Any:
    """Return what a message extends others by."""
    return pool().FindExtensionByName(f"{_PACKAGE}.{name}.ext")


def _describe(message: descriptor_pb2.DescriptorProto, name: str, fields: Mapping[str, tuple[int, str]]) -> None:
    for field, (number, form) in fields.items():
        kind = form.rstrip("*")
        added = message.field.add(name=field, number=number, label=_Field.LABEL_OPTIONAL)
        if form.endswith(("*", "map")):
            added.label = _Field.LABEL_REPEATED
        if kind in _SCALARS:
            added.type = _SCALARS[kind]
            continue
        added.type = _Field.TYPE_MESSAGE
        if kind == "map":
            entry = "".join(word.capitalize() for word in field.split("_")) + "Entry"
            nested = message.nested_type.add(name=entry)
            nested.options.map_entry = True
            for part, part_number in (("key", 1), ("value", 2)):
                nested.field.add(name=part, number=part_number, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
            added.type_name = f".{_PACKAGE}.{name}.{entry}"
        else:
            added.type_name = f".{kind}" if "." in kind else f".{_PACKAGE}.{kind}"
    if name in _EXTENSIBLE:
        message.extension_range.add(start=_FIRST_EXTENSION, end=_END_OF_EXTENSIONS)
    if name in _EXTENSIONS:
        extended, number = _EXTENSIONS[name]
        message.extension.add(
            name="ext",
            number=number,
            label=_Field.LABEL_OPTIONAL,
            type=_Field.TYPE_MESSAGE,
            type_name=f".{_PACKAGE}.{name}",
            extendee=f".{_PACKAGE}.{extended}",
        )
