# SPDX-License-Identifier: Apache-2.0
"""One server as several processes: what the owner and each front do of what was said about the whole."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ConfigError
from forebay.owners.front_counts import CountsOfFronts, CountsTeller
from forebay.owners.front_door import FrontDoor
from forebay.server.config import AttachConfig, Overrides, RepositoryConfig
from forebay.surfaces import surface_of
from forebay.transports.binding import OWN, ListeningPlace
from forebay.transports.grpc.kserve_port import OwnerAt
from forebay.transports.http.forwarding import HttpForwarding
from forebay.workers.address import UnixAddress

if TYPE_CHECKING:
    from forebay.machine.part import Part
    from forebay.surfaces.contract import Options, Project

_FRAME_BYTES: Final = 1 << 24
"""What a frame may have beside the longest body."""


def require_divisible(options: Options) -> None:
    """Check that a server can be divided into fronts and an owner.

    Raises:
        ConfigError: It cannot.
    """
    surface = surface_of(options.target)
    if surface is not None and surface.name != "native":
        raise ConfigError(
            f"--fronts divides a server of forebay's own models; {options.target} is a {surface.name} project, which "
            "is served whole: leave out --fronts"
        )
    if options.attach.owners or options.owned:
        raise ConfigError(
            "--fronts divides a server that has its models itself, and --owner names another server that has them; "
            "leave one of them out"
        )
    if options.http.shared_memory:
        raise ConfigError(
            "--shared-memory is kept by one process, and with --fronts a request may reach another; leave one out"
        )


def lends(options: Options) -> bool:
    """Tell whether models of a repository are loaded when they are asked for, so that only the owner knows them."""
    config = options.repository
    return bool(config.max_models or config.max_model_bytes) if config.lazy is None else config.lazy


def options_of_part(options: Options, part: Part) -> Options:
    """Return what a part of a server is told, of what was said about all of it."""
    again = options.again
    changed = msgspec.structs.replace(
        options, part=part, again=None if again is None else lambda: options_of_part(again(), part)
    )
    if part.is_owner:
        return msgspec.structs.replace(changed, http=msgspec.structs.replace(options.http, access_log=False))
    owner = AttachConfig(owners=(str(UnixAddress(part.door)),), owner_grace_s=options.attach.owner_grace_s)
    return msgspec.structs.replace(
        changed,
        target=None,
        entries=(),
        warnings=(),
        overrides=Overrides(),
        repository=RepositoryConfig(),
        attach=owner,
        reload=False,
        http=msgspec.structs.replace(options.http, port=part.http_port),
        grpc=msgspec.structs.replace(options.grpc, port=part.grpc_port),
    )


def quieten_front() -> None:
    """Let a front log what went wrong, and calls: that it begins and ends, and what its owner serves, is said once."""
    logger = logging.getLogger("forebay")
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
        logging.getLogger("forebay.access").setLevel(logging.INFO)


def places_of(part: Part | None) -> tuple[ListeningPlace, ListeningPlace]:
    """Return where a server, or a part of one, listens for HTTP and for gRPC."""
    if part is None:
        return OWN, OWN
    if part.is_owner:
        return ListeningPlace(path=part.http), ListeningPlace(path=part.grpc)
    return ListeningPlace(is_shared=True), ListeningPlace(is_shared=True)


def owner_of(options: Options) -> OwnerAt | None:
    """Return where a front forwards calls of gRPC to; None if this is no front."""
    part = options.part
    if part is None or part.is_owner:
        return None
    return OwnerAt(part.grpc, options.attach.owner_grace_s, part.lends)


def take_part_in(project: Project, options: Options) -> None:
    """Let a project work as its part of a server."""
    part = options.part
    if part is None:
        return
    app = project.app
    project.place, _ = places_of(part)
    if part.is_owner:
        longest = max(options.http.max_body_bytes, options.http.max_form_bytes) + _FRAME_BYTES
        attach = options.attach
        app.links.append(FrontDoor(app, part.door, max(attach.max_frame_bytes, longest), attach.max_elements))
        counts = CountsOfFronts(part.counts)
        app.links.append(counts)
        app.clients = counts
    else:
        app.has_others = part.lends
        app.links.append(CountsTeller(app, part.counts[part.number - 1]))
        project.asgi = HttpForwarding(project.asgi, project.routes, part.http, options.attach.owner_grace_s)
