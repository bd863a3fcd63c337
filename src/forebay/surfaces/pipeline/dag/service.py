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
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forebay.errors import Cancelled, DeadlineExceeded, ForebayError, QueueFull, Unavailable
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
from forebay.workers.objects import Packed

if TYPE_CHECKING:
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.dag.wiring import Dag
    from forebay.surfaces.pipeline.figures.profile import Profile

log = logging.getLogger("forebay.pipeline")

T = TypeVar("T")

SMALL_BYTES: Final = 64 * 1024
"""Requests and results up to this size are read and written on the loop, where no code of the project's is involved."""

AGAIN: Final = codes.CustomExceptionCode.TIMEOUT.value
"""What `dag.retry` tries again."""


class PipelineService:
    """Answers requests with a graph of ops.

    Attributes:
        name: What requests may name it as; with an empty name any will do.
        request_class: Message of a request.
        response_class: Message of an answer.
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
        mode = config.dag.request_parse
        dag.request_op.request_parse = hooks.parse_mode_of(dag.ops.values()) if mode == "auto" else mode
        dag.response_op.response_class = self.response_class

    async def infer(self, request: Any, *, timeout_s: float | None, peer: str) -> Any:
        """Answer one request.

        Args:
            request: What came in.
            timeout_s: Time it has; None takes the configured one.
            peer: Who sent it, for the log.

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
        times = CallTimes(time.monotonic())
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
        if logs.requests.isEnabledFor(logging.INFO):
            text = "(data_id=%d log_id=%s) %s from %s: err_no %d, %.1f ms"
            taken_ms = (times.ended - times.started) * 1000
            logs.requests.info(text, data_id, log_id, request.method or "inference", peer, response.err_no, taken_ms)
        return response

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
                results = await self.endpoint.call({REQUEST: given}, params=params, timeout_s=left_s)
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
        cause = error.__cause__
        if cause is not None and not self.calls.is_closing:
            log.error("(data_id=%d log_id=%s) %s", data_id, log_id, error.message, exc_info=cause)
        told = codes.err_of(error, closing=self.calls.is_closing)
        text = told.text if told.product else f"(data_id={data_id} log_id={log_id}) {told.text}"
        named = codes.error(told.err_no, text, product=told.product)
        data = ChannelData.of(named, data_id=data_id, log_id=log_id)
        try:
            if self._packs_itself:
                patience = time.monotonic() + ERROR_S
                response = await self._in_thread(lambda: self._pack(data), patience)
            else:
                response = self._pack(data)
        except ForebayError as worse:
            log.error("(data_id=%d log_id=%s) %s", data_id, log_id, worse.message, exc_info=worse.__cause__)  # noqa: TRY400
            response = packing.pack_error(told.err_no, text, self.response_class)
        if self._config.error_codes == "v0.4" and not told.product:
            response.err_no = codes.to_v04(told.err_no)
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


def _bytes_of(request: Any) -> int:
    """Return about how much there is to read."""
    return SMALL_BYTES + 1 if request.tensors else sum(map(len, request.value))


def _size_of(value: Any) -> int:
    if type(value) in {Packed, Stored}:
        return SMALL_BYTES + 1
    return len(value) if isinstance(value, str) else getattr(value, "nbytes", 0)
