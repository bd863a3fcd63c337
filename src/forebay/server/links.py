# SPDX-License-Identifier: Apache-2.0
"""What lives as long as a server's app, beside its models: connections with other servers, files, histories."""

from __future__ import annotations


class Links:
    """One of them. By default it goes on while the server drains, and does not keep it from being ready."""

    async def start(self) -> None:
        """Begin, once the models of the app are up."""
        raise NotImplementedError

    def leave(self) -> None:
        """Take no further requests: the server drains."""

    def stop(self) -> None:
        """Hang up."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """Return why the server is not ready; empty if it is."""
        return []
