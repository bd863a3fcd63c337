# SPDX-License-Identifier: Apache-2.0
"""`OvmsPythonModel`: when its methods are called, with what, and what they may return."""

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.circles import left_in_circles
from tests.compat.ovms.conftest import (
    array,
    config,
    graph_text,
    one_node,
    options,
    python_node,
    serving,
    tensor,
    write,
)
from tests.waiting import reached

from forebay.errors import InvalidRequest, Unavailable
from forebay.server.kserve_facts import is_model_ready
from forebay.surfaces.lookup import build
from forebay.surfaces.ovms.stream_values import ExecutionFailed

pytestmark = pytest.mark.anyio

PLUS_ONE = """
    import numpy as np
    from pyovms import Tensor

    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("output", np.array(inputs[0]) + 1)]
    """


async def test_the_page_for_people_from_the_original_shows_a_graph_that_works(tmp_path):
    page = (Path(__file__).parents[3] / "docs/how-to/coming-from/ovms.md").read_text()
    for name, text in re.findall(r"```\w+\n# ovms/iris/([\w.]+)\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text)
    async with serving(tmp_path, name="iris") as face:
        answer = await face.infer("iris", tensor("measures", np.array([[5.1, 3.5, 1.4, 0.2]], np.float32)))
        assert bytes(answer.outputs[0].data) == b"setosa"


async def test_a_handler_without_initialize_adds_one(tmp_path):  # O2, O10
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": PLUS_ONE})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        answer = await face.infer("g", tensor("input", np.arange(3, dtype=np.float32)))
        assert array(answer.outputs[0]).tolist() == [1, 2, 3]
        assert (answer.model, answer.version) == ("g", "1")  # O117


BAD = {
    "no class": "x = 1",
    "no execute": "class OvmsPythonModel:\n    pass",
    "import": "import not_there",
    "constructor": "class OvmsPythonModel:\n    def __init__(self): 1 / 0\n    def execute(self, inputs): pass",
    "initialize": "class OvmsPythonModel:\n    def initialize(self, kwargs): 1 / 0\n    def execute(self, inputs): pass",  # noqa: E501
}


async def test_the_server_is_ready_once_all_was_tried_and_not_before(tmp_path):  # O109
    slow = """
        import pathlib, time
        class OvmsPythonModel:
            def initialize(self, kwargs):
                while not pathlib.Path(__file__).with_name("go").exists():
                    time.sleep(0.005)
            def execute(self, inputs): pass
        """
    files = {
        "config.json": config(quick={}, slow={}),
        "quick/model.py": "class OvmsPythonModel:\n    execute = print\n",
    }
    write(tmp_path, files | {"slow/model.py": slow, "quick/graph.pbtxt": one_node(), "slow/graph.pbtxt": one_node()})
    app = build(str(tmp_path), options()).app
    starting = asyncio.create_task(app.start())
    await reached(lambda: "quick" in app.ready, "the quick one")
    assert app.problems() == ["graphs and models are being loaded"]
    (tmp_path / "slow/go").touch()
    await starting
    assert app.problems() == []
    await app.drain(5.0)


async def test_a_handler_that_cannot_be_loaded_leaves_the_other_graphs_alone(tmp_path):  # O1, O109
    files = {"good/graph.pbtxt": one_node(), "good/model.py": PLUS_ONE}
    for number, text in enumerate(BAD.values()):
        files |= {f"bad{number}/graph.pbtxt": one_node(), f"bad{number}/model.py": text}
    names = ["good", *(f"bad{number}" for number in range(len(BAD)))]
    write(tmp_path, files | {"config.json": config(**{name: {} for name in names})})
    async with serving(tmp_path / "config.json") as face:
        assert list(face.app.served) == ["good"]
        assert face.app.problems() == []
        told = {one["name"]: one for one in face.app.describe_all()}
        why = {name: told[f"bad{number}"]["versions"][0]["error"] for number, name in enumerate(BAD)}
        assert "no class OvmsPythonModel" in why["no class"]
        assert "no method execute" in why["no execute"]
        assert "not_there" in why["import"]
        assert "ZeroDivisionError" in why["constructor"]
        assert "initialize raised: ZeroDivisionError" in why["initialize"]
        with pytest.raises(Unavailable, match=r"'bad0' is not available: .*no class OvmsPythonModel"):  # O121, O122
            await face.infer("bad0", tensor("input", [1]))
        assert not is_model_ready(face.app, "bad0")  # O118
        assert (await face.infer("good", tensor("input", [1]))).outputs


async def test_initialize_is_told_names_in_the_order_of_the_file(tmp_path):  # O3, O4
    text = graph_text(
        [f"OVMS_PY_TENSOR{name}:{name.lower()}" for name in "BAC"],
        ["OVMS_PY_TENSOR:out"],
        python_node("told", ["B:b", "A:a", "C:c"], ["OUT:out"]),
    )
    handler = """
        import json, os
        from pyovms import Tensor

        class OvmsPythonModel:
            def initialize(self, kwargs):
                assert sorted(kwargs.keys()) == ["base_path", "input_names", "node_name", "output_names"]
                assert kwargs["outputs_names"] == kwargs["output_names"]  # as the documentation spells it
                assert kwargs["base_path"] == os.path.dirname(os.path.realpath(__file__))
                self.told = kwargs
            def execute(self, inputs):
                return [Tensor("out", json.dumps([self.told, [one.name for one in inputs]]).encode())]
        """
    write(tmp_path, {"graph.pbtxt": text, "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        answer = await face.infer("g", *(tensor(name, [1]) for name in "bac"))
    told, order = json.loads(bytes(answer.outputs[0].data))
    assert told["node_name"] == "told"
    assert told["input_names"] == ["b", "a", "c"]
    assert told["output_names"] == ["out"]
    assert order == ["a", "b", "c"]  # O54: by the tags


@pytest.mark.parametrize("is_absolute", [False, True])
async def test_handlers_are_looked_for_from_the_base_path(tmp_path, is_absolute):  # O5, T15
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def initialize(self, kwargs):
                self.base = kwargs["base_path"]
            def execute(self, inputs):
                return [Tensor("output", self.base.encode())]
        """
    path = str(tmp_path / "base/more/own.py") if is_absolute else "more/own.py"
    text = one_node().replace('"model.py"', f'"{path}"')
    where = {"base_path": "base", "graph_path": "../graphs/g.pbtxt"}
    write(tmp_path, {"config.json": config(g=where), "graphs/g.pbtxt": text, "base/more/own.py": handler})
    async with serving(tmp_path) as face:
        answer = await face.infer("g", tensor("input", [1]))
    assert bytes(answer.outputs[0].data).decode() == str(tmp_path / "base/more")  # O4


async def test_inputs_come_in_the_order_of_their_tags_byte_by_byte(tmp_path):  # O54
    tags = ["INPUT10", "INPUT2", "INPUT1"]
    text = graph_text(
        [f"OVMS_PY_TENSOR_{tag}:{tag.lower()}" for tag in tags],
        ["OVMS_PY_TENSOR:out"],
        python_node("n", [f"{tag}:{tag.lower()}" for tag in tags], ["OUT:out"]),
    )
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                return [Tensor("out", ",".join(one.name for one in inputs).encode())]
        """
    write(tmp_path, {"graph.pbtxt": text, "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        answer = await face.infer("g", *(tensor(tag.lower(), [1]) for tag in tags))
    assert bytes(answer.outputs[0].data) == b"input1,input10,input2"


async def test_what_was_initialised_is_finalised_if_a_sibling_fails(tmp_path):  # O6, O12, T14
    text = graph_text(
        ["OVMS_PY_TENSOR:input"],
        ["OVMS_PY_TENSOR:output"],
        python_node("first", ["IN:input"], ["OUT:middle"], handler="first.py"),
        python_node("second", ["IN:middle"], ["OUT:output"], handler="second.py"),
    )
    mark = tmp_path / "mark"
    first = f"""
        from pathlib import Path
        class OvmsPythonModel:
            def initialize(self, kwargs): Path({str(mark)!r}).touch()
            def execute(self, inputs): return []
            def finalize(self): Path({str(mark)!r}).unlink()
        """
    second = f"""
        import time
        from pathlib import Path
        class OvmsPythonModel:
            def initialize(self, kwargs):
                while not Path({str(mark)!r}).exists():
                    time.sleep(0.01)
                raise ValueError("no")
            def execute(self, inputs): return []
        """
    write(tmp_path, {"graph.pbtxt": text, "first.py": first, "second.py": second})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        assert not face.app.served
        assert not mark.exists()


async def test_each_node_has_its_own_object_for_all_requests(tmp_path):  # O7
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def initialize(self, kwargs):
                self.name = kwargs["output_names"][0]
                self.calls = 0
            def execute(self, inputs):
                self.calls += 1
                return [Tensor(self.name, bytes([self.calls]))]
        """
    text = graph_text(
        ["OVMS_PY_TENSOR:x"],
        ["OVMS_PY_TENSOR1:a", "OVMS_PY_TENSOR2:b"],
        python_node("one", ["IN:x"], ["OUT:a"]),
        python_node("two", ["IN:x"], ["OUT:b"]),
    )
    write(tmp_path, {"graph.pbtxt": text, "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        for count in (1, 2, 3):
            answer = await face.infer("g", tensor("x", [1]))
            assert [(one.name, bytes(one.data)) for one in answer.outputs] == [
                ("a", bytes([count])),
                ("b", bytes([count])),
            ]


async def test_handlers_and_siblings_of_the_same_name_do_not_mix(tmp_path):  # O8, O9
    handler = """
        from config import ANSWER
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                import late  # also when it is imported late
                return [Tensor("output", (ANSWER + late.ANSWER).encode())]
        """
    files = {"config.json": config(a={}, b={})}
    for name in "ab":
        files |= {
            f"{name}/graph.pbtxt": one_node().replace("model.py", "text-to-speech.py"),
            f"{name}/text-to-speech.py": handler,
            f"{name}/config.py": f"ANSWER = {name!r}",
            f"{name}/late.py": f"ANSWER = {name.upper()!r}",
        }
    write(tmp_path, files)
    async with serving(tmp_path / "config.json") as face:
        for name in "ab":
            answer = await face.infer(name, tensor("input", [1]))
            assert bytes(answer.outputs[0].data).decode() == name + name.upper()


async def test_four_calls_run_side_by_side(tmp_path):  # O11
    handler = """
        import threading
        together = threading.Barrier(4, timeout=60)
        class OvmsPythonModel:
            def execute(self, inputs):
                together.wait()
                return [inputs[0]]
        """
    text = graph_text(["OVMS_PY_TENSOR:x"], ["OVMS_PY_TENSOR:y"], python_node("n", ["IN:x"], ["OUT:y"]))
    handler = handler.replace("[inputs[0]]", '[__import__("pyovms").Tensor("y", inputs[0])]')
    write(tmp_path, {"graph.pbtxt": text, "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        await asyncio.gather(*(face.infer("g", tensor("x", [1])) for _ in range(4)))


RETURNS = {
    "None": ("None", "returned NoneType"),
    "int": ("3", "returned int"),
    "a bare tensor": ('Tensor("output", b"")', "returned Tensor"),
    "something else in it": ("[3]", "with a int"),
    "another name": ('[Tensor("nope", b"")]', "'nope'; its outputs are output"),  # O16
    "one name twice": ('[Tensor("output", b"1"), Tensor("output", b"2")]', "the tensor 'output' twice"),
    "a generator": ("(one for one in [[]])", "no LOOPBACK"),  # O17
    "objects": ('[Tensor("output", np.array([b"a", b"bc"], object))]', "'output'.*object"),
    "a type that is no text": ('[Tensor("output", b"", datatype="\\ud800")]', "'output'.*type"),
    "a shape that no answer holds": ('[Tensor("output", b"abc", shape=(2**70,))]', "'output'.*shape"),
    "an error": ("1 / 0", "node 'python_node': ZeroDivisionError: division by zero"),  # O14
}


@pytest.mark.parametrize("what", RETURNS)
async def test_a_wrong_return_fails_the_request_and_not_the_graph(tmp_path, what):  # O13, O15
    returned, told = RETURNS[what]
    handler = f"""
        import numpy as np
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                if bytes(inputs[0]) == b"good":
                    return (Tensor("output", b"good"),)
                return {returned}
        """
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        for is_json in (False, True):
            with pytest.raises(InvalidRequest, match=told) as raised:
                await face.infer("g", tensor("input", b"bad"), is_json=is_json)
            assert "python_node" in raised.value.message
        stream = face.stream("g")
        stream.send(tensor("input", b"bad"))  # the client says nothing more
        answers, end = await stream.rest()
        assert not answers
        assert end is not None
        assert end.error.message == raised.value.message
        assert (await face.infer("g", tensor("input", b"good"))).outputs


async def test_a_signature_with_more_parameters_fails_the_request_only_if_they_have_no_default(tmp_path):  # O10
    for parameters, is_good in (("inputs, kwargs={}", True), ("inputs, a, b", False)):
        handler = f"""
            from pyovms import Tensor
            class OvmsPythonModel:
                def execute(self, {parameters}):
                    return [Tensor("output", b"x")]
            """
        write(tmp_path, {"graph.pbtxt": one_node(), "model.py": handler})
        async with serving(tmp_path / "graph.pbtxt", name="g") as face:
            call = face.infer("g", tensor("input", [1]))
            if is_good:
                await call
            else:
                with pytest.raises(InvalidRequest, match="TypeError"):
                    await call


async def test_finalize_is_called_once_when_the_server_ends_whatever_it_raises(tmp_path):  # O12
    handler = f"""
        from pathlib import Path
        class OvmsPythonModel:
            def execute(self, inputs): return []
            def finalize(self):
                with Path({str(tmp_path / "ended")!r}).open("a") as file:
                    file.write("x")
                raise ValueError("no")
        """
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g"):
        pass
    assert (tmp_path / "ended").read_text() == "x"


async def test_a_tensor_between_two_nodes_stays_what_it_is(tmp_path):  # O32
    text = graph_text(
        ["OVMS_PY_TENSOR:input"],
        ["OVMS_PY_TENSOR:output"],
        python_node("first", ["IN:input"], ["OUT:middle"], handler="first.py"),
        python_node("second", ["IN:middle"], ["OUT:output"], handler="second.py"),
    )
    first = """
        import numpy as np
        from pyovms import Tensor
        made = Tensor("middle", np.ones((2, 3)), shape=(7,), datatype="foo")
        class OvmsPythonModel:
            def execute(self, inputs): return [made]
        """
    second = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                (one,) = inputs
                told = f"{one.name} {one.datatype} {one.shape} {one.data.shape} {one.size}"
                return [Tensor("output", told.encode())]
        """
    write(tmp_path, {"graph.pbtxt": text, "first.py": first, "second.py": second})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        answer = await face.infer("g", tensor("input", [1]))
    assert bytes(answer.outputs[0].data) == b"middle foo (7,) (2, 3) 48"


async def test_what_a_request_says_of_a_tensor_is_what_the_handler_sees(tmp_path):  # O33, O34, O35, O38
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                (one,) = inputs
                told = f"{one.datatype} {one.shape} {one.data.format} {one.data.shape} {one.data.readonly}"
                return [Tensor("output", told.encode())]
        """
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:

        async def told(*about):
            answer = await face.infer("g", tensor("input", *about))
            return bytes(answer.outputs[0].data).decode()

        assert await told(b"x" * 23, (3,), "my_string") == "my_string (3,) B (23,) True"
        assert await told(b"unframed") == "BYTES (8,) B (8,) True"
        assert await told(b"\0" * 24, (2, 3), "FP32") == "FP32 (2, 3) f (2, 3) True"
        assert await told(b"\0" * 4, (), "FP32") == "FP32 () f () True"
        assert await told(b"", (1, 32, 32, 0, 1), "FP32") == "FP32 (1, 32, 32, 0, 1) f (1, 32, 32, 0, 1) True"
        for shape in ((1,), (3,), (-2,), (10**7,) * 4, (2**62, 2**62)):
            with pytest.raises(InvalidRequest, match="'input'"):
                await told(b"\0" * 8, shape, "FP32")


async def test_a_graph_names_what_is_wrong_with_its_inputs_before_anything_runs(tmp_path):  # O89
    write(
        tmp_path,
        {
            "graph.pbtxt": one_node(inputs=("left", "right")),
            "model.py": "class OvmsPythonModel:\n    def execute(self, inputs): raise SystemError('it ran')",
        },
    )
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        one, other = tensor("left", [1]), tensor("right", [1])
        with pytest.raises(InvalidRequest, match="'right' is missing"):
            await face.infer("g", one)
        with pytest.raises(InvalidRequest, match="no input 'rihgt'; did you mean 'right'"):
            await face.infer("g", one, tensor("rihgt", [1]))
        with pytest.raises(InvalidRequest, match="'left' came twice"):
            await face.infer("g", one, one, other)


async def test_an_output_that_never_came_is_named(tmp_path):  # O65, O75
    handler = """
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                names = bytes(inputs[0]).decode().split(",")
                return [Tensor(name, name.encode()) for name in names]
        """
    write(tmp_path, {"graph.pbtxt": one_node(outputs=("c", "a", "b")), "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        answer = await face.infer("g", tensor("input", b"a,b,c"), id="7")
        assert [one.name for one in answer.outputs] == ["c", "a", "b"]
        assert answer.id == "7"
        answer = await face.infer("g", tensor("input", b"a,b,c"), outputs=("b", "a"))
        assert [one.name for one in answer.outputs] == ["b", "a"]
        with pytest.raises(InvalidRequest, match="has written the output 'b'"):
            await face.infer("g", tensor("input", b"a,c"))
        with pytest.raises(InvalidRequest, match="no output 'd'"):
            await face.infer("g", tensor("input", b"a,b,c"), outputs=("d",))


async def test_deadlines_free_the_caller(tmp_path):  # O140
    handler = """
        import pathlib, time
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                while not pathlib.Path(__file__).with_name("go").exists():
                    time.sleep(0.005)
                return [Tensor("output", b"")]
        """
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g", timeout_ms=50) as face:
        with pytest.raises(Exception, match="timed out after 50 ms"):
            await face.infer("g", tensor("input", [1]))
        (tmp_path / "go").touch()


async def test_only_what_is_wanted_in_json_has_to_be_sayable_in_it(tmp_path):  # O42, O128
    handler = """
        import numpy as np
        from pyovms import Tensor
        class OvmsPythonModel:
            def execute(self, inputs):
                return [Tensor("half", np.ones(1, np.float16)), Tensor("plain", np.ones(1, np.float32))]
        """
    write(tmp_path, {"graph.pbtxt": one_node(outputs=("half", "plain")), "model.py": handler})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:
        answer = await face.infer("g", tensor("input", b""), outputs=["plain"], is_json=True)
        assert [(one.name, bytes(one.data)) for one in answer.outputs] == [("plain", b"[1.0]")]
        with pytest.raises(InvalidRequest, match="output 'half' is FP16, which JSON cannot express"):
            await face.infer("g", tensor("input", b""), is_json=True)
        params, size = face.app.find("g").tensors.ask(
            [tensor("input", b"")], ["half", "plain"], is_json=True, in_json={"half": False}
        )
        head, *datas = await face.app.find("g").endpoint.call([b""], params=params, size=size)
        assert [bytes(data) for data in datas] == [b"\x00\x3c", b"[1.0]"], head


RAISES = """
    class OvmsPythonModel:
        def execute(self, inputs):
            raise ValueError("no")
    """


async def test_a_call_whose_handler_raises_leaves_nothing_in_a_circle(tmp_path):
    write(tmp_path, {"graph.pbtxt": one_node(), "model.py": RAISES})
    async with serving(tmp_path / "graph.pbtxt", name="g") as face:

        async def ask(times):
            for _ in range(times):
                with pytest.raises(ExecutionFailed):
                    await face.infer("g", tensor("input", np.arange(3, dtype=np.float32)))

        await ask(3)
        with left_in_circles() as left:
            await ask(20)
        assert len(left) < 20, sorted(set(left))
