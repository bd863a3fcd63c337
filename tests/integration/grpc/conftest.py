# SPDX-License-Identifier: Apache-2.0
"""Ports that are closed with the test, and that must not have been surprised by anything."""

import contextlib

import pytest
import trustme
from tests.integration.grpc.served import Apart, Port


@pytest.fixture
def open_port():
    """Opens ports: `open_port(max_calls=1)`."""
    with contextlib.ExitStack() as stack:
        ports = []

        def start(**config):
            ports.append(stack.enter_context(Port(**config)))
            return ports[-1]

        yield start
    for port in ports:
        assert not port.surprises, port.surprises
        assert port.echo.hanging == 0, "a call was left behind"


@pytest.fixture
def port(open_port):
    """A port with the limits that users have."""
    return open_port()


@pytest.fixture(scope="module")
def shared_port():
    """For tests that open many connections and leave nothing on them."""
    with Port() as port:
        yield port
    assert not port.surprises, port.surprises


@pytest.fixture(scope="module")
def apart():
    """A port in a process of its own."""
    with Apart() as server:
        yield server
    assert "Traceback" not in server.log, server.log


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def tls(authority, tmp_path):
    """A certificate chain, its key, and both in one file."""
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    return tmp_path
