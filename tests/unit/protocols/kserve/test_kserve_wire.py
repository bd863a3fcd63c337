# SPDX-License-Identifier: Apache-2.0
"""ModelInfer by hand: what is refused before anything is copied, and that nothing is copied."""

import struct

import numpy as np
import pytest

from forebay.errors import InvalidRequest, TooLarge
from forebay.protocols.kserve import request_layouts, response_bytes
from forebay.protocols.kserve.infer_calls import InferResponse
from forebay.protocols.kserve.messages import messages
from forebay.protocols.kserve.places import Place
from forebay.protocols.kserve.request_layouts import RequestLayouts, scan
from forebay.types.tensor import Tensor

M = messages()


def message(*inputs, raw=(), id="", outputs=(), parameters=None):
    made = M.ModelInferRequest(model_name="m", id=id, raw_input_contents=list(raw))
    for name, datatype, shape, contents, *more in inputs:
        one = made.inputs.add(name=name, datatype=datatype, shape=shape)
        for field, values in contents.items():
            getattr(one.contents, field).extend(values)
        _put(one.parameters, more[0] if more else {})
    for name, told in outputs:
        _put(made.outputs.add(name=name).parameters, told)
    _put(made.parameters, parameters or {})
    return made.SerializeToString()


def _put(into, told):
    for key, value in told.items():
        setattr(into[key], "string_param" if isinstance(value, str) else "int64_param", value)


def read(data):
    return scan(data).request(data)


def test_raw_contents_are_views_of_the_message():
    data = message(("x", "FP32", [2], {}), ("y", "UINT8", [3], {}), raw=[bytes(8), b"abc"])
    found = read(data)
    assert [(one.name, one.datatype, one.shape) for one in found.inputs] == [("x", "FP32", (2,)), ("y", "UINT8", (3,))]
    assert [bytes(one.data) for one in found.inputs] == [bytes(8), b"abc"]
    assert all(isinstance(one.data, memoryview) and one.data.obj is data for one in found.inputs)


def test_a_number_where_the_name_of_an_output_belongs_is_passed_over():
    outputs = b"\x32\x02\x08\x05"  # an output whose first field, its name, is a varint
    found = read(message(("x", "UINT8", [1], {}), raw=[b"a"]) + outputs)
    assert list(found.outputs) == [""]


def test_typed_floats_are_views_as_well():
    data = message(("x", "FP32", [2], {"fp32_contents": [1, 2]}), ("y", "FP64", [1], {"fp64_contents": [3]}))
    found = read(data)
    assert [bytes(one.data) for one in found.inputs] == [struct.pack("<2f", 1, 2), struct.pack("<d", 3)]
    assert all(isinstance(one.data, memoryview) and one.data.obj is data for one in found.inputs)


@pytest.mark.parametrize(
    "datatype, field, values",
    [
        ("BOOL", "bool_contents", [True, False]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("FP32", "fp32_contents", [0.5, -1]),
        ("FP64", "fp64_contents", [1e-300, 2**53 + 2]),
    ],
)
def test_typed_contents_of_every_type(datatype, field, values):  # O37
    tensor = read(message(("x", datatype, [2], {field: values}))).inputs[0]
    kind = {"BOOL": "bool", "FP32": "float32", "FP64": "float64"}.get(datatype, datatype.lower())
    assert np.frombuffer(tensor.data, kind).tolist() == values
    with pytest.raises(InvalidRequest, match=r"'x' of .*: expected (3 elements, got 2|[0-9]+ bytes of data, got)"):
        read(message(("x", datatype, [3], {field: values})))


def test_texts_in_typed_contents_are_put_behind_their_lengths():  # O36
    found = read(message(("x", "BYTES", [3], {"bytes_contents": [b"abc", b"", "é".encode()]}))).inputs[0]
    assert bytes(found.data) == b"\3\0\0\0abc\0\0\0\0\2\0\0\0\xc3\xa9"


def test_raw_texts_are_untouched():  # O35
    assert bytes(read(message(("x", "BYTES", [3], {}), raw=[b"abc"])).inputs[0].data) == b"abc"


def test_a_type_of_the_clients_own_is_raw_and_untouched():  # O34
    found = read(message(("x", "my_string", [3], {}), raw=[b"some bytes"])).inputs[0]
    assert (found.datatype, found.shape, bytes(found.data)) == ("my_string", (3,), b"some bytes")
    with pytest.raises(InvalidRequest, match="'x' is my_string, which has no typed contents"):
        read(message(("x", "my_string", [3], {"bytes_contents": [b"a"]})))


SIZES = {"BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8}
SIZES |= {"FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8}


@pytest.mark.parametrize("datatype, size", SIZES.items())
def test_shape_and_size_agree(datatype, size):  # O33
    for length in (0, 3 * size - 1, 3 * size + 1):
        wanted = rf"'x' of {datatype}\[3\]: expected {3 * size} bytes of data, got {length}"
        with pytest.raises(InvalidRequest, match=wanted):
            scan(message(("x", datatype, [3], {}), raw=[bytes(length)]))
    for shape in ([10**7] * 4, [2**62, 4], [2**32, 2**32], [-1, 3]):
        with pytest.raises(InvalidRequest, match="tensor 'x'"):
            scan(message(("x", datatype, shape, {}), raw=[bytes(3 * size)]))


def test_scalars_and_nothing_are_tensors_too():  # O38
    found = read(message(("x", "FP32", [], {}), ("y", "FP32", [1, 32, 32, 0, 1], {}), raw=[bytes(4), b""]))
    assert [(one.shape, len(one.data)) for one in found.inputs] == [((), 4), ((1, 32, 32, 0, 1), 0)]


@pytest.mark.parametrize(
    "data, said",
    [
        (
            message(("x", "FP32", [1], {}), ("y", "FP32", [1], {}), raw=[bytes(4)]),
            r"are 1, and the inputs 2 \('x', 'y'\)",
        ),
        (message(("x", "FP32", [1], {}), raw=[bytes(4)] * 2), "are 2, and the inputs 1"),
        (message(("x", "FP32", [1], {"fp32_contents": [1]}), raw=[bytes(4)]), "'x' has contents beside raw"),
        (message(("x", "FP16", [1], {"fp32_contents": [1]})), "FP16, which has no typed contents"),
        (
            message(("x", "FP32", [1], {"fp64_contents": [1]})),
            "expected its elements in fp32_contents, got fp64_contents",
        ),
        (message(("x", "INT8", [1], {"int_contents": [300]})), "do not fit in INT8"),
        (message(("x", "UINT16", [1], {"uint_contents": [70000]})), "do not fit in UINT16"),
        (message(("x", "INT32", [1], {})), "expected 1 elements, got 0"),
        (message(("x", "FP32", [1] * 40, {}), raw=[bytes(4)]), "expected at most 32 axes, got 40"),
    ],
)
def test_what_contradicts_itself_is_refused(data, said):  # O37, O39
    with pytest.raises(InvalidRequest, match=said):
        read(data)


def test_a_head_has_an_end():
    with pytest.raises(InvalidRequest, match="more than 20000 fields"):
        scan(b"\x3a\x00" * 30_000)
    with pytest.raises(InvalidRequest, match="more than 20000 fields"):
        scan(message(("x", "FP32", [1] * 30_000, {})))
    with pytest.raises(InvalidRequest, match="more than 20000 fields"):
        scan(b"\x7b" * 50 + b"\x08\x01" * 30_000)


def test_typed_contents_that_would_grow_are_not_read(monkeypatch):
    monkeypatch.setattr(request_layouts, "MAX_TYPED_BYTES", 10)
    with pytest.raises(TooLarge, match="'x' has 13 bytes of typed contents; at most 10"):
        read(message(("x", "INT64", [11], {"int64_contents": [0] * 11})))


def test_a_head_is_read_once():
    layouts = RequestLayouts()
    first = message(("x", "FP32", [2], {}), raw=[bytes(8)], id="abc")
    second = message(("x", "FP32", [2], {}), raw=[b"12345678"], id="xyz")
    third = message(("x", "FP32", [2], {}), raw=[bytes(8)], id="abc", parameters={"a": 1})
    layout = layouts.of(first)
    assert layouts.of(second) is layout
    assert layouts.of(memoryview(second)) is layout
    assert layout.request(second).id == "xyz"
    assert bytes(layout.request(second).inputs[0].data) == b"12345678"
    assert layouts.of(third) is not layout
    assert layouts.of(third).parameters == {"a": 1}


def test_a_head_whose_contents_have_to_be_read_is_not_remembered():
    layouts = RequestLayouts()
    one = message(("x", "INT64", [2], {"int64_contents": [1, 2]}))
    assert scan(one).fixed is None
    assert layouts.of(one) is not layouts.of(one)


def test_only_so_many_heads_are_remembered():
    layouts = RequestLayouts()
    for size in range(request_layouts.MAX_LAYOUTS + 10):
        layouts.of(message(("x", "UINT8", [size], {}), raw=[bytes(size)]))
    assert len(layouts._known) <= request_layouts.MAX_LAYOUTS
    long = message(("x" * request_layouts.MAX_FIXED_BYTES, "UINT8", [1], {}), raw=[b"1"])
    assert layouts.of(long) is not layouts.of(long)


# ---------------------------------------------------------------------------------------------------------------------
# responses


def written_by_us(outputs, parameters=None, **more):
    told = InferResponse(model="m", version="1", id="abc", outputs=outputs, parameters=parameters or {})
    found = response_bytes.response(told, **more)
    return found if isinstance(found, bytes) else b"".join(found)


@pytest.mark.parametrize("size", [0, 5, response_bytes.JOINED_BYTES, response_bytes.JOINED_BYTES + 1, 100_000])
def test_a_response_is_what_the_library_would_write(size):
    big, small = Tensor("y", "UINT8", (size,), memoryview(bytes(size))), Tensor("z", "FP32", (2, 1), bytes(8))
    told = {"a": True, "b": -1, "c": 2**63, "d": 1.5, "e": "", "triton_final_response": False}
    for outputs in ([], [small], [big], [big, small], [small, big]):
        found = M.ModelInferResponse.FromString(written_by_us(outputs, told))
        expected = M.ModelInferResponse(model_name="m", model_version="1", id="abc")
        for one in outputs:
            expected.outputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
            expected.raw_output_contents.append(bytes(one.data))
        expected.parameters["a"].bool_param = True
        expected.parameters["b"].int64_param = -1
        expected.parameters["c"].uint64_param = 2**63
        expected.parameters["d"].double_param = 1.5
        expected.parameters["e"].string_param = ""
        expected.parameters["triton_final_response"].bool_param = False
        assert found == expected
        whole = response_bytes.stream_response(
            response_bytes.response(InferResponse(model="m", version="1", id="abc", outputs=outputs, parameters=told))
        )
        streamed = M.ModelStreamInferResponse.FromString(whole if isinstance(whole, bytes) else b"".join(whole))
        assert streamed.infer_response == expected
        assert not streamed.error_message


def test_large_outputs_are_pieces_of_their_own():
    data = memoryview(bytes(1 << 20))
    pieces = response_bytes.response(InferResponse(model="m", outputs=[Tensor("y", "UINT8", (1 << 20,), data)]))
    assert any(piece is data for piece in pieces)


def test_an_error_of_a_stream_says_whose_it_is():
    found = M.ModelStreamInferResponse.FromString(response_bytes.stream_error("went wrong", "abc"))
    assert (found.error_message, found.infer_response.id) == ("went wrong", "abc")


# ---------------------------------------------------------------------------------------------------------------------
# shared memory


def place(region, size, offset=0):
    return {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}


def test_what_lies_in_shared_memory_is_read_there():
    data = message(
        ("x", "UINT8", [4], {}, place("in", 4, 2)),
        ("y", "INT16", [1], {}),
        raw=[b"ab"],
        id="7",
        outputs=[("z", place("out", 10))],
        parameters={"a": 1},
    )
    layout = scan(data)
    assert layout.is_elsewhere

    def fill(where):
        assert where == Place("in", 2, 4)
        return b"memo"

    found = layout.request(data, fill)
    assert [(one.name, one.shape, bytes(one.data)) for one in found.inputs] == [
        ("x", (4,), b"memo"),
        ("y", (1,), b"ab"),
    ]
    assert (found.model, found.id, found.outputs, found.parameters) == ("m", "7", ["z"], {"a": 1})
    assert layout.outputs[0].place == Place("out", 0, 10)
    with pytest.raises(InvalidRequest, match="'x' lies in shared memory"):
        layout.request(data)


def test_an_output_in_shared_memory_says_so():
    outputs = [Tensor("y", "UINT8", (4,), b""), Tensor("z", "UINT8", (1,), b"z")]
    found = M.ModelInferResponse.FromString(written_by_us(outputs, places={"y": Place("out", 3, 5).told(4)}))
    assert list(found.raw_output_contents) == [b"", b"z"]
    assert {key: one.WhichOneof("parameter_choice") for key, one in found.outputs[0].parameters.items()} == {
        "shared_memory_region": "string_param",
        "shared_memory_byte_size": "int64_param",
        "shared_memory_offset": "int64_param",
    }
    assert found.outputs[0].parameters["shared_memory_byte_size"].int64_param == 4
    assert not found.outputs[1].parameters


@pytest.mark.parametrize(
    "told, said",
    [
        (place("in", 3), r"'x' of UINT8\[4\]: expected 4 bytes"),
        (place("in", -4), "numbers of bytes"),
        (place("in", 4, -1), "numbers of bytes"),
        (place("in", "4"), "numbers of bytes"),
        (place(3, 4), "named by a text"),
    ],
)
def test_a_place_is_told_in_full(told, said):
    with pytest.raises(InvalidRequest, match=said):
        scan(message(("x", "UINT8", [4], {}, told)))
