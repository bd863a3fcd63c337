# SPDX-License-Identifier: Apache-2.0
"""`inference.GRPCInferenceService`, the gRPC face of the KServe v2 protocol, for all models of an app."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from google.protobuf import json_format

from forebay.errors import InvalidRequest, NotFound, UnknownModel
from forebay.protocols.kserve.messages import SERVICE, described, messages, parsed
from forebay.server.kserve_facts import (
    config_of,
    find_served,
    in_tritons_words,
    is_model_ready,
    is_served_ready,
    log_settings,
    model_metadata,
    server_metadata,
    statistics,
    trace_settings,
    unchangeable,
)
from forebay.server.shared_regions import CudaRegions, Region, SharedRegions
from forebay.transports.grpc.model_infer import InferMethods
from forebay.transports.grpc.model_stream_infer import infer_stream
from forebay.transports.grpc.on_demand_models import Lending
from forebay.transports.grpc.service import Call, Direct, GrpcService, Unary
from forebay.transports.grpc.statuses import MayNotManage, NotOffered
from forebay.transports.grpc.tensor_calls import STATUSES
from forebay.workers.memory.landing import HERE, Places

if TYPE_CHECKING:
    from forebay.server.app import App

_NAME_FIRST: Final = 0x0A
"""How a call of a model begins that names it first: the tag of that field; its length comes next."""


class KServe:
    """The service of one port."""

    def __init__(self, app: App, *, is_managed: bool = False) -> None:
        """Describe the service.

        Args:
            is_managed: Whether clients may load and unload them.
        """
        self._app = app
        self._is_managed = is_managed
        self._inference = InferMethods(app)
        self._lending = Lending(app, STATUSES)

    def service(self) -> GrpcService:
        """Return what a port is given."""
        app = self._app
        simple: dict[str, Callable[[Any], Mapping[str, Any]]] = {
            "ServerLive": lambda _: {"live": app.is_live},
            "ServerReady": lambda _: {"ready": not app.problems()},
            "ModelReady": lambda asked: {"ready": is_model_ready(app, asked.name, asked.version)},
            "ServerMetadata": lambda _: server_metadata(app),
            "ModelMetadata": lambda asked: model_metadata(app, asked.name, asked.version),
            "ModelConfig": lambda asked: {"config": config_of(find_served(app, asked.name, asked.version))},
            "TraceSetting": self._tracing,
            "LogSettings": self._logging,
            "SystemSharedMemoryStatus": self._regions,
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": lambda asked: self._shared_regions().unregister(asked.name) or {},
            "CudaSharedMemoryStatus": lambda asked: {"regions": CudaRegions.status(asked.name)},
            "CudaSharedMemoryRegister": lambda asked: CudaRegions.register(asked.name) or {},
            "CudaSharedMemoryUnregister": lambda asked: CudaRegions.unregister(asked.name) or {},
        }
        direct: dict[str, Direct] = {name: _direct(name, answer) for name, answer in simple.items()}
        for name in ("ModelMetadata", "ModelConfig"):
            direct[name] = self._lent(f"{name}Request", direct[name])
        slow = {"RepositoryModelLoad": self._load, "RepositoryModelUnload": self._unload}
        return GrpcService(
            full_name=SERVICE,
            direct={**direct, "ModelInfer": self._inference.infer},
            unary={
                **{name: _unary(name, answer) for name, answer in slow.items()},
                "RepositoryIndex": self._index,
                "ModelStatistics": self._statistics,
            },
            streams={"ModelStreamInfer": partial(infer_stream, self._inference)},
            statuses=STATUSES,
            public=("ServerLive", "ServerReady"),
            lands={"ModelInfer": self._places_of, "ModelStreamInfer": self._places_of},
            files=[described()],
        )

    def _places_of(self, beginning: memoryview) -> Places:
        """Return where a call lands: at the model whose name stands first, as clients write it."""
        if len(beginning) > 1 and beginning[0] == _NAME_FIRST:
            name = str(beginning[2 : 2 + beginning[1]], "utf-8", "replace")
            served = self._app.served.get(name)
            if served is not None:
                return served.in_tensors.endpoint.places or HERE
        return HERE

    def _lent(self, given: str, method: Direct) -> Direct:
        """Return a method that has the model loaded of which it tells."""

        def tell(message: bytes, call: Call) -> None:
            try:
                method(message, call)
            except NotFound:
                asked = parsed(given, message)
                if not self._lending.again(method, message, call, asked.name, asked.version):
                    raise

        return tell

    def is_model_ready(self, model: str) -> bool | None:
        """Tell whether a model can be asked now; None if there is no such model."""
        served = self._app.served.get(model)
        return None if served is None else is_served_ready(served)

    async def _index(self, message: bytes, _call: Call) -> bytes:
        asked = parsed("RepositoryIndexRequest", message)
        told = {"models": await self._app.model_index.index(only_ready=asked.ready)}
        return json_format.ParseDict(told, messages().RepositoryIndexResponse()).SerializeToString()

    async def _statistics(self, message: bytes, _call: Call) -> bytes:
        asked = parsed("ModelStatisticsRequest", message)
        try:
            told = await statistics(self._app, asked.name, asked.version)
        except UnknownModel as error:
            raise in_tritons_words(error) from None
        return json_format.ParseDict(told, messages().ModelStatisticsResponse()).SerializeToString()

    async def _load(self, asked: Any) -> None:
        self._check_managed()
        if asked.parameters:
            msg = f"a model is loaded as the project says, and not with {', '.join(asked.parameters)[:100]}"
            raise InvalidRequest(msg)
        await self._app.model_index.load(asked.model_name)

    async def _unload(self, asked: Any) -> None:
        self._check_managed()
        await self._app.model_index.unload(asked.model_name)

    def _check_managed(self) -> None:
        if not self._is_managed:
            msg = "models are loaded and unloaded by clients where calls need a key (--api-key), or with --manage"
            raise MayNotManage(msg)

    def _tracing(self, asked: Any) -> Mapping[str, Any]:
        _check_reads(asked)
        told = trace_settings(self._app, asked.model_name)
        return {"settings": {name: {"value": values} for name, values in told.items()}}

    def _logging(self, asked: Any) -> Mapping[str, Any]:
        _check_reads(asked)
        kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        return {"settings": {name: {kinds[type(value)]: value} for name, value in log_settings().items()}}

    def _regions(self, asked: Any) -> Mapping[str, Any]:
        return {"regions": self._shared_regions().status(asked.name)}

    def _register(self, asked: Any) -> Mapping[str, Any]:
        self._shared_regions().register(Region(asked.name, asked.key, asked.offset, asked.byte_size))
        return {}

    def _shared_regions(self) -> SharedRegions:
        if self._app.shared_regions is None:
            raise NotOffered("shared memory is read and written by a server with --shared-memory only")
        return self._app.shared_regions


def _direct(name: str, answer: Callable[[Any], Mapping[str, Any]]) -> Direct:
    """Return a method that answers at once with what is said in the words of JSON."""
    given = f"{name}Request"
    response = getattr(messages(), f"{name}Response")

    def method(message: bytes, call: Call) -> None:
        try:
            told = msgspec.to_builtins(answer(parsed(given, message)))
        except UnknownModel as error:
            raise in_tritons_words(error) from None
        call.reply(json_format.ParseDict(told, response()).SerializeToString())

    return method


def _unary(name: str, work: Callable[[Any], Awaitable[None]]) -> Unary:
    """Return a method that does something and then answers with nothing."""

    async def method(message: bytes, _call: Call) -> bytes:
        await work(parsed(f"{name}Request", message))
        return b""

    return method


def _check_reads(asked: Any) -> None:
    """Refuse to change settings; raises NotOffered if that is what is asked for."""
    if asked.settings:
        raise NotOffered(unchangeable(asked.settings))
