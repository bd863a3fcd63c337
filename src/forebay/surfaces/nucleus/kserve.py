# SPDX-License-Identifier: Apache-2.0
"""A handler in the Open Inference Protocol: calls are posts. What the handler is given of them is in `tensors.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from forebay.protocols.native import Contract
from forebay.server.served import StandIn
from forebay.serving.tensor_face import TensorFace
from forebay.transports.http.kserve_calls import InferRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from forebay.server.config import HttpConfig
    from forebay.server.served import Served
    from forebay.server.shared_regions import SharedRegions
    from forebay.serving.endpoint import Endpoint
    from forebay.transports.http.route import Route
    from forebay.types.batch import EntryBatch
    from forebay.types.call import Request

FACE: Final = TensorFace(is_open=True, has_rows=False)
_ASKED: Final[Mapping[str, Any]] = {"verb": "post", "query": b"", "headers": []}
_CONTRACT: Final = Contract(raw_input=True, raw_output=True, batchable=False, streams=False)
"""What a handler streams is no tensor, and is told so."""


def let_in(served: Served, key: Hashable) -> None:
    """Have a handler asked in tensors.

    Args:
        key: The batch key of its posts.
    """
    served.tensors = FACE
    served.stand_in = StandIn(_AskedAsPost(served.endpoint, key), _CONTRACT)


def routes_of(served: Served, config: HttpConfig, regions: Callable[[], SharedRegions | None]) -> dict[bytes, Route]:
    """Return the routes of the protocol, by target."""
    route = InferRoute(served, FACE, config, regions)
    name, version = served.endpoint.name, served.endpoint.config.version
    return {f"/v2/models/{name}{of}/infer".encode(): route for of in ("", f"/versions/{version}")}


class _AskedAsPost:
    """The endpoint of a handler, for requests that do not say by themselves that they are posts."""

    def __init__(self, endpoint: Endpoint, key: Hashable) -> None:
        self.name, self.config, self.batching, self.places = (
            endpoint.name,
            endpoint.config,
            endpoint.batching,
            endpoint.places,
        )
        self.cancel, self.reject, self.is_full = endpoint.cancel, endpoint.reject, endpoint.is_full
        self._endpoint = endpoint
        self._key = key

    @property
    def answering(self) -> EntryBatch | None:
        """The batch whose requests are being replied to right now."""
        return self._endpoint.answering

    def submit(self, request: Request) -> None:
        """Queue a request."""
        request.params = {**request.params, **_ASKED}
        request.key = self._key
        self._endpoint.submit(request)
