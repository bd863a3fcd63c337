# SPDX-License-Identifier: Apache-2.0
"""Calls of the Open Inference Protocol (KServe v2), the same over HTTP and gRPC: what they wish, and what they get."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

from forebay.errors import InvalidRequest
from forebay.protocols.kserve.infer_calls import InferResponse, Parameter, in_class, timeout_of
from forebay.serving.tensor_face import parameters_of, tensors_of
from forebay.types.call import EMPTY, Outcome, Request

if TYPE_CHECKING:
    from forebay.protocols.kserve.places import Place
    from forebay.server.shared_regions import SharedRegions
    from forebay.serving.endpoint import EndpointConfig


def wish(request: Request, parameters: Mapping[str, Parameter]) -> None:
    """Give a request the time limit and the class that its parameters ask for.

    Raises:
        InvalidRequest: If they are none.
    """
    if "timeout" in parameters:
        request.deadline = request.due = min(request.deadline, monotonic() + timeout_of(parameters))
    if request.tenant is not None:
        request.tenant = in_class(request.tenant, parameters)


def require_one_sample(model: str, count: int) -> None:
    """Refuse several samples for a model that streams: nobody could tell their parts apart."""
    if count > 1:
        msg = f"the model '{model}' streams what it gives for one sample, and {count} came; send them one by one"
        raise InvalidRequest(msg)


def offered(regions: SharedRegions | None) -> SharedRegions:
    """Return the shared memory of a server; raises an `InvalidRequest` if it uses none."""
    if regions is None:
        raise InvalidRequest("tensors in shared memory are read and written by a server with --shared-memory only")
    return regions


def response_to(
    name: str,
    outcome: Outcome,
    config: EndpointConfig,
    regions: SharedRegions | None,
    wanted: Mapping[str, Place],
    more: Mapping[str, Parameter] = EMPTY,
) -> tuple[InferResponse, Mapping[str, Mapping[str, Parameter]]]:
    """Return the response to a request, and what it says of outputs that lie elsewhere.

    Args:
        name: What the client calls its request.
        wanted: Where in shared memory outputs go.
        more: Parameters beside the model's.

    Raises:
        ForebayError: If an output cannot be put where it is wanted.
    """
    tensors, places = tensors_of(outcome[0], outcome[1:]), EMPTY
    if wanted:
        tensors, places = offered(regions).put(tensors, wanted)
    said = {**more, **parameters_of(outcome)}
    return InferResponse(outputs=tensors, model=config.name, version=config.version, id=name, parameters=said), places
