# SPDX-License-Identifier: Apache-2.0
"""What a container of a project needs, whatever kind of project it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import yaml

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.server.config import HttpConfig
    from forebay.surfaces.container.bundled_wheel import BundledWheel
    from forebay.surfaces.container.key_files import KeyFile

OLDEST_PYTHON: Final = (3, 11)
"""What forebay itself runs on."""

USER: Final = 10001
"""Who a container runs as, if its base brings nobody."""
PRE_STOP_S: Final = 5
"""How long a pod that goes takes new requests, until every node has heard of it."""
AFTER_DRAIN_S: Final = 10
"""How long after the drain whoever stops a container waits until it kills."""


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """A container beside that of the project, which shares the first folder that the project writes to.

    Attributes:
        host: What the project calls it; empty where it is in the project's own network.
    """

    name: str
    host: str
    dockerfile: str
    port: int


class SplitModel(msgspec.Struct, frozen=True):
    """A model whose workers may run elsewhere.

    Attributes:
        name: Of its endpoint.
        target: What `forebay serve` and `forebay worker` call it in the image.
    """

    name: str
    target: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What a container of a project needs.

    Attributes:
        name: What it is called, in letters that are allowed everywhere.
        folder: The project's folder; None where there is nothing to copy.
        home: Where the project lies in the image.
        serve: What follows `forebay serve` there.
        arguments: What a script that is served finds in `sys.argv`.
        base: The first lines of the Dockerfile; none take the usual ones.
        variables: Variables of the environment of the image.
        extras: Which of forebay's extras are installed.
        modules: What its models need beside them, as if it imported that.
        forebay: What pip installs instead of a release, with the lines that bring it; empty for a release.
        files: The files that say what to install besides: for a shell, for conda, for pip.
        requirements: Text of the file for pip, if the project has none and gets it.
        wheel: The wheel of forebay that is installed, if an index may not have it.
        is_repository: Whether the folder holds models, so that nothing is to be written into it.
        step: What runs a step of the installation, and has nothing but the project before it; empty for the shell.
        http_port: The port of HTTP, with `/readyz` and `/metrics`; None if there is none.
        grpc_port: The port of gRPC; None if there is none.
        tls: Where the certificate and its key lie here, if both speak TLS.
        protocol: What of KServe's protocols it speaks.
        ready: A command that tells whether the server is ready; none asks its port.
        has_keys: Whether a request needs a key, and there are some without a name.
        key_files: Files with the keys of tenants.
        user: Who it runs as; any but the usual one is a user of the base.
        writes: Folders that it writes to, beside /tmp.
        capacity: How many requests the endpoint that has room for the fewest answers at a time.
        models: Its models, if the workers of all of them may run elsewhere.
    """

    name: str
    folder: Path | None
    home: str = "/app"
    serve: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    python: str = ".".join(map(str, OLDEST_PYTHON))
    variables: Mapping[str, str] = {}
    extras: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    forebay: tuple[str, ...] = ()
    files: tuple[str, str, str] = ("dependencies.sh", "conda-packages.txt", "requirements.txt")
    requirements: str = ""
    wheel: BundledWheel | None = None
    is_repository: bool = False
    step: tuple[str, ...] = ()
    http_port: int | None = None
    grpc_port: int | None = None
    tls: tuple[str, str] | None = None
    protocol: str = "v2"
    ready: tuple[str, ...] = ()
    has_keys: bool = False
    key_files: tuple[KeyFile, ...] = ()
    user: int = USER
    writes: tuple[str, ...] = ()
    gpus: int = 0
    workers: int = 1
    capacity: int = 1
    drain_s: float = 30.0
    sidecars: tuple[Sidecar, ...] = ()
    models: tuple[SplitModel, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def reads_bucket(self) -> bool:
        """Whether models come from a bucket, which asks for credentials."""
        return "buckets" in self.extras

    @property
    def index(self) -> Path | None:
        """The file that names a private index, which only the commands that install are told."""
        found = None if self.folder is None else self.folder / "pip.conf"
        return found if found is not None and found.is_file() else None


def tls_of(http: HttpConfig) -> tuple[str, str] | None:
    """Return where certificate and key lie, if a server has any."""
    return (http.certfile, http.keyfile or http.certfile) if http.certfile else None


def called(name: str) -> str:
    """Return a name in the letters that images and clusters allow: not empty, and a text in YAML."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    # Names of Services begin with a letter; `on` and `null` are not texts in YAML.
    if found and (found[0].isdigit() or not isinstance(yaml.safe_load(found), str)):
        found = f"model-{found}"
    return found[:50].strip("-") or "model"


def inside(path: str | Path, folder: Path) -> str:
    """Return a path as it is called from the folder that an image gets.

    Raises:
        ConfigError: If it lies outside, where no image could have it.
    """
    found = os.path.relpath(path, folder)
    if found == os.pardir or found.startswith(os.pardir + os.sep):
        raise ConfigError(f"{path} lies outside of {folder}, which is all that the image has; move it there")
    return Path(found).as_posix()
