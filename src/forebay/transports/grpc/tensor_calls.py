# SPDX-License-Identifier: Apache-2.0
"""What both protocols of tensors do over gRPC: they read long messages beside the loop, and pass on what calls say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar, TypeVarTuple

from forebay.errors import ForebayError, QueueFull, ShareUsed, TooLarge
from forebay.observe.logs.request_ids import next_id
from forebay.transports.grpc.service import Call, parent_in
from forebay.transports.grpc.statuses import Status
from forebay.types.context import PARAM, told

if TYPE_CHECKING:
    from forebay.protocols.native import Contract
    from forebay.server.served import AskedEndpoint
    from forebay.types.call import Request

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

QUICK_BYTES: Final = 16 * 1024
"""What is read up to this length on the loop."""
READERS: Final = 2
"""Threads that read what is longer."""

STATUSES: Final[Mapping[type[ForebayError], Status]] = {
    ShareUsed: Status.RESOURCE_EXHAUSTED,
    QueueFull: Status.UNAVAILABLE,
    TooLarge: Status.RESOURCE_EXHAUSTED,
}
"""What these protocols say differently."""

_NEVER: Final = float("inf")


class TensorReaders:
    """The threads of a service that read long messages."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function in one of them."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="forebay-tensors")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def complete(request: Request, call: Call, contract: Contract, endpoint: AskedEndpoint) -> None:
    """Give a request the trace of its call, and what its model may know of that: metadata are its headers."""
    request.trace = parent_in(call.metadata)
    if contract.has_context:
        request.id = next_id()
        host, _, port = call.peer.rpartition(":")
        peer = (host.strip("[]"), int(port)) if port.isdigit() else None
        headers = {name: value for name, value in call.metadata if isinstance(value, str)}
        usual_s = endpoint.config.usual_s(streams=contract.streams)
        timeout_s = usual_s if request.deadline == _NEVER else request.deadline - monotonic()
        request.params = {**request.params, PARAM: told(headers, request.id, peer, timeout_s)}
