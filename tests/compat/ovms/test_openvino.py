# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - graphs in one line
"""Graphs with nodes that infer, converters around them, and models served beside them; OpenVINO itself runs them."""

import asyncio
import json
import threading
from typing import Any

import numpy as np
import pytest
from tests.compat.ovms import foreign_models
from tests.compat.ovms.conftest import array, graph_text, one_node, python_node, serving, tensor, write
from tests.models import model_files
from tests.waiting import eventually, reached

from forebay.arrays.numpy_tensors import from_array
from forebay.cli.main import main
from forebay.errors import InvalidRequest, ModelError, NotPrepared
from forebay.runtimes.trial import TrialLimits
from forebay.surfaces.ovms.model_nodes import SharedModels
from forebay.surfaces.ovms.model_versions import ModelEntry

pytestmark = pytest.mark.anyio
pytest.importorskip("openvino")


def save(path, kind="f32", *, inputs=("input",), output="output", axis=-1, shape=None):
    """Writes a model that adds its inputs, or one to its only input."""
    import openvino as ov
    from openvino import opset13 as ops

    dtype = getattr(ov.Type, kind)
    ports = [ops.parameter(shape or [axis], dtype, name=name) for name in inputs]
    other = ports[1] if len(ports) > 1 else ops.constant(np.array(1, dtype.to_dtype()))
    result = ops.add(ports[0], other)
    for port, name in zip(ports, inputs, strict=True):
        port.output(0).set_names({name})
    result.output(0).set_names({output})
    path.parent.mkdir(parents=True)
    model: Any = ov.Model
    ov.save_model(model([result], ports), str(path), compress_to_fp16=False)


def session(servable, name="session", version=""):
    more = f'servable_version: "{version}"' if version else ""
    return f"""
node {{
  calculator: "OpenVINOModelServerSessionCalculator"
  output_side_packet: "SESSION:{name}"
  node_options: {{
    [type.googleapis.com / mediapipe.OpenVINOModelServerSessionCalculatorOptions]: {{
      servable_name: "{servable}" {more}
    }}
  }}
}}"""


def inference(inputs, outputs, options="", name="session"):
    lines = [f'  input_stream: "{one}"' for one in inputs] + [f'  output_stream: "{one}"' for one in outputs]
    return f"""
node {{
  calculator: "OpenVINOInferenceCalculator"
  input_side_packet: "SESSION:{name}"
{chr(10).join(lines)}
  node_options: {{ [type.googleapis.com / mediapipe.OpenVINOInferenceCalculatorOptions]: {{ {options} }} }}
}}"""


def to_openvino(source, target):
    return f"""
node {{
  calculator: "PyTensorOvTensorConverterCalculator"
  input_stream: "OVMS_PY_TENSOR:{source}"
  output_stream: "OVTENSOR:{target}"
}}"""


def to_python(source, target, called):
    return f"""
node {{
  calculator: "PyTensorOvTensorConverterCalculator"
  input_stream: "OVTENSOR:{source}"
  output_stream: "OVMS_PY_TENSOR:{target}"
  node_options: {{
    [type.googleapis.com / mediapipe.PyTensorOvTensorConverterCalculatorOptions]: {{
      tag_to_output_tensor_names {{ key: "OVMS_PY_TENSOR" value: "{called}" }}
    }}
  }}
}}"""


def config(*models, graphs=("g",)):
    return json.dumps(
        {
            "model_config_list": [{"config": {"name": name, "base_path": name}} for name in models],
            "mediapipe_config_list": [{"name": name} for name in graphs],
        }
    )


PLUS_TEN = """
    import numpy as np
    from pyovms import Tensor
    class OvmsPythonModel:
        def initialize(self, kwargs):
            (self.name,) = kwargs["output_names"]
        def execute(self, inputs):
            (one,) = inputs
            assert one.name in ("input", "result"), one
            return [Tensor(self.name, np.array(one) + np.asarray(10, np.asarray(one).dtype))]
    """

SEED = graph_text(
    ["OVMS_PY_TENSOR:input"],
    ["OVMS_PY_TENSOR:output"],
    python_node("PythonPreprocess", ["INPUT:input"], ["OUTPUT:preprocessed_py"]),
    session("add"),
    to_openvino("preprocessed_py", "preprocessed_ov"),
    inference(["OVTENSOR:preprocessed_ov"], ["OVTENSOR:result_ov"]),
    to_python("result_ov", "result_py", "result"),
    python_node("PythonPostprocess", ["INPUT:result_py"], ["OUTPUT:output"]),
)


@pytest.mark.parametrize("kind", ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f16", "f32", "f64"])
async def test_every_type_goes_to_a_model_and_back(tmp_path, kind):  # O97, O101
    save(tmp_path / "add/1/add.xml", kind)
    write(tmp_path, {"config.json": config("add"), "g/graph.pbtxt": SEED, "g/model.py": PLUS_TEN})
    given = np.arange(3).astype({"i": "i", "u": "u", "f": "f"}[kind[0]] + str(int(kind[1:]) // 8))
    names = {"i": "INT", "u": "UINT", "f": "FP"}
    async with serving(tmp_path, worker_kind="thread") as face:
        asked = tensor("input", given, datatype=names[kind[0]] + kind[1:])
        answer = await face.infer("g", asked)
        (found,) = answer.outputs
        assert (found.name, found.datatype, found.shape) == ("output", asked.datatype, (3,))
        assert np.frombuffer(found.data, given.dtype).tolist() == [21, 22, 23]
        stream = face.stream("g")
        for _ in range(2):
            stream.send(asked)
        stream.close()
        answers, end = await stream.rest()
        assert end is None
        assert [bytes(one.outputs[0].data) for one in answers] == [bytes(found.data)] * 2


async def test_tags_are_mapped_to_the_names_of_the_model(tmp_path):  # O99, O102, O93
    save(tmp_path / "sum/1/sum.xml", inputs=("input1", "input2"), output="sum")
    save(tmp_path / "add/1/add.xml")
    options = (
        'tag_to_input_tensor_names { key: "ADD_INPUT1" value: "input1" } '
        'tag_to_input_tensor_names { key: "ADD_INPUT2" value: "input2" } '
        'tag_to_output_tensor_names { key: "SUM" value: "sum" }'
    )
    text = graph_text(
        ["OVTENSOR1:a", "OVTENSOR2:b"],
        ["OVTENSOR:total", "OVTENSOR1:more"],
        session("sum", "one"),
        session("add", "two", "1"),
        inference(["ADD_INPUT1:a", "ADD_INPUT2:b"], ["SUM:total"], options, "one"),
        inference(["input:total"], ["output:more"], "", "two"),
    )
    write(tmp_path, {"config.json": config("sum", "add"), "g/graph.pbtxt": text})
    async with serving(tmp_path, worker_kind="thread") as face:
        one = np.ones(2, np.float32)
        answer = await face.infer("g", tensor("a", one), tensor("b", one))
        assert {one.name: array(one).tolist() for one in answer.outputs} == {"total": [2, 2], "more": [3, 3]}
        with pytest.raises(InvalidRequest, match="'input1' came as float64, and the model takes f32"):
            await face.infer("g", tensor("a", [1.0]), tensor("b", [1.0]))
        with pytest.raises(InvalidRequest, match=r"has the shape \[1, 1\]"):
            await face.infer("g", tensor("a", one.reshape(2, 1)[:1]), tensor("b", one.reshape(2, 1)[:1]))
        with pytest.raises(InvalidRequest, match="'BYTES'; OpenVINO tensors hold numbers"):
            await face.infer("g", tensor("a", b"x"), tensor("b", one))


async def test_what_a_handler_gives_a_model_must_be_what_it_says(tmp_path):  # O96
    save(tmp_path / "add/1/add.xml")
    handler = """
        import numpy as np
        from pyovms import Tensor
        class OvmsPythonModel:
            def initialize(self, kwargs):
                (self.name,) = kwargs["output_names"]
            def execute(self, inputs):
                shape, datatype, *objects = bytes(inputs[0]).decode().split() if inputs[0].name == "input" else ("3", "FP32")
                data = np.zeros(3, object if objects else np.float32)
                return [Tensor(self.name, data, shape=[int(shape)], datatype=datatype)]
        """
    write(tmp_path, {"config.json": config("add"), "g/graph.pbtxt": SEED, "g/model.py": handler})
    async with serving(tmp_path, worker_kind="thread") as face:
        assert (await face.infer("g", tensor("input", b"3 FP32"))).outputs
        for said, told in (
            ("3 mine", "'mine'; OpenVINO tensors hold numbers"),
            ("4 FP32", "expected 16 bytes"),
            ("3 FP32 objects", "expected 12 bytes of data, got 24"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                await face.infer("g", tensor("input", said.encode()))


async def test_a_model_that_is_not_there_fails_each_request_and_is_warned_of(tmp_path):  # O98
    save(tmp_path / "add/1/add.xml")
    text = SEED.replace('servable_name: "add"', 'servable_name: "ad"')
    write(tmp_path, {"config.json": config("add"), "g/graph.pbtxt": text, "g/model.py": PLUS_TEN})
    async with serving(tmp_path, worker_kind="thread") as face:
        assert any("there is no model 'ad'" in told for told in face.project.warnings)
        with pytest.raises(NotPrepared, match="there is no model 'ad'"):
            await face.infer("g", tensor("input", [1]))


async def test_a_tensor_name_that_the_model_lacks_stops_the_load(tmp_path):  # O99
    save(tmp_path / "add/1/add.xml")
    options = 'tag_to_output_tensor_names { key: "OVTENSOR" value: "outptu" }'
    text = SEED.replace(
        'OVTENSOR:result_ov"\n  node_options: { [type.googleapis.com / mediapipe.OpenVINOInferenceCalculatorOptions]: {  }',
        'OVTENSOR:result_ov"\n  node_options: { [type.googleapis.com / mediapipe.OpenVINOInferenceCalculatorOptions]: { '
        + options
        + " }",
    )
    assert options in text
    write(tmp_path, {"config.json": config("add"), "g/graph.pbtxt": text, "g/model.py": PLUS_TEN})
    async with serving(tmp_path, worker_kind="thread") as face:
        (version,) = face.app.describe_versions("g")
        assert "no output 'outptu'; did you mean 'output'" in version["error"]


@pytest.mark.parametrize(
    "options, key, told",
    [
        (
            'tag_to_output_tensor_names {\n key: "OVTENSOR"\n value: "outptu" }',
            "tag_to_output_tensor_names",
            "the model has no output 'outptu'; did you mean 'output'?",
        ),
        (
            'tag_to_input_tensor_names {\n key: "OVTENSOR"\n value: "x" }',
            "tag_to_input_tensor_names",
            "the model has no input 'x'; there is input",
        ),
    ],
)
def test_a_tensor_name_that_the_model_lacks_is_told_by_check(tmp_path, capsys, options, key, told):
    save(tmp_path / "add/1/add.xml")
    text = SEED.replace("InferenceCalculatorOptions]: {  }", "InferenceCalculatorOptions]: { " + options + " }")
    write(tmp_path, {"config.json": config("add"), "g/graph.pbtxt": text, "g/model.py": PLUS_TEN})
    assert main(["check", str(tmp_path)]) == 2
    line = 1 + text.partition(options)[0].count("\n")
    place = f"{tmp_path}/g/graph.pbtxt:{line}: {key}: node 'OpenVINOInferenceCalculator_1' (model 'add')"
    assert capsys.readouterr().err == f"forebay: {place}: {told}\n"


def test_a_tag_that_is_no_tensor_of_the_model_is_told_by_check_with_its_stream(tmp_path, capsys):
    save(tmp_path / "add/1/add.xml", inputs=("left", "right"))
    text = SEED.replace('input_stream: "OVTENSOR:preprocessed_ov"', 'input_stream: "LEFTT:preprocessed_ov"', 1)
    write(tmp_path, {"config.json": config("add"), "g/graph.pbtxt": text, "g/model.py": PLUS_TEN})
    assert main(["check", str(tmp_path)]) == 2
    line = 1 + text.partition('"LEFTT:')[0].count("\n")
    assert f"graph.pbtxt:{line}: input_stream 'LEFTT:preprocessed_ov': node " in (said := capsys.readouterr().err)
    assert "the model has no input 'LEFTT'; did you mean 'left'?" in said


def test_a_stream_without_a_tag_is_no_tensor_of_a_model_with_several(tmp_path, capsys):
    save(tmp_path / "add/1/add.xml", inputs=("left", "right"))
    text = SEED.replace('input_stream: "OVTENSOR:preprocessed_ov"', 'input_stream: "preprocessed_ov"', 1)
    write(tmp_path, {"config.json": config("add"), "g/graph.pbtxt": text, "g/model.py": PLUS_TEN})
    assert main(["check", str(tmp_path)]) == 2
    said = "input_stream 'preprocessed_ov': node 'OpenVINOInferenceCalculator_1' (model 'add'): "
    assert f"{said}a tag has to name the input of the model; there is left, right\n" in capsys.readouterr().err


def test_a_shape_of_an_input_that_the_model_lacks_is_told_by_check(tmp_path, capsys):
    save(tmp_path / "add/1/add.xml")
    entry = {"name": "add", "base_path": "add", "shape": {"inptu": "(4)"}}
    write(tmp_path, {"config.json": json.dumps({"model_config_list": [{"config": entry}]}, indent=1)})
    assert main(["check", str(tmp_path)]) == 2
    place = f"{tmp_path}/config.json:8: shape"
    assert f"{place}: the model 'add' has no input 'inptu'; did you mean 'input'?" in capsys.readouterr().err


def test_a_model_that_cannot_be_read_is_told_by_check(tmp_path, capsys):
    write(tmp_path, {"config.json": config("add", graphs=()), "add/1/add.xml": "nonsense"})
    assert main(["check", str(tmp_path)]) == 2
    assert f"the model 'add' ({tmp_path}/add/1/add.xml) cannot be loaded: " in capsys.readouterr().err


@pytest.mark.parametrize("use", ["graph", "endpoint"])
def test_a_model_that_takes_more_memory_than_it_may_is_not_loaded_here(tmp_path, use):
    # F122: a file of 3 KB took gigabytes of the server while the library worked its constants out.
    import openvino
    from openvino import opset13 as ops

    x = ops.parameter([-1], np.float32, name="x")
    many = ops.broadcast(ops.constant(np.float32(1)), ops.constant(np.array([1 << 28], np.int64)))
    total = ops.reduce_sum(many, ops.constant(np.array([0], np.int64)), keep_dims=False)
    made: Any = openvino.Model  # its types do not fit each other
    openvino.save_model(made([ops.add(x, total)], [x], "m"), tmp_path / "m.xml")
    models = SharedModels(None, TrialLimits(60.0, 256 << 20))
    entry = ModelEntry(name="m", version="1", path=tmp_path / "m.xml")
    with pytest.raises(ModelError, match=r"the model 'm' .* bytes of memory \(--max-trial-bytes\)"):
        models.get(entry) if use == "graph" else models.of(entry).trial([])


async def test_models_are_served_as_well(tmp_path):  # O100, O106
    save(tmp_path / "add/1/add.xml")
    save(tmp_path / "add/2/add.xml")
    write(tmp_path, {"config.json": config("add", graphs=())})
    async with serving(tmp_path) as face:
        endpoint = face.app.find("add").endpoint
        assert endpoint.config.version == "2"
        assert json.loads(await endpoint.call(b'{"input": 1}', params={"in": "json", "out": "json"})) == {"output": 2}


def test_version_0_of_a_model_is_whichever_answers(serve, tmp_path):  # O106, O139
    save(tmp_path / "add/1/add.xml")
    save(tmp_path / "add/2/add.xml")
    entry = {"config": {"name": "add", "base_path": "add", "model_version_policy": {"all": {}}}}
    server = serve(write(tmp_path, {"config.json": json.dumps({"model_config_list": [entry]})}))
    asked = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1], "data": [1]}]}
    for version, answered in (("0", "2"), ("1", "1"), ("2", "2")):
        answer = server.client.post(f"/v2/models/add/versions/{version}/infer", json=asked)
        assert answer.json()["model_version"] == answered
    assert server.client.post("/v2/models/add/versions/3/infer", json=asked).status_code == 404


async def test_models_of_texts_are_served(tmp_path):  # O100
    import openvino as ov
    from openvino import opset13 as ops

    port = ops.parameter([-1], ov.Type.string, name="x")
    model: Any = ov.Model
    (tmp_path / "m/1").mkdir(parents=True)
    ov.save_model(model([ops.result(port, name="y")], [port]), str(tmp_path / "m/1/m.xml"))
    write(tmp_path, {"config.json": config("m", graphs=())})
    async with serving(tmp_path) as face:
        asked = from_array("x", np.array([b"a", b"bcd"], object))
        (answer,) = (await face.infer("m", asked)).outputs
        assert (answer.datatype, answer.shape, bytes(answer.data)) == ("BYTES", (2,), asked.data)


@pytest.mark.parametrize("kind", ["bf16", "i4"])
@pytest.mark.parametrize("side", ["input", "output"])
async def test_a_tensor_of_a_type_without_a_name_stops_the_load(tmp_path, capsys, kind, side):  # O96
    import openvino as ov
    from openvino import opset13 as ops

    types = ("f32", kind) if side == "output" else (kind, "f32")
    port = ops.parameter([4], getattr(ov.Type, types[0]), name="x")
    result = ops.convert(port, types[1])
    port.output(0).set_names({"x"})
    result.output(0).set_names({"y"})
    model: Any = ov.Model
    (tmp_path / "m/1").mkdir(parents=True)
    ov.save_model(model([result], [port]), str(tmp_path / "m/1/m.xml"), compress_to_fp16=False)
    text = graph_text(["OVTENSOR:a"], ["OVTENSOR:b"], session("m"), inference(["x:a"], ["y:b"]))
    write(tmp_path, {"config.json": config("m"), "g/graph.pbtxt": text})
    assert main(["check", str(tmp_path)]) == 2
    told = f"{side} '{'x' if side == 'input' else 'y'}' is of the type {kind}, which cannot be served"
    said = capsys.readouterr().err
    assert f"the model 'm' ({tmp_path}/m/1/m.xml) cannot be served: its {told}" in said
    assert f"node 'OpenVINOInferenceCalculator_1' (model 'm'): the {told}" in said
    async with serving(tmp_path, worker_kind="thread") as face:
        for name in ("g", "m"):
            (version,) = face.app.describe_versions(name)
            assert told in version["error"]


@pytest.fixture
def compiled(monkeypatch):
    """The files that OpenVINO was told to load."""
    import openvino

    found = []
    compile_model = openvino.Core.compile_model

    def noted(core, model, *more, **others):
        found.append(model)
        return compile_model(core, model, *more, **others)

    monkeypatch.setattr(openvino.Core, "compile_model", noted)
    return found


async def test_a_model_is_in_memory_once_whoever_uses_it(tmp_path, compiled):  # O100
    save(tmp_path / "add/1/add.xml")
    graph = {"g/graph.pbtxt": SEED, "g/model.py": PLUS_TEN, "h/graph.pbtxt": SEED, "h/model.py": PLUS_TEN}
    write(tmp_path, {"config.json": config("add", graphs=("g", "h")), **graph})
    async with serving(tmp_path) as face:
        asked = tensor("input", np.zeros(1, np.float32))
        assert array((await face.infer("g", asked)).outputs[0]).tolist() == [21]
        assert array((await face.infer("h", asked)).outputs[0]).tolist() == [21]
        assert array((await face.infer("add", asked)).outputs[0]).tolist() == [1]
        assert compiled == [str(tmp_path / "add/1/add.xml")]
        save(tmp_path / "add/2/add.xml")
        assert await face.reload()
        assert compiled == [str(tmp_path / f"add/{version}/add.xml") for version in (1, 2)]
        memory = face.app._in_memory._loaded
        await reached(lambda: len(memory) == 1, "the old version to leave the memory")


FOREIGN = {
    "saved_model.pb": foreign_models.saved_model,
    "frozen.pb": foreign_models.graph_def,
    "net.tflite": foreign_models.tflite,
}


@pytest.mark.parametrize("file", FOREIGN)
async def test_models_of_other_libraries_are_run_by_openvino(tmp_path, file):  # O106
    path = tmp_path / "double/1" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(FOREIGN[file]())
    given, result = ("given:0", "result:0") if file == "frozen.pb" else ("given", "result")
    options = f'tag_to_input_tensor_names {{ key: "IN" value: "{given}" }} '
    options += f'tag_to_output_tensor_names {{ key: "OUT" value: "{result}" }}'
    text = graph_text(["OVTENSOR:x"], ["OVTENSOR:y"], session("double"), inference(["IN:x"], ["OUT:y"], options))
    write(tmp_path, {"config.json": config("double"), "g/graph.pbtxt": text})
    async with serving(tmp_path) as face:
        three = np.array([1, 2, 3], np.float32)
        assert array((await face.infer("g", tensor("x", three))).outputs[0]).tolist() == [2, 4, 6]
        name = face.app.find("double").tensors.inputs[0].name
        assert array((await face.infer("double", tensor(name, three))).outputs[0]).tolist() == [2, 4, 6]


async def test_an_output_without_a_name_has_that_of_its_node(tmp_path):
    import openvino as ov
    from openvino import opset13 as ops

    port = ops.parameter([-1], ov.Type.f32, name="input")
    model: Any = ov.Model
    found = model([ops.result(ops.add(port, port), name="sum")], [port])
    found.output(0).set_names(set())
    assert not found.output(0).get_names()
    (tmp_path / "m/1").mkdir(parents=True)
    ov.save_model(found, str(tmp_path / "m/1/m.xml"))
    write(tmp_path, {"config.json": config("m", graphs=())})
    async with serving(tmp_path) as face:
        answer = await face.infer("m", tensor("input", np.ones(2, np.float32)))
        assert [(one.name, array(one).tolist()) for one in answer.outputs] == [("sum", [2, 2])]


async def test_versions_come_and_go_with_their_folders(tmp_path):  # O106, O110
    save(tmp_path / "add/1/add.xml")
    every = json.loads(config("add", graphs=("g", "h")))
    every["model_config_list"][0]["config"]["model_version_policy"] = {"all": {}}
    count = """
        from pyovms import Tensor
        class OvmsPythonModel:
            count = 0
            def execute(self, inputs):
                self.count += 1
                return [Tensor("output", b"%d" % self.count)]
        """
    plain = graph_text(["OVMS_PY_TENSOR:input"], ["OVMS_PY_TENSOR:output"], python_node("n", ["A:input"], ["B:output"]))
    files = {"g/graph.pbtxt": SEED, "g/model.py": PLUS_TEN, "h/graph.pbtxt": plain, "h/model.py": count}
    write(tmp_path, {"config.json": json.dumps(every), **files})
    async with serving(tmp_path) as face:
        asked = tensor("input", np.zeros(1, np.float32))

        def there():
            return sorted(face.app.versions("add").ready), face.app.find("add").endpoint.config.version

        assert bytes((await face.infer("h", asked)).outputs[0].data) == b"1"
        save(tmp_path / "add/3/add.xml", inputs=("input",))
        save(tmp_path / "add/2/add.xml", inputs=("input",))
        assert await face.reload()
        assert there() == (["1", "2", "3"], "3")
        for version in ("1", "3"):
            for file in (tmp_path / "add" / version).iterdir():
                file.unlink()
        assert await face.reload()
        assert there() == (["2"], "2")
        assert not await face.reload()
        assert array((await face.infer("g", asked)).outputs[0]).tolist() == [21]
        # A graph that uses no model is not loaded anew.
        assert bytes((await face.infer("h", asked)).outputs[0].data) == b"2"


async def test_a_folder_of_a_model_that_is_gone_has_not_lost_its_versions(tmp_path):  # F99, for folders here
    save(tmp_path / "add/1/add.xml")
    write(tmp_path, {"config.json": config("add")})
    async with serving(tmp_path) as face:
        assert list(face.app.versions("add").ready) == ["1"]
        (tmp_path / "add").rename(tmp_path / "away")  # as when a disk is not mounted
        await face.reload()
        assert list(face.app.versions("add").ready) == ["1"]
        assert "cannot be looked at: No such file or directory; its versions stay" in face.app.problem
        (tmp_path / "away").rename(tmp_path / "add")
        await face.reload()
        assert face.app.problem == ""
        for file in (tmp_path / "add/1").iterdir():
            file.unlink()
        await face.reload()
        assert "add" not in face.app.ready  # its version is gone for good


async def test_weights_count_whatever_their_file_is_called(tmp_path):  # O106, O110
    import onnx

    def weights(value):
        (tmp_path / "m/1/weights/w").write_bytes(np.full((3, 1), value, np.float32).tobytes())

    path = tmp_path / "m/1/net.onnx"
    (tmp_path / "m/1/weights").mkdir(parents=True)
    model_files.linear(path)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights/w", size_threshold=0)
    (tmp_path / "m/1/weights/w").unlink()
    text = graph_text(["OVTENSOR:a"], ["OVTENSOR:b"], session("m"), inference(["x:a"], ["price:b"]))
    write(tmp_path, {"config.json": config("m"), "g/graph.pbtxt": text})
    async with serving(tmp_path) as face:
        assert "m" not in face.app.ready
        for value in (1, 2):
            weights(value)
            assert await face.reload()
            for name, given in (("m", "x"), ("g", "a")):
                answer = await face.infer(name, tensor(given, np.ones((1, 3), np.float32)))
                assert array(answer.outputs[0]).tolist() == [[3 * value]]
        assert not await face.reload()


async def test_a_version_goes_on_while_the_one_in_its_place_is_broken(tmp_path):  # O115
    save(tmp_path / "add/1/add.xml")
    write(tmp_path, {"config.json": config("add", graphs=())})
    async with serving(tmp_path) as face:
        write(tmp_path, {"add/2/add.xml": "no model"})
        await face.reload()
        assert list(face.app.versions("add").ready) == ["1"]
        assert any("add/2/add.xml" in one.get("error", "") for one in face.app.describe_versions("add"))
        asked = tensor("input", np.zeros(1, np.float32))
        assert array((await face.infer("add", asked)).outputs[0]).tolist() == [1]


async def test_shape_batch_and_properties_of_a_model_are_used(tmp_path):  # O106
    save(tmp_path / "add/1/add.xml")
    every = json.loads(config("add", graphs=()))
    told = every["model_config_list"][0]["config"]
    for said, shape in (
        ({"shape": "(3)"}, (3,)),
        ({"shape": {"input": "(1:4)"}, "plugin_config": {"NUM_STREAMS": "1"}}, (-1,)),
        ({"batch_size": 5}, (5,)),
        ({"batch_size": "1:4"}, (-1,)),
    ):
        told.clear()
        told.update(name="add", base_path="add", **said)
        write(tmp_path, {"config.json": json.dumps(every)})
        async with serving(tmp_path) as face:
            assert face.app.find("add").tensors.inputs[0].shape == shape
    for wrong, why in (
        ({"shape": {"inptu": "(3)"}}, "the input 'inptu', which the model does not have; did you mean 'input'?"),
        ({"plugin_config": {"NUMBER_OF_STREAMS": 1}}, "NUMBER_OF_STREAMS"),
    ):
        told.clear()
        told.update(name="add", base_path="add", **wrong)
        write(tmp_path, {"config.json": json.dumps(every)})
        async with serving(tmp_path) as face:
            (version,) = face.app.describe_versions("add")
            assert why in version["error"]


async def test_a_batch_is_of_the_inputs_that_have_axes(tmp_path):  # O106
    import openvino as ov
    from openvino import opset13 as ops

    ports = [ops.parameter(shape, ov.Type.f32, name=name) for name, shape in (("input", [2, 3]), ("factor", []))]
    model: Any = ov.Model
    (tmp_path / "m/1").mkdir(parents=True)
    ov.save_model(model([ops.result(ops.multiply(*ports), name="y")], ports), str(tmp_path / "m/1/m.xml"))
    every = json.loads(config("m", graphs=()))
    every["model_config_list"][0]["config"]["batch_size"] = 4
    write(tmp_path, {"config.json": json.dumps(every)})
    async with serving(tmp_path) as face:
        assert {one.name: one.shape for one in face.app.find("m").tensors.inputs} == {"input": (4, 3), "factor": ()}


async def test_a_shape_outside_of_what_is_said_is_the_clients_mistake(tmp_path):  # O122
    save(tmp_path / "add/1/add.xml", shape=[1, -1])
    every = json.loads(config("add"))
    every["model_config_list"][0]["config"]["shape"] = "(1,1:4)"
    write(tmp_path, {"config.json": json.dumps(every), "g/graph.pbtxt": SEED, "g/model.py": PLUS_TEN})
    async with serving(tmp_path) as face:
        for name in ("add", "g"):
            with pytest.raises(InvalidRequest, match=r"has the shape \[1, 5\], and the model takes \[1,1..4\]"):
                await face.infer(name, tensor("input", np.zeros((1, 5), np.float32)))
            assert (await face.infer(name, tensor("input", np.zeros((1, 4), np.float32)))).outputs[0].shape == (1, 4)


@pytest.mark.parametrize("nireq", [1, 2])
async def test_nobody_is_answered_with_the_state_of_another(tmp_path, nireq):
    import openvino as ov
    from openvino import opset6, opset13

    port = opset13.parameter([1], ov.Type.f32, name="input")
    kept = opset6.read_value(opset13.constant(np.zeros(1, np.float32)), "sum", ov.Type.f32, [1])
    total = opset13.add(port, kept)
    model: Any = ov.Model
    made = model([opset13.result(total, name="total")], [opset6.assign(total, "sum")], [port])
    (tmp_path / "m/1").mkdir(parents=True)
    ov.save_model(made, str(tmp_path / "m/1/m.xml"))
    every = json.loads(config("m", graphs=()))
    every["model_config_list"][0]["config"] |= {"nireq": nireq}
    write(tmp_path, {"config.json": json.dumps(every)})
    async with serving(tmp_path) as face:
        for _ in range(3):
            answer = await face.infer("m", tensor("input", np.ones(1, np.float32)))
            assert array(answer.outputs[0]).tolist() == [1]


@pytest.mark.parametrize("device", ["AUTO:CPU", "HETERO:CPU", "MULTI:CPU", "BATCH:CPU(4)"])
@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_devices_that_openvino_puts_together_are_its_own_to_read(tmp_path, monkeypatch, device, kind):  # O106
    import openvino

    devices = []
    compile_model = openvino.Core.compile_model

    def noted(core, model, name, *more):
        devices.append(name)
        return compile_model(core, model, name, *more)

    monkeypatch.setattr(openvino.Core, "compile_model", noted)
    save(tmp_path / "add/1/add.xml")
    every = json.loads(config("add"))
    every["model_config_list"][0]["config"]["target_device"] = device
    write(tmp_path, {"config.json": json.dumps(every), "g/graph.pbtxt": SEED, "g/model.py": PLUS_TEN})
    async with serving(tmp_path, worker_kind=kind) as face:
        asked = tensor("input", np.zeros(2, np.float32))
        assert array((await face.infer("add", asked)).outputs[0]).tolist() == [1, 1]
        assert array((await face.infer("g", asked)).outputs[0]).tolist() == [21, 21]
    assert {*devices} == {device}


@pytest.mark.parametrize("said", [{"shape": "auto"}, {"shape": {"input": "auto"}}, {"batch_size": "auto"}])
async def test_an_automatic_shape_takes_whatever_comes(tmp_path, said):  # O106
    save(tmp_path / "add/1/add.xml", axis=3)
    every = json.loads(config("add"))
    every["model_config_list"][0]["config"] |= said
    write(tmp_path, {"config.json": json.dumps(every), "g/graph.pbtxt": SEED, "g/model.py": PLUS_TEN})
    async with serving(tmp_path) as face:
        assert face.app.find("add").tensors.inputs[0].shape == (-1,)
        for length in (3, 5, 1):
            asked = tensor("input", np.arange(length, dtype=np.float32))
            assert array((await face.infer("add", asked)).outputs[0]).tolist() == [*range(1, length + 1)]
            assert array((await face.infer("g", asked)).outputs[0]).tolist() == [*range(21, length + 21)]


async def test_worker_processes_are_told_what_the_configuration_says(tmp_path):  # O106
    save(tmp_path / "add/1/add.xml", axis=3)
    every = json.loads(config("add", graphs=()))
    every["model_config_list"][0]["config"]["shape"] = "auto"
    write(tmp_path, {"config.json": json.dumps(every)})
    async with serving(tmp_path, worker_kind="process") as face:
        asked = tensor("input", np.arange(5, dtype=np.float32))
        assert array((await face.infer("add", asked)).outputs[0]).tolist() == [1, 2, 3, 4, 5]


def test_a_model_that_cannot_be_reshaped_stays_as_it_is(tmp_path, monkeypatch, caplog):  # O106
    import openvino

    from forebay.runtimes.library import OpenVinoOptions, RunOptions
    from forebay.runtimes.model_file import load_with

    def refuse(*_):
        raise RuntimeError("no other shape")

    path = tmp_path / "add/1/add.xml"
    save(path, axis=3)
    monkeypatch.setattr(openvino.Model, "reshape", refuse)
    loaded = load_with(path, RunOptions(openvino=OpenVinoOptions(shapes=(("", "auto"),))))
    assert loaded.signature().feeds[0].rows == 3
    assert "no other shape" in caplog.text


async def test_so_many_run_at_a_time_as_nireq_says(tmp_path, monkeypatch):  # O106
    from forebay.runtimes.openvino import OpenVino

    together = threading.Barrier(3)
    run = OpenVino.run

    def met(self, feed, fetch):
        if any(value.array.flat[0] == 7 for value in feed.values()):
            together.wait(60)
        return run(self, feed, fetch)

    save(tmp_path / "add/1/add.xml")
    every = json.loads(config("add"))
    every["model_config_list"][0]["config"]["nireq"] = 3
    write(tmp_path, {"config.json": json.dumps(every), "g/graph.pbtxt": SEED, "g/model.py": PLUS_TEN})
    async with serving(tmp_path) as face:
        monkeypatch.setattr(OpenVino, "run", met)
        for name, value, wanted in (("add", 7, 8), ("g", -3, 18)):
            asked = tensor("input", np.array([value], np.float32))
            answers = await asyncio.gather(*[face.infer(name, asked) for _ in range(3)])
            assert [array(one.outputs[0]).tolist() for one in answers] == [[wanted]] * 3


async def test_a_model_that_is_not_there_yet_is_told_of_and_served_once_it_is(tmp_path):  # O98, O106, O110
    write(tmp_path, {"config.json": config("add"), "g/graph.pbtxt": SEED, "g/model.py": PLUS_TEN})
    async with serving(tmp_path) as face:
        asked = tensor("input", np.zeros(1, np.float32))
        assert "config.json:1: " in face.app.problem
        assert "no folder with a number and a model in it" in face.app.problem
        with pytest.raises(NotPrepared):
            await face.infer("g", asked)
        save(tmp_path / "add/1/add.xml")
        assert await face.reload()
        assert face.app.problem == ""
        assert array((await face.infer("g", asked)).outputs[0]).tolist() == [21]
        assert array((await face.infer("add", asked)).outputs[0]).tolist() == [1]


def test_a_signal_while_a_library_loads_ends_the_server_and_not_the_process(serve, tmp_path):
    """Its thread is left behind, and must not be within foreign code when the interpreter goes: that aborts."""
    loading = """
        import pathlib
        import openvino
        class OvmsPythonModel:
            def initialize(self, kwargs):
                core = openvino.Core()
                model = core.read_model(pathlib.Path(__file__).with_name("add.xml"))
                pathlib.Path(__file__).with_name("begun").touch()
                while True:
                    core.compile_model(model, "CPU")
            def execute(self, inputs): pass
        """
    save(tmp_path / "g/add.xml")
    write(tmp_path, {"config.json": config(), "g/graph.pbtxt": one_node(), "g/model.py": loading})
    server = serve(tmp_path, ready=False)
    eventually((tmp_path / "g/begun").exists)
    server.signal()
    assert server.wait() == 0, server.log
