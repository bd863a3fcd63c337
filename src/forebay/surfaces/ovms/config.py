# SPDX-License-Identifier: Apache-2.0
"""`config.json` and `subconfig.json`: which graphs and models there are, and where."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from forebay.errors import ConfigError
from forebay.repository.address import SCHEMES, source_of
from forebay.runtimes.contract import OpenVinoOptions
from forebay.server import yaml
from forebay.server.walker import Walker, line, shown, text, whole
from forebay.surfaces.ovms.model_versions import ModelEntry, StoredModels, model_among
from forebay.types.datatypes import DATATYPES
from forebay.types.settings import MAX_WORKERS
from forebay.types.tensor import TensorMetadata

GRAPH_FILE: Final = "graph.pbtxt"
SUBCONFIG_FILE: Final = "subconfig.json"
MODELS: Final = "model_config_list"
GRAPHS: Final = "mediapipe_config_list"

_IGNORED: Final = (
    "pipeline_config_list",
    "custom_node_library_config_list",
    "custom_loader_config_list",
    "monitoring",
)
_IGNORED_OF_MODELS: Final = (
    *("layout", "precision", "stateful", "idle_sequence_cleanup"),
    *("low_latency_transformation", "max_sequence_number", "allow_cache", "custom_loader_options"),
)
_OF_MODELS: Final = frozenset(
    {"model_version_policy", "target_device", "plugin_config", "shape", "batch_size", "nireq", *_IGNORED_OF_MODELS}
)
_AXIS: Final = re.compile(r"-1|[1-9]\d{0,8}(?::[1-9]\d{0,8})?", re.ASCII)
_SHAPE: Final = re.compile(r"\s*\(\s*(?:(?:-1|\d{1,9}(?::\d{1,9})?)\s*(?:,\s*|(?=\))))*\)\s*", re.ASCII)
_Path = tuple[Any, ...]


class GraphEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A graph that is to be served.

    Attributes:
        name: What it is served as.
        base_path: Where the paths of its handlers begin.
        graph_path: Its file.
        subconfig: A file with models for its sessions, which need not be there.
        inputs: What clients are told of its inputs, where somebody says it.
        outputs: And of its outputs.
        where: Where it is named, for messages.
        problem: Why it is not served, where its files need not be looked at for that.
    """

    name: str
    base_path: Path
    graph_path: Path
    subconfig: Path
    inputs: tuple[TensorMetadata, ...] = ()
    outputs: tuple[TensorMetadata, ...] = ()
    where: str = ""
    problem: str = ""


class OvmsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served.

    Attributes:
        graphs: The graphs; one with a problem is there for what is told of it.
        refused: Graphs that have the name of a model, which is served instead.
        models: The versions of models.
        bases: Where versions of models come and go on this machine.
        stored: Models that are in a bucket, each with its address.
        warnings: What is odd.
        problems: What cannot be served, while the rest is: models of which no version is there.
        shapes_at: Where the shapes of inputs are told, by the names of the model and of the input.
    """

    graphs: tuple[GraphEntry, ...] = ()
    refused: tuple[GraphEntry, ...] = ()
    models: tuple[ModelEntry, ...] = ()
    bases: tuple[Path, ...] = ()
    stored: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    shapes_at: Mapping[str, Mapping[str, str]] = {}


def looks_like_config(path: Path, *, takes_empty: bool = False) -> bool:
    """Tell whether a JSON file is a configuration of the original.

    Args:
        takes_empty: Whether `{}` is one, which the reader refuses with what it lacks.
    """
    try:
        raw = path.read_bytes()[: yaml.MAX_BYTES]
    except OSError:
        return False
    try:
        found: Any = json.loads(raw)
    except (ValueError, RecursionError):  # whoever reads it says where the slip is
        return any(f'"{key}"'.encode() in raw for key in (MODELS, GRAPHS))
    if not isinstance(found, dict):
        return False
    keys = cast("dict[str, Any]", found).keys()
    return not keys.isdisjoint({MODELS, GRAPHS}) or (takes_empty and not keys)


def file_of(target: Path) -> Path:
    """Return the file that a person means by a folder: the original's `config.json`, or else the graph in it."""
    if not target.is_dir():
        return target
    configuration, graph = target / "config.json", target / GRAPH_FILE
    return graph if graph.is_file() and not looks_like_config(configuration) else configuration


def read_target(target: Path, name: str | None, stored: StoredModels | None = None) -> OvmsConfig:
    """Read a `graph.pbtxt` or a `config.json`.

    Args:
        name: What a single graph is called.
        stored: The buckets that were looked at before.

    Raises:
        ConfigError: If a configuration is wrong.
    """
    stored = stored or StoredModels()
    if target.suffix == ".pbtxt":
        folder = target.absolute().parent
        name = name or re.sub(r"[^\w.-]+", "-", folder.name) or "graph"
        entry = GraphEntry(name=name, base_path=folder, graph_path=target.absolute(), subconfig=folder / SUBCONFIG_FILE)
        return _with_models(OvmsConfig(graphs=(entry,)), stored)
    return _with_models(_Reader(_document(target), target.absolute().parent, stored).read(), stored)


def _with_models(config: OvmsConfig, stored: StoredModels) -> OvmsConfig:
    """Add the models of the subconfigs."""
    models, warnings = {(one.name, one.version): one for one in config.models}, [*config.warnings]
    bases, problems, buckets = [*config.bases], [*config.problems], [*config.stored]
    shapes_at = dict(config.shapes_at)
    broken: dict[str, str] = {}
    for graph in config.graphs:
        if not graph.subconfig.is_file():
            continue
        try:
            found = _Reader(_document(graph.subconfig), graph.subconfig.parent, stored, is_sub=True).read()
        except ConfigError as error:
            if not graph.where:  # it is all that there is
                raise
            broken[graph.name] = error.message
            continue
        warnings += found.warnings
        bases += found.bases
        buckets += found.stored
        problems += found.problems
        shapes_at = {**found.shapes_at, **shapes_at}
        for one in found.models:
            if models.setdefault((one.name, one.version), one) != one:
                warnings.append(f"{graph.subconfig}: there is another model '{one.name}', which is served instead")
    names = {one.name for one in models.values()}
    for graph in config.graphs:
        if graph.name in names:
            place = graph.where or graph.graph_path
            msg = f"{place}: a graph and a model are both named '{graph.name}', and the model is served; rename one"
            if not graph.where:
                raise ConfigError(msg)
            broken[graph.name] = msg
            problems.append(broken[graph.name])
    graphs = [msgspec.structs.replace(one, problem=broken.get(one.name, "")) for one in config.graphs]
    return OvmsConfig(
        graphs=tuple(one for one in graphs if one.name not in names),
        refused=tuple(one for one in graphs if one.name in names),
        models=tuple(models.values()),
        bases=tuple(bases),
        stored=tuple(buckets),
        warnings=tuple(warnings),
        problems=tuple(problems),
        shapes_at=shapes_at,
    )


def _document(path: Path) -> yaml.Document:
    """Read a JSON file, with the lines of what is in it.

    Raises:
        ConfigError: If it is no JSON.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from error
    if len(raw) > yaml.MAX_BYTES:
        raise ConfigError(f"{path}: it has {len(raw)} bytes; {yaml.MAX_BYTES} are allowed")
    try:
        data = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: it is no JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: it is no JSON: {error}") from None
    try:  # YAML knows where things stand, and reads JSON but for tabs and escaped slashes
        return yaml.load(raw.replace(b"\t", b" ").replace(b"\\/", b"/"), str(path))
    except ConfigError:
        return yaml.Document(str(path), data, {}, {})


class _Reader(Walker):
    """Reads one document."""

    def __init__(self, document: yaml.Document, folder: Path, stored: StoredModels, *, is_sub: bool = False) -> None:
        super().__init__(document)
        self._folder = folder
        self._stored = stored
        self._is_sub = is_sub
        self._bases: list[Path] = []
        self._buckets: list[tuple[str, str]] = []
        self._problems: list[str] = []
        self._shapes_at: dict[str, dict[str, str]] = {}

    def read(self) -> OvmsConfig:
        top = self.mapping((), self.document.data if self.document.data is not None else [])
        for key in top:
            if key in _IGNORED:
                self.warn((key,), f"{key} is not used by forebay")
            elif key not in {MODELS, GRAPHS}:
                self.unknown((key,), (MODELS, GRAPHS, *_IGNORED))
        if MODELS not in top and not self._is_sub:
            self.fail((), f"there is no {MODELS}; it is needed, and may be an empty list: []")
        graphs: dict[str, GraphEntry] = {}
        models: list[ModelEntry] = []
        named: list[Any] = []
        for path, entry in self._entries((MODELS,), top.get(MODELS, [])):
            inner = self.mapping((*path, "config"), entry.get("config"))
            for key in entry:
                if key != "config":
                    self.unknown((*path, key), ("config",))
            if self._is_graph((*path, "config"), inner):
                for key in [key for key in inner if key in _OF_MODELS]:
                    self.warn(
                        (*path, "config", key), f"{key} is not used: this is a graph, and its models have their own"
                    )
                    inner.pop(key)
                self._add(graphs, (*path, "config"), inner)
            elif (name := inner.get("name")) in named:
                self.warn((*path, "config", "name"), f"there is another model {shown(name)} before it, which is served")
            else:
                models += self._model((*path, "config"), inner)
                named.append(name)
        if self._is_sub and top.get(GRAPHS):
            self.warn((GRAPHS,), f"{GRAPHS} is not used here, only {MODELS} is")
        else:
            for path, entry in self._entries((GRAPHS,), top.get(GRAPHS, [])):
                self._add(graphs, path, entry)
        return OvmsConfig(
            graphs=tuple(graphs.values()),
            models=tuple(models),
            bases=tuple(self._bases),
            stored=tuple(self._buckets),
            warnings=tuple(self.warnings),
            problems=tuple(self._problems),
            shapes_at=self._shapes_at,
        )

    def _entries(self, path: _Path, value: Any) -> list[tuple[_Path, dict[Any, Any]]]:
        if not isinstance(value, list):
            self.wrong(path, value, "a list is needed")
        found: list[tuple[_Path, dict[Any, Any]]] = []
        for index, one in enumerate(cast("list[Any]", value)):
            if not isinstance(one, dict):
                self.wrong((*path, index), one, "an object is needed")
            found.append(((*path, index), cast("dict[Any, Any]", one)))
        return found

    def _add(self, graphs: dict[str, GraphEntry], path: _Path, entry: dict[Any, Any]) -> None:
        graph = self._graph(path, entry)
        if graph.name in graphs:
            self.warn((*path, "name"), f"there is another graph '{graph.name}' before it, which is served")
        else:
            graphs[graph.name] = graph

    def _is_graph(self, path: _Path, entry: dict[Any, Any]) -> bool:
        if "graph_path" in entry:
            return True
        name, base = entry.get("name"), entry.get("base_path")
        if not isinstance(name, str) or not isinstance(base, (str, type(None))):
            return False
        return (self._folder / (base or name) / GRAPH_FILE).is_file()

    def _graph(self, path: _Path, entry: dict[Any, Any]) -> GraphEntry:
        found = self.section(
            path,
            entry,
            {
                "name": line,
                "base_path": text,
                "graph_path": text,
                "subconfig": text,
                "metadata": Walker.mapping,
            },
        )
        name = found.get("name")
        if name is None:
            self.fail(path, "the graph has no name; one is needed")
        told = found.get("base_path") or name
        if "://" in told:
            msg = f"base_path is {shown(told)}; a graph and its handlers lie in a folder on this machine"
            self.fail((*path, "base_path"), msg)
        base = self._folder / told
        metadata = self.section((*path, "metadata"), found.get("metadata"), {"inputs": _metadata, "outputs": _metadata})
        return GraphEntry(
            name=name,
            base_path=base,
            graph_path=base / (found.get("graph_path") or GRAPH_FILE),
            subconfig=base / (found.get("subconfig") or SUBCONFIG_FILE),
            inputs=metadata.get("inputs", ()),
            outputs=metadata.get("outputs", ()),
            where=self.where(path),
        )

    def _model(self, path: _Path, entry: dict[Any, Any]) -> list[ModelEntry]:
        ignored = {key: entry.pop(key) for key in _IGNORED_OF_MODELS if key in entry}
        for key in ignored:
            self.warn((*path, key), f"{key} is not used: the file says what the model takes, forebay how it runs")
        for key in ("graph_path", "subconfig"):
            entry.pop(key, None)
        found = self.section(
            path,
            entry,
            {
                "name": line,
                "base_path": line,
                "model_version_policy": _policy,
                "target_device": line,
                "plugin_config": _properties,
                "shape": _shapes,
                "batch_size": _batch,
                "nireq": whole(0, MAX_WORKERS),
            },
        )
        for key in ("name", "base_path"):
            if key not in found:
                self.fail(path, f"the model has no {key}; it is needed")
        versions = self._versions((*path, "base_path"), found["name"], found["base_path"])
        kind, wanted = found.get("model_version_policy", ("latest", 1))
        if not versions:
            return []
        if kind == "specific":
            for one in wanted:
                if str(one) not in versions:
                    msg = f"version {one} is wanted, and there is {', '.join(versions)}"
                    self._problem((*path, "model_version_policy"), msg)
            chosen = [str(one) for one in wanted if str(one) in versions]
        else:
            chosen = list(versions) if kind == "all" else list(versions)[-wanted:]
        if found.get("shape") and found.pop("batch_size", ""):
            self.warn((*path, "batch_size"), "batch_size is not used, as there is a shape")
        device = found.get("target_device", "CPU")
        self._shapes_at[found["name"]] = {
            one: self.where((*path, "shape", one)) + ": shape" for one, _ in found.get("shape", ()) if one
        }
        options = OpenVinoOptions(
            properties=found.get("plugin_config", ()),
            shapes=found.get("shape", ()),
            batch=found.get("batch_size", ""),
            requests=found.get("nireq", 0) or 1,
            device=device if ":" in device else "",
        )
        return [
            ModelEntry(
                name=found["name"],
                version=version,
                **versions[version],
                device="" if device in {"CPU", "AUTO"} or options.device else device.lower().replace(".", ":"),
                options=options,
            )
            for version in chosen
        ]

    def _versions(self, path: _Path, name: str, told: str) -> dict[str, dict[str, Any]]:
        """Return what an entry says of the place of each version that there is, in rising order."""
        scheme, colon, _ = told.partition("://")
        if colon and scheme not in SCHEMES:
            places = "a folder on this machine or an address with s3://, gs:// or az:// is needed"
            self.fail(path, f"base_path is {shown(told)}; {places}")
        if colon and scheme != "file":
            self._buckets.append((name, told))
            try:
                stored, problem = self._stored.versions(name, told)
            except ConfigError as error:
                self.fail(path, error.message)
            if problem:
                self._problem(path, problem)
            return {
                str(number): {
                    "path": model_among(file.path for file in one.files if "/" not in file.path),
                    "address": told,
                    "revision": one,
                }
                for number, one in sorted(stored.items())
            }
        base = source_of(told, self._folder).folder() if colon else self._folder / told
        assert base is not None
        self._bases.append(base)
        versions, problem = self._stored.versions_here(base)
        if problem:
            self._problem(path, f"base_path is {shown(told)}, and {problem}")
        return {version: {"path": file} for version, file in versions.items()}

    def _problem(self, path: _Path, message: str) -> None:
        self._problems.append(f"{self.where(path)}: {message}")


def _policy(walker: Walker, path: _Path, value: Any) -> tuple[str, Any]:
    """Read `model_version_policy`."""
    if not isinstance(value, dict) or len(cast("dict[str, Any]", value)) != 1:
        walker.wrong(
            path,
            value,
            'one of {"latest": {"num_versions": N}}, {"all": {}}, {"specific": {"versions": [N]}} is needed',
        )
    ((kind, more),) = cast("dict[str, Any]", value).items()
    if kind == "latest":
        found = walker.section((*path, kind), more, {"num_versions": whole(1)})
        return kind, found.get("num_versions", 1)
    if kind == "all":
        return kind, None
    if kind != "specific":
        walker.unknown((*path, kind), ("latest", "all", "specific"))
    versions = walker.mapping((*path, kind), more).get("versions")
    if not isinstance(versions, list) or not versions:
        walker.wrong((*path, kind, "versions"), versions, "a list of version numbers is needed")
    check = whole(1)
    return kind, [
        check(walker, (*path, kind, "versions", index), one) for index, one in enumerate(cast("list[Any]", versions))
    ]


def _properties(walker: Walker, path: _Path, value: Any) -> tuple[tuple[str, str], ...]:
    """Read `plugin_config`."""
    found: list[tuple[str, str]] = []
    for key, one in walker.mapping(path, value).items():
        if not isinstance(one, (str, int, float)):
            walker.wrong((*path, key), one, "a text, a number, or true or false is needed")
        found.append((str(key), str(one).upper() if isinstance(one, bool) else str(one)))
    return tuple(sorted(found))


def _shapes(walker: Walker, path: _Path, value: Any) -> tuple[tuple[str, str], ...]:
    """Read `shape`: of the inputs by their names, or one of all; `auto` takes any, and an empty text says nothing."""
    if value == "":
        return ()
    told = cast("dict[Any, Any]", value) if isinstance(value, dict) else {"": value}
    found: list[tuple[str, str]] = []
    for name, one in told.items():
        if one == "auto":
            found.append((str(name), one))
            continue
        if not isinstance(one, str) or not _SHAPE.fullmatch(one):
            where = (*path, name) if isinstance(value, dict) else path
            walker.wrong(where, one, "a shape such as (1,3,-1,1:224) is needed, or auto")
        axes = [_axis(axis.strip()) for axis in one.strip("() ").split(",")]
        found.append((str(name), f"[{','.join(axis for axis in axes if axis)}]"))
    return tuple(sorted(found))


def _batch(walker: Walker, path: _Path, value: Any) -> str:
    """Read `batch_size`: a length, a range of them, or `auto` or -1 for any; empty or 0 is that of the file."""
    told = value.replace(" ", "") if isinstance(value, str) else value
    if str(told) in {"", "0"}:
        return ""
    if told == "auto":
        return told
    if isinstance(told, str) and _AXIS.fullmatch(told):
        return _axis(told)
    return str(whole(1)(walker, path, told))


def _axis(told: str) -> str:
    """Write an axis of a shape as OpenVINO writes it."""
    return told.replace("-1", "?").replace(":", "..")


def _metadata(walker: Walker, path: _Path, value: Any) -> tuple[TensorMetadata, ...]:
    """Read what clients are told of inputs or outputs."""
    found: list[TensorMetadata] = []
    for name, about in walker.mapping(path, value).items():
        here = (*path, name)
        told = walker.section(here, about, {"datatype": text, "shape": _shape})
        datatype = told.get("datatype", "")
        if datatype not in DATATYPES:
            walker.wrong((*here, "datatype"), datatype, f"one of {', '.join(DATATYPES)} is needed")
        found.append(TensorMetadata(name, datatype, told.get("shape", ())))
    return tuple(found)


def _shape(walker: Walker, path: _Path, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        walker.wrong(path, value, "a list of axes is needed, -1 for one of any length")
    check = whole(-1)
    return tuple(check(walker, (*path, index), one) for index, one in enumerate(cast("list[Any]", value)))
