# SPDX-License-Identifier: Apache-2.0
"""What all fronts of an owner have in common: which models they are told of, by which numbers, and when that changes.

Theory of operation. A number stands for one description of a version of a model. When a version is loaded anew that
describes itself otherwise, it gets another number. The numbers before it go on to stand for it where requests that were
read for them can be answered by it: a front that has not heard of the change may still send some. All fronts are told
at the end of the turn in which something has changed. Whether a model has workers is looked at each second, so that its
fronts are as ready as the owner is; those of the same node process ask it each time. What the server itself hands on to
another owner is not among it.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.observe.logs.access_log import HANDED_ON, CallListeners, EndedCall
from forebay.owners.caller_link import Callee, CalleeHost, CallerLink, MemberEntry
from forebay.owners.detached_bodies import follow
from forebay.owners.model_description import ModelDescription, WeighedModel, description_of, problem_of
from forebay.owners.owner_pool import OwnerPool
from forebay.owners.request_form import require_form, require_params
from forebay.protocols.native import code_of, status_of
from forebay.server.links import Links
from forebay.types.call import Failure, Outcome, Request
from forebay.types.server_state import here
from forebay.workers.wire import frames

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.served import Served
    from forebay.serving.endpoint import Endpoint

MAX_NUMBERS: Final = 8
"""Numbers of a version that are known: the last ones."""
LOOK_S: Final = 1.0
"""Time between two looks whether models have workers."""


class Callers(Links, CalleeHost):
    """The fronts of a server, each of which counts the requests of its clients; they share the budget of clients.

    Attributes:
        described: Numbers and descriptions of what is served.
        calls: Who is told of their requests.
    """

    callers_count = True

    def __init__(self, app: App, max_frame_bytes: int, max_elements: int, *, is_private: bool = False) -> None:
        """Serve the models of an app to fronts.

        Args:
            is_private: Whether they are fronts of the same node process: these forward what is not handed on, so that
                models which come and go are only asked so.
        """
        super().__init__("front", app.byte_budget, max_frame_bytes, max_elements)
        self._is_private = is_private
        self.described: list[tuple[int, WeighedModel]] = []
        self._elsewhere: dict[str, str] = {}
        self.calls = here(CallListeners)
        self._app = app
        self._served: dict[int, Served] = {}
        self._known: dict[tuple[str, str], deque[tuple[int, ModelDescription]]] = {}
        self._is_looking = False
        self._looking: asyncio.TimerHandle | None = None
        app.watch(lambda _name: self._look_soon())

    @property
    def described_on_wire(self) -> list[Any]:
        """What is served as a frame, and what follows it."""
        packed = [(number, frames.encode_part(model)) for number, model in self.described]
        is_long = sum(len(model) for _, model in packed) > frames.LONG_BYTES
        models: list[Any] = []
        following: list[bytes] = []
        for number, model in packed:
            if is_long:
                announced, pieces = follow(model)
                following += pieces
                models.append([number, announced])
            else:
                models.append([number, msgspec.Raw(model)])
        return [frames.encode(["models", models, self._elsewhere]), *following]

    def receive(self, about: Mapping[str, Any], member: MemberEntry | None = None) -> CallerLink:
        """Make what talks to a front that the door lets in, or to a member; it says this about itself."""
        for served in self._served.values():
            served.endpoint.metrics.count_own()
        return CallerLink(self, about, member)

    async def start(self) -> None:
        """Tell the fronts that are here already; called once all models are up."""
        self.is_up = True
        self.calls = here(CallListeners)
        self._look()
        if not self._is_private:
            self._look_at_workers()

    def leave(self) -> None:
        """Take no further requests."""
        for link in self.links:
            link.drain()

    def stop(self) -> None:
        """Hang up."""
        if self._looking is not None:
            self._looking.cancel()
        self.hang_up()

    def require_params(self, params: Mapping[str, Any]) -> None:
        """Check what a front says about a body; raises an `InvalidRequest` if a worker could not read it."""
        require_params(params)

    def room(self, number: int) -> int:
        """Return for how many samples the queue of a model has room."""
        served = self._served.get(number)
        return 0 if served is None else served.endpoint.spare

    def row_s(self, number: int) -> float:
        """Return the seconds in which a sample of a front is answered, if the queue of a model is full."""
        served = self._served.get(number)
        return 0.0 if served is None else served.endpoint.full_row_s * len(self.links)

    def _look_at_workers(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_workers)
        if self.links and any(
            problem_of(self._served[number].endpoint) != told.problem
            for number, told in self.described
            if number in self._served
        ):
            self._look()

    def _look_soon(self) -> None:
        if self.is_up and not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Find out what is served, and tell all fronts if that has changed."""
        self._is_looking = False
        served: dict[int, Served] = {}
        known: dict[tuple[str, str], deque[tuple[int, ModelDescription]]] = {}
        described: list[tuple[int, WeighedModel]] = []
        for one in self._app.every:
            is_handed_on = isinstance(one.endpoint.pool, OwnerPool)
            stock = self._app.stock
            comes_and_goes = stock is not None and stock.is_lazy and stock.offer.has(one.endpoint.name)
            is_left_out = is_handed_on or (self._is_private and comes_and_goes)
            model = None if is_left_out else description_of(one)
            if model is None:
                continue
            if self._is_private or self.links:
                one.endpoint.metrics.count_own()
            name, version = model.config.name, model.config.version
            numbers = known[name, version] = self._known.get((name, version)) or deque(maxlen=MAX_NUMBERS)
            if not numbers or numbers[-1][1] != model:
                self._highest += 1
                numbers.append((self._highest, model))
            served |= {number: one for number, before in numbers if before.reads_as(model)}
            weight = self._app.versions(name).weights.get(version, 0)
            problem = "" if self._is_private else problem_of(one.endpoint)
            described.append((numbers[-1][0], WeighedModel(model, weight, problem)))
        self._served, self._known = served, known
        self._callees = {number: _callee(one, self.calls) for number, one in served.items()}
        elsewhere = {} if self._is_private else dict(self._app.owned)
        if described != self.described or not described or elsewhere != self._elsewhere:
            self.described, self._elsewhere = described, elsewhere
            for link in self.links:
                link.describe()


def _callee(served: Served, calls: CallListeners) -> Callee:
    endpoint = served.endpoint
    takes_lists = {contract.call: contract.batchable for contract in served.contracts.values()}
    return Callee(
        endpoint.batching.capacity,
        endpoint.config.streams,
        lambda: endpoint.places,
        endpoint.submit_bundle,
        endpoint.cancel,
        functools.partial(require_form, takes_lists=takes_lists),
        endpoint.charge_tokens,
        functools.partial(_tell, endpoint, calls) if calls.told else None,
    )


def _tell(endpoint: Endpoint, calls: CallListeners, request: Request, outcome: Outcome, peer: str) -> None:
    """Tell of a request that has ended; its line in the log is the front's affair."""
    call = EndedCall(HANDED_ON, f"/models/{endpoint.name}", client=peer, status=200, parent=request.trace)
    if type(outcome) is Failure:
        call.status, call.code = status_of(outcome.error), code_of(outcome.error)
    call.answered_by(endpoint, request)
    calls.ended(call, writes=False)
