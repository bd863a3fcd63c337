# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - a table of texts
"""`graph.pbtxt`: what is read, and what is said of what cannot be."""

import contextlib
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.compat.ovms.conftest import LOOPBACK, graph_text, one_node, python_node
from tests.fuzz import door_ovms

from forebay.errors import ConfigError
from forebay.surfaces.ovms.graph_pbtxt import MAX_DEPTH, FieldLines
from forebay.surfaces.ovms.linker import read_layout

IN, OUT = ["OVMS_PY_TENSOR:input"], ["OVMS_PY_TENSOR:output"]
GOOD = one_node()


@pytest.fixture
def read(tmp_path):
    (tmp_path / "model.py").touch()

    def read_text(text):
        path = tmp_path / "graph.pbtxt"
        path.write_text(text)
        return read_layout("g", path, tmp_path)

    return read_text


def converter(source, target, options=""):
    return f"""
node {{
  calculator: "PyTensorOvTensorConverterCalculator"
  input_stream: "{source}"
  output_stream: "{target}"
  {options}
}}"""


def names(*pairs):
    entries = "".join(f'tag_to_output_tensor_names {{ key: "{key}" value: "{value}" }}' for key, value in pairs)
    return f"node_options: {{ [type.googleapis.com/mediapipe.PyTensorOvTensorConverterCalculatorOptions]: {{ {entries} }} }}"


SESSION = """
node {
  calculator: "OpenVINOModelServerSessionCalculator"
  output_side_packet: "SESSION:session"
  node_options: { [type.googleapis.com / mediapipe.OpenVINOModelServerSessionCalculatorOptions]: { servable_name: "add" } }
}"""
INFER = """
node {
  calculator: "OpenVINOInferenceCalculator"
  input_side_packet: "SESSION:session"
  input_stream: "OVTENSOR:a"
  output_stream: "OVTENSOR:b"
}"""


def test_both_places_of_options_and_all_spellings_are_read(read):  # O44, O45, O46
    for options in (
        'node_options: { [type.googleapis.com / mediapipe.PythonExecutorCalculatorOptions]: { handler_path: "model.py" } }',
        "node_options { [type.googleapis.com/mediapipe.PythonExecutorCalculatorOptions] { handler_path: 'model.py', } }",
        'options: { [mediapipe.PythonExecutorCalculatorOptions.ext]: { handler_path: "model.py" } }',
    ):
        layout = read(
            f"""
            # a comment with {{ in it
            input_stream: ["OVMS_PY_TENSOR:0:input"], output_stream: "output"
            num_threads: 3 max_queue_size: 5 type: "T" package: "p" executor {{ name: "" type: "ThreadPoolExecutor" }}
            executor {{ name: "e" options {{ [mediapipe.ThreadPoolExecutorOptions.ext] {{ num_threads: 4 }} }} }}
            node < name: "n" calculator: "PythonExecutorCalculator" buffer_size_hint: 3 max_in_flight: 2
              input_side_packet: "PYTHON_NODE_RESOURCES:py" input_stream: "input" output_stream: "OUT:7:output" executor: "e"
              {options}
            >"""
        )
        assert layout.python["n"].handler.endswith("/model.py")
        assert layout.spec.nodes[0].max_in_flight == 2


def test_names_of_mixed_case_and_streams_without_tags_are_read(read):  # O48, O58
    layout = read(graph_text(["Input"], ["Py_Tensor:Output"], python_node("n", ["In:Input"], ["Output"])))
    assert layout.inputs == ("Input",)
    assert layout.python["n"].writes == {"Output": ":0"}


def test_a_pass_through_and_a_converter_are_other_names_of_a_stream(read):  # O57, O94
    text = graph_text(
        IN,
        ["OVMS_PY_TENSOR1:output", "OVTENSOR:ov", "OVMS_PY_TENSOR2:back"],
        'node { calculator: "PassThroughCalculator" input_stream: "A:input" output_stream: "A:middle" }',
        python_node("n", ["IN:middle"], ["OUT:output"]),
        converter("OVMS_PY_TENSOR:output", "OVTENSOR:ov"),
        converter("OVTENSOR:ov", "OVMS_PY_TENSOR:back", names(("OVMS_PY_TENSOR", "zzz"), ("other", "x"))),
    )
    layout = read(text)
    assert [node.name for node in layout.spec.nodes] == ["n"]
    assert dict(layout.spec.nodes[0].inputs) == {"IN:0": "input"}
    assert dict(layout.spec.outputs) == {"output": "output", "ov": "output", "back": "output"}
    assert [one.called for one in layout.outputs] == ["output", "ov", "zzz"]  # O41
    assert layout.python["n"].leaving == {"output": ("output", "ov", "zzz")}


def test_streams_without_a_tag_are_numbered_among_themselves(read):  # O46, O57
    layout = read(
        graph_text(
            ["OVMS_PY_TENSOR:input", "plain"],
            ["OVMS_PY_TENSOR:output", "back"],
            'node { calculator: "PassThroughCalculator" input_stream: ["A:input", "plain"]'
            ' output_stream: ["back", "A:output"] }',
        )
    )
    nodes = {node.name: dict(node.inputs) for node in layout.spec.nodes}
    assert [nodes[name]["in"] for name in layout.spec.outputs.values()] == ["input", "plain"]
    assert list(layout.passing.values()) == ["output", "back"]


BROKEN = {
    "empty": ("  \n", ":1: expected a graph .*, got an empty file"),  # O43
    "no text format": ("input_stream {{", r":1: "),
    "no closing brace": (GOOD.rstrip()[:-1], r":\d+: the '{' of line 4 is not closed"),
    "no closing quote": (
        GOOD.replace('handler_path: "model.py"', 'handler_path: "model.py'),
        r""":\d+: the text '"model.py' has no closing quote on its line""",
    ),
    "a zero byte in a path": (
        GOOD.replace('handler_path: "model.py"', r'handler_path: "model\000.py"'),
        r":\d+: node 'python_node' has the handler_path 'model\\x00.py', and no path has a zero byte",  # F133
    ),
    "unknown field": (
        GOOD.replace("calculator:", "calculatr:"),
        r":\d+: unknown field 'calculatr' in Node; did you mean 'calculator'",
    ),
    "unknown calculator": (
        GOOD.replace('PythonExecutorCalculator"', 'PythonExecuterCalculator"'),
        r":6: unknown calculator .* did you mean 'PythonExecutorCalculator'",
    ),
    "an unlike calculator": (
        GOOD.replace('"PythonExecutorCalculator"', '"NegativeCalculator"'),
        ":6: unknown calculator 'NegativeCalculator'; there is OpenVINOInferenceCalculator, ",
    ),
    "unknown side packet": (
        GOOD.replace("PYTHON_NODE_RESOURCES:py", "PYTHON_NODE_RESOURCE:py"),
        r":7: node 'python_node' has the input_side_packet 'PYTHON_NODE_RESOURCE:py', .* did you mean 'PYTHON_NODE_RES",
    ),
    "side packet of another": (
        GOOD.replace('"PYTHON_NODE_RESOURCES:py"', '["PYTHON_NODE_RESOURCES:py", "SESSION:s"]'),
        r":7: .* 'SESSION:s', which a PythonExecutorCalculator does not take",
    ),
    "unknown executor": (
        'executor { name: "slow" }\n' + one_node(more='executor: "slwo"'),
        r":\d+: node 'python_node' has the executor 'slwo', .* did you mean 'slow'",
    ),
    "unknown type of executor": (
        'executor { name: "slow"\n type: "ThreadPoolExecuter" }\n' + GOOD,
        ":1: the executor 'slow' has the unknown type 'ThreadPoolExecuter'; did you mean 'ThreadPoolExecutor'",
    ),
    "unknown option of an executor": (
        "executor { options { [mediapipe.ThreadPoolExecutorOptions.ext] { num_thread: 4 } } }\n" + GOOD,
        ":1: unknown field 'num_thread' in ThreadPoolExecutorOptions; did you mean 'num_threads'",
    ),
    "unknown options": (
        GOOD.replace("CalculatorOptions]", "CalculatorOption]"),
        r":\d+: there are no options .* did you mean 'PythonExecutorCalculatorOptions'",
    ),
    "options of another": (
        GOOD.replace("PythonExecutorCalculatorOptions", "OpenVINOInferenceCalculatorOptions").replace(
            'handler_path: "model.py"', ""
        ),
        "takes PythonExecutorCalculatorOptions",
    ),
    "same tag twice": (graph_text(["A:x", "A:y"], OUT), ":2: input_stream has the tag 'A' twice"),  # O47
    "same name twice": (graph_text(["A:x", "B:x"], OUT), ":2: the graph has two input_streams named 'x'"),  # O47
    "bad port": (graph_text(["A B:x"], OUT), ":1: input_stream: expected .*, got 'A B:x'"),
    "no input": (graph_text([], OUT, python_node("n", IN, OUT)), "at least one input_stream"),  # O51
    "no output": (graph_text(IN, [], python_node("n", IN, OUT)), "at least one output_stream"),  # O51
    "no name": (GOOD.replace('name: "python_node"', ""), ":4: a PythonExecutorCalculator has no name"),  # O49
    "name twice": (
        graph_text(IN, OUT, python_node("n", IN, ["A:a"]), python_node("n", ["A:a"], OUT)),
        "another node 'n' at line 4",
    ),
    "no options": (re.sub(r"node_options: \{.*?\}\s*\}", "", GOOD, flags=re.DOTALL), "no node_options"),
    "no handler": (GOOD.replace('handler_path: "model.py"', ""), "no handler_path"),  # O49, T23
    "no handler file": (
        GOOD.replace("model.py", "modle.py"),
        r":\d+: .*'modle.py', and /.*/modle.py is not a file",
    ),  # O5
    "no resources": (GOOD.replace('input_side_packet: "PYTHON_NODE_RESOURCES:py"', ""), "PYTHON_NODE_RESOURCES:py"),
    "no input of a node": (graph_text(IN, OUT, python_node("n", [], ["OUT:output"])), "'n' has no input_stream"),
    "no output of a node": (graph_text(IN, OUT, python_node("n", ["IN:input"], [])), "'n' has no output_stream"),
    "two writers": (
        graph_text(
            IN, OUT, python_node("n", ["IN:input"], ["OUT:output"]), python_node("m", ["IN:input"], ["OUT:output"])
        ),
        r":\d+: node 'm' writes 'output', which line \d+ writes",
    ),  # O50
    "no writer": (
        graph_text(IN, OUT, python_node("n", ["IN:inptu"], ["OUT:output"])),
        r":8: node 'n' reads the stream 'inptu', .* did you mean 'input'",
    ),  # O50
    "a cycle": (
        graph_text(
            IN, OUT, python_node("n", ["A:input", "B:b"], ["OUT:output"]), python_node("m", ["IN:output"], ["OUT:b"])
        ),
        r":4: .*cycle: 'n' -> 'm' -> 'n'; break it, or .* input_stream_info \{ tag_index: 'TAG:0' back_edge: true \}",
    ),  # O50
    "a circle of names": (
        graph_text(
            IN,
            OUT,
            converter("OVMS_PY_TENSOR:a", "OVTENSOR:b"),
            converter("OVTENSOR:b", "OVMS_PY_TENSOR:a", names(("OVMS_PY_TENSOR", "a"))),
            python_node("n", ["A:a"], ["OUT:output"]),
        ),
        "round in a circle",
    ),
    "loop on one side": (one_node(more='input_stream: "LOOPBACK:input"'), "LOOPBACK on one side only"),  # O52
    "loop without info": (
        one_node(more=LOOPBACK.replace("input_stream_info: { tag_index: 'LOOPBACK:0', back_edge: true }", "")),
        "needs input_stream_info",
    ),  # O52
    "loop forward": (one_node(more=LOOPBACK.replace("back_edge: true", "back_edge: false")), "back_edge: true"),  # O52
    "wrong index": (one_node(more=LOOPBACK.replace("'LOOPBACK:0'", "'LOOPBACK:1'")), "LOOPBACK"),  # O52
    "other names": (
        one_node(more=LOOPBACK.replace('output_stream: "LOOPBACK:loopback"', 'output_stream: "LOOPBACK:other"')),
        "reads the stream 'loopback', which nothing writes",
    ),  # O52
    "unknown port of a set": (
        one_node(
            more=LOOPBACK.replace(
                'sync_set { tag_index: "LOOPBACK:0" }',
                'sync_set { tag_index: "LOOPBACK:0" } sync_set { tag_index: "INN0" }',
            )
        ),
        "no input_stream 'INN0'; there is IN0:0, LOOPBACK:0",
    ),  # O52
    "default handler": (
        one_node(more=LOOPBACK.replace('SyncSetInputStreamHandler"', 'DefaultInputStreamHandler"')),
        "never come together",
    ),  # O53
    "unknown handler of a loop": (
        one_node(more=LOOPBACK.replace('SyncSetInputStreamHandler"', 'SyncSetInputStreamHandle"')),
        r":\d+: there is no input stream handler 'Sync.*did you mean 'SyncSetInputStreamHandler'",
    ),
    "set of no loop": (
        one_node(more=LOOPBACK.replace('sync_set { tag_index: "LOOPBACK:0" }', 'sync_set { tag_index: "LOOPBAK:0" }')),
        r":\d+: node 'python_node' has no input_stream 'LOOPBAK:0'; did you mean 'LOOPBACK:0'",
    ),
    "info of no loop": (
        one_node(more=LOOPBACK.replace("tag_index: 'LOOPBACK:0'", "tag_index: 'LOOPBAK:0'")),
        r":\d+: node 'python_node' has no input_stream 'LOOPBAK:0'; did you mean 'LOOPBACK:0'",
    ),
    "unknown handler": (
        one_node(more='input_stream_handler { input_stream_handler: "ImediateInputStreamHandler" }'),
        "did you mean 'ImmediateInputStreamHandler'",
    ),
    "converter with one tag": (
        graph_text(IN, OUT, converter("OVTENSOR:input", "OVTENSOR:output")),
        "one tagged OVMS_PY_TENSOR",
    ),  # O94
    "converter with two inputs": (
        graph_text(IN, OUT, converter('OVMS_PY_TENSOR:input" input_stream: "OVTENSOR:input', "OVTENSOR:output")),
        "one input_stream and one output_stream",
    ),
    "converter without names": (
        graph_text(["OVTENSOR:input"], OUT, converter("OVTENSOR:input", "OVMS_PY_TENSOR:output")),
        "tag_to_output_tensor_names",
    ),  # O95
    "converter with another name": (
        graph_text(
            ["OVTENSOR:input"], OUT, converter("OVTENSOR:input", "OVMS_PY_TENSOR:output", names(("OTHER", "x")))
        ),
        "key OVMS_PY_TENSOR",
    ),  # O95
    "no session": (graph_text(["A:a"], ["B:b"], INFER), "session 'session', which no node makes"),  # O93
    "one session twice": (
        graph_text(["A:a"], ["B:b"], SESSION, SESSION, INFER),
        r":\d+: .* makes the session 'session', which the node of line \d+ makes; each needs a name",
    ),  # O93
    "no servable": (
        graph_text(["A:a"], ["B:b"], SESSION.replace('servable_name: "add"', ""), INFER),
        "no servable_name",
    ),  # O98
    "vectors": (graph_text(["A:a"], ["B:b"], SESSION, INFER.replace("OVTENSOR:a", "OVTENSORS:a")), "OVTENSORS"),
    "unknown tag": (
        graph_text(
            ["A:a"],
            ["B:b"],
            SESSION,
            INFER.replace(
                'output_stream: "OVTENSOR:b"',
                'output_stream: "OVTENSOR:b" node_options { [type.googleapis.com/mediapipe.OpenVINOInferenceCalculatorOptions] { tag_to_input_tensor_names { key: "OVTENSR" value: "x" } } }',
            ),
        ),
        "no tag 'OVTENSR'; did you mean 'OVTENSOR'",
    ),
    "tflite": (graph_text(["TFLITE_TENSOR:x"], OUT), "TFLite"),  # O55
    "requests": (graph_text(["REQUEST:x"], OUT), ":1: input_stream has the tag 'REQUEST': whole requests"),  # O56
    "responses": (graph_text(IN, ["RESPONSE:x"]), ":2: output_stream has the tag 'RESPONSE': whole responses"),  # O56
    "queue": ("# OVMS_GRAPH_QUEUE_MAX_SIZE: -1\n" + GOOD, ":1: OVMS_GRAPH_QUEUE_MAX_SIZE"),  # O59
    "queue of loops": ("# OVMS_GRAPH_QUEUE_MAX_SIZE: 3\n" + one_node(loops=True), "LOOPBACK cannot be kept"),  # O59
    "too deep": ("node " + "{ options " * 80, "levels deep"),
}


def test_a_text_that_is_too_deep_is_not_read_to_its_end():
    # F126: each level held the path of all levels around it, 7.6 GB for 100,000 of them.
    places = FieldLines("node { options " + "{ a: 1 a " * 100_000)
    assert places.depth > MAX_DEPTH
    assert len(places.lines) < 4 * MAX_DEPTH


def test_lists_are_found_without_reading_what_is_before_them_again():
    # F126: each bracket copied the text before it, half a terabyte in all.
    assert FieldLines("a: [ " + "[" * 1_000_000).lines == {("a",): 1}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_told_with_file_and_line(read, tmp_path, what):
    text, told = BROKEN[what]
    with pytest.raises(ConfigError, match=told) as raised:
        read(text)
    assert re.match(rf"{re.escape(str(tmp_path / 'graph.pbtxt'))}(:\d+)?: ", raised.value.message)


def test_a_file_that_is_not_there_is_named(tmp_path):  # O43
    with pytest.raises(ConfigError, match=r"nope\.pbtxt: it cannot be read: No such file"):
        read_layout("g", tmp_path / "nope.pbtxt", tmp_path)


@pytest.mark.parametrize("written, takes", [("AUTO", False), ("4", False), ("0", True)])
def test_a_queue_of_graphs_is_read_and_not_needed(read, written, takes):  # O59, T22
    assert read(f"# OVMS_GRAPH_QUEUE_MAX_SIZE: {written}\n{GOOD}").takes_side_packets is takes


def test_a_queue_can_be_switched_off(read, monkeypatch):  # O59
    monkeypatch.setenv("OVMS_GRAPH_QUEUE_OFF", "1")
    assert read(f"# OVMS_GRAPH_QUEUE_MAX_SIZE: 3\n{one_node(loops=True)}").takes_side_packets


def test_an_output_that_nothing_writes_is_a_warning(read):  # O51
    layout = read(graph_text(IN, [*OUT, "MORE:more"], python_node("n", ["IN:input"], ["OUT:output"])))
    assert layout.missing == ("more",)
    assert any(
        "nothing writes the output 'more', so each request fails; there is input, output" in told
        for told in layout.warnings
    )


def test_tags_that_are_nearly_others_are_warnings(read):  # O55: any other tag is a tensor's, as in the original
    text = graph_text(["OVMS_PY_TENSR:input", "IMGE1:a", "MASK:b"], OUT, python_node("n", IN, OUT))
    image, tensor = sorted(told for told in read(text).warnings if "did you mean" in told)[::-1]
    assert re.search(r"graph.pbtxt:2: .*'IMGE1', .* did you mean 'IMAGE'\?", image)
    assert re.search(r"graph.pbtxt:1: .*'OVMS_PY_TENSR', .* did you mean 'OVMS_PY_TENSOR'\?", tensor)
    (loop,) = read(one_node(more=LOOPBACK.replace("LOOPBACK", "LOOPBCK"))).warnings
    assert re.search(r"graph.pbtxt:\d+: node 'python_node' .*'LOOPBCK', .* did you mean 'LOOPBACK'\?", loop)
    assert not read(one_node(more=LOOPBACK)).warnings


def test_sync_sets_of_several_ports(read):  # O63
    more = """input_stream_handler { input_stream_handler: "SyncSetInputStreamHandler"
      options { [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "IN0" tag_index: "IN2:0" } } } }"""
    (node,) = read(one_node(inputs=("a", "b", "c"), more=more)).spec.nodes
    assert node.sets == (frozenset({"IN0:0", "IN2:0"}), frozenset({"IN1:0"}))


WORDS = [
    "input_stream",
    "node",
    "name",
    "calculator",
    "node_options",
    "options",
    "{",
    "}",
    "[",
    "]",
    "<",
    ">",
    ":",
    ",",
    '"',
    "'",
    "\\",
]
WORDS += [
    "#",
    "\n",
    "1",
    "true",
    '"A:x"',
    '"A:0:x"',
    '"LOOPBACK:l"',
    "[type.googleapis.com/mediapipe.X]",
    "\0",
    "é",
    *GOOD.split(),
]


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # protobuf decodes what stands there
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.lists(st.sampled_from(WORDS)).map(" ".join), st.text(max_size=80)))
def test_whatever_stands_in_a_file_is_read_or_refused(read, text):
    with contextlib.suppress(ConfigError):
        read(text)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_good_file_with_a_word_more_or_less_is_read_or_refused(read, data):
    words = re.split(r"(\s+)", one_node(loops=True))
    place = data.draw(st.integers(0, len(words) - 1))
    words[place] = data.draw(st.sampled_from(["", *WORDS]))
    with contextlib.suppress(ConfigError):
        read("".join(words))


def test_an_unknown_calculator_with_options_is_named_as_one_without(read):
    with pytest.raises(ConfigError, match=r"graph\.pbtxt:\d+: .*PythonExecutorCalculatorr.*PythonExecutorCalculator\b"):
        read(GOOD.replace('"PythonExecutorCalculator"', '"PythonExecutorCalculatorr"'))


def test_files_by_their_grammar_are_read_or_refused_however_they_are_written():  # long: make fuzz
    tried, wrong = door_ovms.fuzz(seed=7, count=60)
    assert tried == 60
    assert wrong == []
