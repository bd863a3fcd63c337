# SPDX-License-Identifier: Apache-2.0
"""Models of other servers among those of a project: the server hands their requests on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.owners.model_description import description_of
from forebay.owners.owned_model import OwnedModel, owned_model
from forebay.owners.owner_link import FLAG
from forebay.owners.owners import Owners, WantedOwner, names_of
from forebay.workers.wire.address import UnixAddress, parse_address
from forebay.workers.wire.tls_files import client_tls

if TYPE_CHECKING:
    from forebay.server.config import AttachConfig
    from forebay.server.served import Served
    from forebay.surfaces.contract import Options, Project


def wanted_owners(options: Options) -> list[WantedOwner]:
    """Return the owners that were named.

    Raises:
        ConfigError: An address is none, an owner is named twice, or TLS files are given and there is no owner to dial
            with them.
    """
    attach = options.attach
    if options.part is not None and not options.part.is_owner:
        return [WantedOwner(options.part.owner)]
    try:
        wanted = [WantedOwner(parse_address(address)) for address in attach.owners]
        wanted += [WantedOwner(parse_address(address), name) for address, name in options.owned]
    except ConfigError as error:  # not one of a file, where it is looked at with its line
        raise ConfigError(f"--owner: {error.message}") from error
    files = {"cafile": attach.owner_cafile, "certfile": attach.owner_certfile, "keyfile": attach.owner_keyfile}
    given = [f"{FLAG}{name}" for name, file in files.items() if file is not None]
    if given and not wanted and not attach.peers:
        raise ConfigError(f"{given[0]} was given, and no owner to dial: --owner tcp:HOST:PORT")
    if (
        attach.owner_cafile is not None
        and not attach.peers
        and all(isinstance(one.address, UnixAddress) for one in wanted)
    ):
        raise ConfigError(f"{wanted[0].address} stays on this machine and is not encrypted; leave out {FLAG}cafile")
    names_of(wanted)
    return wanted


def expected_models(served: list[Served], wanted: Sequence[WantedOwner], attach: AttachConfig) -> list[OwnedModel]:
    """Put what asks an owner in the place of the models of a project for which one is wanted by name.

    Their own workers are not started, and clients are told what the project says of them until the owner is reached.

    Args:
        served: What the project serves; it is changed.
        attach: How long requests wait for them.
    """
    owners = {one.name: one.address for one in reversed(wanted) if one.name is not None}
    models: list[OwnedModel] = []
    for place, one in enumerate(served):
        if one.endpoint.name in owners and (description := description_of(one)) is not None:
            model = owned_model(description, str(owners[one.endpoint.name]), attach.owner_grace_s)
            model.served.weight = one.weight
            served[place] = model.served
            models.append(model)
    return models


def serve_owners(
    project: Project,
    attach: AttachConfig,
    wanted: Sequence[WantedOwner],
    expected: Sequence[OwnedModel],
    take_back: Callable[[str], Awaitable[None]],
) -> Owners:
    """Have a project serve the models of these owners.

    Args:
        expected: See `expected_models`.
        take_back: Loads what the project has by a name that no owner serves any more.

    Raises:
        ConfigError: TLS files cannot be used.
    """
    tls = client_tls(attach.owner_cafile, attach.owner_certfile, attach.owner_keyfile, flag=FLAG)
    owners = Owners(project.app, attach.secret, tls, attach.owner_grace_s, take_back)
    owners.want(wanted)
    owners.expect(expected)
    project.app.links.append(owners)
    for one in wanted:
        which = "the models" if one.name is None else f"the model '{one.name}'"
        project.summary.append(f"{which} of its owner {one.address}")
    return owners
