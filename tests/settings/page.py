# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/settings.md and forebay-yaml.md: `python -m tests.settings.page`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import msgspec

from forebay.server.config import (
    SECTIONS,
    AttachConfig,
    ClusterConfig,
    GrpcConfig,
    HttpConfig,
    Overrides,
    ProcessConfig,
    RepositoryConfig,
)
from forebay.serving.models.model import Model
from forebay.types.settings import declared

PAGE = Path(__file__).parents[2] / "docs/reference/settings.md"
FILE_PAGE = PAGE.with_name("forebay-yaml.md")
INTRO = """\
# Settings

Set each setting in one of three ways; `forebay check TARGET --settings` shows every value and where it came from:

    forebay serve iris.py --http-port 9000          a flag
    FOREBAY_HTTP_PORT=9000 forebay serve iris.py    a variable of the environment
    forebay serve iris.py --config prod.yaml        a key of a file, here `http: {port: 9000}`

A flag overrides a variable, a variable the file, and the file the attributes of a model's class. What none of them
sets has the default below. For a project of another server, its own file (`nucleus.yaml`, that of a pipeline) takes
the place of the class; flags and variables that it ignores are warnings. A value out of range, or an unknown key or
flag, ends the start with an error; an unknown `FOREBAY_` variable is a warning. An empty variable counts as unset.
Separate several values of a variable by commas. A size or a duration may have a unit: `10MB`, `64MiB`, `500ms`, `10s`,
`5m`, `1h`. Without one, the end of the name says it (`_bytes`, `_ms`, `_s`). `--port` is short for `--http-port`.

## The file

`forebay.yaml` in the served folder, or any file after `--config`. It names what is served, unless TARGET does; its
paths are relative to it.

```yaml
models:
  - iris.py:Iris
  - target: language.py
    name: german
    version: "2"
    python: old-environment/bin/python
    env: {OMP_NUM_THREADS: "4"}
    max_batch_size: 16
  - owner: tcp:clip.internal:9100
workers: 2
http:
  port: 9000
  api_keys: ["@keys.txt"]
attach: unix:workers.socket
log: {level: info, format: json}
drain: 20
```

A single target may stand at the top: `target: iris.py`. The keys under "Models" below go beside a target, or at the top
for all of them. Worker processes have the variables of `env` before they import anything. The server imports the file
without them, unless `python` names another interpreter. `attach` is an address, or a mapping of the keys below. `owner`
is the address of [another server](../how-to/more-than-one-machine.md) whose models are served here as well. With `name`
it is that model alone, even if a target has one of the same name.

"""
TITLES = {
    HttpConfig: ("HTTP", "http."),
    Overrides: ("Models", ""),
    RepositoryConfig: ("Models in a folder or a bucket", "repository."),
    AttachConfig: ("Workers that attach", "attach."),
    GrpcConfig: ("gRPC", "grpc."),
    ClusterConfig: ("A Ray cluster", "cluster."),
    ProcessConfig: ("The process", ""),
}
CLASS = """\
## Attributes of a model's class

`class Iris(forebay.Model): max_batch_size = 16`. They are read from the class, before a model is made: setting them on
`self` in `__init__` or `load` has no effect but a warning. [Buckets and padding](../how-to/buckets-and-padding.md)
explains `batch_key` and `pad`.

"""


def page() -> str:
    lines = [INTRO.rstrip("\n"), ""]
    for struct in SECTIONS:
        title, prefix = TITLES[struct]
        lines += [f"## {title}", "", (struct.__doc__ or "").partition("\n")[0], ""]
        lines += ["| key | flag, variable | allowed | default | |", "|---|---|---|---|---|"]
        for setting in declared(struct).values():
            if setting.written.flag is None and (struct is not Overrides):
                continue
            key = f"`{prefix}{setting.key}`"
            if struct is ProcessConfig and setting.name.startswith("log_"):
                key = f"`log.{setting.key}`"
            if isinstance(setting.default, msgspec.Struct):
                inner = declared(type(setting.default)).values()
                lines += [row(f"`{prefix}{setting.key}.{one.key}`", "", *rest(one)) for one in inner]
                continue
            ways = [setting.written.flag, setting.variable]
            told = "<br>".join(f"`{way}`" for way in ways if way)
            lines.append(row("" if setting.name == "config" else key, told, *rest(setting)))
        lines.append("")
    lines += [CLASS + "| attribute | allowed | default | |", "|---|---|---|---|"]
    lines += [row(f"`{one.name}`", *rest(one)) for one in declared(Model).values()]
    return "\n".join(lines) + "\n"


FILE_INTRO = """\
# forebay.yaml

Every key, with its default. Keys in a comment have no default, or that of the model. Only a target is required.
[Settings](settings.md) lists the flag and the variable of each key, and which wins. A misspelt key or a value out of
range ends the start with file, line, key and what is allowed; `forebay check` shows the result.

"""
WRITTEN = ("name", "version", "env", "python")
"""Keys that concern one target only."""


def file_page() -> str:
    """The file with all of its keys; a test has the server read it."""
    lines = ["# What is served: paths are relative to this file.", "models:", "  - target: model.py"]
    models = declared(Overrides).values()
    lines += _keys([one for one in models if one.key in WRITTEN], "    ")
    lines += ["    # Here, too, any of the keys that follow, for this target alone.", "", "# For all targets."]
    lines += _keys([one for one in models if one.key not in WRITTEN], "")
    for name, struct in (
        ("http", HttpConfig),
        ("repository", RepositoryConfig),
        ("attach", AttachConfig),
        ("grpc", GrpcConfig),
        ("cluster", ClusterConfig),
    ):
        told = [one for one in declared(struct).values() if one.written.flag]
        lines += ["", f"# {(struct.__doc__ or '').partition(chr(10))[0]}", f"{name}:", *_keys(told, "  ")]
    process = [one for one in declared(ProcessConfig).values() if one.name != "config"]
    log = [one for one in process if one.name.startswith("log_")]
    lines += ["", *_keys([one for one in process if one not in log], ""), "log:", *_keys(log, "  ")]
    return FILE_INTRO + "```yaml\n" + "\n".join(lines) + "\n```\n"


def _keys(settings, indent):
    lines = []
    for one in settings:
        is_struct = isinstance(one.default, msgspec.Struct)
        allowed, usual, doc = ("", "", one.doc) if is_struct else rest(one)
        if doc:
            lines += textwrap.wrap(
                f"{doc}{f' ({allowed})' if allowed else ''}",
                110,
                initial_indent=f"{indent}# ",
                subsequent_indent=f"{indent}# ",
            )
        if is_struct:
            lines += [f"{indent}{one.key}:", *_keys(declared(type(one.default)).values(), f"{indent}  ")]
            continue
        has_default = one.default not in (None, ())
        value = json.dumps(one.default) if has_default else "[]" if one.default == () else "" if " " in usual else usual
        lines.append(f"{indent}{'' if has_default else '# '}{one.key}: {value}".rstrip())
    return lines


def rest(setting):
    allowed = setting.range or {bool: "true, false"}.get(setting.kind, "")
    if setting.unit and not setting.choices:
        allowed = f"{setting.unit}, {allowed}" if allowed else setting.unit
    usual = setting.usual or ("off" if setting.default is False else "")
    return allowed, usual, setting.doc


def row(*cells):
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
    FILE_PAGE.write_text(file_page())
