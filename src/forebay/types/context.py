# SPDX-License-Identifier: Apache-2.0
"""What a model may know of a request beside its sample; only for models that ask, it travels to the worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

PARAM: Final = "context"
"""The parameter of a method that asks for it, and the name it has among the params of a request."""


_NOTHING: Final[tuple[Any, ...]] = ({}, "", None, float("inf"))


class Context(msgspec.Struct, frozen=True, kw_only=True):  # noqa: PLW1641 - headers are a dict, which has no hash
    """One request, as `predict`, `preprocess` or `postprocess` sees it that has a parameter `context`.

    Attributes:
        headers: Of the request, by their names in lower case; several of one name are joined with commas.
        request_id: What the client, the log and the answer call it.
        client: Host and port of who sent it, if that is known; a proxy's where there is one.
        deadline: When its time is over, in seconds of `time.time`; infinity if that is not known.
        device: Where the worker computes, as `self.device` of the model.
        worker: Number of the worker in its pool, from 0.
    """

    headers: Mapping[str, str] = {}
    request_id: str = ""
    client: tuple[str, int] | None = None
    deadline: float = float("inf")
    device: str = "cpu"
    worker: int = 0
    _ends: float = 0.0

    def __post_init__(self) -> None:
        """Note when that is by a clock that nobody sets; a worker may be on another machine, which has its own."""
        msgspec.structs.force_setattr(self, "_ends", time.monotonic() + self.deadline - time.time())

    def __eq__(self, other: object) -> bool:
        """Compare what is told of the request."""
        return isinstance(other, Context) and msgspec.structs.astuple(self)[:-1] == msgspec.structs.astuple(other)[:-1]

    @property
    def remaining_s(self) -> float:
        """Seconds until its time is over; negative if it is."""
        return self._ends - time.monotonic()


def told(
    headers: Mapping[str, str], request_id: str, client: tuple[str, int] | None, timeout_s: float
) -> tuple[Any, ...]:
    """Write down what the server knows, as plain data."""
    return headers, request_id, client, time.time() + timeout_s


def context_of(params: Mapping[str, Any], device: str, worker: int) -> Context:
    """Return what was written down, with what the worker knows; what did not come over HTTP has no headers."""
    headers, request_id, client, deadline = params.get(PARAM) or _NOTHING
    return Context(
        headers=headers,
        request_id=request_id,
        client=None if client is None else (client[0], client[1]),
        deadline=deadline,
        device=device,
        worker=worker,
    )
