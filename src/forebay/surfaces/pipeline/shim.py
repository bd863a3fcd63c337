# SPDX-License-Identifier: Apache-2.0
"""The names scripts import from the original: offered by an import hook, in processes forebay starts.

    paddle_serving_server.pipeline                          Op, RequestOp, ResponseOp, PipelineServer, ...
    paddle_serving_server.pipeline.channel                  ChannelData, ChannelDataType, ChannelDataErrcode, ...
    paddle_serving_server.pipeline.error_catch              CustomException, CustomExceptionCode, ProductErrCode
    paddle_serving_server.pipeline.proto.pipeline_service_pb2   Request, Response, Tensor
    paddle_serving_server.web_service                       WebService, Op
    paddle_serving_client.pipeline                          PipelineClient

The same stands under `paddle_serving_server_gpu`. No file on the disk has those names. The readers of
`paddle_serving_app` are the installed ones; forebay offers its own `IMDBDataset` only if that package is absent or
cannot be imported.

A script of one's own asks for them with

    from forebay.surfaces.pipeline import shim
    shim.install()

before it imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forebay.surfaces.offered_modules import offer

_HOME: Final = "forebay.surfaces.pipeline"

_OPS: Final[Mapping[str, str]] = dict[str, str].fromkeys(("Op", "RequestOp", "ResponseOp"), f"{_HOME}.ops.op")
_PIPELINE: Final[Mapping[str, str]] = {
    **_OPS,
    "PipelineServer": f"{_HOME}.server",
    "PipelineClient": f"{_HOME}.fronts.pipeline_client",
    "LocalServiceHandler": f"{_HOME}.predictors",
    "Analyst": f"{_HOME}.figures.analyst",
}
_CHANNEL: Final[Mapping[str, str]] = {
    "ChannelData": f"{_HOME}.ops.channel",
    "ChannelDataType": f"{_HOME}.ops.channel",
    "ChannelDataErrcode": f"{_HOME}.codes",
    "ChannelDataEcode": f"{_HOME}.codes",
    "ProductErrCode": f"{_HOME}.codes",
}
_ERRORS: Final[Mapping[str, str]] = dict.fromkeys(
    ("CustomException", "CustomExceptionCode", "ProductErrCode"), f"{_HOME}.codes"
)
_MESSAGES: Final[Mapping[str, str]] = {
    "Request": "forebay.surfaces.pipeline.protocol.messages",
    "Response": f"{_HOME}.ops.packing",
    "Tensor": "forebay.surfaces.pipeline.protocol.messages",
}
_SERVICE: Final[Mapping[str, str]] = {"WebService": f"{_HOME}.server", "Op": f"{_HOME}.ops.op"}

NAMES: Final[Mapping[str, str]] = {
    **_PIPELINE,
    **_CHANNEL,
    **_ERRORS,
    "WebService": f"{_HOME}.server",
}
"""All of them by the module they are in, for the package's own `__getattr__`."""

_SERVER: Final[Mapping[str, Mapping[str, str]]] = {
    "": {},
    ".pipeline": _PIPELINE,
    ".pipeline.operator": _OPS,
    ".pipeline.channel": _CHANNEL,
    ".pipeline.error_catch": _ERRORS,
    ".pipeline.pipeline_server": {"PipelineServer": f"{_HOME}.server"},
    ".pipeline.pipeline_client": {"PipelineClient": f"{_HOME}.fronts.pipeline_client"},
    ".pipeline.local_service_handler": {"LocalServiceHandler": f"{_HOME}.predictors"},
    ".pipeline.analyse": {"Analyst": f"{_HOME}.figures.analyst"},
    ".pipeline.proto": {},
    ".pipeline.proto.pipeline_service_pb2": _MESSAGES,
    ".web_service": _SERVICE,
}

_OURS: Final[Mapping[str, Mapping[str, str]]] = {
    **{
        package + name: names
        for package in ("paddle_serving_server", "paddle_serving_server_gpu")
        for name, names in _SERVER.items()
    },
    "paddle_serving_client": {},
    # The original has the same folder in both of its packages.
    **{f"paddle_serving_client{name}": names for name, names in _SERVER.items() if name.startswith(".pipeline")},
}
_READER: Final[Mapping[str, str]] = {"IMDBDataset": f"{_HOME}.ops.imdb"}
_IF_ABSENT: Final[Mapping[str, Mapping[str, str]]] = {
    "paddle_serving_app": {},
    "paddle_serving_app.reader": _READER,
    "paddle_serving_app.reader.imdb_reader": _READER,
}
_NOT_INSTALLED: Final = (
    "forebay offers only {} of paddle_serving_app, and {} is asked for; install the package itself: "
    "pip install paddle-serving-app"
)


def install() -> None:
    """Offer the names in this process."""
    offer(_OURS)
    offer(_IF_ABSENT, if_absent=True, not_there=_NOT_INSTALLED)
