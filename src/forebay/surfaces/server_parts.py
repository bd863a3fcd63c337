# SPDX-License-Identifier: Apache-2.0
"""One server as several processes: what the owner and each front do of what was said about the whole."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.owners.front_counts import CountsOfFronts, CountsTeller
from forebay.owners.front_door import FrontDoor
from forebay.server.config import AttachConfig, Overrides, RepositoryConfig
from forebay.transports.binding import ListeningPlace
from forebay.transports.grpc.kserve_port import KServePort, OwnerAt
from forebay.transports.http.forwarding import HttpForwarding
from forebay.types.tenant import ApiKeys
from forebay.workers.wire.address import UnixAddress

if TYPE_CHECKING:
    from forebay.machine.node_part import Part
    from forebay.surfaces.contract import Options, Project

_FRAME_BYTES: Final = 1 << 24
"""What a frame may have beside the longest body."""


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
    if part.is_owner:  # calls are the fronts'
        return msgspec.structs.replace(changed, http=msgspec.structs.replace(options.http, access_log=False))
    if isinstance(options.http.api_keys, ApiKeys):
        options.http.api_keys.tenants.divide(part.fronts)
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


def take_part_in(project: Project, options: Options, part: Part) -> None:
    """Let a project work as its part of a server."""
    if part.is_owner:
        _be_owner(project, options, part)
    else:
        _be_front(project, options, part)


def _be_owner(project: Project, options: Options, part: Part) -> None:
    app, attach = project.app, options.attach
    longest = max(options.http.max_body_bytes, options.http.max_form_bytes) + _FRAME_BYTES
    app.links.append(FrontDoor(app, part.door, max(attach.max_frame_bytes, longest), attach.max_elements))
    counts = app.clients = CountsOfFronts(part.counts)
    app.links.append(counts)
    project.place = ListeningPlace(path=part.http)
    if options.grpc.port is not None:
        place = ListeningPlace(path=part.grpc)
        project.listeners = [KServePort(app, project.http, options.grpc, place)]


def _be_front(project: Project, options: Options, part: Part) -> None:
    app, grace_s = project.app, options.attach.owner_grace_s
    app.has_others = part.lends
    app.links.append(CountsTeller(app, part.counts[part.number - 1]))
    project.place = ListeningPlace(is_shared=True)
    project.asgi = HttpForwarding(project.asgi, project.routes, part.http, grace_s)
    if options.grpc.port is not None:
        owner = OwnerAt(part.grpc, grace_s, part.lends)
        project.listeners = [KServePort(app, project.http, options.grpc, project.place, owner)]
