# SPDX-License-Identifier: Apache-2.0
"""The owner's side of a link with a front. Sans-I/O.

Bytes go in and messages come out; `caller_link.py` drives it. A front has proven that it knows the secret, and is only
half trusted all the same: what does not fit the state or the types of the protocol ends the link before any part of it
is acted on. Whatever arrives, nothing is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import InvalidRequest
from forebay.owners.detached_bodies import MAX_FRAME_BYTES, MAX_SEATS, BodiesTaker, LinkReader
from forebay.owners.states import BEAT, CALLERS, DRAIN, GREETING, HANG_UP, HELLO, REQUESTS, SEES, SERVINGS
from forebay.owners.wire import CallerHello, FromCaller, HandedRequests, LinkBeat, MemberServings, SeesMemory, bodies_of
from forebay.types.first_use import known
from forebay.workers.wire import frames
from forebay.workers.wire.plain_data import require_plain

if TYPE_CHECKING:
    from forebay.transports.state_table import Event, State

MAX_PARAMS: Final = 256
"""Different params that are remembered."""
MAX_KEPT_BYTES: Final = 4096
"""Longest params that are."""
MAX_PARAM_BYTES: Final = 1 << 20
"""Longest params of a request; headers may stand in them."""
MAX_PARAM_ELEMENTS: Final = 10_000
"""Values in them."""

_MESSAGES: Final = known(FromCaller)
_EVENTS: Final[Mapping[type, tuple[Event, str]]] = {
    CallerHello: (HELLO, "hello"),
    SeesMemory: (SEES, "sees"),
    HandedRequests: (REQUESTS, "requests"),
    MemberServings: (SERVINGS, "servings"),
    LinkBeat: (BEAT, "beat"),
}


class CallerConversation:
    """What a front has said, and what it may say next.

    Attributes:
        state: Where the link is in `CALLERS`.
        problem: Why the link is given up; empty while it is not.
    """

    def __init__(
        self,
        max_body_bytes: int,
        max_elements: int,
        check: Callable[[Mapping[str, Any]], object] = len,
        listener: BodiesTaker | None = None,
    ) -> None:
        """Wait for the front to speak.

        Args:
            max_elements: The most values in a frame, or in what follows it.
            check: Raises an `InvalidRequest` for params that cannot be used.
            listener: Hears of bodies before they come.
        """
        self._check = check
        self.state: State = GREETING
        self.problem = ""
        self._reader = LinkReader(
            _MESSAGES, bodies_of, max_body_bytes, max_elements, min(max_body_bytes, MAX_FRAME_BYTES)
        )
        self._reader.listener = listener
        self._params: dict[bytes, Mapping[str, Any]] = {}

    @property
    def is_open(self) -> bool:
        """Whether the front may send requests, even if they are handed back."""
        return REQUESTS in CALLERS[self.state]

    @property
    def is_taking(self) -> bool:
        """Whether requests are taken."""
        row = CALLERS[self.state]
        return REQUESTS in row and row[REQUESTS] is not row[DRAIN]

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[HandedRequests | MemberServings | SeesMemory]:
        """Read bytes and yield what is said but for beats; a violation ends that, and is the `problem`."""
        if HANG_UP in CALLERS[self.state] and not self.problem:
            try:
                for message in self._reader.feed(data):
                    event, kind = _EVENTS[type(message)]
                    if event not in CALLERS[self.state]:
                        raise InvalidRequest(f"'{kind}' is not a message of the protocol while it is {self.state}")
                    self.state = CALLERS[self.state][event]
                    if isinstance(message, HandedRequests):
                        yield self._checked(message)
                    elif isinstance(message, SeesMemory | MemberServings):
                        yield message
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a message, its sender is at fault
                self.problem = f"it does not speak the protocol: {error}"
                self.state = CALLERS[self.state][HANG_UP]

    def params_of(self, packed: bytes) -> Mapping[str, Any]:
        """Return the params of a request: equal ones are one mapping, so that a batch of equals is seen at once.

        Raises:
            InvalidRequest: They are none.
        """
        found = self._params.get(packed)
        if found is None:
            if len(packed) > MAX_PARAM_BYTES:
                raise InvalidRequest(f"the params of a request have {len(packed)} bytes, more than {MAX_PARAM_BYTES}")
            frames.require_few(packed, MAX_PARAM_ELEMENTS)
            try:
                told = msgspec.msgpack.decode(packed, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"the params of a request cannot be read: {error}") from error
            require_plain(told)
            self._check(told)
            if len(packed) > MAX_KEPT_BYTES:
                return told
            if len(self._params) >= MAX_PARAMS:
                self._params.clear()
            found = self._params[packed] = told
        return found

    def drain(self) -> None:
        """Hand back requests from now on."""
        if DRAIN in CALLERS[self.state]:
            self.state = CALLERS[self.state][DRAIN]

    def close(self) -> None:
        """Read nothing more."""
        self.state = CALLERS[self.state][HANG_UP]

    @staticmethod
    def _checked(message: HandedRequests) -> HandedRequests:
        count = 0
        for bundle in message.bundles:
            count += len(bundle.seats)
            for one in bundle.seats:
                if not one.left_s == one.left_s:
                    raise InvalidRequest("the time that is left to a request: expected a number, got NaN")
        if count + len(message.bundles) > MAX_SEATS:
            raise InvalidRequest(f"a frame has more than {MAX_SEATS} requests and bundles")
        if count != len(message.bodies):
            raise InvalidRequest(f"a bundle has {count} requests and {len(message.bodies)} bodies")
        return message
