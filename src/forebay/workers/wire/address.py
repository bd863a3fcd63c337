# SPDX-License-Identifier: Apache-2.0
"""Where workers dial in: `unix:PATH` or `tcp:HOST:PORT`."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import select
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast, overload

import msgspec

from forebay.errors import ConfigError
from forebay.types.did_you_mean import nearest
from forebay.types.loopback import is_loopback
from forebay.workers.wire.tls_socket import TlsSocket

if TYPE_CHECKING:
    import asyncio
    import ssl

MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""What the kernel takes as the path of a socket."""
HALF_CLOSED: Final[int] = getattr(select, "POLLRDHUP", 0)
"""What `poll` calls a connection whose other end sends nothing more; nothing where it does not tell."""
CONNECT_S = 5.0
"""Time in which another machine must have answered a call: the kernel itself asks again less and less often."""
UNRECEIVED_MS = 30_000
"""Time in which a server must have received what it was sent; it always reads."""


class UnixAddress(msgspec.Struct, frozen=True):
    """A socket in the file system; only its owner may connect."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


class TcpAddress(msgspec.Struct, frozen=True):
    """A TCP port; 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        return is_loopback(self.host)


Address: TypeAlias = UnixAddress | TcpAddress


class AddressFile(msgspec.Struct, frozen=True):
    """A file that has an address: what runs there may move, and then the file is written anew."""

    path: str

    def __str__(self) -> str:
        return f"the address in {self.path}"

    def read(self) -> Address:
        """Return the address that it has now; raises an `OSError` if it cannot be read, or has none."""
        text = Path(self.path).read_text(encoding="utf-8").strip()
        try:
            return parse_address(text)
        except ConfigError as error:
            raise ConnectionError(f"{self.path}: {error.message}") from error


_KINDS = ("unix", "tcp")
_NAME = re.compile(rb"[\w.:%-]+")


def parse_address(text: str) -> Address:
    """Read an address; raises a `ConfigError` naming what was found and how it is written."""
    kind, colon, rest = text.partition(":")
    if kind == "unix" and rest:
        size = len(os.fsencode(rest))
        if size > MAX_PATH_BYTES:
            raise ConfigError(
                f"the path of the socket has {size} bytes, the kernel takes at most {MAX_PATH_BYTES}; "
                f"choose a shorter one, such as unix:/run/forebay.socket: {rest}"
            )
        return UnixAddress(rest)
    is_url = rest.startswith("//")
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and not is_url and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return TcpAddress(checked_host(host.removeprefix("[").removesuffix("]")), int(port))
    hint = ""
    if is_url and kind != "unix":
        hint = f"; did you mean tcp:{rest.strip('/')}?"
    elif not colon or kind not in _KINDS:
        meant = nearest(kind, _KINDS) if colon else None
        if meant:
            hint = f"; did you mean {meant}:{rest}?"
        else:
            hint = f"; did you mean unix:{text}?" if "/" in text or not colon else f"; did you mean tcp:{text}?"
    raise ConfigError(f"expected unix:PATH or tcp:HOST:PORT, got {text!r}{hint}")


def checked_host(host: str) -> str:
    """Return a host if it is an address or could be the name of one; no name server is asked.

    Raises:
        ConfigError: If it is neither.
    """
    try:
        encoded = host.encode("idna")
    except UnicodeError:
        encoded = b""
    if not encoded.strip(b".") or not _NAME.fullmatch(encoded):
        raise ConfigError(f"expected an address or a host name, such as 127.0.0.1 or localhost, got '{host}'")
    return host


@overload
def dial(address: Address, timeout_s: float) -> socket.socket: ...


@overload
def dial(address: Address, timeout_s: float, tls: ssl.SSLContext | None) -> socket.socket | TlsSocket: ...


def dial(address: Address, timeout_s: float, tls: ssl.SSLContext | None = None) -> socket.socket | TlsSocket:
    """Connect, waiting at most `timeout_s`; the socket blocks without a limit afterwards.

    Raises:
        OSError: If nobody listens there; `ssl.SSLError` if TLS cannot be agreed on.
    """
    if isinstance(address, UnixAddress):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(address.path)
        except BaseException:
            connection.close()
            raise
    else:
        connection = socket.create_connection((address.host, address.port), min(timeout_s, CONNECT_S))
        tune(connection)
        _set(connection, "TCP_USER_TIMEOUT", UNRECEIVED_MS)  # nobody asks who owes a receipt whether it is there
    if tls is not None and isinstance(address, TcpAddress):
        try:
            connection.settimeout(min(timeout_s, CONNECT_S))
            encrypted = TlsSocket(connection, tls, address.host)
        except BaseException:
            connection.close()
            raise
        encrypted.settimeout(None)
        return encrypted
    connection.settimeout(None)
    return connection


def stranger_at(connection: socket.socket) -> str:
    """Return who may listen at the other end beside this user and root, as the end of a sentence; empty if nobody."""
    if connection.family == socket.AF_UNIX:
        user = user_of(connection)
        return "" if user in {0, os.geteuid()} else f"the user {user}"
    host = str(connection.getpeername()[0]).partition("%")[0]
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return "" if (mapped or address).is_loopback else "another machine"


def user_of(connection: socket.socket) -> int:
    """Return the id of the user at the other end of a Unix socket; of its file where the kernel does not tell more."""
    found = _credentials(connection)
    return os.stat(connection.getpeername()).st_uid if found is None else found[1]  # noqa: PTH116 - may be bytes


def process_of(connection: socket.socket) -> int:
    """Return the id of the process at the other end of a Unix socket; 0 if this process cannot see it."""
    found = _credentials(connection)
    return 0 if found is None else found[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int] | None:
    option: int | None = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))


def peer_of(transport: asyncio.BaseTransport | None) -> tuple[str, int] | None:
    """Return where a connection comes from; for a unix socket that is nowhere in particular."""
    peer = None if transport is None else transport.get_extra_info("peername")
    return cast("tuple[str, int]", peer[:2]) if isinstance(peer, tuple) else None


def tune(connection: socket.socket) -> None:
    """Let a TCP connection send at once, and end when the other machine has been silent for half a minute."""
    if connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS calls the first of them TCP_KEEPALIVE, which no other system has.
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPALIVE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        _set(connection, option, value)


def _set(connection: socket.socket, option: str, value: int) -> None:
    """Set an option of a TCP connection where this system has it."""
    with contextlib.suppress(AttributeError, OSError):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def require_place(address: UnixAddress) -> None:
    """Check that a socket can be made there, but not whether one listens there now.

    Raises:
        ConfigError: If something else has the path, or it is in a folder that cannot be used.
    """
    path = Path(address.path)
    if os.path.lexists(path):
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode):
            raise ConfigError(f"{path} exists and is not a socket; choose another path or remove it")
        if found.st_uid != os.geteuid():
            raise ConfigError(f"the socket {path} belongs to another user; choose another path")
    elif not path.parent.is_dir():
        raise _no_place(path, f"there is no folder {path.parent}")
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        raise _no_place(path, os.strerror(errno.EACCES))


def _no_place(path: Path, why: str) -> ConfigError:
    return ConfigError(f"the socket {path} cannot be made: {why}; choose a path in a folder that you may write to")


def bind_unix(address: UnixAddress) -> socket.socket:
    """Make a socket that only this user may connect to; what a server that was killed left there is removed.

    Raises:
        ConfigError: If the path is too long, taken by something else or in a folder that cannot be used.
    """
    require_place(address)
    path = Path(address.path)
    if path.exists():
        _remove_stale(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # the socket is born with mode 0600: there is no moment in which others may connect
    try:
        server.bind(address.path)
    except OSError as error:
        server.close()
        raise _no_place(path, error.strerror or str(error)) from error
    finally:
        os.umask(before)
    server.setblocking(False)
    return server


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # a backlog that is full, for example: somebody is there
    raise ConfigError(f"another server listens on {path}; stop it or choose another path")
