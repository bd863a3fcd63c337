# SPDX-License-Identifier: Apache-2.0
"""Certificates that are renewed while servers and workers run: each new connection gets what the files hold then."""

import ssl

import httpx
import pytest
import trustme
from tests.integration.test_attached import Worker, door_of, joined
from tests.ports import free_port
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def old():
    return trustme.CA()


@pytest.fixture(scope="module")
def new():
    return trustme.CA()


def lay(folder, authority):
    """Puts the files of an authority into a folder, each at one moment, as who renews them should."""
    folder.mkdir(exist_ok=True)
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    told = {
        "ca.pem": authority.cert_pem.bytes(),
        "chain.pem": b"".join(one.bytes() for one in certificate.cert_chain_pems),
        "key.pem": certificate.private_key_pem.bytes(),
    }
    for name, data in told.items():
        (folder / f"{name}.new").write_bytes(data)
    for name in told:
        (folder / f"{name}.new").replace(folder / name)


def flags(folder, *names, prefix="--"):
    kinds = {"ca.pem": "cafile", "chain.pem": "certfile", "key.pem": "keyfile"}
    return [word for name in names for word in (f"{prefix}{kinds[name]}", str(folder / name))]


def trust(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def status(url, authority):
    return httpx.get(f"{url}/healthz", verify=trust(authority), timeout=PATIENCE_S).status_code


def test_a_port_shows_the_renewed_certificate_and_keeps_the_connections_that_it_has(serve, old, new, tmp_path):
    lay(tmp_path / "tls", old)
    server = serve("single.py", "--worker-kind", "thread", *flags(tmp_path / "tls", "chain.pem", "key.pem"), ca=old)
    assert server.client.get("/healthz").status_code == 200
    lay(tmp_path / "tls", new)
    assert status(server.url, new) == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        status(server.url, old)
    assert server.client.get("/healthz").status_code == 200  # over the connection that it has
    assert "new connections use the changed TLS files" in server.log


def test_files_that_cannot_be_used_change_nothing_and_are_said_once(serve, old, new, tmp_path, eventually):
    lay(tmp_path / "tls", old)
    server = serve("single.py", "--worker-kind", "thread", *flags(tmp_path / "tls", "chain.pem", "key.pem"), ca=old)
    (tmp_path / "tls/key.pem").write_bytes(new.issue_cert("localhost").private_key_pem.bytes())
    for _ in range(3):
        assert status(server.url, old) == 200
    said = "is the key of another certificate than that in"
    eventually(lambda: said in server.log)
    assert server.log.count(said) == 1
    lay(tmp_path / "tls", new)
    assert status(server.url, new) == 200


def test_owners_and_fronts_take_renewed_certificates_and_authorities_up(serve, old, new, tmp_path, eventually):
    lay(tmp_path / "owner", old)
    lay(tmp_path / "front", new)
    names = ("chain.pem", "key.pem", "ca.pem")
    owner = door_of(
        serve("owned.py", "--attach", "tcp:127.0.0.1:0", *flags(tmp_path / "owner", *names, prefix="--attach-"))
    )
    front = serve(None, "--owner", owner.door, *flags(tmp_path / "front", *names, prefix="--owner-"))
    assert "shows a certificate that is not believed" in front.log
    common = trustme.CA()
    lay(tmp_path / "owner", common)
    lay(tmp_path / "front", common)
    eventually(lambda: front.client.get("/readyz").status_code == 200)
    assert front.call("clip", 1.0).json()[0] == 1.0


def test_a_worker_dials_again_with_what_its_files_hold_then(serve, old, new, tmp_path, eventually):
    model = (
        "import forebay\n\nclass Echo(forebay.Model):\n    name = 'echo'\n\n    def predict(self, batch: list[int]):\n"
    )
    (tmp_path / "model.py").write_text(f"{model}        return batch\n")
    address = f"tcp:127.0.0.1:{free_port()}"
    names = ("chain.pem", "key.pem", "ca.pem")
    asks = ("--attach", address, *flags(tmp_path / "tls", *names, prefix="--attach-"))
    lay(tmp_path / "tls", old)
    server = serve(None, *asks)
    worker = Worker(tmp_path / "model.py", address, *flags(tmp_path / "tls", *names))
    try:
        worker.ready()
        server.stop()
        lay(tmp_path / "tls", new)
        server = serve(None, *asks)
        joined(server, "echo", 1, eventually)
        assert server.call("echo", 7).json() == 7
    finally:
        worker.stop()
