# SPDX-License-Identifier: Apache-2.0
"""Tensors that no node makes anything of: pass-throughs, converters, and inputs that become OpenVINO tensors."""

import json

import numpy as np
import pytest
from tests.compat.ovms.conftest import graph_text, one_node, python_node, serving, tensor, write

from forebay.errors import RequestError
from forebay.types.tensor import Tensor

pytestmark = pytest.mark.anyio

PASSING = graph_text(
    ["OVMS_PY_TENSOR:input"],
    ["OVMS_PY_TENSOR:output"],
    'node { calculator: "PassThroughCalculator" input_stream: "A:input" output_stream: "A:output" }',
)


def converter(source, target):
    return f"""
node {{
  calculator: "PyTensorOvTensorConverterCalculator"
  input_stream: "{source}"
  output_stream: "{target}"
  node_options: {{
    [type.googleapis.com / mediapipe.PyTensorOvTensorConverterCalculatorOptions]: {{
      tag_to_output_tensor_names {{ key: "OVMS_PY_TENSOR" value: "output" }}
    }}
  }}
}}
"""


def in_json(value, datatype, shape):
    return Tensor("input", datatype, shape, json.dumps(value).encode(), is_json=True)


@pytest.mark.parametrize("is_json", [True, False])
@pytest.mark.parametrize(
    "value, datatype, shape",
    [
        ([1, {"a": 2}], "INT32", (2,)),
        ([1, 2, 3], "INT32", (2,)),
        ([1.5, 2], "INT32", (2,)),
        ([300], "UINT8", (1,)),
        (["a", 1], "BYTES", (2,)),
        ({"a": 1}, "FP32", (1,)),
    ],
)
async def test_a_pass_through_gives_on_no_json_that_it_has_not_read(tmp_path, value, datatype, shape, is_json):  # F94
    write(tmp_path, {"graph.pbtxt": PASSING})
    async with serving(tmp_path, name="g") as face:
        with pytest.raises(RequestError, match="input"):
            await face.infer("g", in_json(value, datatype, shape), is_json=is_json)


async def test_a_pass_through_answers_as_it_is_asked(tmp_path):  # F94, O57
    write(tmp_path, {"graph.pbtxt": PASSING})
    async with serving(tmp_path, name="g") as face:
        given = in_json([[1, 2], [3, 4]], "INT32", (2, 2))
        [found] = (await face.infer("g", given, is_json=True)).outputs
        assert (found.name, found.shape, json.loads(bytes(found.data))) == ("output", (2, 2), [1, 2, 3, 4])
        [found] = (await face.infer("g", given, is_json=False)).outputs
        assert bytes(found.data) == np.array([1, 2, 3, 4], np.int32).tobytes()
        stream = face.stream("g")
        stream.send(tensor("input", b"as it is", [3], "my_own"))
        [found] = (await stream.take()).outputs
        assert (bytes(found.data), found.datatype, found.shape) == (b"as it is", "my_own", (3,))
        stream.close()


HANDLER = """
    import numpy as np
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            kind = bytes(inputs[0]).decode()
            told = {
                "right": ("FP32", (2,)), "type": ("text", (2,)), "bytes": ("BYTES", (2,)), "size": ("FP32", (3,)),
                "negative": ("FP32", (-2,)),
            }[kind]
            return [Tensor("made", np.ones(2, np.float32), datatype=told[0], shape=told[1])]
    """


@pytest.mark.parametrize("kind", ["right", "type", "bytes", "size", "negative"])
async def test_a_converter_at_an_output_takes_what_openvino_holds(tmp_path, kind):  # F97
    text = graph_text(
        ["OVMS_PY_TENSOR:input"],
        ["OVTENSOR:output"],
        python_node("n", ["IN:input"], ["OUT:made"]),
        converter("OVMS_PY_TENSOR:made", "OVTENSOR:output"),
    )
    write(tmp_path, {"graph.pbtxt": text, "model.py": HANDLER})
    async with serving(tmp_path, name="g") as face:
        if kind == "right":
            [found] = (await face.infer("g", tensor("input", kind.encode()))).outputs
            assert (found.name, found.datatype, found.shape) == ("output", "FP32", (2,))
        else:
            with pytest.raises(RequestError, match=r"node 'n': .*'made'"):
                await face.infer("g", tensor("input", kind.encode()))


@pytest.mark.parametrize("tag", ["OVTENSOR", "OVMS_PY_TENSOR"])
async def test_what_becomes_an_openvino_tensor_holds_numbers(tmp_path, tag):  # F97
    passing = 'node { calculator: "PassThroughCalculator" input_stream: "A:input" output_stream: "A:output" }'
    last = passing if tag == "OVTENSOR" else converter("OVMS_PY_TENSOR:input", "OVTENSOR:output")
    write(tmp_path, {"graph.pbtxt": graph_text([f"{tag}:input"], ["OVTENSOR:output"], last)})
    async with serving(tmp_path, name="g") as face:
        [found] = (await face.infer("g", tensor("input", np.ones((2, 3), np.float32)))).outputs
        assert (found.datatype, found.shape) == ("FP32", (2, 3))
        for datatype in ("my_own", "BYTES"):
            with pytest.raises(RequestError, match=f"input 'input' is of the type '{datatype}'"):
                await face.infer("g", tensor("input", b"abc", [3], datatype))


@pytest.mark.parametrize("datatype", ["my_own", "BYTES", "FP32"])
async def test_no_axis_of_an_input_is_negative(tmp_path, datatype):  # F97
    handler = """
        class OvmsPythonModel:
            def execute(self, inputs):
                return inputs
        """
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": handler})
    async with serving(tmp_path, name="g") as face:
        with pytest.raises(RequestError, match=r"'input' has the shape \[-1, -2\]; every axis must be 0 or more"):
            await face.infer("g", tensor("input", b"12345678", [-1, -2], datatype))
