# SPDX-License-Identifier: Apache-2.0
"""A handler in the Open Inference Protocol: calls are posts. What the handler is given of them is in `tensors.py`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import Unavailable
from forebay.protocols.native import Contract
from forebay.server.served import Served, StandIn
from forebay.serving.tensor_face import TensorFace
from forebay.surfaces.nucleus.in_flight import TOO_MANY, InFlight
from forebay.types.call import Failure, Outcome, Reply, Request

if TYPE_CHECKING:
    from forebay.serving.endpoint import Endpoint
    from forebay.types.batch import EntryBatch

_ASKED: Final[Mapping[str, Any]] = {"verb": "post", "query": b"", "headers": []}
_CONTRACT: Final = Contract(raw_input=True, raw_output=True, batchable=False, streams=False)
"""What a handler streams is not a tensor, and is told so."""


def let_in(served: Served, key: Hashable, in_flight: InFlight) -> None:
    """Have a handler asked in tensors; `key` is the batch key of its posts."""
    served.tensors = TensorFace(is_open=True, has_rows=False)
    served.stand_in = StandIn(_AskedAsPost(served.endpoint, key, in_flight), _CONTRACT)


class _AskedAsPost:
    """The endpoint of a handler, for requests that do not say by themselves that they are posts."""

    def __init__(self, endpoint: Endpoint, key: Hashable, in_flight: InFlight) -> None:
        self.name, self.config = endpoint.name, endpoint.config
        self.batching, self.places = endpoint.batching, endpoint.places
        self.cancel, self.reject, self.is_full = endpoint.cancel, endpoint.reject, endpoint.is_full
        self.is_full_for = endpoint.is_full_for
        self._endpoint = endpoint
        self._key = key
        self._in_flight = in_flight

    @property
    def answering(self) -> EntryBatch | None:
        """The batch whose requests are being replied to right now."""
        return self._endpoint.answering

    def submit(self, request: Request) -> None:
        """Queue a request, unless too many are in flight."""
        request.params = {**request.params, **_ASKED}
        request.key = self._key
        in_flight = self._in_flight
        if in_flight.is_full:
            error = Unavailable(TOO_MANY)
            request.done = True
            self.reject(error)
            request.reply(request, Failure(error))
            return
        if in_flight.limit:
            request.reply = _counted(request.reply, in_flight)
        self._endpoint.submit(request)


def _counted(reply: Reply, in_flight: InFlight) -> Reply:
    """Return what replies to a request that is in flight until then."""
    in_flight.begin()
    is_counted = True

    def replied(request: Request, outcome: Outcome) -> None:
        nonlocal is_counted
        if is_counted:  # where an answer cannot be written, what is wrong with it is told instead
            is_counted = False
            in_flight.end()  # first: a client that is answered may ask again
        reply(request, outcome)

    return replied
