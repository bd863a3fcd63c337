# SPDX-License-Identifier: Apache-2.0
"""The door: where workers that nobody here has started dial in.

Theory of operation. Whoever connects is a `Visitor` until its first bytes say what it speaks: four zero bytes are the
batching protocol, anything else must be a whole hello of the worker protocol, followed by a proof if there is a secret.
Before that proof nothing is read of the hello but what the proof needs: whatever else it holds, to make it costs a
hundred times more than to send it. Then the connection, with all bytes read so far, is handed to the class that speaks
that dialect, and the door has nothing more to do with it. Until then a visitor has little time and little room, and
takes no place from workers: visitors have few places of their own, and the one that has been there longest makes room
for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, cast

import msgspec

from forebay.errors import ConfigError, ForebayError, InvalidRequest, Unavailable
from forebay.observe.logs.refusal_log import RefusalLog
from forebay.types.first_use import known
from forebay.workers.memory import shm
from forebay.workers.wire import frames, shared_secret
from forebay.workers.wire.address import Address, TcpAddress, UnixAddress, bind_unix, peer_of, tune
from forebay.workers.wire.kept_socket import keep_socket
from forebay.workers.wire.peeking import peek
from forebay.workers.wire.plain_data import require_plain

if TYPE_CHECKING:
    import socket

    from forebay.workers.wire.tls_files import TlsFiles

log = logging.getLogger("forebay.workers")

JOBS = b"\0\0\0\0"
"""What a worker that speaks the batching protocol says first."""
HELLO_BYTES = 1 << 20
"""Longest hello."""
HELLO_ELEMENTS = 100_000
"""Values in one."""
BACKLOG = 128
TLS = b"\x16"
"""What TLS begins with."""
GOODBYE_S = 1.0
"""How long a TLS connection that closes waits for the other side's goodbye."""
_CAFILE: Final = "--cafile (of a front: --owner-cafile)"
"""Before TLS is agreed on nobody has said what they are."""
_SECRETS: Final = {
    "worker": "--secret @FILE",
    "front": "--attach-secret @FILE",
    "member": "join(ADDRESS, secret='@FILE')",
}
"""How each kind of visitor is given a secret."""


class VisitorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much time and room a visitor may take.

    Attributes:
        hello_s: Time in which a connection must have said what it is, and have proven it where there is a secret.
        visitors: Connections at a time that have not done so yet.
        connections: Connections at a time that have.
        frame_bytes: Longest frame that is read.
    """

    hello_s: float = 5.0
    visitors: int = 64
    connections: int = 256
    frame_bytes: int = 256 * 1024 * 1024


class DoorWords(msgspec.Struct, frozen=True):
    """What the log says of a door.

    Attributes:
        guests: Who dials in.
        certificate: How a certificate is given.
        is_private: Whether it is no person's affair where it is.
    """

    guests: str = "workers"
    certificate: str = "--attach-certfile PEM"
    is_private: bool = False


class PortAcceptor(Protocol):
    """Takes the connections of one address."""

    async def open(self, host: str, port: int, backlog: int) -> tuple[str, int]:
        """Bind and accept; returns the address; raises `OSError` if it cannot be bound."""
        ...

    def close(self) -> None:
        """Accept nothing more."""
        ...


class EncryptedPort(NamedTuple):
    """How a port that speaks TLS is opened.

    Attributes:
        files: How connections are encrypted.
        acceptor: Given what takes each connection and the address of its client, makes what accepts them: the event
            loop's own server knows a connection only once its handshake is over.
    """

    files: TlsFiles
    acceptor: Callable[[Callable[[socket.socket, tuple[str, int]], object]], PortAcceptor]


class WorkerListener:
    """Listens for workers and hands each to the dialect it speaks."""

    def __init__(
        self,
        address: Address,
        *,
        native: Callable[[Mapping[str, Any]], asyncio.Protocol] | None = None,
        jobs: Callable[[], asyncio.Protocol] | None = None,
        secret: bytes | None = None,
        tls: EncryptedPort | None = None,
        limits: VisitorLimits = VisitorLimits(),  # noqa: B008 - immutable
        words: DoorWords = DoorWords(),  # noqa: B008 - immutable
    ) -> None:
        """Describe the door; `start` opens it.

        Args:
            native: Given what a worker says about itself, makes what talks to it, which then reads its hello again;
                raises a `ForebayError` with a sentence to refuse it. None where the worker protocol is not spoken.
            jobs: Makes what talks to a worker that speaks the batching protocol. None where that is not spoken.
            secret: What workers must know.

        Raises:
            ConfigError: If other machines could connect without a secret or a certificate, or a Unix socket is to be
                encrypted.
        """
        is_proven = secret is not None or (tls is not None and tls.files.context.verify_mode is ssl.CERT_REQUIRED)
        self._is_open = isinstance(address, TcpAddress) and not address.is_loopback
        if self._is_open and not is_proven and native is not None:
            raise ConfigError(
                f"workers of other machines can attach at {address}, so set a secret: --attach-secret @FILE; "
                "or listen on tcp:127.0.0.1:PORT"
            )
        if tls is not None and isinstance(address, UnixAddress):
            raise ConfigError(f"{address} stays on this machine and is not encrypted; leave out --attach-certfile")
        self.address = address
        self.native = native
        self.jobs = jobs
        self.secret = secret
        self.tls = tls
        self.limits = limits
        self.told = {role: RefusalLog(role) for role in ("worker", "front", "member")}
        self._words = words
        self._server: asyncio.Server | PortAcceptor | None = None
        self._inode: tuple[int, int] | None = None
        self._keeping: asyncio.Task[NoReturn] | None = None
        self._visitors: dict[Visitor, None] = {}  # by the time they came
        self._connections: set[asyncio.Transport] = set()

    async def start(self) -> None:
        """Begin to listen; raises a `ConfigError` if the address cannot be used, with the reason and the cure."""
        loop = asyncio.get_running_loop()
        address = self.address
        if isinstance(address, UnixAddress):
            await self._listen_at(address.path, bind_unix(address))
            if self._words.is_private:
                again = functools.partial(self._listen_at, address.path)
                self._keeping = loop.create_task(keep_socket(address.path, again))
        else:
            try:
                port = await self._open(address)
            except OSError as error:
                # Event loops put the address, and words of their own, around what the system says.
                number = error.errno or 0
                said = os.strerror(number) if number > 0 else error.strerror or error
                msg = f"{address} cannot be bound: {str(said).lower()}; choose another address or port"
                raise ConfigError(msg) from error
            self.address = TcpAddress(address.host, port)
        if not self._words.is_private:
            log.info("%s may attach at %s", self._words.guests, self.shown)
        if self._is_open and self.tls is None:
            log.warning(
                "traffic of %s at %s is not encrypted, and others on the network can read it; set a certificate: %s",
                self._words.guests,
                self.shown,
                self._words.certificate,
            )

    async def _listen_at(self, path: str, listening: socket.socket) -> None:
        loop, before = asyncio.get_running_loop(), self._server
        self._inode = _inode(path)
        self._server = await loop.create_unix_server(lambda: Visitor(self), sock=listening, backlog=BACKLOG)
        if before is not None:
            before.close()

    async def _open(self, address: TcpAddress) -> int:
        """Listen on a port; returns its number."""
        if self.tls is None:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: Visitor(self), address.host, address.port, backlog=BACKLOG)
            self._server = server
            return int(server.sockets[0].getsockname()[1])
        files = self.tls.files
        self._server = self.tls.acceptor(lambda accepted, _peer: Visitor(self).greet(accepted, files.context))
        return (await self._server.open(address.host, address.port, BACKLOG))[1]

    @property
    def shown(self) -> str:
        """The address as a person needs it, the path of a socket in full."""
        if isinstance(self.address, UnixAddress):
            return f"unix:{Path(self.address.path).absolute()}"
        return str(self.address)

    def close(self) -> None:
        """Let nobody in any more; those inside stay."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None
        if isinstance(self.address, UnixAddress) and self._inode is not None:
            with contextlib.suppress(OSError):
                if _inode(self.address.path) == self._inode:  # else somebody has put another one there
                    Path(self.address.path).unlink()
            self._inode = None

    def stop(self) -> None:
        """Close the door and every connection."""
        self.close()
        for visitor in list(self._visitors):
            visitor.hang_up()
        for transport in self._connections:
            transport.abort()
        self._connections.clear()
        for told in self.told.values():
            told.close()

    def shared(self) -> shm.Arenas | None:
        """Make a slot's shared memory; None where the other side may be on another machine."""
        return shm.make_arenas() if isinstance(self.address, UnixAddress) else None

    def enter(self, visitor: Visitor) -> None:
        """Count a visitor; if there are too many, the one that came first makes room."""
        if len(self._visitors) >= self.limits.visitors:
            next(iter(self._visitors)).refuse("others wait at the door, and it has said nothing yet that lets it in")
        self._visitors[visitor] = None

    def leave(self, visitor: Visitor) -> None:
        """A visitor was let in, or is gone."""
        self._visitors.pop(visitor, None)

    def let_in(self, transport: asyncio.Transport) -> bool:
        """Count a connection that has said what it is; tells whether there is room for it."""
        self._connections = {other for other in self._connections if not other.is_closing()}
        if len(self._connections) >= self.limits.connections:
            return False
        self._connections.add(transport)
        return True


class _About(msgspec.Struct, frozen=True):
    """What a hello says for a proof; the rest of it may be as long as it likes and costs little."""

    nonce: bytes | None = None
    role: str | None = None


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """A hello of a visitor that has proven nothing yet."""

    kind: str
    version: int | float | bool | str | None = None
    about: _About = _About()


class _Proof(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a challenge."""

    kind: str
    proof: bytes = b""


_HELLO = msgspec.msgpack.Decoder(known(_Hello))
_PROOF = msgspec.msgpack.Decoder(known(_Proof))


class Visitor(asyncio.Protocol):
    """A connection that has not yet said what it is."""

    def __init__(self, door: WorkerListener) -> None:
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._raw = bytearray()
        self._hello = b""
        self._nonce = b""
        self._theirs = b""
        self._role = "worker"
        self._peer: tuple[str, int] | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._is_plain = door.tls is None
        """Whether it does not speak TLS."""

    def greet(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        """Shake hands before anything else; it is a visitor meanwhile."""
        with contextlib.suppress(OSError):  # it has hung up
            self._peer = accepted.getpeername()[:2]
        self._begin(accepted)
        self._handshake = asyncio.get_running_loop().create_task(self._encrypt(accepted, context))

    async def _encrypt(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        """Make a connection of a socket. Who speaks without TLS is told why that is refused, in its own words."""
        loop, hello_s = asyncio.get_running_loop(), self._door.limits.hello_s
        is_taken = False
        try:
            self._is_plain = not (await peek(accepted)).startswith(TLS)
            is_taken = True
            if self._is_plain:
                await loop.connect_accepted_socket(lambda: self, accepted)
            else:
                await loop.connect_accepted_socket(
                    lambda: self, accepted, ssl=context, ssl_handshake_timeout=hello_s, ssl_shutdown_timeout=GOODBYE_S
                )
        except OSError as error:
            self._handshake = None
            self.refuse(_why_no_tls(error))
        finally:
            if not is_taken:
                accepted.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for words that count."""
        self._transport = cast("asyncio.Transport", transport)
        self._peer = peer_of(transport)
        if self._timer is None:
            self._begin(transport.get_extra_info("socket"))

    def _begin(self, connection: socket.socket | None) -> None:
        if connection is not None:
            tune(connection)
        self._door.enter(self)
        hello_s = self._door.limits.hello_s
        self._timer = asyncio.get_running_loop().call_later(
            hello_s, self.refuse, f"it did not say what it is within {hello_s:g} s"
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._transport = None
        self._door.leave(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Read on until the dialect is known."""
        if self._transport is None or self._transport.is_closing():
            return
        self._raw += data
        if len(self._raw) < len(JOBS):
            return
        try:
            if self._door.tls is not None and self._is_plain:
                raise InvalidRequest(f"it does not speak TLS, and this server does: {_CAFILE} names its authority")
            if self._door.tls is None and self._raw.startswith(TLS):
                raise InvalidRequest("it speaks TLS, and this server does not")
            if self._raw.startswith(JOBS):
                self._speak_jobs()
            else:
                self._speak_native()
        except ForebayError as error:
            self.refuse(error.message)
        except (LookupError, TypeError, ValueError, RecursionError, msgspec.DecodeError) as error:
            self.refuse(f"it does not speak the worker protocol: {error}")

    def _speak_jobs(self) -> None:
        door = self._door
        if door.jobs is None:
            raise InvalidRequest("it speaks the batching protocol, which is not spoken here")
        if door.secret is not None:
            raise InvalidRequest("it speaks the batching protocol, which cannot prove that it knows the secret")
        self._hand_over(door.jobs, bytes(self._raw))

    def _speak_native(self) -> None:
        door = self._door
        if door.native is None:
            raise InvalidRequest("it does not speak the batching protocol, and nothing else is spoken here")
        while (frame := self._next_frame()) is not None:
            if self._nonce:
                self._check(frame)
            else:
                self._hello = frame
                if door.secret is not None:
                    self._challenge(frame)
            if not self._nonce:
                about = _told_in(self._hello)
                self._role = _role_of(about.get("role"))
                self._hand_over(functools.partial(door.native, about), self._hello + self._raw)
                return

    def _next_frame(self) -> bytes | None:
        """Take one whole frame off what was read, or None."""
        length = int.from_bytes(self._raw[: frames.HEADER], "big")
        if length > HELLO_BYTES:
            msg = f"a frame of {length} bytes was announced where a hello of at most {HELLO_BYTES} is expected"
            raise InvalidRequest(msg)
        end = frames.HEADER + length
        if len(self._raw) < max(end, frames.HEADER):
            return None
        frame = bytes(self._raw[:end])
        del self._raw[:end]
        return frame

    def _challenge(self, frame: bytes) -> None:
        hello = _HELLO.decode(memoryview(frame)[frames.HEADER :])
        _require_kind(hello.kind, "hello")
        frames.require_version(hello.version)
        self._role = _role_of(hello.about.role)
        if hello.about.nonce is None:
            raise InvalidRequest(
                f"this server asks for a secret; give the {self._role} the same one: {_SECRETS[self._role]}"
            )
        self._theirs = hello.about.nonce
        self._nonce = shared_secret.nonce()
        self._send(["challenge", self._nonce])

    def _check(self, frame: bytes) -> None:
        secret = self._door.secret
        assert secret is not None
        given = _PROOF.decode(memoryview(frame)[frames.HEADER :])
        _require_kind(given.kind, "proof")
        if not shared_secret.is_proof(given.proof, secret, "worker", self._nonce, self._theirs):
            raise InvalidRequest("its secret is not this server's")
        self._send(["welcome", shared_secret.proof(secret, "server", self._nonce, self._theirs)])
        self._nonce = b""

    def _hand_over(self, dialect_of: Callable[[], asyncio.Protocol], data: bytes) -> None:
        assert self._transport is not None
        assert self._timer is not None
        if not self._door.let_in(self._transport):
            raise Unavailable(f"all {self._door.limits.connections} connections for {self._role}s are taken")
        dialect = dialect_of()
        self._timer.cancel()
        self._door.leave(self)
        self._transport.set_protocol(dialect)
        dialect.connection_made(self._transport)
        dialect.data_received(data)

    def _send(self, message: Sequence[Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))

    def hang_up(self) -> None:
        """Close the connection now."""
        if self._transport is not None:
            self._transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()

    def refuse(self, reason: str) -> None:
        """Close the connection, with the reason in the log and, where it speaks the worker protocol, to the peer."""
        self._door.leave(self)
        self._door.told[self._role].refused(int(time.monotonic()), self._peer, reason, reason)
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is None:
            self.hang_up()
            return
        if self._door.native is not None and not self._raw.startswith(JOBS):
            self._send(["refused", reason])
        self._transport.close()


def _why_no_tls(error: OSError) -> str:
    """Return why TLS was not agreed on with a worker."""
    if isinstance(error, ConnectionResetError):  # event loops tell nobody that they do not believe a certificate
        return (
            "it hung up during the TLS handshake, as who does not believe this server's certificate does: "
            f"its {_CAFILE} must have the authority, and the certificate name the host that it dials"
        )
    reason = str(getattr(error, "reason", None) or error.strerror or error)
    if reason == "CERTIFICATE_VERIFY_FAILED":
        return "its certificate is not of an authority in --attach-cafile"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return (
            "it has no certificate, and --attach-cafile asks for one: --certfile, --keyfile (of a front: "
            "--owner-certfile, --owner-keyfile)"
        )
    spelled = reason.replace("_", " ").lower()
    if "ALERT" in reason:
        believes = f"its {_CAFILE} must have the authority"
        return f"it does not believe this server's certificate ({spelled}): {believes}"
    return f"the TLS handshake failed: {spelled}"


def _told_in(frame: bytes) -> dict[str, Any]:
    """Return what a worker says about itself in its hello."""
    (message,) = frames.FrameReader(max_bytes=HELLO_BYTES, max_elements=HELLO_ELEMENTS).feed(frame)
    if not isinstance(message, list) or not message:
        raise InvalidRequest("expected an array in a frame")
    hello = cast("list[Any]", message)
    _require_kind(hello[0], "hello")
    about = frames.told_in_hello(hello)
    require_plain({key: value for key, value in about.items() if key != "nonce"})
    return about


def _role_of(told: object) -> str:
    return {frames.CALLER: "front", frames.PEER: "front", frames.MEMBER: "member"}.get(str(told), "worker")


def _require_kind(kind: Any, expected: str) -> None:
    if kind != expected:
        raise InvalidRequest(f"{str(kind)[:40]!r} is not what a worker says here")


def _inode(path: str) -> tuple[int, int]:
    found = Path(path).lstat()
    return found.st_dev, found.st_ino
