# SPDX-License-Identifier: Apache-2.0
"""One owner of a front: it is dialled, and dialled again when its link ends. What it says it serves is kept by link."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING

import msgspec

from forebay.owners.owner_link import FLAG, OwnerLink, dialled
from forebay.workers.redialling import Pauses
from forebay.workers.tls_files import why_no_tls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from forebay.owners.model_description import WeighedModel
    from forebay.workers.address import Address
    from forebay.workers.tls_files import TlsFiles

log = logging.getLogger("forebay.owners")


class LinkOptions(msgspec.Struct, frozen=True):
    """What all links of a front have in common.

    Attributes:
        name: What the front calls itself.
        secret: What both sides must know.
        tls: How connections to other machines are encrypted; None if they are not.
    """

    name: str
    secret: bytes | None
    tls: TlsFiles | None


class OwnedVersion(msgspec.Struct, frozen=True):
    """A version of a model, as one link to its owner tells of it.

    Attributes:
        link: The link.
        number: What the owner calls it.
        weighed: Its description.
    """

    link: OwnerLink
    number: int
    weighed: WeighedModel


class Owner:
    """A server whose models are served here as well.

    Attributes:
        address: Where it is.
        only: The names of the models that are wanted of it; empty for all.
        problem: Why it serves nothing here; empty if it does.
    """

    def __init__(
        self, address: Address, options: LinkOptions, on_change: Callable[[Owner, Iterable[str]], object]
    ) -> None:
        """Describe it.

        Args:
            address: Where it is.
            options: What all links have in common.
            on_change: Called with the names of models of which it says something else than before.
        """
        self.address = address
        self.only: frozenset[str] = frozenset()
        self.problem = f"the owner {address} has not answered yet"
        self._options = options
        self._on_change = on_change
        self._links: dict[OwnerLink, dict[str, list[OwnedVersion]]] = {}
        self._answering: set[OwnerLink] = set()
        self._first: asyncio.Future[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._said: set[str] = set()

    @property
    def is_here(self) -> bool:
        """Whether it has said what it serves, and takes requests."""
        return bool(self._links)

    @property
    def names(self) -> dict[str, None]:
        """The names of the models that it has, in its order."""
        return dict.fromkeys(name for told in self._links.values() for name in told)

    def has(self, name: str) -> bool:
        """Tell whether it has a model of that name which is wanted."""
        return self.may_serve(name) and name in self.names

    def may_serve(self, name: str) -> bool:
        """Tell whether a model of that name is wanted of it."""
        return not self.only or name in self.only

    def versions(self, name: str) -> list[OwnedVersion]:
        """Return what its links tell of a model."""
        return [one for told in self._links.values() for one in told.get(name, ())]

    def start(self) -> asyncio.Future[None]:
        """Begin to dial; returns what is done once the first attempt is over."""
        loop = asyncio.get_running_loop()
        self._first = loop.create_future()
        self._keeping = loop.create_task(self._keep())
        return self._first

    def begun(self) -> None:
        """Note that the first attempt is over."""
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def leave(self) -> None:
        """Dial no more; links end once all that was handed on is answered."""
        self._hang_up(OwnerLink.leave)

    def stop(self) -> None:
        """Dial no more, and hang up."""
        self._hang_up(OwnerLink.close)

    def say(self, problem: str) -> None:
        """Log a problem of the owner, if it is not known."""
        self.problem = f"the owner {self.address} {problem}"
        self.say_once(self.problem)

    def say_once(self, text: str) -> None:
        """Log a sentence about the owner, if that was not done since it was last reached."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)

    def _hang_up(self, how: Callable[[OwnerLink], object]) -> None:
        self.begun()
        if self._keeping is not None:
            self._keeping.cancel()
        for link in [*self._answering]:
            how(link)

    async def _keep(self) -> None:
        """Keep a link to the owner, as long as it is wanted."""
        pauses = Pauses()
        while True:
            try:
                link = await self._dial()
                reason = await asyncio.shield(link.greeted)
                if not reason:
                    pauses.begin_again()
                    reason = await asyncio.shield(link.ended)
            except ssl.SSLError as error:
                reason = f"it {why_no_tls(error, FLAG)}"
            except OSError as error:
                reason = f"it cannot be reached: {error.strerror or error or 'it does not answer'}"
            self.say(f"is away: {reason}")
            self.begun()
            await asyncio.sleep(pauses.next_s())

    async def _dial(self) -> OwnerLink:
        """Connect.

        Raises:
            OSError: Nobody is there.
        """
        options = self._options

        def make() -> OwnerLink:
            return OwnerLink(options.name, options.secret, self._told, self._ended, self._answering.discard)

        link = await dialled(self.address, options.tls, make)
        self._answering.add(link)
        return link

    def _told(self, link: OwnerLink, models: Sequence[tuple[int, WeighedModel]]) -> None:
        """Note what an owner describes from now on."""
        told: dict[str, list[OwnedVersion]] = {}
        for number, weighed in models:
            told.setdefault(weighed.model.config.name, []).append(OwnedVersion(link, number, weighed))
        if self.problem:
            log.info("the owner %s is here", self.address)
        self.problem = ""
        self._said.clear()
        before = self._links.get(link, {})
        self._links[link] = told
        self._on_change(self, {**told, **before})

    def _ended(self, link: OwnerLink) -> None:
        told = self._links.pop(link, None)
        if told is not None:
            self._on_change(self, told.keys())
