# SPDX-License-Identifier: Apache-2.0
"""One request from the wire through the graph to its answer: read it, run it, write what became of it.

    submit -> _begin -> _enter -> the graph's endpoint -> _replied -> _answered -> _end

Each step calls the next one, now or later, or `_failed`; all of them run on the loop, and none waits. Steps that may
raise are made by `_do`, so that whatever one raises ends its request, once.

The hooks of the request and the response op are the project's code and run in a few threads of their own. The defaults
run on the loop, where a request or a result is small.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import Cancelled, DeadlineExceeded, ForebayError, InternalError, QueueFull, TooLate
from forebay.graph.values import loaded
from forebay.observe.traces import timeline
from forebay.remote_servers.servers import PARENT
from forebay.surfaces.pipeline import codes
from forebay.surfaces.pipeline.dag.predictions import Prediction, Predictions, log_call, stopped
from forebay.surfaces.pipeline.dag.wiring import RESULT, Dag
from forebay.surfaces.pipeline.figures.profile import KEY, CallTimes, Profile, RequestProfile, take_wish
from forebay.surfaces.pipeline.ops import hooks, packing
from forebay.surfaces.pipeline.ops.channel import ChannelData
from forebay.surfaces.pipeline.ops.op import REQUEST
from forebay.surfaces.pipeline.store.store import Stored
from forebay.types.call import Failure, Outcome, Request
from forebay.types.failures import trace_of, without_frames, words_of
from forebay.types.user_exceptions import caught
from forebay.workers.user_calls.hanging_calls import Late, LoopThreads
from forebay.workers.wire.objects import Packed

if TYPE_CHECKING:
    import itertools

    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.config import PipelineConfig

log = logging.getLogger("forebay.pipeline")

SMALL_BYTES: Final = 64 * 1024
"""Requests and results up to this size are read and written on the loop, where no code of the project's is involved."""

SMALL_COUNT: Final = 1_000
"""So may those with up to this many keys and values."""

AGAIN: Final = codes.CustomExceptionCode.TIMEOUT.value
"""What `dag.retry` tries again."""

ERROR_S: Final = 5.0
"""Time the project's hook has to write an error; after it the usual form is taken."""


class PipelineService(Predictions):
    """Answers requests with a graph of ops in this process."""

    def __init__(  # noqa: PLR0913 - each is one plain fact about the service
        self,
        name: str,
        dag: Dag,
        endpoint: Endpoint,
        config: PipelineConfig,
        *,
        ids: itertools.count[int],
        profile: Profile,
        restored: Callable[[Mapping[str, Any], int], Mapping[str, Any]],
        ended: Callable[[int, CallTimes, bool], None],
    ) -> None:
        """Put a graph behind its first and its last op.

        Args:
            restored: Puts back into a result what is in the store, given the number of its request.
            ended: Called with each request that has come to its end: its number, its times and whether it was
                answered without an error.
        """
        super().__init__(name, endpoint, config)
        self._request_op = dag.request_op
        self._response_op = dag.response_op
        self._unpacks_itself = hooks.overrides(dag.request_op, "unpack_request_package")
        self._packs_itself = hooks.overrides(dag.response_op, "pack_response_package")
        fields = self.response_class.DESCRIPTOR.fields_by_name
        self._tells_pairs = "key" in fields and "value" in fields
        self._debug = config.debug_errors
        self._attempts = config.dag.retry
        self._ids = ids
        self._profile = profile
        self._restored = restored
        self._ended = ended
        self._threads = LoopThreads(config.worker_num)
        mode = config.dag.request_parse
        dag.request_op.request_parse = hooks.parse_mode_of(dag.ops.values()) if mode == "auto" else mode
        dag.response_op.response_class = self.response_class

    def _begin(self, asked: Prediction) -> None:
        asked.data_id = next(self._ids)
        beside = self._unpacks_itself or _bytes_of(asked.message) > SMALL_BYTES
        self._do(asked, self._unpack, self._enter, self._failed, asked.deadline if beside else None)

    @property
    def problem(self) -> str:
        """Why requests cannot be answered, although the ops could work; empty if they can."""
        return "all threads of its request and response hooks hang" if self._threads.is_stuck else ""

    def close(self) -> None:
        """Let its threads end."""
        self._threads.close()

    def _unpack(self, asked: Prediction) -> hooks.Unpacked:
        return hooks.unpack(self._request_op, asked.message, debug=self._debug)

    def _enter(self, asked: Prediction, unpacked: hooks.Unpacked) -> None:
        inputs = unpacked.inputs
        asked.log_id = unpacked.log_id
        asked.times.unpacked = time.monotonic()
        if take_wish(inputs) and self._tells_pairs:
            asked.profile = RequestProfile(self._profile, asked.data_id)
            asked.profile.__enter__()
            asked.reply = self._replied_soon
        asked.params = {"data_id": asked.data_id, "log_id": asked.log_id}
        if asked.parent:
            asked.params = {**asked.params, PARENT: asked.parent}
        asked.id = _name_of(asked)
        if self._attempts == 1:
            asked.body = {REQUEST: inputs}
            self.endpoint.submit(asked)
        else:
            timeline.name(asked)
            self._try(asked, inputs, self._attempts)

    def _try(self, asked: Prediction, inputs: dict[str, Any], attempts: int) -> None:
        """Run the graph, again after a time-out if attempts and time are left."""

        def replied(_attempt: Request, outcome: Outcome) -> None:
            may_try = attempts > 1 and type(outcome) is Failure and not asked.is_cut
            if may_try and codes.err_of(outcome.error).err_no == AGAIN and time.monotonic() < asked.deadline:
                self._try(asked, inputs, attempts - 1)
            else:
                asked.reply(asked, outcome)

        # What a first attempt changed in place must not be what the next one sees.
        given, raised = (inputs, None) if attempts == 1 else caught(copy.deepcopy, inputs)
        if raised is not None:
            text = f"the values of the request cannot be copied, which dag.retry needs: {words_of(raised)}"
            self._failed(asked, codes.error(codes.CustomExceptionCode.TYPE_ERROR.value, text))
            return
        asked.attempt = Request(
            body={REQUEST: given},
            reply=replied,
            params=asked.params,
            deadline=asked.deadline,
            due=asked.due,
            id=asked.id,
            run_id=asked.run_id,
            tenant=asked.tenant,
        )
        self.endpoint.submit(asked.attempt)

    def _replied_soon(self, asked: Request, outcome: Outcome) -> None:
        """Go on in the next turn: only then has the timeline reported the last op's batch."""
        asyncio.get_running_loop().call_soon(self._replied, asked, outcome)

    def _replied(self, asked: Request, outcome: Outcome) -> None:
        """Take what came out of the graph."""
        assert isinstance(asked, Prediction)
        asked.attempt = None
        if asked.profile is not None:
            asked.profile.__exit__()
        asked.times.packing = time.monotonic()
        if type(outcome) is Failure:
            self._failed(asked, outcome.error)
            return
        asked.is_leaving = True
        result = asked.body = outcome[RESULT]
        is_large = type(result) is Packed or sum(map(_size_of, result.values())) > SMALL_BYTES
        until = asked.deadline if self._packs_itself or is_large else None
        self._do(asked, self._pack_result, self._answered, self._failed, until)

    def _pack_result(self, asked: Prediction) -> Any:
        result, data_id = asked.body, asked.data_id
        values = result.load() if type(result) is Packed else loaded(result)
        return self._pack(ChannelData.of(self._restored(values, data_id), data_id=data_id, log_id=asked.log_id))

    def _pack(self, data: ChannelData) -> Any:
        response = packing.message_of(hooks.pack(self._response_op, data, debug=self._debug))
        if not isinstance(response, self.response_class):
            found = type(response).__name__
            text = f"rpc package error: pack_response_package should return a Response, it returned {found}"
            raise codes.error(codes.CustomExceptionCode.RPC_PACKAGE_ERROR.value, text)
        if data.prod_error_code is None:
            response.err_no = codes.numbered(_number_of(response, data), self.error_codes)
        return response

    def _answered(self, asked: Prediction, response: Any) -> None:
        if asked.profile is not None:
            asked.times.ended = time.monotonic()
            response.key.append(KEY)
            response.value.append(asked.profile.text(asked.times))
        self._end(asked, response, ok=response.err_no == codes.OK)

    def _failed(self, asked: Prediction, error: ForebayError) -> None:
        """Write the answer to a request that failed; the project's own hook may give it another form."""
        if asked.is_cut:
            error = stopped()
        elif isinstance(error, QueueFull | TooLate | Cancelled):
            self._end(asked, error, ok=False)
            return
        asked.is_leaving = True
        cause = error.__cause__
        if cause is not None and not self.is_closing:
            log.error("(%s) %s", _name_of(asked), error.message, extra={"trace": trace_of(cause)})
        told = codes.err_of(error, closing=self.is_closing)
        text = told.text if told.product else f"({_name_of(asked)}) {told.text}"

        def pack(asked: Prediction) -> Any:
            named = codes.error(told.err_no, text, product=told.product)
            return self._pack(ChannelData.of(named, data_id=asked.data_id, log_id=asked.log_id))

        def packed(asked: Prediction, response: Any) -> None:
            self._end(asked, response, ok=False)

        def failed(asked: Prediction, worse: ForebayError) -> None:
            log.error("(%s) %s", _name_of(asked), worse.message, exc_info=worse.__cause__)
            packed(asked, self.error(told.err_no, text, is_product=told.product))

        self._do(asked, pack, packed, failed, time.monotonic() + ERROR_S if self._packs_itself else None)

    def _give_up(self, asked: Prediction, error: ForebayError) -> None:
        """Answer a request whose error cannot be written: with a number and words that every answer can carry."""
        text = f"({_name_of(asked)}) {error.message}"
        number = codes.CustomExceptionCode.UNKNOW.value
        self._end(asked, packing.pack_error(number, text, self.response_class), ok=False)

    def _end(self, asked: Prediction, answer: Any, *, ok: bool) -> None:
        if asked not in self._open:  # a step failed after it had answered
            return
        asked.times.ended = time.monotonic()
        try:
            self._ended(asked.data_id, asked.times, ok)
            if not isinstance(answer, ForebayError):
                log_call(asked, answer)
        finally:
            self._respond(asked, answer)

    def _do(
        self,
        asked: Prediction,
        work: Callable[[Prediction], Any],
        then: Callable[[Prediction, Any], None],
        otherwise: Callable[[Prediction, ForebayError], None],
        until: float | None,
    ) -> None:
        """Do a step, and go on with what came of it.

        Args:
            work: The step.
            then: What follows, with what it returned.
            otherwise: What follows if it, or `then`, fails.
            until: When it is late and stays behind: it is done beside the loop, because it is the project's code or
                takes long. None does it here and now.
        """

        def done(result: Any, error: BaseException | None) -> None:
            asked.beside = None
            if error is None:
                _, error = caught(then, asked, result)
            if error is not None:
                _, error = caught(otherwise, asked, _named(error))
            if error is not None:
                self._give_up(asked, _named(error))

        if until is None:
            done(*caught(work, asked))
        else:
            asked.beside = self._threads.call(partial(work, asked), until, done)

    def _call_off(self, prediction: Prediction) -> None:
        beside = prediction.beside
        if beside is None:
            super()._call_off(prediction)
            return
        beside.drop()
        prediction.beside = None
        if prediction.is_cut and not prediction.is_leaving:
            self._failed(prediction, stopped())
        else:
            self._end(prediction, Cancelled("the client went away"), ok=False)


def _name_of(asked: Prediction) -> str:
    """Return what clients and the log call a request."""
    return f"data_id={asked.data_id} log_id={asked.log_id}"


def _number_of(response: Any, data: ChannelData) -> int:
    """Return the number of an answer: the error's, unless the hook gave another one, or a result in place of the error.

    `ecode` has fewer numbers than `err_no`, so one that was handed on by that name may stand for another.
    """
    found: int = response.err_no
    gives = any(field.name not in {"err_no", "err_msg"} for field, _ in response.ListFields())
    is_handed_on = found == codes.from_v03(codes.to_v03(data.error_code)) or not (found or gives)
    return data.error_code if is_handed_on else found


def _named(error: BaseException) -> ForebayError:
    """Return an error in a form that clients can be told; a defect of ours is logged."""
    if isinstance(error, ForebayError):
        return without_frames(error)  # its frames hold the request, which the garbage collector does not look at
    if isinstance(error, Late):
        return DeadlineExceeded("the time of the request was over before its answer was ready")
    log.error("failed to answer a request", exc_info=error)
    return InternalError("the server failed; its log says why")


def _bytes_of(request: Any) -> int:
    """Return about how much there is to read."""
    keys, values, tensors = (getattr(request, name, ()) for name in ("key", "value", "tensors"))
    if tensors or len(values) + len(keys) > SMALL_COUNT:
        return SMALL_BYTES + 1
    return sum(map(len, values))


def _size_of(value: Any) -> int:
    if type(value) in {Packed, Stored}:
        return SMALL_BYTES + 1
    if isinstance(value, str):
        return len(value)
    size, _ = caught(getattr, value, "nbytes", 0)  # it may be an object of the user's
    return size if isinstance(size, int) else 0
