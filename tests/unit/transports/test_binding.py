# SPDX-License-Identifier: Apache-2.0
"""Of a host's addresses those are listened on that this machine has."""

from __future__ import annotations

import contextlib
import errno
import socket

import pytest

from forebay.errors import ConfigError
from forebay.transports.binding import PASSIVE, bound, require_free, reserved


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
def test_an_address_that_this_machine_has_not_is_left_out_where_it_has_others(monkeypatch, number):
    class Socket(socket.socket):
        def bind(self, address):
            if self.family == socket.AF_INET6:
                raise OSError(number, "IPv6 is switched off")
            super().bind(address)

    addresses = [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")]
    found = [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for family, address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", Socket)
    (only,) = bound(socket.getaddrinfo("localhost", 0, **PASSIVE))
    with only:
        assert only.getsockname()[0] == "127.0.0.1"
    require_free("localhost", 0)
    del found[1]
    with pytest.raises(ConfigError, match="localhost"):
        require_free("localhost", 0)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_of_ipv6_are_those_of_ipv4_too():
    both = bound(socket.getaddrinfo("::", 0, **PASSIVE))
    try:
        assert [it.getsockname()[0] for it in both] == ["::", "0.0.0.0"]
        for it in both:
            it.listen()
        port = both[0].getsockname()[1]
        for listening, host in zip(both, ("::1", "127.0.0.1"), strict=True):
            with socket.create_connection((host, port)):
                accepted, peer = listening.accept()
                accepted.close()
                assert peer[0] == host
    finally:
        for it in both:
            it.close()


def test_an_address_that_is_taken_is_not_left_out(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with pytest.raises(ConfigError, match=f"localhost:{port}"):
            require_free("localhost", port)


def test_all_addresses_of_a_host_get_one_port_where_any_will_do(monkeypatch):
    hosts = ("127.0.0.1", "127.0.0.2")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]
    with socket.create_server(("127.0.0.2", 0)) as taken:
        offered = [taken.getsockname()[1]]

        class Socket(socket.socket):
            def bind(self, address):
                host, port = address
                super().bind((host, port or (offered.pop() if offered else 0)))

        monkeypatch.setattr(socket, "socket", Socket)
        one, other = bound(found)
        with one, other:
            assert not offered, "a port that only the first address has was tried"
            assert [it.getsockname()[0] for it in (one, other)] == list(hosts)
            assert one.getsockname()[1] == other.getsockname()[1] != taken.getsockname()[1]


def test_an_address_is_shared_with_who_wants_to_share_it_only():
    with contextlib.ExitStack() as stack:
        first, *_ = map(stack.enter_context, bound(socket.getaddrinfo("127.0.0.1", 0, **PASSIVE), is_shared=True))
        port = first.getsockname()[1]
        first.listen()
        second, *_ = map(stack.enter_context, bound(socket.getaddrinfo("127.0.0.1", port, **PASSIVE), is_shared=True))
        second.listen()
        with pytest.raises(ConfigError, match="in use already"):
            require_free("127.0.0.1", port)


def test_an_address_that_is_reserved_is_free_for_those_that_share_it_only():
    (kept,) = reserved("127.0.0.1", 0)
    with kept:
        host, port = kept.getsockname()
        for ask in (require_free, reserved):
            with pytest.raises(ConfigError, match="in use already"):
                ask(host, port)
        (sharing,) = bound(socket.getaddrinfo(host, port, **PASSIVE), is_shared=True)
        with sharing:
            sharing.listen()


def test_an_address_can_be_reserved_while_connections_of_a_server_before_end():
    with socket.create_server(("127.0.0.1", 0)) as before:
        host, port = before.getsockname()
        with socket.create_connection((host, port)) as client:
            accepted, _ = before.accept()
            accepted.close()  # who closes first waits
            assert client.recv(1) == b""
    with reserved(host, port)[0] as kept:
        assert kept.getsockname() == (host, port)
