# SPDX-License-Identifier: Apache-2.0
"""The KServe v2 codec: what is said arrives, over both faces and in every form, and what is broken is told."""

import json

import numpy as np
import pytest
from google.protobuf import descriptor_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from forebay.arrays.numpy_tensors import from_array, to_array
from forebay.errors import TooLarge, ValidationError
from forebay.protocols.kserve import rest, rest_client, rpc
from forebay.protocols.kserve.contents import FIELDS
from forebay.protocols.kserve.infer_calls import InferRequest
from forebay.protocols.kserve.messages import messages
from forebay.types.datatypes import DATATYPES, datatype_of
from forebay.types.tensor import Tensor

NUMBERS = [dtype for dtype in DATATYPES.values() if dtype.size and dtype.name != "BF16"]
TYPED = [dtype for dtype in NUMBERS if dtype.name in FIELDS]


def some_array(dtype):
    return (np.arange(6) % 2 if dtype.name == "BOOL" else np.arange(6)).astype(dtype.numpy).reshape(2, 3)


def echoed_by_rpc(request):
    """A response with what a request said, as a server in between would make it of the messages."""
    read = messages().ModelInferRequest.FromString(request)
    answer = messages().ModelInferResponse(model_name=read.model_name, id=read.id)
    for tensor in read.inputs:
        put = answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        put.contents.CopyFrom(tensor.contents)
    answer.raw_output_contents.extend(read.raw_input_contents)
    for key, value in read.parameters.items():
        answer.parameters[key].CopyFrom(value)
    return answer.SerializeToString()


def in_typed_contents(request):
    """The bytes of a request as other clients send it: elements one by one."""
    message = messages().ModelInferRequest.FromString(rpc.encode_request(request))
    del message.raw_input_contents[:]
    for tensor, whole in zip(message.inputs, request.inputs, strict=True):
        getattr(tensor.contents, FIELDS[tensor.datatype]).extend(to_array(whole).ravel().tolist())
    return message.SerializeToString()


def echoed_by_rest(body, headers):
    """The same for HTTP: the parts of the body as they are, under the name an answer has."""
    length = int(headers.get(rest.LENGTH_HEADER, len(body)))
    read = json.loads(body[:length])
    head = json.dumps({"model_name": "m", "outputs": read["inputs"], "id": read.get("id")}).encode()
    said = str(len(head)) if rest.LENGTH_HEADER in headers else None
    return head + body[length:], said


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: dtype.name)
def test_arrays_of_every_type_come_back_as_they_were(dtype):
    array = some_array(dtype)
    request = InferRequest(model="m", id="7", inputs=[from_array("x", array)])
    assert request.inputs[0].datatype == dtype.name
    answers = [rpc.decode_response(echoed_by_rpc(rpc.encode_request(request)))]
    if dtype in TYPED:
        answers.append(rpc.decode_response(echoed_by_rpc(in_typed_contents(request))))
    answers += [
        rest_client.decode_response(*echoed_by_rest(*rest_client.encode_request(request, binary=way)))
        for way in (True, False)
    ]
    for answer in answers:
        assert answer.id == "7"
        found = to_array(answer.outputs[0])
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(NUMBERS).flatmap(
        lambda dtype: st_numpy.arrays(
            dtype.numpy, st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
        )
    )
)
def test_any_array_survives_bit_by_bit_where_its_bytes_are_sent(array):
    request = InferRequest(model="m", inputs=[from_array("x", array)])
    for answer in (
        rpc.decode_response(echoed_by_rpc(rpc.encode_request(request))),
        rest_client.decode_response(*echoed_by_rest(*rest_client.encode_request(request))),
    ):
        found = to_array(answer.outputs[0])
        assert (found.shape, found.dtype, found.tobytes()) == (array.shape, array.dtype, array.tobytes())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=8), max_size=6))
def test_bytes_survive_with_any_content(values):
    array = np.empty(len(values), object)
    array[:] = values
    request = InferRequest(model="m", inputs=[from_array("x", array)])
    for data in (rpc.encode_request(request), in_typed_contents(request)):
        assert to_array(rpc.decode_response(echoed_by_rpc(data)).outputs[0]).tolist() == values
    assert (
        to_array(rest_client.decode_response(*echoed_by_rest(*rest_client.encode_request(request))).outputs[0]).tolist()
        == values
    )


def test_texts_are_bytes_and_json_says_them_as_texts():
    request = InferRequest(model="m", inputs=[from_array("x", np.array([["a", "bé"]]))])
    body, _ = rest_client.encode_request(request, binary=False)
    assert json.loads(body)["inputs"][0] == {"name": "x", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "bé"]}
    assert to_array(request.inputs[0]).tolist() == [[b"a", "bé".encode()]]


def test_memory_that_is_not_in_order_is_sent_in_order():
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    found = to_array(from_array("x", array))
    np.testing.assert_array_equal(found, array)
    assert not found.flags.writeable


def test_bf16_is_sixteen_bits_in_binary_and_a_number_in_json():
    bits = np.array([0x3F80, 0xC000], np.uint16)  # 1 and -2
    tensor = from_array("x", bits, "BF16")
    request = InferRequest(model="m", inputs=[tensor])
    body, headers = rest_client.encode_request(request, binary=False)
    assert json.loads(body)["inputs"][0]["data"] == [1.0, -2.0]
    for answer in (
        rest_client.decode_response(*echoed_by_rest(body, headers)),
        rpc.decode_response(echoed_by_rpc(rpc.encode_request(request))),
    ):
        np.testing.assert_array_equal(to_array(answer.outputs[0]), bits)


def test_parameters_keep_their_kinds():
    said = {"a": True, "b": -3, "c": 0.5, "d": "x"}
    request = InferRequest(model="m", inputs=[], parameters=said)
    assert rpc.decode_response(echoed_by_rpc(rpc.encode_request(request))).parameters == said
    body, _ = rest_client.encode_request(request, binary=False)
    assert json.loads(body)["parameters"] == said
    with_input = {**json.loads(body), "inputs": [INPUT]}
    assert rest.decode_request(json.dumps(with_input).encode()).parameters == said


def test_outputs_are_asked_for_by_name_and_raw_where_the_request_is():
    request = InferRequest(model="m", inputs=[], outputs=["y"])
    assert json.loads(rest_client.encode_request(request)[0])["outputs"] == [
        {"name": "y", "parameters": {"binary_data": True}}
    ]
    assert json.loads(rest_client.encode_request(request, binary=False)[0])["outputs"] == [{"name": "y"}]
    everything = InferRequest(model="m", inputs=[])
    assert json.loads(rest_client.encode_request(everything)[0])["parameters"] == {"binary_data_output": True}
    assert messages().ModelInferRequest.FromString(rpc.encode_request(request)).outputs[0].name == "y"


def test_metadata_over_both_faces():
    told = messages().ModelMetadataResponse(name="m")
    told.inputs.add(name="x", datatype="FP32", shape=[-1, 13])
    told.outputs.add(name="y", datatype="BYTES", shape=[-1])
    body = {
        "name": "m",
        "versions": None,
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 13]}],
        "outputs": [{"name": "y", "datatype": "BYTES", "shape": [-1]}],
    }
    for found in (
        rpc.decode_metadata(told.SerializeToString()),
        rest_client.decode_metadata(json.dumps(body).encode()),
    ):
        assert [(one.name, one.datatype, one.shape) for one in (*found.inputs, *found.outputs)] == [
            ("x", "FP32", (-1, 13)),
            ("y", "BYTES", (-1,)),
        ]


def test_data_that_is_null_was_not_said():
    head = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[2],"data": null ,"parameters":{"binary_data_size":2}}]}'
    (tensor,) = rest.decode_request(head + b"\x01\x02", str(len(head))).inputs
    assert (bytes(tensor.data), tensor.is_json) == (b"\x01\x02", False)


def test_a_request_without_an_id_has_an_empty_one():
    tensor = {"name": "x", "datatype": "INT8", "shape": [1], "data": [1]}
    assert [
        rest.decode_request(json.dumps({"inputs": [tensor], **more}).encode()).id for more in ({}, {"id": "7"})
    ] == [
        "",
        "7",
    ]


def test_the_path_of_a_model_is_quoted():
    assert rest_client.model_path("a/b", "1") == "/v2/models/a%2Fb/versions/1"


def test_the_messages_leave_the_common_pool_alone():
    made = messages()
    assert made.ModelInferRequest.DESCRIPTOR.full_name == "inference.ModelInferRequest"
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")


# ---------------------------------------------------------------------------------------------------------------------
# What is broken


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", "FP32", (2**31, 2**31), b"1234"),
        Tensor("x", "FP32", (2,), b"1234"),
        Tensor("x", "FP32", (-1,), b""),
        Tensor("x", "FP33", (1,), b"1234"),
        Tensor("x", "BYTES", (1,), b"\xff\xff\xff\xff"),
        Tensor("x", "BYTES", (1,), b"\x01\x00"),
        Tensor("x", "BYTES", (2**40,), b"\x01\x00\x00\x00a"),
        Tensor("x", "BYTES", (0,), b"\x00\x00\x00\x00"),
    ],
)
def test_shape_and_data_that_do_not_agree_are_refused_before_memory_is_taken(tensor):
    with pytest.raises(ValidationError, match=r"x|FP33"):
        to_array(tensor)


def test_an_unknown_type_gets_the_nearest():
    with pytest.raises(ValidationError, match="did you mean 'FP32'"):
        datatype_of("fp23")


def test_what_json_cannot_say_is_refused_with_the_cure():
    for array in (np.array([np.nan]), np.array([np.inf], np.float16), np.array([b"\xff"], object)):
        request = InferRequest(model="m", inputs=[from_array("x", array)])
        with pytest.raises(ValidationError, match="send it as binary"):
            rest_client.encode_request(request, binary=False)


def test_what_has_no_typed_contents_is_refused_with_the_cure():
    answer = messages().ModelInferResponse()
    answer.outputs.add(name="y", datatype="FP16", shape=[1]).contents.fp32_contents.append(0.5)
    with pytest.raises(ValidationError, match="send raw contents"):
        rpc.decode_response(answer.SerializeToString())


@pytest.mark.parametrize("value", [np.array([1 + 2j]), np.array([{}], object), np.array(["2026-01-01"], "M8[D]")])
def test_arrays_the_protocol_has_no_type_for(value):
    with pytest.raises(ValidationError, match="'x'"):
        from_array("x", value)


@pytest.mark.parametrize(
    "body, length",
    [
        (b"{", None),
        (b"[" * 100_000, None),
        (b"{}", None),
        (b'{"outputs":[]}', "99"),
        (b'{"outputs":[]}', "x"),
        (b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":["a"]}]}', None),
        (b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1]}]}', None),
        (b'{"outputs":[{"name":"y","datatype":"UINT8","shape":[1],"data":[300]}]}', None),
        (b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":[[1],[2,3]]}]}', None),
        (b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":-4}}]}', None),
        (b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}', None),
        (b'{"outputs":[{"name":"y","datatype":"INT8","shape":[1],"parameters":{"binary_data_size":0.5}}]}1', "94"),
    ],
)
def test_a_broken_answer_over_http_is_told(body, length):
    with pytest.raises(ValidationError):
        list(map(to_array, rest_client.decode_response(body, length).outputs))


def test_a_broken_answer_over_grpc_is_told():
    with pytest.raises(ValidationError, match="ModelInferResponse"):
        rpc.decode_response(b"\xff\xff")
    lacking = messages().ModelInferResponse(raw_output_contents=[b"1234"])
    with pytest.raises(ValidationError, match="must agree"):
        rpc.decode_response(lacking.SerializeToString())
    narrow = messages().ModelInferResponse()
    narrow.outputs.add(name="y", datatype="UINT8", shape=[1]).contents.uint_contents.append(300)
    with pytest.raises(ValidationError, match="do not fit"):
        rpc.decode_response(narrow.SerializeToString())


def test_the_text_of_an_error():
    assert rest_client.error_text(b'{"error":"no such model"}') == "no such model"
    assert rest_client.error_text(b"<html>") == "<html>"


INPUT = {"name": "x", "datatype": "BYTES", "shape": [1], "data": ["a"]}
MANY = {f"k{number}": 1 for number in range(20_001)}


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": [INPUT] * 6000},
        {"inputs": [INPUT], "outputs": [{"name": "y"}] * 30_000},
        {"inputs": [INPUT], "parameters": MANY},
        {"inputs": [{**INPUT, "parameters": MANY}]},
        {"inputs": [INPUT], "outputs": [{"name": "y", "parameters": MANY}]},
    ],
)
def test_what_a_call_says_beside_its_data_is_counted(body):
    with pytest.raises(TooLarge, match=r"more than|expected at most"):
        rest.decode_request(json.dumps(body).encode())


@pytest.mark.parametrize(
    "before, after",
    [
        ({"inputs": [INPUT] * 30_000}, {"inputs": [INPUT]}),
        ({"inputs": [INPUT], "parameters": MANY}, {"parameters": {}}),
        ({"inputs": [INPUT], "outputs": [{"name": "y"}] * 30_000}, {"outputs": []}),
        ({"inputs": [INPUT], "outputs": [], "parameters": MANY}, {}),
    ],
)
def test_what_is_said_again_counts_each_time(before, after):
    body = json.dumps(before)[:-1] + ", " * bool(after) + json.dumps(after)[1:]
    with pytest.raises(TooLarge, match=r"more than|expected at most"):
        rest.decode_request(body.encode())
    inside = json.dumps({**INPUT, "parameters": MANY})[:-1] + ', "parameters": {}}'
    with pytest.raises(TooLarge, match=r"more than|expected at most"):
        rest.decode_request(b'{"inputs": [%b]}' % inside.encode())


def test_texts_among_the_data_are_not():
    texts = [json.dumps({"a": 1, "b": 2})] * 15_000
    (tensor,) = rest.decode_request(json.dumps({"inputs": [{**INPUT, "data": texts}], "id": ":"}).encode()).inputs
    assert json.loads(bytes(tensor.data)) == texts
