# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile of a project: what changes seldom stands above what changes often, and the server is not root."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from forebay._version import __version__
from forebay.surfaces.container.install_steps import InstallStep, steps
from forebay.surfaces.container.recipe import USER, Recipe

CONDA_IMAGE: Final = "condaforge/miniforge3:24.9.2-0"
ENVIRONMENT: Final = "/opt/venv"
WHEELS: Final = "wheels"
"""A build context of its own, which has the wheel of forebay: the project need not be around the output's folder."""
_BUNDLED: Final = "/opt/wheels"
"""Where that wheel lies in the image: not in the project's folder, which may hold models."""

_PLAIN: Final = re.compile(r"[\w@%+=:,./-]+")
_INDEX: Final = "--mount=type=secret,id=pip.conf PIP_CONFIG_FILE=/run/secrets/pip.conf"
"""A private index is told to one command, and to no layer. A secret is read-only where it is mounted, so not at
`/etc/pip.conf`: scripts of Nucleus projects copy a file of their own there."""


def dockerfile(recipe: Recipe, build: str, source: str = ".") -> str:
    """Return the Dockerfile.

    Args:
        build: The command that builds it.
        source: The project's folder, seen from where the image is built.
    """
    found = [] if recipe.folder is None else steps(recipe.folder, recipe.files, pins=recipe.requirements)
    is_ours = recipe.user == USER
    variables = {**recipe.variables, "FOREBAY_HOST": "0.0.0.0"}  # noqa: S104 - in a container only it is alone
    wheels: list[str] = []
    links: list[str] = []
    if recipe.folder is not None and (recipe.folder / "wheels").is_dir():
        links.append(f"{recipe.home}/wheels")
        wheels.append(_copy(f"{source}/wheels/", f"{recipe.home}/wheels/"))
    if recipe.wheel is not None:
        links.append(_BUNDLED)
        copied = _copy(recipe.wheel.name, f"{_BUNDLED}/", f"--from={WHEELS} ")
        wheels += [
            f"# --build-context {WHEELS}=...: the forebay that wrote this file.",
            "# hadolint ignore=DL3022",
            copied,
        ]
    if links:
        variables["PIP_FIND_LINKS"] = " ".join(links)
    is_named = any(re.search(r"^forebay\b", step.text, re.MULTILINE) for step in found)
    # The server may read its code and not change it. A link has no permissions of its own.
    others = "! -type l '(' ! -perm -o=r -o -perm /go=w -o -type d ! -perm -o=x ')'"
    restricted = f"RUN find {_words([recipe.home])} {others} -exec chmod go-w,o+rX {{}} +"
    project = [_copy(f"{source}/", f"{recipe.home}/"), restricted]
    is_early = bool(found) and (bool(recipe.step) or any(step.needs for step in found))
    # Only what the steps read, so that a change of the code installs nothing anew.
    files = [_copy(f"{source}/{step.file}", f"{recipe.home}/{step.file}") for step in found]
    lines = [
        f"# {build}",
        *(recipe.base or _base(recipe.python, with_conda=any(step.name == "conda" for step in found))),
        *_system(found, recipe.extras),
        *([f"RUN useradd --uid {USER} --no-log-init --no-create-home --home-dir /tmp forebay"] if is_ours else []),
        "ENV " + " \\\n    ".join(f"{name}={_quoted(value)}" for name, value in variables.items()),
        *wheels,
        *([] if is_named and not recipe.step else _forebay(recipe, is_named=False)),
        "",
        f"WORKDIR {recipe.home}",
        *(project if is_early else files),
        *(f"RUN {_INDEX} {_words([*recipe.step, *one])}" for step in found for one in step.commands),
    ]
    if found and not (is_named and not recipe.extras):
        lines += [
            "# Restores what forebay needs, whatever the steps above replaced or removed.",
            "# hadolint ignore=DL3059",
        ]
        lines += _forebay(recipe, is_named=is_named)[-1:]
    lines += project if recipe.folder is not None and not is_early else []
    if recipe.writes:
        lines += ["", f"RUN mkdir -p {_words(recipe.writes)} && chown {recipe.user} {_words(recipe.writes)}"]
    ports = " ".join(str(port) for port in (recipe.http_port, recipe.grpc_port) if port is not None)
    lines += ["", f"USER {recipe.user}", f"EXPOSE {ports}"]
    lines += ["HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \\"]
    lines += [f"    CMD {json.dumps(health(recipe))}"]
    arguments = ["--", *recipe.arguments] if recipe.arguments else []
    return "\n".join([*lines, f"CMD {json.dumps(['forebay', 'serve', *recipe.serve, *arguments])}", ""])


def health(recipe: Recipe) -> list[str]:
    """Return the command that tells whether the server in this container is ready."""
    if recipe.ready:
        return list(recipe.ready)
    if recipe.http_port is not None:
        asks = f"r.urlopen('http://127.0.0.1:{recipe.http_port}/readyz', timeout=4"
        if recipe.tls:
            asks = f"{asks.replace('http:', 'https:')}, context=__import__('ssl')._create_unverified_context()"
        return ["python", "-c", f"import urllib.request as r; {asks})"]
    if recipe.tls:  # its name is not known here, and grpcio asks no server whose name it cannot check
        begin = "import socket, ssl; ssl._create_unverified_context().wrap_socket(socket.create_connection("
        return ["python", "-c", f"{begin}('127.0.0.1', {recipe.grpc_port}), 4))"]
    check = f"g.insecure_channel('127.0.0.1:{recipe.grpc_port}').unary_unary('/grpc.health.v1.Health/Check')"
    return ["python", "-c", f"import grpc as g; assert {check}(b'', timeout=4) == bytes([8, 1])"]  # 1 is SERVING


def _base(python: str, *, with_conda: bool) -> list[str]:
    if with_conda:
        return conda_base(python, f"FROM {CONDA_IMAGE}")
    image = f"python:{python}-slim"
    return [
        f"# Gets security updates at each build. To pin it: --build-arg BASE={image}@sha256:...",
        f"ARG BASE={image}",
        "FROM $BASE",
        f"RUN python3 -m venv {ENVIRONMENT}",
        f"ENV PATH={ENVIRONMENT}/bin:$PATH",
    ]


def conda_base(python: str, *before: str) -> list[str]:
    """Return the first lines of an image whose Python is one of conda's, after those that bring conda."""
    return [
        *before,
        f"RUN /opt/conda/bin/conda create -y -p {ENVIRONMENT} python={python} pip",
        f"ENV CONDA_PREFIX={ENVIRONMENT} \\",
        f"    PATH={ENVIRONMENT}/bin:/opt/conda/bin:$PATH",
    ]


def _system(found: Sequence[InstallStep], extras: Sequence[str]) -> list[str]:
    has_git = any(step.name == "pip" and "git+" in step.text for step in found)
    packages = [*(["git", "ca-certificates"] if has_git else []), *(["libgomp1"] if "lightgbm" in extras else [])]
    if not packages:
        return []
    return [
        "# hadolint ignore=DL3008",
        f"RUN apt-get update && apt-get install -y --no-install-recommends {' '.join(packages)} \\",
        "    && rm -rf /var/lib/apt/lists/*",
    ]


def _forebay(recipe: Recipe, *, is_named: bool) -> list[str]:
    """Return the lines that install forebay, of which the last one can be run again."""
    extras = f"[{','.join(recipe.extras)}]" if recipe.extras else ""
    if recipe.forebay:
        *before, folder = recipe.forebay
        return [*before, f'RUN {_INDEX} pip --no-cache-dir install "{folder}{extras}"']
    # The requirements say which release where they name it.
    release = "" if is_named else f"=={__version__}"
    return [f'RUN {_INDEX} pip --no-cache-dir install "forebay{extras}{release}"']


def _copy(source: str, target: str, more: str = "") -> str:
    words = [source if source == "./" else source.removeprefix("./"), target]
    return f"COPY {more}" + (" ".join(words) if all(map(_PLAIN.fullmatch, words)) else json.dumps(words))


def _words(words: Sequence[str]) -> str:
    return " ".join(word if _PLAIN.fullmatch(word) else "'" + word.replace("'", "'\"'\"'") + "'" for word in words)


def _quoted(text: str) -> str:
    if re.fullmatch(r"[\w./:-]*", text):
        return text or '""'
    return '"' + re.sub(r'([\\"$])', r"\\\1", text) + '"'
