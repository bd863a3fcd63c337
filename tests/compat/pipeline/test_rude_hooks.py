# SPDX-License-Identifier: Apache-2.0
"""Whatever a hook raises is the answer of its request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.compat.pipeline.op_items import run_one, told
from tests.pools.rude import FAULTS_OF_THE_CLIENT, made

from forebay.errors import ForebayError
from forebay.protocols import native
from forebay.surfaces.pipeline.ops.hooks import pack, unpack
from forebay.surfaces.pipeline.ops.op import Op, RequestOp, ResponseOp

BY_HAND = ["cancelled", "generator_exit", "keyboard", "exit", "own", "surrogate", "mute", "cursed"]


def in_a_worker(function: Any, *arguments: Any) -> Any:
    """As a worker calls it: in the main thread of a test, KeyboardInterrupt is somebody's Ctrl-C."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *arguments).result()


@pytest.mark.parametrize("hook", ["preprocess", "process", "postprocess"])
@pytest.mark.parametrize("what", BY_HAND)
def test_what_a_hook_raises_is_10000_and_its_worker_goes_on(hook: str, what: str) -> None:  # F18, F43
    def raises(*_arguments: Any) -> Any:
        raise made(what)

    op = Op("rude")
    setattr(op, hook, raises)
    outcome = in_a_worker(lambda: run_one(op, {"q": 1}, run_process=True))
    number, text = told(outcome)
    assert number == 10000
    assert text.encode()
    assert native.error_body(outcome.error, "id")


@pytest.mark.parametrize("what", sorted(FAULTS_OF_THE_CLIENT))
def test_own_errors_of_a_hook_can_be_written(what: str) -> None:  # F27
    op = Op("rude")

    def raises(input_dicts: Any) -> Any:
        raise made(what)

    op.preprocess = raises  # type: ignore[method-assign]
    outcome = in_a_worker(lambda: run_one(op, {"q": 1}, run_process=True))
    assert native.error_body(outcome.error, "id")


@pytest.mark.parametrize("what", BY_HAND)
def test_what_the_hooks_at_the_edge_raise_is_8000(what: str) -> None:  # F18, F43
    class Request(RequestOp):
        def unpack_request_package(self, request: Any) -> Any:
            raise made(what)

    class Response(ResponseOp):
        def pack_response_package(self, channeldata: Any) -> Any:
            raise made(what)

    for call in (lambda: unpack(Request(), None), lambda: pack(Response([]), None)):
        with pytest.raises(ForebayError, match="rpc package error") as raised:
            in_a_worker(call)
        assert native.error_body(raised.value, "id")
