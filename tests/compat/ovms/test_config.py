# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - tables of texts
"""`config.json`: which graphs and models it names, and what is said of one that is wrong."""

import contextlib
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.compat.ovms.conftest import config, one_node, write

from forebay.cli.main import main
from forebay.errors import ConfigError
from forebay.surfaces.lookup import surface_of
from forebay.surfaces.ovms.config import file_of, read_target
from forebay.surfaces.ovms.model_versions import ModelEntry, versions_in

HANDLER = "class OvmsPythonModel:\n    def execute(self, inputs): pass\n"


def models(**more):
    return {"model_config_list": [{"config": {"name": "add", "base_path": "add", **more}}]}


@pytest.fixture
def read(tmp_path):
    def read_data(data):
        (tmp_path / "config.json").write_text(data if isinstance(data, str) else json.dumps(data, indent=2))
        return read_target(tmp_path / "config.json", None)

    return read_data


def test_paths_of_a_graph_have_their_defaults(read, tmp_path):  # O104
    entries = [
        {"name": "a"},
        {"name": "b", "base_path": "."},
        {"name": "c", "base_path": "x/y/", "graph_path": "z.pbtxt", "subconfig": "s.json"},
        {"name": "d", "base_path": "", "graph_path": str(tmp_path / "d.pbtxt")},
    ]
    found = read({"model_config_list": [], "mediapipe_config_list": entries}).graphs
    assert [one.base_path for one in found] == [tmp_path / "a", tmp_path, tmp_path / "x/y", tmp_path / "d"]
    assert [one.graph_path for one in found] == [
        tmp_path / "a/graph.pbtxt",
        tmp_path / "graph.pbtxt",
        tmp_path / "x/y/z.pbtxt",
        tmp_path / "d.pbtxt",
    ]
    assert found[2].subconfig == tmp_path / "x/y/s.json"


def test_a_graph_may_stand_among_the_models(read, tmp_path):  # O105
    write(tmp_path, {"g/graph.pbtxt": one_node()})
    listed = read({"model_config_list": [{"config": {"name": "g", "base_path": "g"}}]}).graphs
    other = read({"model_config_list": [], "mediapipe_config_list": [{"name": "g", "base_path": "g"}]}).graphs
    assert [one.graph_path for one in listed] == [one.graph_path for one in other]


def test_what_is_said_of_models_is_a_warning_where_it_stands_for_a_graph(read, tmp_path):  # O105
    write(tmp_path, {"add/graph.pbtxt": one_node()})
    found = read(models(target_device="CPU", nireq=2, layout="NHWC"))
    assert [one.name for one in found.graphs] == ["add"]
    assert [re.sub(r"^.*:(\d+): ", "", told).split()[0] for told in found.warnings] == [
        "target_device",
        "nireq",
        "layout",
    ]


def test_the_first_of_two_graphs_of_a_name_is_served(read):  # O104
    found = read(
        '{"model_config_list": [], "mediapipe_config_list": [{"name": "a"},\n {"name": "a", "base_path": "b"}]}'
    )
    assert [one.base_path.name for one in found.graphs] == ["a"]
    assert re.search(r"config.json:2: there is another graph 'a' before it", found.warnings[0])


def test_the_first_of_two_models_of_a_name_is_served(read, tmp_path):
    write(tmp_path, {f"{name}/1/net.onnx": "" for name in "ab"})
    entries = ",\n".join(f'{{"config": {{"name": "a", "base_path": "{base}"}}}}' for base in "ab")
    found = read(f'{{"model_config_list": [{entries}]}}')
    assert ([one.path for one in found.models], found.bases) == ([tmp_path / "a/1/net.onnx"], (tmp_path / "a",))
    assert re.search(r"config.json:2: there is another model 'a' before it, which is served", found.warnings[0])


@pytest.mark.parametrize(
    "policy, versions",
    [
        (None, ["10"]),
        ({"latest": {"num_versions": 2}}, ["2", "10"]),
        ({"all": {}}, ["1", "2", "10"]),
        ({"specific": {"versions": [1, 10]}}, ["1", "10"]),
    ],
)
def test_versions_of_a_model_are_folders_with_numbers(read, tmp_path, policy, versions):  # O106
    write(
        tmp_path, {f"add/{version}/net.xml": "" for version in (1, 2, 10)} | {"add/x/net.xml": "", "add/3/readme": ""}
    )
    found = read(models() if policy is None else models(model_version_policy=policy)).models
    assert [one.version for one in found] == versions
    assert found[-1].path == tmp_path / "add/10/net.xml"
    assert versions_in(tmp_path / "add/1/net.xml") == {"1": tmp_path / "add/1/net.xml"}


def test_models_of_a_subconfig_are_served_too(read, tmp_path):  # O100
    write(tmp_path, {"g/subconfig.json": json.dumps(models()), "g/add/1/net.onnx": ""})
    assert [one.path for one in read(json.loads(config(g={}))).models] == [tmp_path / "g/add/1/net.onnx"]


def test_what_forebay_has_no_use_for_is_a_warning(read, tmp_path):  # O103
    write(tmp_path, {"add/1/net.xml": ""})
    found = read(models(precision="FP16", layout="NHWC") | {"monitoring": {}, "pipeline_config_list": []})
    assert [re.sub(r"^.*:(\d+): ", r"\1 ", told).split()[1] for told in found.warnings] == [
        "monitoring",
        "pipeline_config_list",
        "layout",
        "precision",
    ]


WRONG = {
    "no JSON": ('{"model_config_list": [],\n]', ":2: not valid JSON"),
    "a list": ("[]", "expected a mapping of keys to values"),
    "no models": ('{"mediapipe_config_list": []}', "the key 'model_config_list' is missing"),
    "an unknown key": ('{"model_config_list": [],\n"mediapipe_config_lst": []}', ":2: .*did you mean mediapipe_config_list"),
    "no list": ('{"model_config_list": {}}', "expected a list, got a mapping"),
    "no name": ('{"model_config_list": [], "mediapipe_config_list": [{}]}', "the key 'name' of the graph is missing"),
    "an unknown key of a graph": ('{"model_config_list": [],\n"mediapipe_config_list": [\n{"name": "a", "graf_path": ""}]}', ":3: .*did you mean graph_path"),
    "a number for a name": ('{"model_config_list": [], "mediapipe_config_list": [{"name": 1}]}', "expected a string of one line, got 1"),
    "a model elsewhere": (models(base_path="http://x/y"), "a folder on this machine"),
    "a policy": (models(base_path="m", model_version_policy={"latst": {}}), "did you mean latest"),
    "a shape": (models(base_path="m", shape="1,3"), r"shape such as \(1,3"),
    "a shape of an input": (models(base_path="m", shape={"a": "(1,x)"}), r"shape.a: expected auto or a shape such as \(1,3"),
    "a property": (models(base_path="m", plugin_config={"NUM_STREAMS": []}), r"NUM_STREAMS: expected a string, a number, true or false, got \[\]"),
    "a batch": (models(base_path="m", batch_size="many"), "batch_size: expected a whole number >= 1, got 'many'"),
    "a negative batch": (models(base_path="m", batch_size=-2), "batch_size: expected a whole number >= 1, got -2"),
    "a zero byte in a path": ('{"model_config_list": [], "mediapipe_config_list": [{"name": "a", "base_path": "x\\u0000y"}]}', r"base_path: expected a string without a zero byte, got 'x\\x00y'"),  # F133
    "a zero byte in another": ('{"model_config_list": [], "mediapipe_config_list": [{"name": "a", "graph_path": "x\\u0000"}]}', r"graph_path: expected a string without a zero byte, got 'x\\x00'"),  # F133
    "requests": (models(base_path="m", nireq="2"), "nireq: expected a whole number from 0 to 1024, got '2'"),
    "too many requests": (models(base_path="m", nireq=10**9), "nireq: expected a whole number from 0 to 1024, got 1000000000"),  # F134
    "metadata": ('{"model_config_list": [], "mediapipe_config_list": [{"name": "a", "metadata": {"inputs": {"x": {"datatype": "FP31"}}}}]}', "FP32"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_with_its_place(read, tmp_path, what):  # O103
    write(tmp_path, {"m/1/net.xml": ""})
    data, told = WRONG[what]
    with pytest.raises(ConfigError, match=told) as raised:
        read(data)
    assert raised.value.message.startswith(str(tmp_path / "config.json"))


def test_models_that_are_not_there_are_problems_and_the_others_are_served(read, tmp_path):  # O106
    write(tmp_path, {"m/1/net.xml": ""})
    listed = [
        {"config": {"name": "add", "base_path": "add"}},
        {"config": {"name": "m", "base_path": "m", "model_version_policy": {"specific": {"versions": [7, 1]}}}},
    ]
    found = read({"model_config_list": listed})
    assert [(one.name, one.version) for one in found.models] == [("m", "1")]
    add, seven = found.problems
    assert re.search(r"config.json:6: .*no folder with a number and a model in it", add)
    assert re.search(r"config.json:\d+: .*version 7 is wanted, and there is 1", seven)


def test_a_graph_with_the_name_of_a_model_is_refused_and_the_others_are_served(read, tmp_path):  # O104
    write(tmp_path, {"m/1/net.xml": ""})
    entry = '{"config": {"name": "add", "base_path": "m"}}'
    found = read(f'{{"model_config_list": [{entry}],\n"mediapipe_config_list": [{{"name": "a"}},\n{{"name": "add"}}]}}')
    assert ([one.name for one in found.graphs], [one.name for one in found.models]) == (["a"], ["add"])
    assert re.search(
        r"config.json:3: a graph and a model are both named 'add', and the model is served", found.problems[0]
    )


def test_what_openvino_is_told_of_a_model(read, tmp_path):  # O106
    write(tmp_path, {"m/1/net.xml": ""})
    said = {
        "shape": {"b": "(1, 3)", "a": "(-1,1:224,)"},
        "plugin_config": {"NUM_STREAMS": 2, "X": True},
    }
    (entry,) = read(models(base_path="m", **said)).models
    assert entry.options.shapes == (("a", "[?,1..224]"), ("b", "[1,3]"))
    assert entry.options.properties == (("NUM_STREAMS", "2"), ("X", "TRUE"))
    (entry,) = read(models(base_path="m", shape="()")).models
    assert entry.options.shapes == (("", "[]"),)
    (entry,) = read(models(base_path="m", shape={"a": "auto", "b": "(1,)"}, nireq=4)).models
    assert (entry.options.shapes, entry.options.requests) == ((("a", "auto"), ("b", "[1]")), 4)
    assert read(models(base_path="m", nireq=0)).models[0].options.requests == 1
    assert read(models(base_path="m", shape="", batch_size=4)).models[0].options.batch == "4"


@pytest.mark.parametrize(
    "said, batch",
    [
        *[(4, "4"), ("4", "4"), ("-1", "?"), ("2:8", "2..8"), ("auto", "auto"), ("10 : 40", "10..40")],
        *[("", ""), ("0", ""), (0, "")],
    ],
)
def test_a_batch_is_a_length_a_range_any_or_that_of_the_file(read, tmp_path, said, batch):  # O106
    write(tmp_path, {"m/1/net.xml": ""})
    (entry,) = read(models(base_path="m", batch_size=said)).models
    assert entry.options.batch == batch


def test_a_shape_counts_and_a_batch_beside_it_does_not(read, tmp_path):  # O106
    write(tmp_path, {"m/1/net.xml": ""})
    found = read(models(base_path="m", shape="(1,3)", batch_size=4))
    assert (found.models[0].options.shapes, found.models[0].options.batch) == ((("", "[1,3]"),), "")
    assert "batch_size is not used" in found.warnings[0]


@pytest.mark.parametrize(
    "files, wanted",
    [
        (["net.onnx", "net.xml", "net.bin"], "1/net.xml"),
        (["saved_model.pb"], "1"),
        (["frozen.pb"], "1/frozen.pb"),
        (["net.tflite", "readme.md"], "1/net.tflite"),
        (["net.pdmodel", "net.pdiparams"], "1/net.pdmodel"),
    ],
)
def test_a_version_is_whatever_openvino_reads(tmp_path, files, wanted):  # O106
    write(tmp_path, {f"m/1/{name}": "" for name in files})
    assert versions_in(tmp_path / "m") == {"1": tmp_path / "m" / wanted}


def test_of_two_spellings_of_a_version_the_shorter_one_is_served(tmp_path):
    write(tmp_path, {f"m/{name}{number}/net.onnx": "" for number in range(1, 10) for name in ("", "0", "00")})
    assert versions_in(tmp_path / "m") == {str(one): tmp_path / f"m/{one}/net.onnx" for one in range(1, 10)}


def test_a_version_has_all_files_of_its_folder_and_a_file_alone_those_called_like_it(tmp_path):  # O106, O110
    files = {"m/1/net.onnx", "m/1/weights/w", "alone/net.xml", "alone/net.bin", "alone/other.bin", "alone/1/net.bin"}
    write(tmp_path, dict.fromkeys(files, ""))
    seen = {
        base: {
            (entry.folder / one.path).relative_to(tmp_path).as_posix()
            for version, path in versions_in(tmp_path / base).items()
            for entry in [ModelEntry(name="m", version=version, path=path)]
            for one in entry.look()
        }
        for base in ("m", "alone/net.xml")
    }
    assert seen == {"m": {"m/1/net.onnx", "m/1/weights/w"}, "alone/net.xml": {"alone/net.xml", "alone/net.bin"}}


def test_check_names_every_broken_graph(tmp_path, capsys):
    files = {"config.json": config(good={}, bad={}, worse={}), "good/graph.pbtxt": one_node(), "good/model.py": HANDLER}
    write(tmp_path, files | {"bad/graph.pbtxt": "node {", "worse/graph.pbtxt": ""})
    assert main(["check", str(tmp_path)]) != 0
    told = capsys.readouterr().err
    assert "bad/graph.pbtxt:1:" in told
    assert "worse/graph.pbtxt:1:" in told
    write(tmp_path, {"config.json": config(good={})})
    assert main(["check", str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().out == "good: a graph of python_node; input -> output\n"


def test_a_configuration_with_a_slip_in_it_is_one_all_the_same(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{\n"model_config_list": []\n"mediapipe_config_list": []}')
    for target in (tmp_path, tmp_path / "config.json"):
        assert main(["check", str(target)]) == 2
        assert "config.json:3: not valid JSON: Expecting ',' delimiter" in capsys.readouterr().err


def test_a_graph_that_is_not_there_is_told_where_it_is_named(tmp_path, capsys):
    write(tmp_path, {"config.json": config(good={}, gone={}), "good/graph.pbtxt": one_node(), "good/model.py": HANDLER})
    assert main(["check", str(tmp_path)]) == 2
    told = f"config.json:1: the graph 'gone' is to be in {tmp_path}/gone/graph.pbtxt, and no file is there"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("side, name, there", [("inputs", "inptu", "input"), ("outputs", "outputs", "output")])
def test_metadata_of_no_stream_is_told_with_the_nearest(tmp_path, capsys, side, name, there):  # O120
    told = {side: {name: {"datatype": "FP32", "shape": [1]}}}
    files = {"config.json": config(good={"metadata": told}), "good/graph.pbtxt": one_node(), "good/model.py": HANDLER}
    write(tmp_path, files)
    assert main(["check", str(tmp_path)]) == 2
    message = f"config.json:1: metadata.{side} names '{name}', which the graph has not; did you mean '{there}'?"
    assert message in capsys.readouterr().err


def test_targets_are_known_by_what_is_in_them(tmp_path):
    write(
        tmp_path,
        {"a/graph.pbtxt": "", "b/config.json": '{"model_config_list": []}', "c/config.json": "{}", "d.json": "3"},
    )
    known = ["a", "a/graph.pbtxt", "b", "b/config.json", "c/config.json"]
    assert [getattr(surface_of(str(tmp_path / one)), "name", None) for one in known] == ["ovms"] * 5
    assert surface_of(str(tmp_path / "c")) is None
    assert getattr(surface_of(str(tmp_path / "d.json")), "name", None) != "ovms"


def test_an_empty_configuration_is_told_what_it_lacks(tmp_path, capsys):  # F97
    write(tmp_path, {"config.json": "{}"})
    assert main(["check", str(tmp_path / "config.json")]) == 2
    assert "the key 'model_config_list' is missing" in capsys.readouterr().err


def test_a_graph_beside_a_json_file_of_somebody_else_is_the_target(tmp_path):
    write(tmp_path, {"graph.pbtxt": "", "config.json": '{"architectures": ["BertModel"]}'})
    (graph,) = read_target(file_of(tmp_path), "g").graphs
    assert (graph.name, graph.graph_path) == ("g", tmp_path / "graph.pbtxt")
    write(tmp_path, {"config.json": config(other={})})
    assert [one.name for one in read_target(file_of(tmp_path), None).graphs] == ["other"]


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 99), st.sampled_from(["", "a", "name", "m", "CPU", "\t/", "../.."])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["name", "base_path", "config", "graph_path", "metadata", "inputs", "model_version_policy", "all", "latest", "specific", "versions", "num_versions", "shape", "datatype", "target_device", "?"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VALUES, VALUES)
def test_whatever_stands_in_a_file_is_read_or_refused(read, models, graphs):
    with contextlib.suppress(ConfigError):
        read({"model_config_list": models, "mediapipe_config_list": graphs})
