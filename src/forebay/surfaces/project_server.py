# SPDX-License-Identifier: Apache-2.0
"""From a project to the server that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.transports.binding import require_free
from forebay.transports.server import Listener, Server
from forebay.types.tenant import ApiKeys
from forebay.workers.wire.address import TcpAddress, require_place
from forebay.workers.wire.tls_files import server_tls

if TYPE_CHECKING:
    from forebay.surfaces.contract import Project


def server_of(project: Project, *, drain_s: float, ready: Callable[[str], None], is_part: bool = False) -> Server:
    """Open the project's ports; the HTTP one is the first, if it has one.

    Args:
        ready: Called with the address, as a URL, once everything is up.
        is_part: Whether it is a part of one server, whose node process is signalled.
    """
    keys = project.http.api_keys
    if isinstance(keys, ApiKeys):
        project.app.state.put(keys.tenants)
    project.app.state.of(Accounts).is_asked = project.http.answer_cost
    listeners: list[Listener] = [*project.listeners]
    scheme = "grpcs" if project.http.certfile else "grpc"
    if project.asgi is not None:
        from forebay.transports.http.listener import HttpListener

        app = project.app
        with app.state.entered():
            http = HttpListener(
                project.http,
                project.routes,
                project.asgi,
                project.port_source,
                app.byte_budget,
                place=project.place,
            )
        project.app.watch(http.routes_changed)
        listeners.insert(0, http)
        scheme = "https" if project.http.certfile else "http"

    def on_ready(host: str, port: int) -> None:
        project.on_ready()
        shown = f"[{host}]" if ":" in host else host
        ready(f"{scheme}://{shown}:{port}")

    server = Server(
        project.app,
        listeners[0],
        more=listeners[1:],
        drain_s=drain_s,
        ready=on_ready,
        stopping=project.on_stop,
        reload=project.reload,
    )
    server.is_part = is_part
    project.connect(server.fail)
    return server


def require_ports(project: Project) -> None:
    """Check all of the project's ports but whether they are free: the caller may be about to take them over.

    Raises:
        ConfigError: If an address is none of this machine, or the folder of a socket or the TLS files cannot be used.
    """
    require_free(project.http.host, 0)
    if project.app.door is not None:
        address = project.app.door.address
        if isinstance(address, TcpAddress):
            require_free(address.host, 0)
        else:
            require_place(address)
    server_tls(project.http.certfile, project.http.keyfile)
