# SPDX-License-Identifier: Apache-2.0
"""A version of a model that another server owns, as it is served here: an endpoint with an `OwnerPool` behind it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.batching.queue import BatchConfig
from forebay.owners.owner_pool import OwnerPool
from forebay.serving.endpoint import Endpoint
from forebay.types.call import ALONE, Request

if TYPE_CHECKING:
    from forebay.owners.model_description import ModelDescription
    from forebay.server.served import Served


class OwnedModel(msgspec.Struct, eq=False):
    """A version of a model of an owner.

    Attributes:
        description: What the owner says of it.
        pool: Hands its requests on.
        served: What answers for it here.
    """

    description: ModelDescription
    pool: OwnerPool
    served: Served


def owned_model(description: ModelDescription, owner: str, grace_s: float) -> OwnedModel:
    """Make an endpoint for a version of a model; requests wait `grace_s` for an owner that is gone."""
    name, capacity = description.config.name, description.capacity
    pool = OwnerPool(name, owner, description.max_size, capacity, grace_s)
    config = msgspec.structs.replace(description.config, split=False)  # its owner cuts it
    queue = BatchConfig(max_size=capacity, capacity=capacity, idle="go")
    endpoint = Endpoint(config, queue, pool, keys_of=_alone if config.streams else None)
    endpoint.batching = description.batching  # as it is told to clients
    return OwnedModel(description, pool, description.served_by(endpoint))


def _alone(_request: Request) -> Sequence[Hashable]:
    """Have each streamed request leave as a batch of its own: parts are told of one batch at a time."""
    return _ALONE


_ALONE: Final = (ALONE,)
