# SPDX-License-Identifier: Apache-2.0
"""Models of other servers among those of a project: the server hands their requests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.owners.owner_link import FLAG
from forebay.owners.owners import Owners, WantedOwner
from forebay.workers.address import UnixAddress, parse_address
from forebay.workers.tls_files import client_context

if TYPE_CHECKING:
    from forebay.surfaces.contract import Options, Project


def serve_owners(project: Project, options: Options) -> None:
    """Have a project serve the models of the owners that were named.

    Raises:
        ConfigError: An address is none, or an owner is named twice; TLS files cannot be used.
    """
    attach = options.attach
    owned = [*((address, None) for address in attach.owners), *options.owned]
    if not owned:
        return
    try:
        wanted = [WantedOwner(parse_address(address), name) for address, name in owned]
    except ConfigError as error:  # not one of a file, where it is looked at with its line
        raise ConfigError(f"--owner: {error.message}") from error
    tls = client_context(attach.owner_cafile, attach.owner_certfile, attach.owner_keyfile, flag=FLAG)
    if tls is not None and all(isinstance(one.address, UnixAddress) for one in wanted):
        raise ConfigError(f"{wanted[0].address} stays on this machine and is not encrypted; leave out {FLAG}cafile")
    project.app.links.append(Owners(project.app, wanted, attach.secret, tls, attach.owner_grace_s))
    for one in wanted:
        which = "the models" if one.name is None else f"the model '{one.name}'"
        project.summary.append(f"{which} of its owner {one.address}")
