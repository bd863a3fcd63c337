# SPDX-License-Identifier: Apache-2.0
"""`forebay.yaml`: several models, each with settings and an interpreter of its own, behind one server.

    models:
      - target: iris.py:Iris
        workers: 2
      - target: language.py
        python: old-environment/bin/python
        max_batch_size: 16
    http:
      port: 9000
    attach: unix:workers.socket

What a model may set are the options of `forebay serve` that hold for models, by the same names. Paths are relative to
the file. What the command line says wins.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from forebay.errors import ConfigError, nearest
from forebay.server.config import AttachConfig, HttpConfig, Overrides
from forebay.workers.address import UnixAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from forebay.server.yaml import Document
    from forebay.surfaces.contract import Options

FILE = "forebay.yaml"

_HTTP = ("host", "port")
_SECTIONS = ("models", "http", "attach")


class Entry(NamedTuple):
    """One target of the file, what holds for its models, and which of that was said by the file or the person."""

    target: str
    overrides: Overrides
    given: Collection[str]


class Plan(msgspec.Struct, frozen=True):
    """What a file asks for, with what the command line overrode."""

    entries: list[Entry]
    http: HttpConfig
    attach: AttachConfig


def find_config(target: str) -> Path | None:
    """Return the configuration a target names, itself or by its folder."""
    path = Path(target)
    if path.is_dir():
        path /= FILE
    return path if path.name == FILE and path.is_file() else None


def read_config(path: Path, options: Options) -> Plan:
    """Read a configuration.

    Raises:
        ConfigError: With file, line, key, and the nearest right spelling.
    """
    from forebay.server import yaml

    document = yaml.load(path.read_bytes(), str(path))
    root = _mapping(document, (), document.data, _SECTIONS)
    folder = path.parent
    models = root.get("models")
    if not isinstance(models, list) or not models:
        if models is not None or "attach" not in root:
            raise document.error(("models",), "models: a list with at least one model is needed, each with a target")
        models = []
    listed = cast("list[Any]", models)
    entries = [_entry(document, ("models", index), model, folder, options) for index, model in enumerate(listed)]
    attach = _attach(document, root.get("attach"), folder, options)
    return Plan(entries, _http(document, root.get("http"), options), attach)


def _entry(document: Document, path: tuple[Any, ...], model: Any, folder: Path, options: Options) -> Entry:
    keys = _mapping(document, path, model, ("target", *Overrides.__struct_fields__))
    target = keys.get("target")
    if not isinstance(target, str) or not target:
        raise document.error((*path, "target"), "target: a Python file is needed, or file.py:Name")
    given = {name: value for name, value in keys.items() if name != "target" and name not in options.given}
    settings = _values(document, path, Overrides, given)
    if "/" in settings.get("python", ""):  # else it is looked up in PATH
        settings["python"] = _below(folder, settings["python"])
    overrides = msgspec.structs.replace(options.overrides, **settings)
    return Entry(_below(folder, target), overrides, options.given | settings.keys())


def _http(document: Document, section: Any, options: Options) -> HttpConfig:
    if section is None:
        return options.http
    keys = _mapping(document, ("http",), section, _HTTP)
    given = {name: value for name, value in keys.items() if name not in options.given}
    return msgspec.structs.replace(options.http, **_values(document, ("http",), HttpConfig, given, lowest=0))


def _attach(document: Document, address: Any, folder: Path, options: Options) -> AttachConfig:
    if address is None or options.attach.address is not None:
        return options.attach
    if not isinstance(address, str):
        raise document.error(("attach",), "attach: an address is needed, unix:PATH or tcp:HOST:PORT")
    try:
        found = parse_address(address)
    except ConfigError as error:
        raise document.error(("attach",), f"attach: {error.message}") from error
    if isinstance(found, UnixAddress):
        address = str(UnixAddress(_below(folder, found.path)))
    return msgspec.structs.replace(options.attach, address=address)


def _mapping(document: Document, path: tuple[Any, ...], value: Any, known: Iterable[str]) -> Mapping[str, Any]:
    names = list(known)
    if not isinstance(value, dict):
        where = path[-1] if path else FILE
        raise document.error(path, f"{where}: a mapping with {', '.join(names)} is needed")
    for key in cast("dict[Any, Any]", value):
        if key not in names:
            hint = nearest(str(key), names)
            did_you_mean = f"did you mean {hint}?" if hint else f"allowed are {', '.join(names)}"
            raise document.error((*path, key), f"{key}: there is no such key; {did_you_mean}")
    return cast("dict[str, Any]", value)


def _values(
    document: Document, path: tuple[Any, ...], kind: type[msgspec.Struct], given: Mapping[str, Any], *, lowest: int = 1
) -> dict[str, Any]:
    """Check values against the fields of a struct."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    found: dict[str, Any] = {}
    for name, written in given.items():
        try:
            value = found[name] = msgspec.convert(written, fields[name])
        except msgspec.ValidationError as error:
            raise document.error((*path, name), f"{name}: {error}") from error
        if type(value) is int and value < lowest:
            raise document.error((*path, name), f"{name}: {value} is not possible, at least {lowest} is needed")
        if type(value) is float and not 0.0 <= value < math.inf:
            raise document.error((*path, name), f"{name}: {value} is not possible, a number of at least 0 is needed")
    return found


def _below(folder: Path, path: str) -> str:
    return os.path.join(folder, path)  # noqa: PTH118 - a Path would resolve nothing either, but drop what `./` says
