# SPDX-License-Identifier: Apache-2.0
"""The Chrome trace event format, as its documentation has it, and what a viewer needs beyond that."""

from __future__ import annotations

import itertools
import json

import jsonschema_rs

_NUMBER = {"type": "number"}
_NATURAL = {"type": "integer", "minimum": 0}


def _event(phase, *required, **more):
    properties = {
        "name": {"type": "string", "minLength": 1},
        "ph": {"const": phase},
        "pid": _NATURAL,
        "tid": _NATURAL,
        "ts": {"type": "number", "minimum": 0},
        "args": {"type": "object"},
        **more,
    }
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "ph", "pid", "tid", "ts", *required],
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_FLOW = {"id": _NATURAL, "cat": _TEXT}
_CALLED = {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]}
_SORTED = {"type": "object", "properties": {"sort_index": _NATURAL}, "required": ["sort_index"]}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit", "otherData"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "anyOf": [
                    _event("X", "dur", "cat", "args", dur={"type": "number", "minimum": 0}, cat=_TEXT),
                    _event("s", "id", "cat", **_FLOW),
                    _event("t", "id", "cat", "bp", **_FLOW, bp={"const": "e"}),
                    _event("f", "id", "cat", "bp", **_FLOW, bp={"const": "e"}),
                    _event("C", "args", args={"type": "object", "additionalProperties": _NUMBER, "minProperties": 1}),
                    _event("M", "args", name={"enum": ["process_name", "thread_name"]}, args=_CALLED),
                    _event("M", "args", name={"enum": ["process_sort_index", "thread_sort_index"]}, args=_SORTED),
                ]
            },
        },
    },
}


_VALIDATOR = jsonschema_rs.Draft202012Validator(SCHEMA)


def check(text):
    """Asserts that a viewer shows this trace as it is meant; returns its events."""
    trace = json.loads(text)
    _VALIDATOR.validate(trace)
    events = trace["traceEvents"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    slices = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for own in slices.values():
        _check_nesting(own)
    _check_flows([event for event in events if event["ph"] in "stf"], slices)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(slices), "every thread that is shown has a name, and no other"
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    assert sorted(processes) == sorted({event["pid"] for event in events})
    return events


def _check_nesting(slices):
    """Slices of a thread lie in each other or beside each other, and the outer one comes first."""
    noise = 1e-6
    open_until = []
    for begun, over in slices:
        while open_until and open_until[-1] <= begun + noise:
            open_until.pop()
        assert not open_until or over <= open_until[-1] + noise, "two slices of a thread overlap"
        open_until.append(over)


def _check_flows(flows, slices):
    for _, points in itertools.groupby(sorted(flows, key=lambda event: event["id"]), key=lambda event: event["id"]):
        phases = "".join(event["ph"] for event in points)
        assert phases[0] == "s", "an arrow begins once, first"
        assert phases[-1] == "f", "an arrow ends once, last"
        assert set(phases[1:-1]) <= {"t"}
    for event in flows:
        own = slices[event["pid"], event["tid"]]
        assert any(begun <= event["ts"] <= over + 1e-6 for begun, over in own), "an arrow hangs in the air"
