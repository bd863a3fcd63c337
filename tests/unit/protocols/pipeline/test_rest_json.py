# SPDX-License-Identifier: Apache-2.0
"""Requests and responses in JSON: the quick way says what protobuf's own says."""

import json
import math

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidRequest
from forebay.surfaces.pipeline.protocol.messages import Request, Response, Tensor
from forebay.surfaces.pipeline.protocol.rest import request_of, response_json

BODIES = [
    b"", b"  \n", b"{}", b'{"key":["x"],"value":["1"]}', b'{"logid":77}', b'{"logid":"77"}',
    b'{"logid":"-9223372036854775808"}',
    b'{"name":"a","method":"b","clientip":"c","more":{"x":[1]}}', b'{"key":null}', b'{"tensors":[]}', b'{"logid":3.0}',
    b'{"tensors":[{"name":"x","elem_type":1,"shape":[2],"float_data":[1.5,"NaN"],"int64_data":["1",2]}]}',
    b'{"tensors":[{"name":"x","elem_type":13,"byte_data":"AP8="}]}',
    b'{"tensors":[{"elemType":3}]}', b'{"key":["\\u00e9\\ud83d\\ude00"]}', '{"key":["é"]}'.encode(),
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_bodies_are_read_as_protobuf_reads_them(body):  # P19, P23
    expected = json_format.Parse(body, Request(), ignore_unknown_fields=True) if body.strip() else Request()
    assert request_of(body) == expected


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"1", b'"x"', b'{"key":"x"}', b'{"key":[1]}', b'{"logid":"x"}', b'{"logid":9223372036854775808}',
     b'{"logid":1.5}', b'{"name":1}', b"\xff", b'{"tensors":[{"shape":"x"}]}', b"[" * 100_000, b'{"a":' * 100_000],
)  # fmt: skip
def test_bodies_that_are_no_requests(body):  # P23
    with pytest.raises(InvalidRequest, match="body: expected a Request "):
        request_of(body)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(-(2**31), 2**31 - 1),
)
def test_answers_have_every_field(texts, message, number):  # P21
    response = Response(err_no=number, err_msg=message, key=texts, value=texts)
    found = json.loads(response_json(response))
    assert found == {"err_no": number, "err_msg": message, "key": texts, "value": texts, "tensors": []}
    assert list(found) == ["err_no", "err_msg", "key", "value", "tensors"]


def test_tensors_in_answers():
    tensor = Tensor(name="x", elem_type=1, shape=[3], float_data=[0.1, math.nan, math.inf], int64_data=[2**60])
    found = json.loads(response_json(Response(tensors=[tensor])))["tensors"][0]
    assert found["float_data"] == [0.1, "NaN", "Infinity"]
    assert found["int64_data"] == [str(2**60)]
    assert (found["name"], found["elem_type"], found["shape"], found["lod"]) == ("x", 1, [3], [])
    assert (
        request_of(json.dumps({"tensors": [found]}).encode()).tensors[0].SerializeToString()
        == tensor.SerializeToString()
    )
