# SPDX-License-Identifier: Apache-2.0
"""`ModelInfer` of the KServe v2 protocol: to endpoints and back. `ModelStreamInfer` begins its requests here, too.

Theory of operation. The head of a request (`kserve/request_layouts.py`) says whom it is for and what it holds. It is
checked once, and what came of it is kept beside the layout (`_Plan`): another request laid out the same differs only in
its data, so all that is left to do is to cut that out and to submit it. What tensors hold is not looked at here, but
for typed contents and shared memory, which have to be read first, beside the loop if they are large.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ForebayError, InvalidRequest, NotFound, UnknownModel
from forebay.protocols.kserve import response_bytes
from forebay.protocols.kserve.infer_calls import Parameter
from forebay.protocols.kserve.request_layouts import RequestLayout, RequestLayouts, Span
from forebay.protocols.kserve.response_bytes import Written
from forebay.server.infer_exchange import offered, require_one_sample, response_to, wish
from forebay.server.kserve_facts import in_tritons_words
from forebay.serving.tensor_face import TensorRequest
from forebay.transports.grpc.call_tasks import run_beside
from forebay.transports.grpc.on_demand_models import Lending
from forebay.transports.grpc.tensor_calls import QUICK_BYTES, STATUSES, TensorReaders, complete
from forebay.types.call import EMPTY, Failure, Outcome, Request
from forebay.types.tensor import Data, Tensor

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.served import Served, StandIn
    from forebay.transports.grpc.service import Call

SHORT_BYTES: Final = 4 * 1024
"""Data is cut out of messages up to this; of longer ones it is seen where it lies."""
MAX_PLANS: Final = 1024


class _Plan(msgspec.Struct, eq=False):
    """What was found out about requests of one layout.

    Attributes:
        size: How many samples it has.
        spans: Where in the message its data lies.
        answered: What the last answer said of its only tensor, how long that was, and what stood before it.
    """

    layout: RequestLayout
    served: Served | StandIn
    params: dict[str, Any]
    size: int
    spans: Sequence[Span]
    answered: tuple[Any, int, bytes] = (None, 0, b"")


class BegunInfer(TensorRequest, gc=False, eq=False):
    """A request that is inside; `call` is how it came.

    Attributes:
        plan: What was found out about it.
        name: What the client calls it.
        kept_bytes: What is counted of its message.
    """

    plan: Any = None
    name: str = ""
    kept_bytes: int = 0

    def cancel(self) -> None:
        """Call it off."""
        self.plan.served.endpoint.cancel(self)


Enter = Callable[[BegunInfer], None]
"""Registers a request of a stream before it can be answered, and sets its `reply`."""


class InferMethods:
    """Answers `ModelInfer`, and begins requests, for the models of an app."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.layouts = RequestLayouts()
        self._reply = self._replied
        self._plans: dict[RequestLayout, _Plan] = {}
        self._readers = TensorReaders()
        self.lending = Lending(app, STATUSES)
        app.watch(lambda _name: self._plans.clear())

    def infer(self, message: Data, call: Call) -> None:
        """Answer `ModelInfer`."""
        try:
            self._infer(message, call)
        except NotFound as error:
            layout = self.layouts.of(message)
            if not self.lending.again(self._infer, message, call, layout.model, layout.version):
                call.fail(error, STATUSES)
        except ForebayError as error:
            call.fail(error, STATUSES)

    def served(self, model: str, version: str) -> Served:
        """Return who answers for a model; raises NotFound if there is no such model, or no such version of it."""
        try:
            versions = self._app.versions(model)
        except UnknownModel as error:
            raise in_tritons_words(error) from None
        return versions.named(version) if version else versions.turn()

    def response(self, asked: BegunInfer, outcome: Outcome, parameters: Mapping[str, Parameter] = EMPTY) -> Written:
        """Return the response to a request.

        Raises:
            ForebayError: If an output cannot be put where the client wants it.
        """
        plan: _Plan = asked.plan
        config, regions = plan.served.endpoint.config, self._app.shared_regions
        found, places = response_to(asked.name, outcome, config, regions, plan.layout.places, parameters)
        return response_bytes.response(found, places)

    async def read(self, message: Data, layout: RequestLayout) -> list[Tensor]:
        """Return the tensors of a request; reads them beside the loop where that takes long."""
        if self._is_slow(layout):
            return await self._readers.run(self._tensors, message, layout)
        return self._tensors(message, layout)

    def begin(
        self, call: Call, message: Data, layout: RequestLayout, tensors: Sequence[Tensor], enter: Enter | None = None
    ) -> BegunInfer:
        """Submit a request whose tensors have been read; raises the ForebayError that says why not."""
        served = self.served(layout.model, layout.version)
        name = served.endpoint.name
        if served.tensors is None:
            raise InvalidRequest(f"the model '{name}' does not accept tensors; ask it over HTTP at /models/{name}")
        asked = served.in_tensors
        if asked.contract.streams and enter is None:
            raise InvalidRequest(f"the model '{name}' answers in any number of parts; ask it by ModelStreamInfer")
        for place in layout.places.values():
            offered(self._app.shared_regions).require(place)
        params, size = served.tensors.ask(tensors, [one.name for one in layout.outputs], parameters=layout.parameters)
        if asked.contract.streams:
            require_one_sample(name, size)
        spans = [span for span in layout.data if span is not None]
        plan = _Plan(layout, asked, params, size, spans)
        is_usual = layout.fixed is not None and not layout.is_elsewhere and len(spans) == len(layout.inputs)
        if is_usual and not asked.contract.streams and len(self._app.versions(name).weights) < 2:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[layout] = plan
        return self._submit(call, message, plan, [one.data for one in tensors], enter)

    def _infer(self, message: Data, call: Call) -> None:
        layout = self.layouts.of(message)
        plan = self._plans.get(layout)
        if plan is not None:
            view = message if len(message) <= SHORT_BYTES else memoryview(message)
            data: list[Any] = [view[start:end] for start, end in plan.spans]
            self._submit(call, message, plan, data)
        elif self._is_slow(layout):
            if not self.lending.may_lend(layout.model, layout.version):
                self.served(layout.model, layout.version)  # else nothing has to be read
            run_beside(partial(self._infer_slowly, message, layout, call), call, STATUSES)
        else:
            self.begin(call, message, layout, self._tensors(message, layout))

    async def _infer_slowly(self, message: Data, layout: RequestLayout, call: Call) -> None:
        tensors = await self.read(message, layout)
        is_away = self.lending.may_lend(layout.model, layout.version)
        lent = self.lending.lend(layout.model, layout.version, call) if is_away else contextlib.nullcontext()
        async with lent:
            self.begin(call, message, layout, tensors)

    def _submit(
        self, call: Call, message: Data, plan: _Plan, data: list[Data], enter: Enter | None = None
    ) -> BegunInfer:
        until, parameters = call.deadline, plan.layout.parameters
        asked = BegunInfer(data, self._reply, plan.params, None, until, plan.size, due=until, tenant=call.tenant)
        asked.call, asked.plan = call, plan
        if parameters:
            wish(asked, parameters)
        served = plan.served
        complete(asked, call, served.contract, served.endpoint)
        if plan.layout.id is not None:
            asked.name = plan.layout.id_in(message)
        if enter is None:
            call.on_cancel = asked.cancel  # before, for it may be refused at once: an ended call refers to no request
        else:
            enter(asked)
        served.endpoint.submit(asked)
        return asked

    def _replied(self, request: Request, outcome: Outcome) -> None:
        assert type(request) is BegunInfer
        call, plan = request.call, request.plan
        call.answered_by(plan.served.endpoint, request)
        is_plain = outcome.__class__ is list and len(outcome) == 2 and not request.name
        if is_plain:
            told, size, head = plan.answered
            if outcome[0] == told and len(outcome[1]) == size:  # as nearly always
                call.reply(head + outcome[1])
                return
        if type(outcome) is Failure:
            call.fail(outcome.error, STATUSES)
            return
        try:
            message = self.response(request, outcome)
        except ForebayError as error:
            call.fail(error, STATUSES)
            return
        if not isinstance(message, bytes):
            call.reply_in_pieces(message)
            return
        if is_plain and not plan.layout.is_elsewhere:
            size = len(outcome[1])
            plan.answered = outcome[0], size, message[: len(message) - size]
        call.reply(message)

    @staticmethod
    def _is_slow(layout: RequestLayout) -> bool:
        """Tell whether so much of a request has to be read that it is done beside the loop."""
        size = 0
        for one, span in zip(layout.inputs, layout.data, strict=True):
            if one.place is not None:
                size += one.place.size
            elif span is None:
                size += sum(end - start for start, end in one.contents)
        return size > QUICK_BYTES

    def _tensors(self, message: Data, layout: RequestLayout) -> list[Tensor]:
        return layout.tensors(message, offered(self._app.shared_regions).reader() if layout.is_elsewhere else None)
