# SPDX-License-Identifier: Apache-2.0
"""`ModelInfer` of the KServe v2 protocol, and each request of a `ModelStreamInfer`: to endpoints and back.

Theory of operation. The head of a request (`kserve/request_layouts.py`) says whom it is for and what it holds. It is
checked once, and what came of it is kept beside the layout (`_Plan`): another request laid out the same differs only in
its data, so all that is left to do is to cut that out and to submit it. What tensors hold is not looked at here, but
for typed contents and shared memory, which have to be read first, beside the loop if they are large.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ForebayError, InvalidRequest, NotFound, UnknownModel
from forebay.protocols.kserve import response_bytes
from forebay.protocols.kserve.infer_calls import Parameter, timeout_of
from forebay.protocols.kserve.request_layouts import RequestLayout, RequestLayouts, Span, id_of
from forebay.protocols.kserve.response_bytes import Written
from forebay.server.infer_exchange import offered, response_to, wish
from forebay.server.kserve_facts import in_tritons_words
from forebay.transports.grpc.call_tasks import run_beside
from forebay.transports.grpc.lent_models import Lending
from forebay.transports.grpc.model_stream_infer import BegunInfer, InferStream
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


class InferMethods:
    """Answers the two methods for the models of an app."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._layouts = RequestLayouts()
        self._reply = self._replied
        self._plans: dict[RequestLayout, _Plan] = {}
        self._readers = TensorReaders()
        self._lending = Lending(app, STATUSES)
        app.watch(lambda _name: self._plans.clear())

    def infer(self, message: Data, call: Call) -> None:
        """Answer `ModelInfer`."""
        try:
            self._infer(message, call)
        except NotFound as error:
            layout = self._layouts.of(message)
            if not self._lending.again(self._infer, message, call, layout.model, layout.version):
                call.fail(error, STATUSES)
        except ForebayError as error:
            call.fail(error, STATUSES)

    async def infer_stream(self, messages: AsyncIterator[Data], call: Call) -> AsyncIterator[Written]:
        """Answer `ModelStreamInfer`."""
        stream = InferStream(self.begin_for, self.response, call)
        reading = asyncio.ensure_future(stream.read(messages))
        try:
            async for message in stream.ready():
                yield message
            await reading  # what it raises is no error of a request
        finally:
            reading.cancel()
            stream.close()

    def served(self, model: str, version: str) -> Served:
        """Return who answers for a model; raises NotFound if there is no such model, or no such version of it."""
        try:
            versions = self._app.versions(model)
        except UnknownModel as error:
            raise in_tritons_words(error) from None
        return versions.named(version) if version else versions.turn()

    async def begin_for(self, stream: InferStream, call: Call, message: Data) -> BegunInfer | None:
        """Begin a request of a stream; None if it went to the session of the stream.

        Raises:
            ForebayError: Why it cannot be answered.
        """
        try:
            layout = self._layouts.of(message)
        except InvalidRequest:
            stream.id = id_of(message)
            raise
        stream.id = layout.id_in(message)
        is_slow = self._is_slow(layout)
        tensors = await self._read_beside(message, layout) if is_slow else self._tensors(message, layout)
        if self._lending.may_lend(layout.model, layout.version):
            async with self._lending.lend(layout.model, layout.version, call, timeout_of(layout.parameters)):
                return self._begin(call, stream, message, layout, tensors)
        if stream.joined is None and not stream.has_begun:
            served = self.served(layout.model, layout.version)
            stream.has_begun = True
            if served.session is not None:
                stream.join(served)
        if stream.joined is not None:
            stream.send(layout, tensors)
            return None
        return self._begin(call, stream, message, layout, tensors)

    def response(self, asked: BegunInfer, outcome: Outcome, parameters: Mapping[str, Parameter] = EMPTY) -> Written:
        """Return the response to a request.

        Raises:
            ForebayError: If an output cannot be put where the client wants it.
        """
        plan: _Plan = asked.plan
        config, regions = plan.served.endpoint.config, self._app.shared_regions
        found, places = response_to(asked.name, outcome, config, regions, plan.layout.places, parameters)
        return response_bytes.response(found, places)

    def _infer(self, message: Data, call: Call) -> None:
        layout = self._layouts.of(message)
        plan = self._plans.get(layout)
        if plan is not None:
            view = message if len(message) <= SHORT_BYTES else memoryview(message)
            data: list[Any] = [view[start:end] for start, end in plan.spans]
            self._submit(call, None, message, plan, data)
        elif self._is_slow(layout):
            if not self._lending.may_lend(layout.model, layout.version):
                self.served(layout.model, layout.version)  # else nothing has to be read
            run_beside(partial(self._infer_slowly, message, layout, call), call, STATUSES)
        else:
            self._begin(call, None, message, layout, self._tensors(message, layout))

    async def _infer_slowly(self, message: Data, layout: RequestLayout, call: Call) -> None:
        tensors = await self._read_beside(message, layout)
        is_away = self._lending.may_lend(layout.model, layout.version)
        lent = self._lending.lend(layout.model, layout.version, call) if is_away else contextlib.nullcontext()
        async with lent:
            self._begin(call, None, message, layout, tensors)

    def _begin(
        self, call: Call, stream: InferStream | None, message: Data, layout: RequestLayout, tensors: Sequence[Tensor]
    ) -> BegunInfer:
        """Submit a request whose tensors have been read; raises the ForebayError that says why not."""
        served = self.served(layout.model, layout.version)
        name = served.endpoint.name
        if served.tensors is None:
            raise InvalidRequest(f"the model '{name}' does not accept tensors; ask it over HTTP at /models/{name}")
        asked = served.in_tensors
        if asked.contract.streams and stream is None:
            raise InvalidRequest(f"the model '{name}' answers in any number of parts; ask it by ModelStreamInfer")
        for place in layout.places.values():
            offered(self._app.shared_regions).require(place)
        params, size = served.tensors.ask(tensors, [one.name for one in layout.outputs], parameters=layout.parameters)
        if size > 1 and asked.contract.streams:
            msg = f"the model '{name}' streams what it gives for one sample, and {size} came; send them one by one"
            raise InvalidRequest(msg)
        spans = [span for span in layout.data if span is not None]
        plan = _Plan(layout, asked, params, size, spans)
        is_usual = layout.fixed is not None and not layout.is_elsewhere and len(spans) == len(layout.inputs)
        if is_usual and not asked.contract.streams and len(self._app.versions(name).weights) < 2:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[layout] = plan
        return self._submit(call, stream, message, plan, [one.data for one in tensors])

    def _submit(
        self, call: Call, stream: InferStream | None, message: Data, plan: _Plan, data: list[Data]
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
        if stream is None:
            call.on_cancel = asked.cancel  # before, for it may be refused at once: an ended call refers to no request
        else:
            asked.stream = stream
            stream.enter(asked)
            if served.contract.streams:
                asked.on_part = partial(stream.part, asked)
        served.endpoint.submit(asked)
        return asked

    def _replied(self, request: Request, outcome: Outcome) -> None:
        assert type(request) is BegunInfer
        if request.stream is not None:
            request.stream.answered(request, outcome)
            return
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

    async def _read_beside(self, message: Data, layout: RequestLayout) -> list[Tensor]:
        return await self._readers.run(self._tensors, message, layout)

    def _tensors(self, message: Data, layout: RequestLayout) -> list[Tensor]:
        return layout.tensors(message, offered(self._app.shared_regions).reader() if layout.is_elsewhere else None)
