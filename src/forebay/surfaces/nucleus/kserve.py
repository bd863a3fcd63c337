# SPDX-License-Identifier: Apache-2.0
"""The routes of a handler in the Open Inference Protocol; what the handler is given is in `tensors.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from forebay.serving.tensor_face import TensorFace
from forebay.transports.http.kserve_calls import InferRoute

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from forebay.server.config import HttpConfig
    from forebay.server.served import Served
    from forebay.transports.http.route import Head, Route
    from forebay.types.call import Origin, Reply, Request

FACE: Final = TensorFace(is_open=True, has_rows=False)
_ASKED: Final[Mapping[str, Any]] = {"verb": "post", "query": b"", "headers": []}


def routes_of(served: Served, key: Hashable, config: HttpConfig) -> dict[bytes, Route]:
    """Return the routes of the protocol, by target.

    Args:
        key: The batch key of its posts.
    """
    route = _HandlerRoute(served, key, config)
    name, version = served.endpoint.name, served.endpoint.config.version
    return {f"/v2/models/{name}{of}/infer".encode(): route for of in ("", f"/versions/{version}")}


class _HandlerRoute(InferRoute):
    """Calls are posts."""

    def __init__(self, served: Served, key: Hashable, config: HttpConfig) -> None:
        super().__init__(served, FACE, config)
        self._key = key
        self._streams = False  # what a handler streams is no tensor, and is told so

    def request(self, head: Head, body: bytes | memoryview, reply: Reply, origin: Origin | None) -> Request:
        """Make a request of a head and its body."""
        request = super().request(head, body, reply, origin)
        request.params = {**request.params, **_ASKED}
        request.key = self._key
        return request
