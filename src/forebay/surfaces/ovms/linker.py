# SPDX-License-Identifier: Apache-2.0
"""A `graph.pbtxt` becomes a graph of ours.

Converters and pass-throughs are not nodes: their output is another name of their input, and its reader makes of the
value what it needs. Only where a tensor would go from an input of the graph to an output unread is there a node, which
reads it. A session is not a node either; the nodes that infer with it know their model.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import msgspec

from forebay.errors import ConfigError
from forebay.graph.spec import OUT, GraphSpec, NodeSpec, Policy, check
from forebay.surfaces.ovms.graph_pbtxt import CalculatorNode, GraphFile, Handler, StreamPort, meant, read_graph
from forebay.surfaces.ovms.linked_graph import (
    IMAGE,
    OV_TENSOR,
    PY_TENSOR,
    GraphLayout,
    GraphOutput,
    InferenceNode,
    PythonNode,
    Read,
    TensorName,
)

PYTHON: Final = "PythonExecutorCalculator"
CONVERTER: Final = "PyTensorOvTensorConverterCalculator"
SESSION: Final = "OpenVINOModelServerSessionCalculator"
INFERENCE: Final = "OpenVINOInferenceCalculator"
PASSING: Final = "PassThroughCalculator"
CALCULATORS: Final[Mapping[str, str | None]] = {
    PYTHON: f"{PYTHON}Options",
    CONVERTER: f"{CONVERTER}Options",
    SESSION: f"{SESSION}Options",
    INFERENCE: f"{INFERENCE}Options",
    PASSING: None,
}
LOOPBACK: Final = "LOOPBACK"
IN: Final = "in"
"""The input port of a node between an input and an output of the graph."""
RESOURCES: Final = "PYTHON_NODE_RESOURCES"
_POLICIES: Final[Mapping[str, Policy]] = {
    "DefaultInputStreamHandler": "sync",
    "SyncSetInputStreamHandler": "sync",
    "ImmediateInputStreamHandler": "immediate",
    "BarrierInputStreamHandler": "barrier",
}
_REFUSED: Final = {
    "TFLITE_TENSOR": "TFLite tensors are not served",
    # Only calculators that people build into the original in C++ read and write these.
    "REQUEST": "whole requests as packets are not served; take the tensors of one as OVMS_PY_TENSOR",
    "RESPONSE": "whole responses as packets are not served; return tensors as OVMS_PY_TENSOR",
    "OVTENSORS": "lists of tensors in one packet are not served; give each tensor a stream of its own",
    "TENSORS": "lists of tensors in one packet are not served; give each tensor a stream of its own",
}
_KNOWN_TAGS: Final = (PY_TENSOR, OV_TENSOR, IMAGE, "TENSOR", "TFTENSOR")
_ALIKE: Final = 0.75
_SIDE_TAGS: Final[Mapping[str, tuple[str, ...]]] = {PYTHON: (RESOURCES,), INFERENCE: ("SESSION",)}
"""The side packets that nodes take; pass-throughs take any."""
_EXECUTORS: Final = ("ThreadPoolExecutor", "ApplicationThreadExecutor")


def read_layout(name: str, path: Path, base_path: Path) -> GraphLayout:
    """Read a graph and link it.

    Args:
        base_path: Where the paths of its handlers begin.

    Raises:
        ConfigError: With file, line, what was found and what it may have meant.
    """
    return _Linker(name, read_graph(path, CALCULATORS), base_path).link()


def handlers_of(path: Path, base_path: Path) -> list[Path]:
    """Return the files of the handlers that a graph names, which need not be there; none if it cannot be read."""
    try:
        nodes = read_graph(path, CALCULATORS).nodes
    except ConfigError:
        return []
    told = [(node.options or {}).get("handler_path") for node in nodes if node.calculator == PYTHON]
    return [_absolute(base_path / one) for one in told if one]


class _Alias(msgspec.Struct, frozen=True):
    """A stream that is another one, and the name its tensors then have."""

    stream: str
    called: str = ""


class _Linker:
    def __init__(self, name: str, file: GraphFile, base_path: Path) -> None:
        self._name = name
        self._file = file
        self._base_path = base_path
        self._aliases: dict[str, _Alias] = {}
        self._sessions: dict[str, CalculatorNode] = {}
        self._names: dict[str, CalculatorNode] = {}
        self._written: dict[str, StreamPort] = {}
        self._converters: list[CalculatorNode] = []
        self._warnings: list[str] = []

    def link(self) -> GraphLayout:
        file = self._file
        self._check_front()
        for node in file.nodes:
            self._enter(node)
        self._check_reads()
        converted = frozenset(self._resolved(node.inputs[0]).stream for node in self._converters)
        python: dict[str, PythonNode] = {}
        inference: dict[str, InferenceNode] = {}
        specs: list[NodeSpec] = []
        missing = tuple(port.name for port in file.outputs if port.name not in self._written)
        self._warnings += [
            f"{file.path}:{port.line}: nothing writes the output '{port.name}', so each request fails"
            + meant(port.name, self._written)
            for port in file.outputs
            if port.name in missing
        ]
        outputs = [(port, self._resolved(port)) for port in file.outputs if port.name not in missing]
        leaving: dict[str, tuple[str, ...]] = {}
        for port, alias in outputs:
            leaving[alias.stream] = (*leaving.get(alias.stream, ()), alias.called or port.name)
        for name, node in self._names.items():
            if node.calculator == PYTHON:
                python[name] = self._python(node, leaving, converted)
                specs.append(self._spec(name, node, takes_any=True))
            else:
                inference[name] = self._inference(name, node)
                specs.append(self._spec(name, node, takes_any=False))
        passing: dict[str, str] = {}
        sources = {port.name: alias.stream for port, alias in outputs}
        for port, alias in outputs:
            if alias.stream in {one.name for one in file.inputs}:
                name = self._free(f"{PASSING}:{port.name}")
                passing[name] = alias.called or port.name
                specs.append(NodeSpec(name=name, inputs={IN: alias.stream}, outputs={OUT: name}, max_in_flight=1))
                sources[port.name] = name
        loops = any(node.loop for node in python.values())
        has_queue = file.queue_size != 0 and os.environ.get("OVMS_GRAPH_QUEUE_OFF") != "1"
        if has_queue and loops:
            file.fail(1, "OVMS_GRAPH_QUEUE_MAX_SIZE: graphs with a LOOPBACK cannot be kept ready; leave it out")
        spec = GraphSpec(
            name=self._name,
            inputs=tuple(port.name for port in file.inputs),
            # A graph none of whose outputs is written is there all the same; no request gets into it.
            outputs=sources or {"": file.inputs[0].name},
            nodes=tuple(specs),
        )
        self._check(spec)
        return GraphLayout(
            path=file.path,
            spec=spec,
            python=python,
            inference=inference,
            passing=passing,
            inputs=spec.inputs,
            images=frozenset(port.name for port in file.inputs if port.tag.startswith(IMAGE)),
            numbers=converted.union(port.name for port in file.inputs if port.tag.startswith(OV_TENSOR)),
            outputs=tuple(GraphOutput(port.name, alias.called or port.name) for port, alias in outputs),
            missing=missing,
            side_packets=tuple(port.name for port in file.side_inputs if port.name != "py"),
            takes_side_packets=not has_queue,
            loops=loops,
            warnings=tuple(self._warnings),
        )

    def _check_front(self) -> None:
        file = self._file
        for field, ports in (("input_stream", file.inputs), ("output_stream", file.outputs)):
            if not ports:
                file.fail(file.lines[field], f"expected at least one {field} of the graph, got none")
            seen: set[str] = set()
            for port in ports:
                if port.name in seen:
                    file.fail(port.line, f"the graph has two {field}s named '{port.name}'")
                seen.add(port.name)
                kind = next((kind for kind in _REFUSED if port.tag.startswith(kind)), None)
                if kind is not None:
                    file.fail(port.line, f"{field} has the tag '{port.tag}': {_REFUSED[kind]}")
                if not port.tag.startswith(_KNOWN_TAGS):
                    self._warn_of_tag(field, port, _KNOWN_TAGS)
        for port in file.inputs:
            self._written[port.name] = port
        for name, kind, line in file.executors:
            if kind and kind not in _EXECUTORS:
                what = f"the executor '{name}'" if name else "the executor"
                file.fail(line, f"{what} has the unknown type '{kind}'{meant(kind, _EXECUTORS)}")

    def _warn_of_tag(self, what: str, port: StreamPort, known: Sequence[str]) -> None:
        """Warn of a tag that means nothing here, and nearly something."""
        for hint in get_close_matches(port.tag.rstrip("0123456789"), known, 1, _ALIKE):
            told = f"{what} has the tag '{port.tag}', which means nothing by itself; did you mean '{hint}'?"
            self._warnings.append(f"{self._file.path}:{port.line}: {told}")

    def _enter(self, node: CalculatorNode) -> None:
        """Note what a node writes, and check what it says of itself."""
        file = self._file
        executors = [name for name, _, _ in file.executors if name]
        if node.executor and node.executor not in executors:
            msg = f"{node.shown} has the executor '{node.executor}', which the graph has not"
            file.fail(node.lines["executor"], msg + meant(node.executor, executors))
        takes = _SIDE_TAGS.get(node.calculator, ())
        for port in node.side_inputs if node.calculator != PASSING else ():
            if port.tag not in takes:
                msg = f"{node.shown} has the input_side_packet '{port}', which a {node.calculator} does not take"
                file.fail(port.line, msg + meant(port.tag, takes))
        for port in node.outputs:
            if port.name in self._written:
                msg = f"{node.shown} writes '{port.name}', which line {self._written[port.name].line} writes as well"
                file.fail(port.line, f"{msg}; a stream has one writer")
            self._written[port.name] = port
        if node.calculator == SESSION:
            self._enter_session(node)
        elif node.calculator == CONVERTER:
            self._enter_converter(node)
        elif node.calculator == PASSING:
            self._enter_pass_through(node)
        else:
            name = node.name
            if not name and node.calculator == PYTHON:
                file.fail(node.line, f"a {PYTHON} has no name; add one")
            if name in self._names:
                line = self._names[name].line
                file.fail(node.lines["name"], f"there is another node '{name}' at line {line}; a name is given once")
            self._names[name or self._free(node.calculator)] = node

    def _free(self, name: str) -> str:
        """Return a name that no node has."""
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        return next(one for one in numbered if one not in self._names)

    def _enter_session(self, node: CalculatorNode) -> None:
        if node.options is None or not node.options.get("servable_name"):
            self._file.fail(
                node.line, f"{node.shown} has no servable_name in its options; it says which model is meant"
            )
        sessions = [port for port in node.side_outputs if port.tag.startswith("SESSION")]
        if len(sessions) != 1 or len(node.side_outputs) != 1:
            self._file.fail(node.line, f'{node.shown} needs one output_side_packet, such as "SESSION:{{name}}"')
        name, line = sessions[0].name, sessions[0].line
        if name in self._sessions:
            msg = f"{node.shown} makes the session '{name}', which the node of line {self._sessions[name].line} makes"
            self._file.fail(line, f"{msg}; each needs a name of its own")
        self._sessions[name] = node

    def _enter_converter(self, node: CalculatorNode) -> None:
        shown = node.shown
        tags = [port.tag for port in (*node.inputs, *node.outputs)]
        if len(node.inputs) != 1 or len(node.outputs) != 1 or set(tags) != {PY_TENSOR, OV_TENSOR}:
            msg = f"{shown} needs one input_stream and one output_stream, one tagged {PY_TENSOR} and one {OV_TENSOR}"
            self._file.fail(node.line, f"{msg}; found {', '.join(tag or 'no tag' for tag in tags) or 'none'}")
        called = ""
        if node.outputs[0].tag == PY_TENSOR:
            names: Mapping[str, str] = (node.options or {}).get("tag_to_output_tensor_names", {})
            called = names.get(PY_TENSOR, "")
            if not called:
                msg = f"{shown} needs the option tag_to_output_tensor_names with the key {PY_TENSOR}"
                self._file.fail(node.lines["node_options"], msg)
        else:
            self._converters.append(node)
        self._aliases[node.outputs[0].name] = _Alias(node.inputs[0].name, called)

    def _enter_pass_through(self, node: CalculatorNode) -> None:
        sources = {port.key: port.name for port in node.inputs}
        if not sources or sources.keys() != {port.key for port in node.outputs}:
            self._file.fail(
                node.line, f"{node.shown} needs an output_stream with the tag and index of each input_stream"
            )
        for port in node.outputs:
            self._aliases[port.name] = _Alias(sources[port.key])

    def _check_reads(self) -> None:
        for node in self._file.nodes:
            for port in node.inputs:
                if port.name not in self._written:
                    msg = f"{node.shown} reads the stream '{port.name}', which nothing writes"
                    self._file.fail(port.line, msg + meant(port.name, self._written))

    def _resolved(self, port: StreamPort) -> _Alias:
        """Return the stream that a stream is in truth, and the name that its tensors have."""
        stream, called = port.name, ""
        seen = [stream]
        while (alias := self._aliases.get(stream)) is not None:
            stream, called = alias.stream, called or alias.called
            if stream in seen:
                self._file.fail(self._written[stream].line, f"the streams {' -> '.join(seen)} go round in a circle")
            seen.append(stream)
        return _Alias(stream, called)

    def _read(self, port: StreamPort) -> Read:
        alias = self._resolved(port)
        return Read(port.key, alias.called or port.name, bool(alias.called))

    def _python(
        self, node: CalculatorNode, leaving: Mapping[str, tuple[str, ...]], converted: frozenset[str]
    ) -> PythonNode:
        fail = self._file.fail
        options = node.options
        if options is None:
            fail(node.line, f"{node.shown} has no node_options; add {CALCULATORS[PYTHON]} with a handler_path")
        if not options.get("handler_path"):
            fail(node.lines["node_options"], f"{node.shown} has no handler_path; name the file with its class")
        if "\0" in options["handler_path"]:
            msg = f"{node.shown} has the handler_path {options['handler_path'][:100]!r}, and no path has a zero byte"
            fail(node.lines["node_options"], msg)
        if not node.outputs:
            fail(node.line, f"{node.shown} has no output_stream; add one")
        if all(port.tag == LOOPBACK for port in node.inputs):
            fail(node.line, f"{node.shown} has no input_stream; add one")
        if not any(port.tag == RESOURCES and port.name == "py" for port in node.side_inputs):
            fail(node.line, f'{node.shown} has no input_side_packet; add input_side_packet: "{RESOURCES}:py"')
        self._check_handler(node)
        loop, turn = self._loop(node)
        handler = self._base_path / options["handler_path"]
        if not handler.is_file():
            msg = (
                f"{node.shown} has the handler_path '{options['handler_path']}', and {_absolute(handler)} is not a file"
            )
            fail(node.lines["node_options"], msg)
        ports = sorted((port for port in node.inputs if port.tag != LOOPBACK), key=lambda port: port.tag.encode())
        writes = {port.name: port.key for port in node.outputs if port.tag != LOOPBACK}
        return PythonNode(
            name=node.name,
            handler=str(_absolute(handler)),
            input_names=tuple(port.name for port in node.inputs),
            output_names=tuple(port.name for port in node.outputs),
            reads=tuple(map(self._read, ports)),
            writes=writes,
            leaving={name: leaving[name] for name in writes if name in leaving},
            converted=converted.intersection(writes),
            loop=loop,
            turn=turn,
        )

    def _loop(self, node: CalculatorNode) -> tuple[str, str]:
        """Check the loop of a node; returns its ports, empty without one."""
        fail = self._file.fail
        for port in node.inputs:
            if port.tag != LOOPBACK and any(_normal(info.tag_index) == port.key for info in node.infos):
                self._warn_of_tag(f"{node.shown} with a back edge", port, (LOOPBACK,))
        come, go = ([port for port in side if port.tag == LOOPBACK] for side in (node.inputs, node.outputs))
        if not come and not go:
            return "", ""
        if not come or not go:
            (only,) = (come or go)[:1]
            fail(only.line, f"{node.shown} has {LOOPBACK} on one side only; input_stream and output_stream need it")
        if len(come) > 1 or len(go) > 1:
            fail(node.line, f"{node.shown}: expected at most one {LOOPBACK}, got more")
        port = come[0]
        if port.name != go[0].name:
            fail(go[0].line, f"{node.shown} loops from '{go[0].name}' to '{port.name}'; both need the same name")
        infos = [info for info in node.infos if _normal(info.tag_index) == port.key]
        if not any(info.back_edge for info in infos):
            line = next((info.line for info in (*infos, *node.infos)), port.line)
            msg = f"{node.shown} needs input_stream_info {{ tag_index: '{port.key}' back_edge: true }}"
            fail(line, f"{msg}; without it {LOOPBACK} is not a loop")
        handler = self._handler(node)
        if handler.name == "SyncSetInputStreamHandler":
            alone = [group for group in handler.sync_sets if port.key in map(_normal, group)]
        else:
            alone = [(port.key,)] if handler.name == "ImmediateInputStreamHandler" else []
        if not alone or len(alone[0]) > 1:
            msg = f"{node.shown} would wait for {LOOPBACK} and the other inputs together, which never come together"
            fail(handler.line, f"{msg}; give it a SyncSetInputStreamHandler with a sync_set of '{port.key}' alone")
        return port.key, go[0].key

    def _inference(self, name: str, node: CalculatorNode) -> InferenceNode:
        fail = self._file.fail
        wanted = [port for port in node.side_inputs if port.tag == "SESSION"]
        if len(wanted) != 1:
            fail(node.line, f'{node.shown} needs one input_side_packet "SESSION:{{name}}"')
        session = self._sessions.get(wanted[0].name)
        if session is None:
            msg = f"{node.shown} uses the session '{wanted[0].name}', which no node makes"
            fail(wanted[0].line, msg + meant(wanted[0].name, self._sessions))
        for port in (*node.inputs, *node.outputs):
            if port.tag in _REFUSED:
                fail(port.line, f"{node.shown} has the tag '{port.tag}': {_REFUSED[port.tag]}")
        if not node.inputs or not node.outputs:
            fail(node.line, f"{node.shown} needs at least one input_stream and one output_stream")
        options = node.options or {}
        for given in ("input_order_list", "output_order_list"):
            if given in options:
                fail(node.lines["node_options"], f"{node.shown} has the option {given}: {_REFUSED['OVTENSORS']}")
        assert session.options is not None
        return InferenceNode(
            name=name,
            servable=session.options["servable_name"],
            version=session.options.get("servable_version", ""),
            inputs=self._tensors(node, node.inputs, options, "tag_to_input_tensor_names", "input_stream"),
            outputs=self._tensors(node, node.outputs, options, "tag_to_output_tensor_names", "output_stream"),
            place=f"{self._file.path}:{node.line}",
            line=session.line,
        )

    def _tensors(
        self,
        node: CalculatorNode,
        ports: Sequence[StreamPort],
        options: Mapping[str, Mapping[str, str]],
        key: str,
        field: str,
    ) -> dict[str, TensorName]:
        """Return the model's names by port: what the options say under a key, else the tag of the field."""
        names = options.get(key, {})
        tags = {name for port in ports for name in (port.tag, port.key)}
        for tag in names:
            if tag not in tags:
                msg = f"{key}: {node.shown} has no tag '{tag}'"
                self._file.fail(_line_of(node, key, tag), msg + meant(tag, [port.tag for port in ports]))
        found: dict[str, TensorName] = {}
        for port in ports:
            told = next((one for one in (port.tag, port.key) if names.get(one)), None)
            line, what = (port.line, f"{field} '{port}'") if told is None else (_line_of(node, key, told), key)
            name = port.tag if told is None else names[told]
            found[port.key] = TensorName(name, f"{self._file.path}:{line}: {what}")
        return found

    def _handler(self, node: CalculatorNode) -> Handler:
        if node.handler.name != Handler().name or self._file.handler is None:
            return node.handler
        return self._file.handler

    def _check_handler(self, node: CalculatorNode) -> None:
        """Refuse what a node says of inputs that it has not, and handlers that there are not."""
        handler = self._handler(node)
        if handler.name not in _POLICIES:
            msg = f"there is no input stream handler '{handler.name}'"
            self._file.fail(handler.line, msg + meant(handler.name, _POLICIES))
        keys = [port.key for port in node.inputs]
        told = [(info.line, info.tag_index) for info in node.infos]
        told += [(handler.line, one) for group in handler.sync_sets for one in group]
        for line, one in told:
            if _normal(one) not in keys:
                self._file.fail(line, f"{node.shown} has no input_stream '{one}'" + meant(one, keys))

    def _spec(self, name: str, node: CalculatorNode, *, takes_any: bool) -> NodeSpec:
        self._check_handler(node)
        handler = self._handler(node)
        policy = _POLICIES[handler.name]
        keys = [port.key for port in node.inputs]
        back = {_normal(info.tag_index): info for info in node.infos if info.back_edge}
        if policy == "barrier" and back:
            self._file.fail(handler.line, f"{node.shown} has a loop, which a barrier would wait for; use sync sets")
        return NodeSpec(
            name=name,
            inputs={port.key: self._resolved(port).stream for port in node.inputs},
            outputs={port.key: port.name for port in node.outputs},
            policy=policy,
            sets=self._sets(node, handler, keys),
            optional=frozenset(keys) if takes_any else frozenset(),
            back_edges=frozenset(back),
            max_in_flight=max(node.max_in_flight, 1),
            closed_loop=any(port.tag == LOOPBACK for port in node.inputs),
        )

    def _sets(self, node: CalculatorNode, handler: Handler, keys: Sequence[str]) -> tuple[frozenset[str], ...]:
        """Return the sync sets of a node, the one of all that is in none included."""
        if handler.name != "SyncSetInputStreamHandler":
            return ()
        sets: list[frozenset[str]] = []
        for written in handler.sync_sets:
            for one in written:
                if any(_normal(one) in group for group in sets):
                    self._file.fail(handler.line, f"{node.shown} has '{one}' in two sync sets; it belongs to one")
            sets.append(frozenset(map(_normal, written)))
        rest = frozenset(keys).difference(*sets)
        return tuple(group for group in (*sets, rest) if group)

    def _check(self, spec: GraphSpec) -> None:
        """Refuse what the engine refuses, with a line: what is left is a cycle."""
        try:
            self._warnings += [f"{self._file.path}: {told}" for told in check(spec)]
        except ConfigError as error:
            concerned = [node.line for name, node in self._names.items() if f"'{name}'" in error.message]
            said, semicolon, _ = error.message.partition("; break it")
            how = ", or let the node that closes it say input_stream_info { tag_index: 'TAG:0' back_edge: true }"
            self._file.fail(min(concerned, default=1), said + semicolon + (how if semicolon else ""))


def _line_of(node: CalculatorNode, key: str, entry: str) -> int:
    """Return the line of an entry of a map in the options of a node, of the options if it is not found."""
    return node.lines.get(f"{key}.{entry}", node.lines["node_options"])


def _normal(tag_index: str) -> str:
    """Return `TAG:index` of what may be written `TAG`."""
    tag, _, index = tag_index.partition(":")
    return f"{tag}:{int(index) if index.isascii() and index.isdigit() else index or 0}"


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - links stay as they are
