# SPDX-License-Identifier: Apache-2.0
"""`config.json` and `subconfig.json`: which graphs and models there are, and where."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from forebay.errors import ConfigError
from forebay.repository.repository_address import SCHEMES, source_of
from forebay.runtimes.library import OpenVinoOptions
from forebay.server import yaml
from forebay.server.config_document import Document
from forebay.server.config_document import Path as Place
from forebay.server.struct_reader import StructReader, shown
from forebay.surfaces.ovms.model_versions import ModelEntry, StoredModels, model_among
from forebay.types.datatypes import DATATYPES
from forebay.types.did_you_mean import either, meant
from forebay.types.settings import MAX_WORKERS, Checked, Count, Line, Setting, Written, declared
from forebay.types.tensor import TensorMetadata

GRAPH_FILE: Final = "graph.pbtxt"
SUBCONFIG_FILE: Final = "subconfig.json"
MODELS: Final = "model_config_list"
GRAPHS: Final = "mediapipe_config_list"

_IGNORED_OF_MODELS: Final = (
    *("layout", "precision", "stateful", "idle_sequence_cleanup"),
    *("low_latency_transformation", "max_sequence_number", "allow_cache", "custom_loader_options"),
)
_OF_MODELS: Final = frozenset(
    {"model_version_policy", "target_device", "plugin_config", "shape", "batch_size", "nireq", *_IGNORED_OF_MODELS}
)
_AXIS: Final = re.compile(r"-1|[1-9]\d{0,8}(?::[1-9]\d{0,8})?", re.ASCII)
_SHAPE: Final = re.compile(r"\s*\(\s*(?:(?:-1|\d{1,9}(?::\d{1,9})?)\s*(?:,\s*|(?=\))))*\)\s*", re.ASCII)
_POLICY: Final = 'expected {"latest": {"num_versions": N}}, {"all": {}} or {"specific": {"versions": [N]}}'


class GraphEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A graph that is to be served.

    Attributes:
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


def _document(path: Path) -> Document:
    """Read a JSON file, with the lines of what is in it; raises ConfigError if it is not JSON."""
    raw = yaml.read(path)
    try:
        data = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    try:  # YAML knows where things stand, and reads JSON but for tabs and escaped slashes
        return yaml.load(raw.replace(b"\t", b" ").replace(b"\\/", b"/"), str(path))
    except ConfigError:
        return Document(str(path), data)


def _datatype(name: str) -> str:
    if name not in DATATYPES:
        raise ValueError(f"expected {either(DATATYPES)}{meant(name, DATATYPES)}")
    return name


def _property(value: Any) -> str:
    if type(value) not in {str, int, float, bool}:
        raise ValueError("expected a string, a number, true or false")
    return str(value).upper() if isinstance(value, bool) else str(value)


def _shape(value: Any) -> str:
    """Return a shape as OpenVINO writes it; `auto` takes any."""
    if value == "auto":
        return value
    if not isinstance(value, str) or not _SHAPE.fullmatch(value):
        raise ValueError("expected auto or a shape such as (1,3,-1,1:224)")
    axes = [_axis(axis.strip()) for axis in value.strip("() ").split(",")]
    return f"[{','.join(axis for axis in axes if axis)}]"


def _batch(value: Any) -> str:
    """Read a length, a range of them, or `auto` or -1 for any; empty or 0 is that of the file."""
    told = value.replace(" ", "") if isinstance(value, str) else value
    if str(told) in {"", "0"}:
        return ""
    if told == "auto":
        return told
    if isinstance(told, str) and _AXIS.fullmatch(told):
        return _axis(told)
    if type(told) is not int or told < 1:
        raise ValueError("expected a whole number >= 1")
    return str(told)


def _axis(told: str) -> str:
    """Write an axis of a shape as OpenVINO writes it."""
    return told.replace("-1", "?").replace(":", "..")


class _Tensor(msgspec.Struct, frozen=True):
    datatype: Annotated[str, Checked(_datatype)]
    shape: tuple[Annotated[int, Meta(ge=-1)], ...] = ()


class _Metadata(msgspec.Struct, frozen=True):
    """What clients are told of inputs and outputs."""

    inputs: dict[str, _Tensor] = {}
    outputs: dict[str, _Tensor] = {}


class _Graph(msgspec.Struct, frozen=True):
    name: Annotated[Line, Written(missing="the key 'name' of the graph is missing")]
    base_path: str = ""
    graph_path: str = ""
    subconfig: str = ""
    metadata: _Metadata = _Metadata()


class _Latest(msgspec.Struct, frozen=True):
    num_versions: Count = 1


class _Specific(msgspec.Struct, frozen=True):
    versions: Annotated[list[Count], Meta(min_length=1)]


class _Policy(msgspec.Struct, frozen=True):
    latest: _Latest = _Latest()
    all: dict[str, Any] | None = None
    specific: _Specific | None = None


class _Model(msgspec.Struct, frozen=True):
    name: Annotated[Line, Written(missing="the key 'name' of the model is missing")]
    base_path: Annotated[Line, Written(missing="the key 'base_path' of the model is missing")]
    model_version_policy: _Policy = _Policy()
    target_device: Line = "CPU"
    properties: Annotated[tuple[tuple[str, str], ...], Checked(_property), Written(key="plugin_config")] = ()
    shapes: Annotated[tuple[tuple[str, str], ...], Checked(_shape), Written(key="shape")] = ()
    batch_size: Annotated[Any, Checked(_batch)] = ""
    nireq: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] = 0


class _Entry(msgspec.Struct, frozen=True):
    config: dict[Any, Any] = {}


class _File(msgspec.Struct, frozen=True):
    model_config_list: tuple[_Entry, ...] = ()
    mediapipe_config_list: tuple[_Graph, ...] = ()
    pipeline_config_list: Any = None
    custom_node_library_config_list: Any = None
    custom_loader_config_list: Any = None
    monitoring: Any = None


class _Reader(StructReader):
    def __init__(self, document: Document, folder: Path, stored: StoredModels, *, is_sub: bool = False) -> None:
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
        if MODELS not in top and not self._is_sub:
            self.fail((), f"the key '{MODELS}' is missing; it may be an empty list: []")
        if self._is_sub and top.pop(GRAPHS, None):
            self.warn((GRAPHS,), f"{GRAPHS} is not used here, only {MODELS} is")
        file = _File(**self.fields((), top, declared(_File)))
        for key in top:
            if key not in {MODELS, GRAPHS}:
                self.warn((key,), f"{key} is not used by forebay")
        graphs: dict[str, GraphEntry] = {}
        models: list[ModelEntry] = []
        named: list[Any] = []
        for index, entry in enumerate(file.model_config_list):
            path, inner = (MODELS, index, "config"), entry.config
            if self._is_graph(inner):
                for key in [key for key in inner if key in _OF_MODELS]:
                    self.warn((*path, key), f"{key} is not used: this is a graph, and its models have their own")
                    inner.pop(key)
                self._add(graphs, path, self.struct(path, inner, _Graph))
            elif (name := inner.get("name")) in named:
                self.warn((*path, "name"), f"there is another model {shown(name)} before it, which is served")
            else:
                models += self._model(path, inner)
                named.append(name)
        for index, graph in enumerate(file.mediapipe_config_list):
            self._add(graphs, (GRAPHS, index), graph)
        return OvmsConfig(
            graphs=tuple(graphs.values()),
            models=tuple(models),
            bases=tuple(self._bases),
            stored=tuple(self._buckets),
            warnings=tuple(self.warnings),
            problems=tuple(self._problems),
            shapes_at=self._shapes_at,
        )

    def value(self, path: Place, value: Any, setting: Setting) -> Any:
        if setting.name == "model_version_policy":
            kinds = self.mapping(path, value)
            if len(kinds) != 1 or None in kinds.values():
                self.wrong(path, value, _POLICY)
        if setting.name == "shapes" and not isinstance(value, dict):  # that of all inputs
            return (("", super().value(path, value, setting)),) if value != "" else ()
        if setting.name in {"shapes", "properties"}:
            entries = self.mapping(path, value).items()
            told = {str(key): StructReader.value(self, (*path, key), one, setting) for key, one in entries}
            return tuple(sorted(told.items()))
        return super().value(path, value, setting)

    def _add(self, graphs: dict[str, GraphEntry], path: Place, found: _Graph) -> None:
        if found.name in graphs:
            self.warn((*path, "name"), f"there is another graph '{found.name}' before it, which is served")
            return
        told = found.base_path or found.name
        if "://" in told:
            msg = f"base_path is {shown(told)}; a graph and its handlers lie in a folder on this machine"
            self.fail((*path, "base_path"), msg)
        base = self._folder / told
        inputs, outputs = (
            tuple(TensorMetadata(name, one.datatype, one.shape) for name, one in side.items())
            for side in (found.metadata.inputs, found.metadata.outputs)
        )
        graphs[found.name] = GraphEntry(
            name=found.name,
            base_path=base,
            graph_path=base / (found.graph_path or GRAPH_FILE),
            subconfig=base / (found.subconfig or SUBCONFIG_FILE),
            inputs=inputs,
            outputs=outputs,
            where=self.document.where(path),
        )

    def _is_graph(self, entry: dict[Any, Any]) -> bool:
        if "graph_path" in entry:
            return True
        name, base = entry.get("name"), entry.get("base_path")
        if not isinstance(name, str) or not isinstance(base, (str, type(None))):
            return False
        return (self._folder / (base or name) / GRAPH_FILE).is_file()

    def _model(self, path: Place, entry: dict[Any, Any]) -> list[ModelEntry]:
        for key in [key for key in _IGNORED_OF_MODELS if key in entry]:
            self.warn((*path, key), f"{key} is not used: the file says what the model takes, forebay how it runs")
        unused = {*_IGNORED_OF_MODELS, "graph_path", "subconfig"}
        found = self.struct(path, {key: one for key, one in entry.items() if key not in unused}, _Model)
        versions = self._versions((*path, "base_path"), found.name, found.base_path)
        if not versions:
            return []
        policy = found.model_version_policy
        chosen = list(versions)
        if policy.specific is not None:
            wanted = [str(one) for one in policy.specific.versions]
            for one in [one for one in wanted if one not in versions]:
                msg = f"version {one} is wanted, and there is {', '.join(versions)}"
                self._problem((*path, "model_version_policy"), msg)
            chosen = [one for one in wanted if one in versions]
        elif policy.all is None:
            chosen = chosen[-policy.latest.num_versions :]
        if found.shapes and found.batch_size:
            self.warn((*path, "batch_size"), "batch_size is not used, as there is a shape")
        device = found.target_device
        self._shapes_at[found.name] = {
            one: self.document.where((*path, "shape", one)) + ": shape" for one, _ in found.shapes if one
        }
        options = OpenVinoOptions(
            properties=found.properties,
            shapes=found.shapes,
            batch="" if found.shapes else found.batch_size,
            requests=found.nireq or 1,
            device=device if ":" in device else "",
        )
        return [
            ModelEntry(
                name=found.name,
                version=version,
                **versions[version],
                device="" if device in {"CPU", "AUTO"} or options.device else device.lower().replace(".", ":"),
                options=options,
            )
            for version in chosen
        ]

    def _versions(self, path: Place, name: str, told: str) -> dict[str, dict[str, Any]]:
        """Return what an entry says of the place of each version that there is, in rising order."""
        scheme, colon, _ = told.partition("://")
        if colon and scheme not in SCHEMES:
            places = "a folder on this machine or an address with s3://, gs:// or az://"
            self.fail(path, f"base_path: expected {places}, got {shown(told)}")
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

    def _problem(self, path: Place, message: str) -> None:
        self._problems.append(f"{self.document.where(path)}: {message}")
