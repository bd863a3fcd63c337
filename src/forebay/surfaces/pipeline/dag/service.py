# SPDX-License-Identifier: Apache-2.0
"""One request from the wire through the graph to its answer: read it, run it, write what became of it.

The hooks of the request and the response op are the project's code and run in a few threads of their own. The defaults
run on the loop, where a request or a result is small.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forebay.errors import Cancelled, DeadlineExceeded, ForebayError, InternalError, QueueFull, Unavailable
from forebay.graph.values import loaded
from forebay.surfaces.pipeline import codes, logs
from forebay.surfaces.pipeline.dag.calls import OpenCalls
from forebay.surfaces.pipeline.dag.edge import EdgeThreads
from forebay.surfaces.pipeline.dag.wiring import RESULT
from forebay.surfaces.pipeline.figures.profile import KEY, CallTimes, RequestProfile, take_wish
from forebay.surfaces.pipeline.ops import hooks, packing
from forebay.surfaces.pipeline.ops.channel import ChannelData
from forebay.surfaces.pipeline.ops.op import REQUEST
from forebay.surfaces.pipeline.store.store import Stored
from forebay.types.call import Failure, Request
from forebay.types.caught import caught
from forebay.workers.objects import Packed

if TYPE_CHECKING:
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.config import ErrorCodes, PipelineConfig
    from forebay.surfaces.pipeline.dag.wiring import Dag
    from forebay.surfaces.pipeline.figures.profile import Profile
    from forebay.types.call import Outcome

log = logging.getLogger("forebay.pipeline")

T = TypeVar("T")

Respond = Callable[[Any], None]
"""Takes a request's answer, or the `ForebayError` that is a fault of the transport."""

SMALL_BYTES: Final = 64 * 1024
"""Requests and results up to this size are read and written on the loop, where no code of the project's is involved."""

SMALL_COUNT: Final = 1_000
"""So may those with up to this many keys and values."""

AGAIN: Final = codes.CustomExceptionCode.TIMEOUT.value
"""What `dag.retry` tries again."""


class Direct(Request, gc=False, eq=False):
    """A request to the graph that is answered without a task: nothing of the project's code is at its border."""

    data_id: int = 0
    log_id: Any = 0
    asked: Any = None
    peer: str = ""
    times: CallTimes | None = None
    respond: Respond | None = None
    is_cut: bool = False


class PipelineService:
    """Answers requests with a graph of ops.

    Attributes:
        name: What requests may name it as; with an empty name any will do.
        request_class: Message of a request.
        response_class: Message of an answer.
        methods: What requests may call; None allows anything.
        error_codes: Which generation's numbers answers carry.
        calls: The requests that wait.
        endpoint: The graph.
    """

    def __init__(  # noqa: PLR0913 - each is one plain fact about the service
        self,
        name: str,
        dag: Dag,
        endpoint: Endpoint,
        config: PipelineConfig,
        *,
        messages: tuple[Any, Any],
        ids: itertools.count[int],
        profile: Profile,
        restored: Callable[[Mapping[str, Any], int], Mapping[str, Any]],
        answered: Callable[[int, CallTimes, bool], None],
    ) -> None:
        """Put a graph behind its first and its last op.

        Args:
            name: What requests may name it as.
            dag: The ops.
            endpoint: The graph of them.
            config: What holds for it.
            messages: The classes of a request and of an answer.
            ids: Numbers of its requests.
            profile: Makes the profile of a request that asks for it.
            restored: Gives a result with what is in the store put back, by the number of its request.
            answered: Called with each request that has come to its end: its number, its times and whether it was
                answered without an error.
        """
        self.name = name
        self.request_class, self.response_class = messages
        self.methods: Sequence[str] | None = config.methods
        self.error_codes: ErrorCodes = config.error_codes
        self.calls = OpenCalls()
        self.endpoint = endpoint
        self._config = config
        self._request_op = dag.request_op
        self._response_op = dag.response_op
        self._unpacks_itself = hooks.overrides(dag.request_op, "unpack_request_package")
        self._packs_itself = hooks.overrides(dag.response_op, "pack_response_package")
        self._ids = ids
        self._profile = profile
        self._restored = restored
        self._answered = answered
        self._threads = EdgeThreads(config.worker_num)
        self._is_direct = not self._unpacks_itself and not self._packs_itself and config.dag.retry == 1
        self._direct: set[Direct] = set()
        self._packing: set[asyncio.Task[None]] = set()
        self.calls.on_cut = self._cut
        mode = config.dag.request_parse
        dag.request_op.request_parse = hooks.parse_mode_of(dag.ops.values()) if mode == "auto" else mode
        dag.response_op.response_class = self.response_class

    async def infer(self, request: Any, *, timeout_s: float | None, peer: str, came: float | None = None) -> Any:
        """Answer one request.

        Args:
            request: What came in.
            timeout_s: Time it has; None takes the configured one.
            peer: Who sent it, for the log.
            came: When it came in, in seconds of `time.monotonic`, if it was in another process before; None means now.

        Returns:
            The answer; its `err_no` says whether it is an error.

        Raises:
            QueueFull: If too many requests wait.
            Unavailable: If the ops are not up yet.
        """
        endpoint = self.endpoint
        if not endpoint.accepting and not self.calls.is_closing:
            msg = "the ops are still loading; try again later"
            raise Unavailable(msg)
        data_id, log_id = next(self._ids), request.logid
        now = time.monotonic()
        times = CallTimes(now) if came is None else CallTimes(came, entered=now)
        limit_s = endpoint.config.timeout_s
        until = times.started + (limit_s if timeout_s is None else min(timeout_s, limit_s))
        ok = False
        try:
            with self.calls.waiting():
                unpacked = await self._unpack(request, until)
                log_id = unpacked.log_id
                times.unpacked = time.monotonic()
                profile = RequestProfile(self._profile, data_id) if take_wish(unpacked.inputs) else None
                with profile or nullcontext():
                    result = await self._run(unpacked.inputs, {"data_id": data_id, "log_id": log_id}, until)
            times.packing = time.monotonic()
            response = await self._pack_result(result, data_id, log_id, until)
            ok = response.err_no == codes.OK
            if profile is not None:
                times.ended = time.monotonic()
                response.key.append(KEY)
                response.value.append(profile.text(times))
        except (QueueFull, Cancelled):
            raise
        except ForebayError as error:
            response = await self._pack_error(error, data_id, log_id)
        finally:
            times.ended = time.monotonic()
            self._answered(data_id, times, ok)
        log_call(request, peer, response, data_id, log_id, times)
        return response

    def submit(self, request: Any, *, deadline: float, peer: str, respond: Respond) -> Direct | None:
        """Answer one request as `infer` does, without a task of its own where that is possible.

        Args:
            request: What came in.
            deadline: Absolute, in seconds of `time.monotonic`.
            peer: Who sent it, for the log.
            respond: Called on the loop, once, unless the request is cancelled.

        Returns:
            What `cancel` takes; None where only `infer` can answer: hooks of the project's at the border, retries of
            the whole graph, a profile, or values too large for the loop. Nothing was done then.
        """
        endpoint = self.endpoint
        is_usual = self._is_direct and endpoint.accepting and _bytes_of(request) <= SMALL_BYTES
        if not is_usual or KEY in request.key:
            return None
        times = CallTimes(time.monotonic())
        direct = Direct(
            body=None,
            reply=self._direct_reply,
            deadline=min(deadline, times.started + endpoint.config.timeout_s),
            data_id=next(self._ids),
            log_id=request.logid,
            asked=request,
            peer=peer,
            times=times,
            respond=respond,
        )
        self._direct.add(direct)
        try:
            unpacked = hooks.unpack(self._request_op, request, debug=self._config.debug_errors)
        except ForebayError as error:
            direct.done = True
            self._direct_reply(direct, Failure(error))
            return direct
        direct.log_id = unpacked.log_id
        direct.body = {REQUEST: unpacked.inputs}
        direct.params = {"data_id": direct.data_id, "log_id": direct.log_id}
        direct.id = _name_of(direct.data_id, direct.log_id)
        times.unpacked = time.monotonic()
        endpoint.submit(direct)
        return direct

    def cancel(self, direct: Direct) -> None:
        """Forget a request whose client went away."""
        direct.respond = None
        self.endpoint.cancel(direct)

    def _cut(self) -> None:
        for direct in list(self._direct):
            direct.is_cut = True
            self.endpoint.cancel(direct)

    def _direct_reply(self, direct: Request, outcome: Outcome) -> None:
        assert isinstance(direct, Direct)
        times = direct.times
        assert times is not None
        times.packing = time.monotonic()
        if type(outcome) is Failure:
            self._direct_failed(direct, outcome.error)
            return
        result = outcome[RESULT]
        if sum(map(_size_of, result.values())) > SMALL_BYTES:
            task = asyncio.ensure_future(self._pack_directly(direct, result))
            self._packing.add(task)
            task.add_done_callback(self._packing.discard)
            return
        try:
            values = self._restored(result, direct.data_id)
            response = self._pack(ChannelData.of(values, data_id=direct.data_id, log_id=direct.log_id))
        except Exception as error:  # noqa: BLE001 - a defect must not leave a client without an answer
            self._direct_failed(direct, _named(error))
        else:
            self._direct_done(direct, response, ok=response.err_no == codes.OK)

    async def _pack_directly(self, direct: Direct, result: Any) -> None:
        try:
            response = await self._pack_result(result, direct.data_id, direct.log_id, direct.deadline)
        except Exception as error:  # noqa: BLE001 - see `_direct_reply`
            self._direct_failed(direct, _named(error))
        else:
            self._direct_done(direct, response, ok=response.err_no == codes.OK)

    def _direct_failed(self, direct: Direct, error: ForebayError) -> None:
        if direct.is_cut:
            error = Unavailable("the server stopped before the request was answered")
        elif isinstance(error, QueueFull | Cancelled):
            self._direct_done(direct, error, ok=False)
            return
        self._direct_done(direct, self._error_response(error, direct.data_id, direct.log_id), ok=False)

    def _direct_done(self, direct: Direct, answer: Any, *, ok: bool) -> None:
        times, respond = direct.times, direct.respond
        assert times is not None
        self._direct.discard(direct)
        direct.respond = None
        times.ended = time.monotonic()
        self._answered(direct.data_id, times, ok)
        if not isinstance(answer, ForebayError):
            log_call(direct.asked, direct.peer, answer, direct.data_id, direct.log_id, times)
        if respond is not None:
            respond(answer)

    def close(self) -> None:
        """Let its threads end."""
        self._threads.close()

    async def _unpack(self, request: Any, until: float) -> hooks.Unpacked:
        debug = self._config.debug_errors
        if self._unpacks_itself or _bytes_of(request) > SMALL_BYTES:
            return await self._in_thread(lambda: hooks.unpack(self._request_op, request, debug=debug), until)
        return hooks.unpack(self._request_op, request, debug=debug)

    async def _run(self, inputs: dict[str, Any], params: Mapping[str, Any], until: float) -> Mapping[str, Any]:
        """Run the graph, again after a time-out if the configuration says so and time is left."""
        attempts = self._config.dag.retry
        for attempt in range(1, attempts + 1):
            # What a first attempt changed in place must not be what the next one sees.
            given = inputs if attempt == attempts else copy.deepcopy(inputs)
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            try:
                results = await self.endpoint.call(
                    {REQUEST: given}, params=params, timeout_s=left_s, request_id=_name_of(**params)
                )
            except ForebayError as error:
                is_last = attempt == attempts or codes.err_of(error).err_no != AGAIN
                if is_last or time.monotonic() >= until:
                    # Without the frames of the call: they hold the request, which the garbage collector does not look
                    # at, and by it this error.
                    raise error.with_traceback(None) from None
            else:
                return results[RESULT]
        msg = "the time of the request was over before its answer was ready"
        raise DeadlineExceeded(msg)

    async def _pack_result(self, result: Any, data_id: int, log_id: int, until: float) -> Any:
        def pack() -> Any:
            values = result.load() if type(result) is Packed else loaded(result)
            values = self._restored(values, data_id)
            return self._pack(ChannelData.of(values, data_id=data_id, log_id=log_id))

        is_small = type(result) is not Packed and sum(map(_size_of, result.values())) <= SMALL_BYTES
        if is_small and not self._packs_itself:
            return pack()
        return await self._in_thread(pack, until)

    def _pack(self, data: ChannelData) -> Any:
        hook = self._response_op
        response = packing.message_of(hooks.pack(hook, data, debug=self._config.debug_errors))
        if not isinstance(response, self.response_class):
            found = type(response).__name__
            text = f"rpc package error: pack_response_package should return a Response, it returned {found}"
            raise codes.error(codes.CustomExceptionCode.RPC_PACKAGE_ERROR.value, text)
        return response

    async def _pack_error(self, error: ForebayError, data_id: int, log_id: int) -> Any:
        """Write the answer to a request that failed; the project's own hook may have a form of its own for it."""
        told, data, text = self._error_data(error, data_id, log_id)
        try:
            if self._packs_itself:
                patience = time.monotonic() + ERROR_S
                response = await self._in_thread(lambda: self._pack(data), patience)
            else:
                response = self._pack(data)
        except ForebayError as worse:
            response = self._worse(worse, told, data_id, log_id, text)
        return self._numbered(response, told)

    def _error_response(self, error: ForebayError, data_id: int, log_id: Any) -> Any:
        """Write the answer to a request that failed, where the project has no hook for it."""
        told, data, text = self._error_data(error, data_id, log_id)
        try:
            response = self._pack(data)
        except ForebayError as worse:
            response = self._worse(worse, told, data_id, log_id, text)
        return self._numbered(response, told)

    def _error_data(self, error: ForebayError, data_id: int, log_id: Any) -> tuple[codes.Told, ChannelData, str]:
        cause = error.__cause__
        if cause is not None and not self.calls.is_closing:
            log.error("(data_id=%d log_id=%s) %s", data_id, log_id, error.message, exc_info=cause)
        told = codes.err_of(error, closing=self.calls.is_closing)
        text = told.text if told.product else f"({_name_of(data_id, log_id)}) {told.text}"
        named = codes.error(told.err_no, text, product=told.product)
        return told, ChannelData.of(named, data_id=data_id, log_id=log_id), text

    def _worse(self, error: ForebayError, told: codes.Told, data_id: int, log_id: Any, text: str) -> Any:
        """Write an error in the usual form: the project's own form of it failed."""
        log.error("(data_id=%d log_id=%s) %s", data_id, log_id, error.message, exc_info=error.__cause__)
        return packing.pack_error(told.err_no, text, self.response_class)

    def _numbered(self, response: Any, told: codes.Told) -> Any:
        if not told.product:
            response.err_no = codes.numbered(told.err_no, self.error_codes)
        return response

    async def _in_thread(self, work: Callable[[], T], until: float) -> T:
        """Run code of the project's beside the loop.

        Raises:
            DeadlineExceeded: If it takes longer than the request has; it is left to end by itself.
        """
        try:
            return await asyncio.wait_for(self._threads.run(work), max(until - time.monotonic(), 0.0))
        except TimeoutError as error:
            msg = "the time of the request was over before its answer was ready"
            raise DeadlineExceeded(msg) from error


ERROR_S: Final = 5.0
"""Time the project's hook has to write an error; after it the usual form is taken."""


def log_call(request: Any, peer: str, response: Any, data_id: Any, log_id: Any, times: CallTimes) -> None:
    """Write the line of a request that was answered."""
    if logs.requests.isEnabledFor(logging.INFO):
        text = "(data_id=%s log_id=%s) %s from %s: err_no %d, %.1f ms"
        taken_ms = (times.ended - times.started) * 1000
        logs.requests.info(text, data_id, log_id, request.method or "inference", peer, response.err_no, taken_ms)


def _name_of(data_id: int, log_id: Any) -> str:
    """Return what clients and the log call a request."""
    return f"data_id={data_id} log_id={log_id}"


def _named(error: Exception) -> ForebayError:
    """Return an error as one that a client can be told; a defect of ours is logged."""
    if isinstance(error, ForebayError):
        return error
    log.error("an answer could not be written", exc_info=error)
    return InternalError("the server failed; its log says why")


def _bytes_of(request: Any) -> int:
    """Return about how much there is to read."""
    if request.tensors or len(request.value) + len(request.key) > SMALL_COUNT:
        return SMALL_BYTES + 1
    return sum(map(len, request.value))


def _size_of(value: Any) -> int:
    if type(value) in {Packed, Stored}:
        return SMALL_BYTES + 1
    if isinstance(value, str):
        return len(value)
    size, _ = caught(getattr, value, "nbytes", 0)  # it may be an object of the user's
    return size if isinstance(size, int) else 0
