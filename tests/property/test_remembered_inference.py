# SPDX-License-Identifier: Apache-2.0
"""A call like one before is answered as one that was never seen, over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import MODELS

from forebay.errors import ForebayError
from forebay.protocols.kserve.infer_calls import InferRequest
from forebay.protocols.kserve.messages import messages
from forebay.server.app import App
from forebay.server.config import HttpConfig, Overrides
from forebay.serving.tensor_face import TensorRequest, outcome_of, tensors_of
from forebay.surfaces.native.target_models import serve_target
from forebay.transports.grpc.model_infer import InferMethods
from forebay.transports.http.kserve_calls import InferRoute

M = messages()


class Call:
    """Keeps what it is answered."""

    peer, metadata, deadline, tenant = "127.0.0.1:1", (), float("inf"), None

    def __init__(self) -> None:
        self.on_cancel: Any = None
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered_by(self, *_: Any) -> None: ...

    def reply(self, message: bytes) -> None:
        self.answer.set_result(message)

    def reply_in_pieces(self, pieces: Any) -> None:
        self.answer.set_result(b"".join(pieces))

    def fail(self, error: ForebayError, _own: Any) -> None:
        self.answer.set_result(error.message)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Requests to models of tests/models/tensors_rpc.py, most of them alike."""
    name = draw(st.sampled_from(["mirror"] * 4 + ["add", "upper", "picky", "no such"]))
    made = M.ModelInferRequest(model_name=name, id=draw(st.sampled_from(["", "", "", "a", "b"])))
    rows, value = draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.integers(0, 9))
    if name == "upper":
        given = {"input": (np.array([draw(st.sampled_from(["a", "b", "ab"]))] * rows, object), "BYTES")}
    elif name == "picky":
        given = {"input": (np.full([rows], value, "i8"), "INT64")}
    else:
        width = draw(st.sampled_from([4, 4, 4, 2])) if name == "mirror" else 4
        names = ["left", "right"] if name == "add" else ["input"]
        given = {one: (np.full([rows, width], value, "f4"), "FP32") for one in names}
    for one, (array, datatype) in given.items():
        made.inputs.add(name=one, datatype=datatype, shape=array.shape)
        texts = [len(text).to_bytes(4, "little") + text.encode() for text in array] if datatype == "BYTES" else []
        made.raw_input_contents.append(b"".join(texts) if texts else array.tobytes())
    if draw(st.booleans()) and name == "mirror":
        made.outputs.add(name=draw(st.sampled_from(["output", "other"])))
    if draw(st.integers(0, 5)) == 0:
        made.parameters["timeout"].int64_param = 10**9
    return made.SerializeToString()


@given(st.lists(requests(), min_size=2, max_size=12))
@settings(max_examples=25, deadline=None)
def test_a_call_like_one_before_is_answered_as_one_never_seen(asked):
    async def run() -> None:
        app = App(serve_target(str(MODELS / "tensors_rpc.py"), Overrides(worker_kind="inline")).served)
        await app.start()
        try:
            remembers = InferMethods(app)
            for message in asked:
                found = []
                for methods in (remembers, remembers, InferMethods(app)):
                    call: Any = Call()
                    methods.infer(message, call)
                    found.append(await call.answer)
                assert found[0] == found[1] == found[2]
        finally:
            await app.drain(0.0)

    asyncio.run(run())


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[InferRequest, Any]:
    """Answers, most of them of one tensor that is told as the one before."""
    asked = InferRequest(model="mirror", id=draw(st.sampled_from(["", "", "", "a"])), inputs=(), outputs=())
    found: list[Any] = [[]]
    for name in draw(st.sampled_from([["output"]] * 4 + [["other"], ["output", "other"]])):
        shape = [draw(st.sampled_from([1, 1, 1, 2])), draw(st.sampled_from([2, 2, 1]))]
        values = np.full(shape, draw(st.integers(0, 3)), draw(st.sampled_from(["f4", "f4", "i4"])))
        is_json = draw(st.integers(0, 3)) == 0
        found[0].append([name, "FP32" if values.dtype.kind == "f" else "INT32", shape, is_json])
        found.append(str(values.tolist()).encode() if is_json else values.tobytes())
    return asked, outcome_of(tensors_of(found[0], found[1:]), draw(st.sampled_from([{}, {}, {"a": 1}])))


@given(st.lists(outcomes(), min_size=2, max_size=12))
@settings(max_examples=50, deadline=None)
def test_an_answer_over_http_like_one_before_says_what_one_never_told_says(answers):
    (served,) = (
        one for one in serve_target(str(MODELS / "tensors_rpc.py"), Overrides()).served if one.endpoint.name == "mirror"
    )
    assert served.tensors is not None
    remembers = InferRoute(served, served.tensors, HttpConfig(), lambda: None)
    for asked, outcome in answers:
        request = TensorRequest([], print, {}, None, call=asked)
        fresh = InferRoute(served, served.tensors, HttpConfig(), lambda: None)
        assert (
            remembers.answer(request, outcome) == remembers.answer(request, outcome) == fresh.answer(request, outcome)
        )
