# SPDX-License-Identifier: Apache-2.0
"""Calls as values, the same for every encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from forebay.errors import InvalidRequest
from forebay.protocols.kserve.places import Parameter, Place
from forebay.types.tenant import LEAST_URGENT, Tenant
from forebay.types.tensor import Tensor, TensorMetadata

NEVER: Final = float("inf")


class InferRequest(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A question to a model.

    Attributes:
        version: Its version; empty lets the server choose.
        id: What the answer repeats.
        outputs: Names of what it shall give; none asks for everything.
        parameters: What else the model takes.
        is_binary: Whether outputs are wanted as they lie in memory, rather than as lists in JSON.
        binary: The same for single outputs, by name.
        places: Where in shared memory outputs are wanted, by name.
    """

    model: str
    inputs: Sequence[Tensor]
    version: str = ""
    id: str = ""
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Parameter] = {}
    is_binary: bool = True
    binary: Mapping[str, bool] = {}
    places: Mapping[str, Place] = {}


class InferResponse(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A model's answer.

    Attributes:
        version: The version that answered.
        id: What the request said.
        parameters: What else the model says.
    """

    outputs: Sequence[Tensor]
    model: str = ""
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Parameter] = {}


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes and gives; servers may leave both empty."""

    name: str
    inputs: Sequence[TensorMetadata] = ()
    outputs: Sequence[TensorMetadata] = ()


def timeout_of(parameters: Mapping[str, Parameter]) -> float:
    """Return the seconds for the microseconds that a client gives its request; 0 is no limit.

    Raises:
        InvalidRequest: If they are something else.
    """
    given = parameters.get("timeout", 0)
    if type(given) is not int or given < 0:
        raise InvalidRequest(f"parameter 'timeout': expected a whole number of microseconds, got {given!r:.60}")
    return given / 1e6 if given else NEVER


def in_class(tenant: Tenant, parameters: Mapping[str, Parameter]) -> Tenant:
    """Return a tenant in the class that the parameters of a request wish for, as Triton's clients do.

    Raises:
        InvalidRequest: If that is not a priority.
    """
    wish = parameters.get("priority", 0)
    if type(wish) is not int or wish < 0:
        raise InvalidRequest(f"parameter 'priority': expected a whole number >= 0, got {wish!r:.60}")
    return tenant.wishing(min(wish - 1, LEAST_URGENT)) if wish else tenant
