# SPDX-License-Identifier: Apache-2.0
"""Records what the original's server answers over HTTP, with the script `tests/compat/pipeline/projects/either.py`.

.venv/bin/python -m tests.originals.pipeline.record > tests/originals/pipeline/http.json
"""

import json
import tempfile
from pathlib import Path

import httpx
from tests.compat.pipeline.test_original import EITHER, PATIENCE_S, original_server
from tests.originals.replay import recorded

COMMAND = "paddle_serving_server 0.9.0, python -m tests.originals.pipeline.record"
PATH = "/svc/prediction"


def pairs(**values):
    return {"key": list(values), "value": list(values.values())}


def tensor(**more):
    return {"tensors": [{"name": "x", **more}]}


BODIES = {
    "texts": pairs(x="1", y="ä 東京"),
    "no pairs": {"key": [], "value": []},
    "an empty name of a value": pairs(**{"": "1"}),
    "a name given twice": {"key": ["x", "x"], "value": ["1", "2"]},
    "an empty value": pairs(x=""),
    "more names than values": {"key": ["x", "y"], "value": ["1"]},
    "more values than names": {"key": ["x"], "value": ["1", "2"]},
    "a number for a text": {"key": ["x"], "value": [1]},
    "a truth for a text": {"key": ["x"], "value": [True]},
    "null for a text": {"key": ["x"], "value": [None]},
    "null for a list": {"key": None, "value": None},
    "a text for a list": {"key": "x", "value": "1"},
    "log id as a number": {**pairs(x="1"), "logid": 7},
    "log id as a text": {**pairs(x="1"), "logid": "8"},
    "log id with a fraction": {**pairs(x="1"), "logid": 1.5},
    "log id with a fraction of nothing": {**pairs(x="1"), "logid": 2.0},
    "log id as a text with a space": {**pairs(x="1"), "logid": " 8"},
    "log id that is no number": {**pairs(x="1"), "logid": "x"},
    "log id too large": {**pairs(x="1"), "logid": 2**63},
    "log id null": {**pairs(x="1"), "logid": None},
    "client's address": {**pairs(x="1"), "clientip": "10.0.0.1"},
    "client's address as a number": {**pairs(x="1"), "clientip": 1},
    "names of the path are not overruled": {**pairs(x="1"), "name": "other", "method": "other"},
    "a name in camel case": {**pairs(x="1"), "clientIp": "10.0.0.1"},
    "an unknown field": {**pairs(x="1"), "more": 1},
    "a product error": pairs(fail="1"),
    "an exception": pairs(**{"raise": "it is broken"}),
    "both branches fail": pairs(fail="1", second="1"),
    "both branches fail, the first one later": pairs(late="1", fail="1", second="1"),
    "the second branch fails": pairs(second="1"),
    "an answer of the wrong type": pairs(echo="1"),
    **{
        f"an array of {kind}": pairs(make=kind) for kind in ("objects", "complex", "dates", "bytes", "texts", "numbers")
    },
    "int64": tensor(elem_type=0, shape=[2], int64_data=[1, 2]),
    "int64 as texts": tensor(elem_type=0, shape=[2], int64_data=["1", "2"]),
    "float32": tensor(elem_type=1, shape=[2], float_data=[0.5, 2]),
    "float32 as texts": tensor(elem_type=1, shape=[2], float_data=["0.5", "NaN"]),
    "int32": tensor(elem_type=2, shape=[2], int_data=[1, 2]),
    "float64": tensor(elem_type=3, shape=[2], float64_data=[0.5, 2]),
    "a text tensor": tensor(elem_type=13, shape=[2], str_data=["a", "b"]),
    "a truth": tensor(elem_type=9, shape=[2], bool_data=[True, False]),
    "an unknown type": tensor(elem_type=99, shape=[1], int_data=[1]),
    "another shape": tensor(elem_type=2, shape=[3], int_data=[1, 2]),
    "a free axis": tensor(elem_type=2, shape=[-1], int_data=[1, 2]),
    "no shape": tensor(elem_type=2, int_data=[1]),
    "a fraction for a whole number": tensor(elem_type=2, shape=[1], int_data=[1.5]),
    "a number too large": tensor(elem_type=2, shape=[1], int_data=[2**31]),
    "int32 as a text with a fraction": tensor(elem_type=2, shape=[1], int_data=["1.0"]),
    "int32 as a text": tensor(elem_type=2, shape=[1], int_data=["1"]),
    "int32 as an exponent": tensor(elem_type=2, shape=[1], int_data=[1e3]),
    "float32 without end": tensor(elem_type=1, shape=[2], float_data=["Infinity", "-Infinity"]),
    "float32 as inf": tensor(elem_type=1, shape=[1], float_data=["inf"]),
    "a truth as a text": tensor(elem_type=9, shape=[1], bool_data=["true"]),
    "a truth as a number": tensor(elem_type=9, shape=[1], bool_data=[1]),
    "a type as a text": tensor(elem_type="2", shape=[1], int_data=[1]),
    "a shape as a text": tensor(elem_type=2, shape=["1"], int_data=[1]),
    "a tensor without a name": {"tensors": [{"elem_type": 2, "shape": [1], "int_data": [1]}]},
    "a tensor of null": {"tensors": [None]},
    "no list of tensors": {"tensors": {}},
    "null among numbers": tensor(elem_type=2, shape=[1], int_data=[None]),
    "log id as an empty text": {**pairs(x="1"), "logid": ""},
    "log id below nothing": {**pairs(x="1"), "logid": -1},
    "log id as a text with a sign": {**pairs(x="1"), "logid": "+1"},
    "log id as a text with a zero before it": {**pairs(x="1"), "logid": "01"},
    "log id as an exponent": {**pairs(x="1"), "logid": 1e3},
    "log id as a truth": {**pairs(x="1"), "logid": True},
    "a list": [1],
    "a number": 1,
    "nothing": None,
}
RAW = {
    "an empty body": "",
    "half a body": '{"key": ["x"',
    "a field given twice": '{"key": ["x"], "value": ["1"], "key": ["y"], "value": ["2"]}',
    "something behind it": '{"key": [], "value": []} x',
    "a number that is none": '{"logid": 01}',
}
PATHS = {
    "another service": ("POST", "/other/prediction"),
    "another method": ("POST", "/svc/other"),
    "no method": ("POST", "/svc"),
    "a path below": ("POST", "/svc/prediction/more"),
    "the root": ("POST", "/"),
    "an empty name in the path": ("POST", "//prediction"),
    "to read": ("GET", "/svc/prediction"),
    "to put": ("PUT", "/svc/prediction"),
    "to delete": ("DELETE", "/svc/prediction"),
}


def _each(names, row):
    """All of the answers to these differ."""
    return {name: {"": row} for name in names}


ERROR = {"json.error": "P23", "json.message": "P23"}
TEXT = {"json.err_msg": "P14"}
DIFFERS = {
    **dict.fromkeys(
        (
            *("a number for a text", "a truth for a text", "a text for a list", "log id with a fraction"),
            *("log id that is no number", "log id too large", "client's address as a number", "a list", "a number"),
            *("a truth as a text", "a truth as a number", "no list of tensors", "log id as an empty text"),
            *(
                "log id as a truth",
                "a fraction for a whole number",
                "a number too large",
                "half a body",
                "a number that is none",
            ),
        ),
        ERROR,
    ),
    **dict.fromkeys(("a text tensor", "an unknown type", "another shape"), TEXT),
    **_each(
        (
            *("log id with a fraction of nothing", "log id as a text with a space", "log id as a text with a sign"),
            *("log id as a text with a zero before it", "log id as an exponent"),
        ),
        "P19",
    ),
    **_each(("int32 as a text with a fraction", "int32 as an exponent", "float32 as inf"), "P14"),
    **_each(("a tensor of null", "null among numbers"), "P23"),
    "more names than values": {"json.err_msg": "P10"},
    "an exception": {"json.err_msg": "P95"},
    "something behind it": {"": "P23"},
    "another service": {"json.err_msg": "P24"},
}
"""What we answer otherwise, by the name of the request: the places, and the row of the README that gives the reason."""


def requests():
    """All requests, by name."""
    headers = {"content-type": "application/json"}
    found = {name: {"json": body} for name, body in BODIES.items()} | {
        name: {"text": body} for name, body in RAW.items()
    }
    asked = {name: {"method": "POST", "path": PATH, "headers": headers, **body} for name, body in found.items()}
    for name, (method, path) in PATHS.items():
        asked[name] = {"method": method, "path": path, "headers": headers, "json": pairs(x="1")}
    return asked


def main():
    lines = []
    with (
        tempfile.TemporaryDirectory() as folder,
        original_server(EITHER, Path(folder), worker_num=8) as (_, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
    ):
        for name, request in requests().items():
            told = {"name": name, "request": request, "answer": recorded(client, request)}
            if name in DIFFERS:
                told["differs"] = DIFFERS[name]
            lines.append(json.dumps(told, default=float))
    text = ",\n".join(lines)
    print(f'{{"source": {json.dumps(COMMAND)}, "exchanges": [\n{text}\n]}}')


if __name__ == "__main__":
    main()
