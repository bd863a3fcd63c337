# SPDX-License-Identifier: Apache-2.0
"""A program that has joined a cluster: its servings can be called by others, and it calls theirs.

Theory of operation. One thread has a loop with everything that is connected: the link to the server that keeps the
directory, the door where other members call, and the links to these. Callers are threads and tasks of the program; see
`remote_call.py`. While the server is away, calls go on by the directory as it was, and the program tries its peers as
well, which the directory names. A server that was joined anew knows only of members that have come back: what it says
takes effect `SETTLE_S` later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from random import SystemRandom
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from forebay.cluster.directory import MAX_WEIGHT, PROTOCOL, Directory, read_directory
from forebay.cluster.keeper import MAX_SERVINGS
from forebay.cluster.member_links import MemberLinks
from forebay.cluster.node_folder import folders
from forebay.cluster.remote_answer import AsyncAnswer, BlockingAnswer, input_of
from forebay.cluster.remote_call import NEVER, RemoteCall
from forebay.cluster.serving_host import ServingHost
from forebay.errors import ConfigError, InvalidRequest, Unavailable
from forebay.owners.caller_link import CallerLink
from forebay.owners.owner_link import GREET_S, OwnerLink, dialled
from forebay.serving.nx_serving import registry
from forebay.serving.nx_serving.stream import AsyncInbox, Inbox
from forebay.transports.acceptor import Acceptor
from forebay.types.call import Failure
from forebay.workers.processes.loop_thread import LoopThread
from forebay.workers.processes.private_folder import PrivateFolder
from forebay.workers.wire import frames
from forebay.workers.wire.address import Address, TcpAddress, UnixAddress, parse_address
from forebay.workers.wire.redialling import MAX_PAUSE_S, Pauses
from forebay.workers.wire.shared_secret import read_secret
from forebay.workers.wire.tls_files import TlsFiles, client_tls, server_tls, why_no_tls
from forebay.workers.wire.worker_listener import DoorWords, EncryptedPort, VisitorLimits, WorkerListener

if TYPE_CHECKING:
    from forebay.serving.nx_serving.registry import Before

log = logging.getLogger("forebay.cluster")

JOIN_S: Final = 8.0
"""How long `join` waits for a server that does not answer."""
GOODBYE_S: Final = 1.0
"""How long connections may take to close when the program leaves."""
TURN_S: Final = 0.005
"""How often that is looked at."""
SETTLE_S: Final = 2.0
"""How long members have to come back to a server that was away."""
LEAVE_S: Final = 5.0
"""How long calls that members have under way have to end when the program leaves."""
MAX_SAID: Final = 16
"""Reasons why the server is away that are logged, each once."""
MAX_ELEMENTS: Final = 1_000_000
"""The most values in a frame of another member."""

_LEFT: Final = "this program has left the cluster"


class JoinOptions(msgspec.Struct, frozen=True):
    """How a program joins.

    Attributes:
        address: The server that keeps the directory.
        listen: Where other members call this program; None for a port of its own on the interface towards the server.
        secret: What all must know.
        dialling: How connections are encrypted that this program dials; None if they are not.
        listening: The same of those that are accepted.
    """

    address: Address
    listen: Address | None
    secret: bytes | None
    dialling: TlsFiles | None
    listening: TlsFiles | None


def read_options(
    address: str, secret: str | None, listen: str | None, cafile: str | None, certfile: str | None, keyfile: str | None
) -> JoinOptions:
    """Read what `join` was given.

    Raises:
        ConfigError: Something of it cannot be used, with the reason.
    """
    server = parse_address(address)
    if isinstance(server, UnixAddress) and (cafile or certfile):
        raise ConfigError(f"{server} stays on this machine and is not encrypted; leave out cafile and certfile")
    if bool(cafile) != bool(certfile):
        raise ConfigError(
            "join needs cafile and certfile together: by the first it knows the others, by the second they know it"
        )
    return JoinOptions(
        server,
        None if listen is None else parse_address(listen),
        read_secret(secret, "the secret given to join") or _secret_here(server),
        client_tls(cafile, certfile, keyfile, flag=""),
        server_tls(certfile, keyfile, cafile, flag=""),
    )


class Membership:
    """What `forebay.cluster.join` returns. Use it as a context manager, or call `leave`; from any thread.

    Attributes:
        id: What the directory calls this program.
        directory: What runs where, as far as it is known here.
    """

    def __init__(self, options: JoinOptions) -> None:
        """Describe it; `start` joins."""
        self.id: str = secrets.token_hex(16)
        self.directory: Directory = Directory()
        self._options = options
        self._thread = LoopThread("forebay-cluster", self._live)
        self._links = MemberLinks(self.id, options.secret, options.dialling)
        self._host: ServingHost | None = None
        self._door: WorkerListener | None = None
        self._folder: PrivateFolder | None = None
        self._server: OwnerLink | None = None
        self._source: OwnerLink | None = None
        self._pending: tuple[OwnerLink, Directory] | None = None
        self._said = b""
        self._stopped: asyncio.Event
        self._heard: asyncio.Event
        self._chance = SystemRandom().random
        self._lock = threading.Lock()
        self._calls: set[RemoteCall] = set()
        self._is_over = False
        self._at = options.address
        """The server that this program has joined last."""

    @property
    def is_running(self) -> bool:
        """Whether this program is in the cluster; not in a process that was forked from it."""
        return self._thread.is_running

    @property
    def address(self) -> str:
        """Where other members call this program."""
        return "" if self._door is None else self._door.shown

    def start(self) -> None:
        """Join.

        Raises:
            ConfigError: The server does not answer, or does not let this program in; or no door could be opened.
        """
        self._thread.start()

    def leave(self) -> None:
        """Leave the cluster: calls that others have under way here have some seconds to end."""
        with self._lock:
            self._is_over = True
        _forget(self)
        self._thread.call(self._stop)
        self._thread.join()
        with self._lock:
            calls, self._calls = self._calls, set()
        for call in [*calls]:  # those that had not begun
            call.end(Failure(Unavailable(_LEFT)))

    def changed(self) -> None:
        """Note that servings of this program have started or stopped."""
        self._thread.call(self._announce)

    def batched_run(self, name: str, given: Any, before: Before | None, timeout_s: float | None) -> Any:
        """Execute an input on a serving of a member; see `forebay.batched_run`."""
        body, items = input_of(given if before is None else before(given))
        inbox = Inbox()
        return BlockingAnswer(self._begun(name, body, timeout_s, inbox), items, inbox, self._thread.call).whole()

    async def batched_run_async(self, name: str, given: Any, before: Before | None, timeout_s: float | None) -> Any:
        """Execute an input on a serving of a member; see `forebay.batched_run_async`."""
        body, items = input_of(given if before is None else before(given))
        inbox = AsyncInbox(asyncio.get_running_loop())
        return await AsyncAnswer(self._begun(name, body, timeout_s, inbox), items, inbox, self._thread.call).whole()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def __repr__(self) -> str:
        return f"Membership({self.address!r}, in the cluster at {self._options.address})"

    def _begun(self, name: str, body: list[Any] | None, timeout_s: float | None, inbox: Inbox) -> RemoteCall:
        """Send a call.

        Raises:
            Unavailable: This program has left the cluster, or was forked from the one that joined it.
        """
        deadline = NEVER if timeout_s is None else time.monotonic() + timeout_s
        call = RemoteCall(name, body, deadline, inbox, self._calls.discard)
        with self._lock:
            if self._is_over or not self._thread.is_running:
                raise Unavailable("this program is in no cluster any more; forebay.cluster.join(ADDRESS) joins one")
            self._calls.add(call)
        self._thread.call(self._begin, call)
        return call

    def _begin(self, call: RemoteCall) -> None:
        call.begin(self._links, self.directory, self._chance)

    async def _live(self, is_up: Callable[[], None]) -> None:
        self._stopped = asyncio.Event()
        self._heard = asyncio.Event()
        options = self._options
        self._host = ServingHost(VisitorLimits().frame_bytes, MAX_ELEMENTS)
        keeping: asyncio.Task[None] | None = None
        try:
            link = await self._first_link()
            try:
                await self._open_door(link.local_host)
            except ConfigError:
                self._server = link  # it is closed with the rest
                raise
            self._server = link
            self._announce()
            is_up()
            log.info("joined the cluster at %s; other members call %s", options.address, self.address)
            keeping = asyncio.get_running_loop().create_task(self._keep(link))
            await self._stopped.wait()
        finally:
            if keeping is not None:
                keeping.cancel()
            await self._close()

    def _stop(self) -> None:
        self._stopped.set()

    async def _close(self) -> None:
        """Be no member any more, before the door closes: nobody begins to call then."""
        if self._server is not None:
            self._server.close()
        if self._door is not None:
            self._door.close()
        if self._host is not None:
            await self._host.close(LEAVE_S)
        for call in [*self._calls]:
            call.abort(Unavailable(_LEFT))
        self._links.close()
        if self._server is not None:
            await self._let_go(self._server)
        if self._door is not None:
            self._door.stop()
        if self._folder is not None:
            self._folder.remove()

    async def _let_go(self, server: OwnerLink) -> None:
        """Wait until all connections are closed; those are cut that take long."""
        until = time.monotonic() + GOODBYE_S
        while server.is_connected or self._links.is_connected or (self._host is not None and self._host.links):
            if time.monotonic() > until:
                server.give_up(_LEFT)
                return
            await asyncio.sleep(TURN_S)

    async def _first_link(self) -> OwnerLink:
        """Reach the server; raises a `ConfigError` if it does not answer, or does not let this program in."""
        until = time.monotonic() + JOIN_S
        pauses = Pauses()
        while True:
            link, reason = await self._attempt(self._options.address)
            if link is not None:
                return link
            if time.monotonic() > until:
                raise ConfigError(
                    f"no server at {self._options.address} keeps a cluster: {reason}; start one with: forebay serve "
                    "--attach ADDRESS"
                )
            await asyncio.sleep(pauses.next_s())

    async def _attempt(self, address: Address) -> tuple[OwnerLink | None, str]:
        """Dial a server; returns the link once the directory was heard, or why there is none.

        Raises:
            ConfigError: It is of no use to try again.
        """
        self._heard.clear()
        try:
            link = await dialled(address, self._options.dialling, self._link)
        except ssl.SSLError as error:
            raise ConfigError(f"cannot join the cluster: the server at {address} {why_no_tls(error, '')}") from error
        except OSError as error:
            return None, f"it cannot be reached ({error.strerror or error or 'it does not answer'})"
        heard = asyncio.get_running_loop().create_task(self._heard.wait())
        await asyncio.wait((heard, link.ended), timeout=GREET_S, return_when=asyncio.FIRST_COMPLETED)
        if heard.done() and not link.ended.done():
            return link, ""
        heard.cancel()
        reason = link.ended.result() if link.ended.done() else f"did not tell its directory within {GREET_S:g} s"
        if link.problem:
            raise ConfigError(f"cannot join the cluster at {address}: {link.problem}")
        link.give_up(reason)
        return None, f"it has ended the connection ({reason})"

    def _link(self) -> OwnerLink:
        options = self._options
        return OwnerLink(self.id, options.secret, _ignore, _ignore, _ignore, self._hear, _ignore)

    async def _open_door(self, host: str) -> None:
        """Open the door where other members call.

        Raises:
            ConfigError: It cannot be opened, or would let anybody in.
        """
        options, host_of = self._options, self._host
        assert host_of is not None
        address = options.listen
        if address is None and isinstance(options.address, UnixAddress):
            self._folder = PrivateFolder()
            self._folder.guard()
            address = UnixAddress(f"{self._folder.path}/member")
        elif address is None:
            address = TcpAddress(host, 0)
        if isinstance(address, TcpAddress) and not address.is_loopback and not (options.secret or options.listening):
            raise ConfigError(
                f"other machines can call this program at {address}, so set a secret: join(ADDRESS, secret='@FILE')"
            )
        files = options.listening if isinstance(address, TcpAddress) else None
        self._door = WorkerListener(
            address,
            native=self._receive,
            secret=options.secret,
            tls=None if files is None else EncryptedPort(files, Acceptor),
            words=DoorWords("members", "join(ADDRESS, cafile=PEM, certfile=PEM)"),
        )
        await self._door.start()

    def _receive(self, about: Mapping[str, Any]) -> CallerLink:
        if about.get("role") != frames.CALLER or self._host is None:
            raise InvalidRequest("this is the door of a member, where other members call its servings")
        return CallerLink(self._host, about)

    async def _keep(self, link: OwnerLink) -> None:
        """Stay joined, whatever becomes of the server."""
        pauses = Pauses()
        began = time.monotonic()
        while True:
            problem = await asyncio.shield(link.ended)
            log.warning("the server of the cluster, %s, is unreachable: %s", self._at, problem)
            if time.monotonic() - began > MAX_PAUSE_S:
                pauses.begin_again()
            link = await self._next_link(pauses)
            began = time.monotonic()
            self._server, self._said = link, b""
            self._announce()

    async def _next_link(self, pauses: Pauses) -> OwnerLink:
        """Reach the server that was away or another one of the cluster, however long that takes."""
        said: set[str] = set()
        while True:
            await asyncio.sleep(pauses.next_s())
            for address in self._servers():
                try:
                    link, problem = await self._attempt(address)
                except ConfigError as error:
                    link, problem = None, error.message
                if link is not None:
                    log.info("joined the cluster again, at %s", address)
                    self._at = address
                    return link
                if problem not in said and len(said) < MAX_SAID:
                    said.add(problem)
                    log.warning("the server of the cluster, %s, is still unreachable: %s", address, problem)

    def _servers(self) -> list[Address]:
        """Return the servers that may be joined: the last one, then the others in any order."""
        others: list[Address] = []
        for one in sorted(self.directory.nodes.values(), key=lambda _: self._chance()):
            with contextlib.suppress(ConfigError):
                others.append(parse_address(one))
        return [*dict.fromkeys([self._at, self._options.address, *others])]

    def _announce(self) -> None:
        """Say which servings this program runs, to the server and to those who call."""
        if self._host is None or self._server is None:
            return
        processes = [one for one in registry.running() if not one.is_forked][:MAX_SERVINGS]
        self._host.offer([one.name for one in processes])
        servings = [(one.name, min(one.weight, MAX_WEIGHT)) for one in processes]
        frame = frames.encode(["servings", self.address, PROTOCOL, servings])
        if frame != self._said:
            self._said = frame
            self._server.say(frame)

    def _hear(self, link: OwnerLink, data: bytes) -> None:
        """Take a directory."""
        directory = read_directory(data)
        self._heard.set()
        if self._source is None or (link is self._source and directory.is_newer_than(self.directory)):
            self._adopt(link, directory)
        elif link is not self._source:
            if self._pending is None or self._pending[0] is not link:
                asyncio.get_running_loop().call_later(SETTLE_S, self._settle, link)
            self._pending = link, directory

    def _settle(self, link: OwnerLink) -> None:
        """Go by what a server says that has come back."""
        if self._pending is not None and self._pending[0] is link:
            _, directory = self._pending
            self._pending = None
            self._adopt(link, directory)

    def _adopt(self, link: OwnerLink, directory: Directory) -> None:
        self._source, self.directory = link, directory
        self._links.keep(directory)


def _secret_here(server: Address) -> bytes | None:
    """Return the secret of the deployment that has a front at an address, if a node of it is on this machine."""
    try:
        for folder in folders():
            state = folder.state
            if state is not None and str(server) in state.doors.values():
                return folder.secret
    except ConfigError as error:
        log.warning("cannot search the folders of nodes for a secret: %s", error.message)
    return None


_current: Membership | None = None
_joining: Final = threading.Lock()


def joined(options: JoinOptions) -> Membership:
    """Join a cluster; raises a `ConfigError` if this program has joined one already, or cannot join this one."""
    global _current  # noqa: PLW0603 - a program is in one cluster at most
    with _joining:
        if _current is not None and _current.is_running:
            raise ConfigError(f"this program has joined a cluster already: {_current!r}; leave that first")
        membership = Membership(options)
        membership.start()
        _current = membership
        registry.join(membership)
    membership.changed()
    return membership


def _forget(membership: Membership) -> None:
    global _current  # noqa: PLW0603 - a program is in one cluster at most
    with _joining:
        if _current is membership:
            _current = None
            registry.join(None)


def _ignore(*_: object) -> None:
    """The models of the server are not servings."""
