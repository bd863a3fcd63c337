# SPDX-License-Identifier: Apache-2.0
"""The messages of a `graph.pbtxt`, as a table: what MediaPipe's own files say of a graph, as far as graphs say it.

They live in a pool of their own, so that MediaPipe itself, or any version of protobuf, may be installed beside us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.types.proto_tables import ProtoTable

_PACKAGE: Final = "mediapipe"

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

# Nothing is required here: what is missing is told with its line.
_TABLE: Final = ProtoTable(
    file="forebay/graph.proto",
    package=_PACKAGE,
    syntax="proto2",
    messages={
        "MediaPipeOptions": "",
        "CalculatorOptions": "1 bool merge_fields",
        "InputStreamHandlerConfig": "1 string input_stream_handler, 3 MediaPipeOptions options",
        "OutputStreamHandlerConfig": (
            "1 string output_stream_handler, 2 string* input_side_packet, 3 MediaPipeOptions options"
        ),
        "InputStreamInfo": "1 string tag_index, 2 bool back_edge",
        "ExecutorConfig": "1 string name, 2 string type, 3 MediaPipeOptions options",
        "ThreadPoolExecutorOptions": (
            "1 int32 num_threads, 2 int32 stack_size, 3 int32 nice_priority_level, 5 string thread_name_prefix"
        ),
        "SyncSet": "1 string* tag_index",
        "SyncSetInputStreamHandlerOptions": "1 SyncSet* sync_set",
        "Node": (
            "1 string name, 2 string calculator, 3 string* input_stream, 4 string* output_stream, "
            "5 string* input_side_packet, 6 string* output_side_packet, 7 CalculatorOptions options, "
            "8 google.protobuf.Any* node_options, 9 int32 source_layer, 10 int32 buffer_size_hint, "
            "11 InputStreamHandlerConfig input_stream_handler, 12 OutputStreamHandlerConfig output_stream_handler, "
            "13 InputStreamInfo* input_stream_info, 14 string executor, 16 int32 max_in_flight"
        ),
        "CalculatorGraphConfig": (
            "1 Node* node, 8 int32 num_threads, 10 string* input_stream, 11 int32 max_queue_size, "
            "12 InputStreamHandlerConfig input_stream_handler, 13 OutputStreamHandlerConfig output_stream_handler, "
            "14 ExecutorConfig* executor, 15 string* output_stream, 16 string* input_side_packet, "
            "17 string* output_side_packet, 19 string package, 20 string type, 21 bool report_deadlock, "
            "1001 MediaPipeOptions options"
        ),
        "PythonExecutorCalculatorOptions": "1 string handler_path",
        "PyTensorOvTensorConverterCalculatorOptions": "1 map:string tag_to_output_tensor_names",
        "OpenVINOModelServerSessionCalculatorOptions": (
            "1 string servable_name, 2 string servable_version, 3 string service_url, 4 string server_config, "
            "5 string log_level"
        ),
        "OpenVINOInferenceCalculatorOptions": (
            "1 map:string tag_to_input_tensor_names, 2 map:string tag_to_output_tensor_names, "
            "3 string* input_order_list, 4 string* output_order_list"
        ),
    },
    extensions=_EXTENSIONS,
)


def pool() -> Any:
    """Return the pool with all messages."""
    return message("CalculatorGraphConfig").DESCRIPTOR.file.pool


def message(name: str) -> Any:
    """Return the class of a message."""
    return getattr(_TABLE.classes(), name)


def extension(name: str) -> Any:
    """Return what a message extends others by."""
    return pool().FindExtensionByName(f"{_PACKAGE}.{name}.ext")
