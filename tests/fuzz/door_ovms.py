# SPDX-License-Identifier: Apache-2.0
"""Fuzz of graph.pbtxt and config.json: files by their grammar, spoiled here and there.

The oracle: a file is read or refused in one sentence with its name and a line that it has; the same content written in
another way means the same; what is read can be built; and `forebay check` never ends with a traceback.

    .venv/bin/python -m tests.fuzz.door_ovms SECONDS SEED
"""

import contextlib
import io
import json
import random
import re
import sys
import tempfile
import traceback
from pathlib import Path

import msgspec
from tests.fuzz.patience import awake

from forebay.cli.main import main as forebay
from forebay.errors import ConfigError
from forebay.server.config import Overrides
from forebay.surfaces.ovms.config import GraphEntry, read_target
from forebay.surfaces.ovms.graphs import serve_graph
from forebay.surfaces.ovms.linker import read_layout
from forebay.surfaces.ovms.model_nodes import SharedModels

CHECK_EVERY = 20
"""One in so many folders is also given to the whole command, which costs more."""
TAGS = ["", "", "IN", "OUT", "IN2", "OVMS_PY_TENSOR", "OVTENSOR", "OVTENSORS", "LOOPBACK", "SESSION", "REQUEST", "a b"]
NAMES = ["input", "output", "loopback", "py", "s", "x1", "x2", "", "é", "X"]
NUMBERS = [0, 1, -1, 2**31, 2**70]
WORDS = ["PythonExecutorCalculator", "model.py", "../model.py", "/", "\0", "n1", "LOOPBACK:0", "IN:0", "IN:1", "true"]
HANDLERS = ["Default", "SyncSet", "Immediate", "Barrier", "Imediate", "FixedSize"]

Tree = list[tuple[str, object]]


def port(draw, name, tag=None):
    tag = draw.choice(TAGS) if tag is None else tag
    index = draw.choice(["", "", "", "0:", "1:"]) if tag else ""
    return f"{tag}:{index}{name}" if tag else name


def options(name, *fields):
    return ("node_options", [(f"[type.googleapis.com/mediapipe.{name}]", list(fields))])


def loop():
    info = ("input_stream_info", [("tag_index", "LOOPBACK:0"), ("back_edge", True)])
    sync_set = ("sync_set", [("tag_index", "LOOPBACK:0")])
    sets = ("options", [("[mediapipe.SyncSetInputStreamHandlerOptions.ext]", [sync_set])])
    handler = ("input_stream_handler", [("input_stream_handler", "SyncSetInputStreamHandler"), sets])
    return [("input_stream", "LOOPBACK:loopback"), ("output_stream", "LOOPBACK:loopback"), info, handler]


def good(draw):
    """A graph that is right, of one to four nodes."""
    there, has_loop = ["input"], False
    nodes: Tree = []
    for number in range(draw.randint(1, 4)):
        kind, made = draw.choice(["python", "python", "passing", "converter", "model"]), f"x{number}"
        source = draw.choice(there)
        node: Tree = [("name", f"n{number}")]
        if kind == "python":
            node += [("calculator", "PythonExecutorCalculator"), ("input_side_packet", "PYTHON_NODE_RESOURCES:py")]
            node += [("input_stream", f"IN{at}:{one}") for at, one in enumerate({source, draw.choice(there)})]
            node += [
                ("output_stream", f"OUT:{made}"),
                options("PythonExecutorCalculatorOptions", ("handler_path", "model.py")),
            ]
            if draw.random() < 0.2 and not has_loop:
                node += loop()
                has_loop = True
        elif kind == "passing":
            node += [
                ("calculator", "PassThroughCalculator"),
                ("input_stream", f"A:{source}"),
                ("output_stream", f"A:{made}"),
            ]
        elif kind == "converter":
            node += [("calculator", "PyTensorOvTensorConverterCalculator"), ("input_stream", f"OVTENSOR:{source}")]
            called = [("key", "OVMS_PY_TENSOR"), ("value", "called")]
            node += [("output_stream", f"OVMS_PY_TENSOR:{made}")]
            node += [options("PyTensorOvTensorConverterCalculatorOptions", ("tag_to_output_tensor_names", called))]
        else:
            session: Tree = [
                ("calculator", "OpenVINOModelServerSessionCalculator"),
                ("output_side_packet", f"SESSION:s{number}"),
            ]
            session += [options("OpenVINOModelServerSessionCalculatorOptions", ("servable_name", "add"))]
            nodes.append(("node", session))
            node += [("calculator", "OpenVINOInferenceCalculator"), ("input_side_packet", f"SESSION:s{number}")]
            node += [("input_stream", f"OVTENSOR:{source}"), ("output_stream", f"OVTENSOR:{made}")]
        there.append(made)
        nodes.append(("node", node))
    front: Tree = [("input_stream", "OVMS_PY_TENSOR:input"), ("output_stream", port(draw, there[-1], "OVMS_PY_TENSOR"))]
    front += [("executor", [("name", "e"), ("type", "ThreadPoolExecutor")])] if draw.random() < 0.2 else []
    front += [("num_threads", 4), ("input_side_packet", "VAL:val")] if draw.random() < 0.2 else []
    return [*front, *nodes]


def spoil(draw, tree):
    """Changes one thing somewhere in a tree."""
    at = draw.randrange(len(tree)) if tree else 0
    if not tree:
        tree.append((draw.choice(["name", "node", "input_stream"]), "x"))
        return
    field, value = tree[at]
    if isinstance(value, list) and draw.random() < 0.8:
        spoil(draw, value)
        return
    match draw.randrange(7):
        case 0:
            del tree[at]
        case 1:
            tree.insert(draw.randrange(len(tree) + 1), tree[at])
        case 2:
            tree[at] = (draw.choice([field[:-1] or "x", field.upper(), "handler_path", "executor", "sync_set"]), value)
        case 3:
            tree[at] = (field, draw.choice([port(draw, draw.choice(NAMES)), *WORDS, *NUMBERS, True, []]))
        case 4:
            tree[at] = (field, port(draw, draw.choice(NAMES)))
        case 5:
            handler = f"{draw.choice(HANDLERS)}InputStreamHandler"
            tree.append(("input_stream_handler", [("input_stream_handler", handler)]))
        case 6:
            draw.shuffle(tree)


def written(draw, tree, depth=0):
    """Writes a tree in one of the ways that the text format has."""
    found = []
    for field, value in tree:
        quote = draw.choice("\"'")
        if isinstance(value, list):
            opening, closing = draw.choice(["{}", "<>"])
            name = field.replace("/", draw.choice(["/", " / "])) if field.startswith("[type") else field
            inner = written(draw, value, depth + 1)
            text = f"{name}{draw.choice(['', ':', ' : '])} {opening}{draw.choice([' ', chr(10)])}{inner}{closing}"
        elif isinstance(value, bool):
            text = f"{field}: {str(value).lower()}"
        elif isinstance(value, int):
            text = f"{field}: {value}"
        else:
            escaped = str(value).replace("\\", r"\\").replace("\0", r"\000").replace(quote, "\\" + quote)
            text = f"{field}{draw.choice([':', ' : '])}{quote}{escaped}{quote}"
        ends = ["\n", " # told {\n"] if isinstance(value, list) else ["\n", ",\n", ";\n", " # told {\n"]
        found.append("  " * depth + text + draw.choice(ends))
    return "".join(found)


def configuration(draw):
    """A config.json, right or not, of graphs and models that are there or not."""

    def text():
        return draw.choice(["g", "add", "", ".", "g/../g", "/", "nope", "a\tb", "é", 1, None, [], {}])

    def graph():
        told = {"name": draw.choice(["g", "h", text()]), "base_path": text(), "graph_path": text(), "subconfig": text()}
        told["metadata"] = {
            "inputs": {"input": {"datatype": draw.choice(["FP32", "FP31", 3]), "shape": draw.choice([[-1], 3])}}
        }
        return {
            key: told[key] for key in ["name", *draw.sample(sorted(told), draw.randint(0, 3))] if draw.random() < 0.9
        }

    def model():
        policy = draw.choice(
            [
                {"all": {}},
                {"latest": {"num_versions": draw.choice([1, 0, "x"])}},
                {"specific": {"versions": [1]}},
                {},
                3,
            ]
        )
        told = {"name": text(), "base_path": text(), "model_version_policy": policy, "target_device": "CPU", "nireq": 3}
        told |= {
            "shape": draw.choice(["(1,3)", "auto", {"a": "(1:"}, [], "("]),
            "batch_size": draw.choice([1, "auto", [], "x"]),
        }
        told |= {"plugin_config": draw.choice([{"NUM_STREAMS": 1}, {"X": []}, 3])}
        return {"config": {key: told[key] for key in draw.sample(sorted(told), draw.randint(0, 5))}}

    found = {
        "model_config_list": [model() for _ in range(draw.randint(0, 2))],
        "mediapipe_config_list": [graph() for _ in range(draw.randint(0, 3))],
        "monitoring": {},
    }
    if draw.random() < 0.3:
        found[draw.choice([*found, "mediapipe_config_lst", ""])] = draw.choice([None, {}, 3, [3], [[]], "x"])
    if draw.random() < 0.2:
        del found[draw.choice(sorted(found))]
    text_of = json.dumps(found, indent=draw.choice([None, 1]))
    return text_of if draw.random() < 0.9 else text_of.replace(draw.choice('{}[]":,'), draw.choice(["", "}", "//"]), 1)


class Difference(Exception):
    """Something that must not be."""


def refused(read, path):
    """What reading gives, or the sentence by which it is refused, without place."""
    try:
        return read(), ""
    except ConfigError as error:
        found = re.match(rf"{re.escape(str(path.parent))}/[\w./-]*(?::(\d+))?: (.+)", error.message, re.DOTALL)
        if found is None or "Traceback" in error.message:
            raise Difference(f"refused without its place: {error.message}") from None
        lines = path.read_text().count("\n") + 1
        if found[1] and path.name in error.message and not 1 <= int(found[1]) <= lines:
            raise Difference(f"line {found[1]} of {lines}: {error.message}") from None
        said = re.sub(r"^'.*': |line \d+", "", found[2])  # protobuf quotes the line
        return None, said.replace('"', "'")


def try_graph(draw, folder):
    tree = good(draw)
    for _ in range(draw.choice([0, 1, 1, 2, 5])):
        spoil(draw, tree)
    path = folder / "graph.pbtxt"
    found = []
    for _ in range(2):
        path.write_text(written(draw, tree))
        layout, why = refused(lambda: read_layout("g", path, folder), path)
        found.append((layout and msgspec.structs.replace(layout, warnings=(), inference={}), why))
    is_misread = all(
        why.startswith(("Expected ", "Couldn't parse ")) for _, why in found
    )  # which mark was missed depends on the marks
    if found[0] != found[1] and not is_misread:
        raise Difference(f"one meaning, two readings: {found}")
    if found[1][0] is not None:
        entry = GraphEntry(name="g", base_path=folder, graph_path=path, subconfig=folder / "none.json")
        serve_graph(entry, (), SharedModels(), Overrides())


def try_config(draw, folder):
    path = folder / "config.json"
    path.write_text(configuration(draw))
    refused(lambda: read_target(path, None), path)


def try_check(folder):
    """The whole command."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = forebay(["check", str(folder)])
    if status not in {0, 2} or "Traceback" in said.getvalue():
        raise Difference(f"status {status}: {said.getvalue()}")


def fuzz(seed, count=None, seconds=float("inf")):
    """Tries so many files; returns how many, and what was wrong."""
    until, wrong, tried = awake() + seconds, [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.py").write_text("class OvmsPythonModel:\n    def execute(self, inputs): pass\n")
        (folder / "g").mkdir()
        (folder / "add/1").mkdir(parents=True)
        (folder / "add/1/add.xml").touch()
        (folder / "config.json").touch()
        while tried != count and awake() < until:
            draw = random.Random(f"{seed}.{tried}")
            tried += 1
            try:
                try_graph(draw, folder)
                (folder / "g/graph.pbtxt").write_text((folder / "graph.pbtxt").read_text())
                try_config(draw, folder)
                if tried % CHECK_EVERY == 0:
                    try_check(folder)
            except Exception:
                files = "\n".join((folder / one).read_text() for one in ("graph.pbtxt", "config.json"))
                wrong.append(f"{seed}.{tried - 1}: {traceback.format_exc()}\n{files}")
    return tried, wrong


def main(seconds: float, seed: int) -> int:
    """Fuzz for a while; returns the number of differences."""
    tried, wrong = fuzz(seed, seconds=seconds)
    print(f"ovms: {tried} graphs and configurations, {len(wrong)} differences", flush=True)
    for one in wrong[:5]:
        print(one, flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
