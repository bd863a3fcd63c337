# SPDX-License-Identifier: Apache-2.0
"""What a surface is: it recognises a project of its kind and builds an app with an HTTP face from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from forebay.graph.drawing.draw import Drawable
from forebay.machine.node_part import Part
from forebay.server.app import App
from forebay.server.config import (
    AttachConfig,
    ClusterConfig,
    GrpcConfig,
    HttpConfig,
    Overrides,
    ProcessConfig,
    RepositoryConfig,
)
from forebay.surfaces.container.recipe import Recipe
from forebay.transports.binding import OWN, ListeningPlace
from forebay.transports.http.route import Route
from forebay.transports.server import Listener


class TargetEntry(NamedTuple):
    """One of several targets.

    Attributes:
        target: A Python file, or a name in it.
        overrides: What is said about its models.
        given: Which of that was said and is not a default.
        place: Where a file names it, for messages.
    """

    target: str
    overrides: Overrides
    given: frozenset[str]
    place: str = ""


class Options(ProcessConfig, frozen=True, kw_only=True):
    """What person, environment and file say to a surface, beside what they say about the process.

    Attributes:
        target: What is served, if it is not `entries`.
        http: The HTTP front; a project may set what nobody said.
        grpc: The gRPC port, as far as it is not like HTTP.
        sources: What has told each setting, by its struct and name; those with their defaults are not in it.
        given: Names of the options that were said, so that a project's own settings do not undo them.
        overrides: What holds for every model.
        repository: What holds for models of repositories.
        attach: Where workers that somebody else starts may attach.
        cluster: The cluster that serves it, if it is not this process.
        entries: Targets that a file names instead of the command line.
        owned: Other servers whose models are served, and which of them; None for all.
        warnings: What is odd about what was said.
        arguments: What a script that is the target finds in `sys.argv`.
        source: The configuration that was read, if there is one.
        again: Reads all of it anew; None if it cannot be read again.
        part: Which part of a server this is; None if it is all of it.
    """

    target: str | None = None
    http: HttpConfig
    grpc: GrpcConfig = GrpcConfig()
    sources: Mapping[tuple[type, str], str] = {}
    given: frozenset[str] = frozenset()
    overrides: Overrides = Overrides()
    repository: RepositoryConfig = RepositoryConfig()
    attach: AttachConfig = AttachConfig()
    cluster: ClusterConfig = ClusterConfig()
    entries: Sequence[TargetEntry] = ()
    owned: Sequence[tuple[str, str | None]] = ()
    warnings: Sequence[str] = ()
    arguments: tuple[str, ...] = ()
    source: Path | None = None
    again: Callable[[], Options] | None = None
    part: Part | None = None


class Project(msgspec.Struct, kw_only=True):
    """A project ready to be served.

    Attributes:
        app: Its endpoints.
        http: The HTTP front it wants.
        port_source: What has set its port, for messages; see `forebay.transports.binding.why_not`.
        place: Where that listens, if not just at its address.
        asgi: Its face as an ASGI application; None opens no HTTP port.
        routes: Models on the fast lane, by the target of their POST requests.
        listeners: Further ports; at least one where there is no HTTP port.
        summary: What would be served, for `forebay check`: lines for a person.
        first_steps: Returns what a person may do once it is ready: lines with `{address}` for the URL of the server.
        warnings: What is odd about the project but does not stop it.
        problems: What of it is wrong and will not be served, while the rest is.
        look: For `forebay check`: reads the files of models that nothing has read so far, loads none, and returns what
            the project says of them that is not so.
        graphs: Its graphs, for `forebay check --draw`.
        log_level: Level the project asks for.
        on_ready: Called once every worker is up and the port answers.
        on_stop: Called when the server begins to stop.
        reload: Has the project read anew, soon; None if it cannot be.
        connect: Given a function that stops the server with a status, for projects that end with their workers.
    """

    app: App
    http: HttpConfig
    port_source: str = ""
    place: ListeningPlace = OWN
    asgi: Any
    routes: Mapping[bytes, Route] = {}
    listeners: list[Listener] = []
    summary: list[str]
    first_steps: Callable[[], list[str]] = list
    warnings: list[str] = []
    problems: list[str] = []
    look: Callable[[], list[str]] = list
    graphs: list[Drawable] = []
    log_level: str | None = None
    on_ready: Callable[[], None] = lambda: None
    on_stop: Callable[[], None] = lambda: None
    reload: Callable[[], None] | None = None
    connect: Callable[[Callable[[int], None]], None] = lambda _fail: None


class Surface(Protocol):
    """Reads projects of one kind."""

    name: str

    def detect(self, target: str) -> bool:
        """Tell whether a target of `forebay serve` is a project of this kind; reads files, runs nothing."""
        ...

    def build(self, target: str, options: Options) -> Project:
        """Build the project.

        Raises:
            ConfigError: With place and cure.
        """
        ...

    def recipe(self, target: str, options: Options) -> Recipe:
        """Return what a container of the project needs.

        Raises:
            ConfigError: If the project is wrong, or cannot be moved into a container as it is.
        """
        ...
