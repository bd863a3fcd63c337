# SPDX-License-Identifier: Apache-2.0
"""How answers are written: the default, and the bodies that projects bring."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from forebay.errors import DeadlineExceeded, ForebayError, RunnerFailed
from forebay.surfaces.pipeline.codes import CustomExceptionCode, err_of, error
from forebay.surfaces.pipeline.ops import hooks, packing
from forebay.surfaces.pipeline.ops.channel import (
    ChannelData,
    ChannelDataEcode,
    ChannelDataErrcode,
    ChannelDataType,
)
from forebay.surfaces.pipeline.ops.op import ResponseOp
from forebay.surfaces.pipeline.protocol import literal, messages, tensors


def packed(outcome: Any, op: ResponseOp | None = None) -> Any:
    return hooks.pack(op or ResponseOp(), ChannelData.of(outcome, data_id=3, log_id=7))


def pairs(response: Any) -> dict[str, str]:
    return dict(zip(response.key, response.value, strict=True))


def read_back(text: str) -> Any:
    return literal.parse(text, "ndarray")


# ---------------------------------------------------------------------------------------------------------------------
# The default


@pytest.mark.parametrize(
    "value",
    [
        np.array([0.30000000000000004, 1e-300, -0.0]),
        np.array([0.1, 1 / 3], dtype="float32"),
        np.array([[1, 2], [3, 4]]),
        np.array([1, 2], dtype="int32"),
        np.array([True, False]),
        np.array([np.nan, np.inf, -np.inf]),
        np.zeros((2, 0)),
        np.arange(5000, dtype="float32"),
        np.array(5),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}",
)
def test_arrays_are_written_so_that_they_read_back_as_they_were(value: Any) -> None:  # P60
    response = packed({"y": value})
    assert (response.err_no, response.err_msg) == (0, "")
    text = pairs(response)["y"]
    assert text.startswith("array(")
    assert "..." not in text
    found = read_back(text)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()


@given(arrays.arrays(st.sampled_from(["float32", "float64", "int64"]), arrays.array_shapes(max_dims=3, max_side=4)))
@settings(max_examples=50, deadline=None)
def test_no_digit_is_lost(value: Any) -> None:  # P60
    found = read_back(pairs(packed({"y": value}))["y"])
    np.testing.assert_array_equal(found, value)
    assert found.dtype == value.dtype


def test_an_old_client_can_evaluate_what_it_is_sent() -> None:  # P60, trap 24
    values = {"y": np.array([[0.1, np.nan]], dtype="float32"), "n": np.arange(3)}
    names = {"array": np.array, "nan": np.nan, "inf": np.inf, "float32": np.float32}
    for name, text in pairs(packed(values)).items():
        assert "np." not in text
        np.testing.assert_array_equal(eval(text, names), values[name])  # the client's way, not ours


def test_numpys_print_options_are_left_alone() -> None:  # P60
    before = np.get_printoptions()
    packed({"y": np.zeros(5000)})
    assert np.get_printoptions() == before


def test_texts_are_answered_as_they_are() -> None:  # P61
    values = {"label": "cat", "text": str([np.float32(1.5)])}
    response = packed(values)
    assert response.err_no == 0
    assert pairs(response) == values


def test_lists_of_texts_are_written_like_arrays() -> None:  # P61
    assert pairs(packed({"labels": ["cat", "it's"], "y": np.array([1, 2])})) == {
        "labels": repr(["cat", "it's"]),
        "y": "array([1, 2])",
    }


@pytest.mark.parametrize(
    "outcome, kind",
    [
        ({"a": "text", "n": 1}, "<class 'int'>"),
        ({"a": "text", "y": np.zeros(1)}, "<class 'numpy.ndarray'>"),
        ({"labels": []}, "<class 'list'>"),
        ({"a": "text", "n": None}, "<class 'NoneType'>"),
    ],
)
def test_what_is_no_text_is_7000_without_any_pair(outcome: Any, kind: str) -> None:  # P61, trap 17
    response = packed(outcome)
    assert response.err_no == 7000
    assert response.err_msg == f"@DAGExecutor fetch var type must be str({kind})."
    assert pairs(response) == {}


def test_an_empty_result_is_a_success() -> None:  # P61
    response = packed({})
    assert (response.err_no, response.err_msg, pairs(response)) == (0, "", {})


def test_arrays_can_be_answered_as_tensors() -> None:  # P62
    op = ResponseOp()
    op.set_pack_format(isTensor=True)
    values = {"y": np.arange(6, dtype="float32").reshape(2, 3), "n": np.array([1, 2], dtype="int32")}
    response = packed(values, op)
    assert pairs(response) == {}
    found = tensors.unpack_all(response.tensors)
    for name, value in values.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(found[name], value)
    op.set_pack_format(False)
    assert list(pairs(packed(values, op))) == ["y", "n"]


def test_errors_are_answered_with_their_number_and_text() -> None:  # P63
    response = packed(error(5000, "no such feed"))
    assert (response.err_no, response.err_msg, pairs(response)) == (5000, "no such feed", {})
    response = packed(DeadlineExceeded("timed out after 200 ms"))
    assert (response.err_no, response.err_msg) == (6000, "timed out after 200 ms")


@pytest.mark.parametrize("code", [70, 100001])
def test_product_errors_are_answered_with_the_projects_own_number(code: int) -> None:  # P43, P94
    response = packed(error(code, "sold out", product=True))
    assert (response.err_no, response.err_msg, pairs(response)) == (code, "sold out", {})


@pytest.mark.parametrize("outcome", [{"y": np.array([object()])}])
def test_what_cannot_be_written_is_8000(outcome: Any) -> None:  # P63
    with pytest.raises(ForebayError) as caught:
        packed(outcome)
    assert err_of(caught.value).err_no == 8000


def test_the_answer_may_be_a_message_of_the_projects_own() -> None:  # P17
    op = ResponseOp()
    op.response_class = packing.Response
    assert pairs(packed({"a": "text"}, op)) == {"a": "text"}


# ---------------------------------------------------------------------------------------------------------------------
# Bodies of projects


class OldBody(ResponseOp):
    """The body of v0.3, with a print option that is still allowed."""

    def pack_response_package(self, channeldata: Any) -> Any:
        resp = packing.Response()
        resp.ecode = channeldata.ecode
        if resp.ecode == ChannelDataEcode.OK.value:
            if channeldata.datatype == ChannelDataType.CHANNEL_NPDATA.value:
                feed = channeldata.parse()
                for name, var in feed.items():
                    resp.value.append(var.__repr__())
                    resp.key.append(name)
            elif channeldata.datatype == ChannelDataType.DICT.value:
                feed = channeldata.parse()
                for name, var in feed.items():
                    if not isinstance(var, str):
                        resp.ecode = ChannelDataEcode.TYPE_ERROR.value
                        resp.error_info = self._log(f"fetch var type must be str({type(var)}).")
                        break
                    resp.value.append(var)
                    resp.key.append(name)
            else:
                resp.ecode = ChannelDataEcode.TYPE_ERROR.value
                resp.error_info = self._log(f"Error type({channeldata.datatype}) in datatype.")
        else:
            resp.error_info = channeldata.error_info
        return resp


class NewBody(ResponseOp):
    """The body of v0.4 and later."""

    def pack_response_package(self, channeldata: Any) -> Any:
        resp = packing.Response()
        resp.err_no = channeldata.error_code
        if resp.err_no == ChannelDataErrcode.OK.value:
            feed = channeldata.parse()
            for name, var in feed.items():
                resp.value.append(var.__repr__())
                resp.key.append(name)
        elif resp.err_no == ChannelDataErrcode.PRODUCT_ERROR.value:
            resp.err_no = channeldata.prod_error_code
            resp.err_msg = channeldata.prod_error_info
        else:
            resp.err_msg = channeldata.error_info
        return resp


@pytest.mark.parametrize("body", [OldBody, NewBody])
def test_bodies_of_every_version_work(body: type[ResponseOp]) -> None:  # P59
    response = packed({"y": np.array([1, 2])}, body())
    assert type(response) is messages.Response
    assert response.err_no == 0
    assert pairs(response) == {"y": "array([1, 2])"}
    # What the client reads are the numbers of today, whatever the body speaks.
    response = packed(error(6000, "late"), body())
    assert (response.err_no, response.err_msg) == (6000, "late")
    response = packed(RunnerFailed("boom"), body())
    assert (response.err_no, response.err_msg) == (10000, "boom")
    response = packed(error(71, "sold out", product=True), body())
    assert (response.err_no, response.err_msg) == (71, "sold out")


def test_an_old_body_refuses_in_numbers_of_its_own() -> None:  # P59, P91
    response = packed({"a": 1}, OldBody())
    assert response.err_no == CustomExceptionCode.TYPE_ERROR.value
    assert "fetch var type must be str" in response.err_msg


def test_a_response_has_its_fields_under_all_names() -> None:  # P59
    response = packing.Response(err_no=6000, err_msg="late", key=["a"], value=["b"])
    assert (response.ecode, response.error_info) == (ChannelDataEcode.TIMEOUT.value, "late")
    response.ecode = 71
    response.error_info = "sold out"
    assert (response.err_no, response.err_msg) == (71, "sold out")
    assert pairs(response) == {"a": "b"}
    assert packing.message_of(response).SerializeToString()
    with pytest.raises(AttributeError):
        response.tenant = "x"


def test_a_response_can_be_copied() -> None:  # P59
    response = packing.Response(ecode=1, key=["a"], value=["b"])
    for made in (copy.copy(response), copy.deepcopy(response), pickle.loads(pickle.dumps(response))):
        assert (made.ecode, made.err_no, pairs(made)) == (1, 6000, {"a": "b"})


def test_a_body_may_return_a_plain_message() -> None:  # P59
    class Plain(ResponseOp):
        def pack_response_package(self, channeldata: Any) -> Any:
            return messages.Response(err_no=0, key=["id"], value=[f"{channeldata.id} {channeldata.log_id}"])

    assert pairs(packed({}, Plain())) == {"id": "3 7"}


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit("no")])
def test_a_body_that_raises_is_8000(raised: BaseException) -> None:  # P63
    class Broken(ResponseOp):
        def pack_response_package(self, channeldata: Any) -> Any:
            raise raised

    with pytest.raises(ForebayError, match="rpc package error: no") as caught:
        packed({}, Broken())
    assert err_of(caught.value).err_no == 8000


def test_a_body_that_returns_nothing_is_8000() -> None:  # P63
    class Mute(ResponseOp):
        def pack_response_package(self, channeldata: Any) -> Any:
            return None

    with pytest.raises(ForebayError, match="should return a Response") as caught:
        packed({}, Mute())
    assert err_of(caught.value).err_no == 8000


# ---------------------------------------------------------------------------------------------------------------------
# What bodies are given


def test_channel_data_tells_arrays_from_other_results() -> None:  # P59
    found = ChannelData.of({"y": np.zeros(1)}, data_id=3, log_id=7)
    assert (found.id, found.log_id, found.error_code, found.ecode) == (3, 7, 0, 0)
    assert found.datatype == ChannelDataType.CHANNEL_NPDATA.value
    assert found.parse() is found.npdata
    found = ChannelData.of({"y": "text"}, data_id=3, log_id=7)
    assert found.datatype == ChannelDataType.DICT.value
    assert found.parse() is found.dictdata


def test_channel_data_of_an_error_has_no_result() -> None:  # P59
    found = ChannelData.of(error(71, "sold out", product=True), data_id=3, log_id=7)
    assert (found.error_code, found.prod_error_code, found.prod_error_info) == (50, 71, "sold out")
    assert (found.ecode, found.error_info) == (71, "sold out")
    with pytest.raises(TypeError, match=r"Error type\(2\) in datatype"):
        found.parse()


def test_channel_data_checks_batches() -> None:  # P59
    assert ChannelData.check_batch_npdata([{"x": np.zeros(1)}, {"x": ["a"]}]) == (0, None)
    err_no, text = ChannelData.check_batch_npdata([{"x": np.zeros(1)}, {"x": 1}])
    assert (err_no, text) == (7000, "the value of data must be np.ndarray, but get <class 'int'>.")
    assert ChannelData.check_npdata(1)[0] == ChannelData.check_dictdata([1])[0] == 7000
    assert ChannelData.check_dictdata({"x": 1}) == ChannelData.check_dictdata([{}]) == (0, None)
