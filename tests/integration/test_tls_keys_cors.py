# SPDX-License-Identifier: Apache-2.0
"""Who may call: TLS, API keys, and the pages of other origins."""

import ssl

import httpx
import pytest
import trustme

ORIGIN = "http://page.example"
PUBLIC = ["/healthz", "/readyz", "/docs", "/openapi.json", "/docs/docs-init.js"]


@pytest.fixture(scope="session")
def authority():
    return trustme.CA()


@pytest.fixture(scope="session")
def files(authority, tmp_path_factory):
    """A certificate chain, its key, and both in one file."""
    folder = tmp_path_factory.mktemp("tls")
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    return folder


@pytest.fixture(scope="session")
def secure(launch, authority, files):
    return launch(
        "zoo.py",
        *("--worker-kind", "thread", "--certfile", str(files / "cert.pem"), "--keyfile", str(files / "key.pem")),
        ca=authority,
    )


@pytest.fixture(scope="session")
def guarded(launch, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("from-file-1\nfrom-file-2\n\n")
    return launch("zoo.py", "--worker-kind", "thread", "--api-key", "k1", "--api-key", f"@{path}")


def test_with_a_certificate_the_port_speaks_https(secure):
    assert secure.url.startswith("https://")
    assert secure.call("echo", [1]).json() == [1]
    assert secure.client.get("/models/echo").json()["name"] == "echo"
    assert secure.call("count", 2).text == "data: 0\n\ndata: 1\n\n"
    assert len(secure.call("large", 2_000_000).content) == 2_000_000


def test_pipelining_works_over_tls(secure):
    with secure.connect() as wire:
        wire.send(wire.request("POST", "/models/echo", b"1") + wire.request("GET", "/healthz"))
        assert wire.read().body == b"1"
        assert wire.read().json() == {"status": "alive"}


def test_plain_http_and_strangers_get_nothing_from_a_tls_port(secure):
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://{secure.host}:{secure.port}/models/echo", json=1)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.post(f"https://{secure.host}:{secure.port}/models/echo", json=1)
    assert secure.call("echo", 1).json() == 1
    assert "Traceback" not in secure.log


def test_old_tls_versions_are_refused(secure, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    assert secure.client.get("/healthz").status_code == 200
    with secure.connect() as wire:
        assert wire.socket.version() in {"TLSv1.2", "TLSv1.3"}


def test_one_file_may_hold_certificate_and_key(serve, authority, files):
    server = serve("single.py", "--worker-kind", "thread", "--certfile", str(files / "both.pem"), ca=authority)
    assert server.client.post("/", json=0).status_code == 200


def test_a_tls_server_drains_like_any_other(serve, authority, files, eventually):
    server = serve("single.py", "--worker-kind", "thread", "--certfile", str(files / "both.pem"), ca=authority)
    with server.connect() as wire:
        wire.send(wire.request("POST", "/", b"0.2"))
        eventually(lambda: server.metric("forebay_in_flight") == 1)
        server.signal()
        assert wire.read().status == 200
    assert server.wait(5) == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "k1"},
        {"authorization": "Bearer k1"},
        {"authorization": "bearer from-file-2"},
        {"x-api-key": "from-file-1"},
    ],
)
def test_a_known_key_opens_every_door(guarded, headers):
    assert guarded.client.post("/models/echo", json=1, headers=headers).json() == 1
    for path in ("/models", "/models/echo", "/metrics"):
        assert guarded.client.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"x-api-key": "k"},
        {"x-api-key": "k11"},
        {"x-api-key": "K1"},
        {"authorization": "Basic k1"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer from-file-1\tx"},
    ],
)
def test_without_a_known_key_nothing_is_told(guarded, headers):
    for method, path in [
        ("POST", "/models/echo"),
        ("GET", "/models"),
        ("GET", "/models/echo"),
        ("GET", "/metrics"),
        ("POST", "/models/ehco"),
        ("GET", "/"),
        ("GET", "/nowhere"),
        ("GET", "/docsx"),
        ("PUT", "/models/echo"),
    ]:
        with guarded.connect() as wire:
            answer = wire.ask(method, path, b"1", headers=[f"{name}: {value}" for name, value in headers.items()])
        assert answer.status == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "echo" not in answer.body.decode()


def test_probes_and_the_documentation_page_need_no_key(guarded):
    for path in PUBLIC:
        assert guarded.client.get(path).status_code == 200


def test_a_body_is_not_waited_for_when_the_key_is_wrong(guarded):
    with guarded.connect() as wire:
        wire.send(wire.head("POST", "/models/echo", "expect: 100-continue", "content-length: 10"))
        assert wire.read().status == 401


def test_the_document_says_that_a_key_is_needed(guarded):
    document = guarded.client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]
    assert document["security"]


def test_a_right_key_beside_a_wrong_one_does_the_same_on_both_lanes(guarded):
    # Two headers carry keys; which of them counts must not depend on the lane.
    headers = {"x-api-key": "k1", "authorization": "Basic abc"}
    fast = guarded.client.post("/models/echo", json=1, headers=headers).status_code
    slow = guarded.client.post("/models/%65cho", json=1, headers=headers).status_code
    assert fast == slow == 200


def test_a_remembered_key_is_no_key_for_others(guarded):
    body = b"1"
    for _ in range(3):
        with guarded.connect() as wire:
            assert wire.ask("POST", "/models/echo", body, headers=["x-api-key: k1"]).status == 200
            assert wire.ask("POST", "/models/echo", body, headers=["x-api-key: k2"]).status == 401
            assert wire.ask("POST", "/models/echo", body).status == 401
            assert wire.ask("POST", "/models/echo", body, headers=["x-api-key: k1"]).status == 200


def test_cors_is_off_unless_asked_for(launch):
    server = launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")
    for method, path in [("POST", "/models/echo"), ("GET", "/models"), ("OPTIONS", "/models/echo")]:
        headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
        answer = server.client.request(method, path, headers=headers, json=1 if method == "POST" else None)
        assert answer.status_code in {200, 204}
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_cors_lets_in_the_origins_that_were_named(launch):
    server = launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000", "--cors-origin", ORIGIN)
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-api-key"}
    preflight = server.client.options("/models/echo", headers={"origin": ORIGIN, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    for answer in (
        server.client.post("/models/echo", json=1, headers={"origin": ORIGIN}),
        server.client.post("/models/echo", content="nonsense", headers={"origin": ORIGIN}),
        server.client.get("/models", headers={"origin": ORIGIN}),
    ):
        assert answer.headers["access-control-allow-origin"] == ORIGIN
    other = server.client.post("/models/echo", json=1, headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_page_may_ask_beforehand_where_a_key_is_needed(serve):
    server = serve("zoo.py:Echo", "--worker-kind", "thread", "--cors-origin", ORIGIN, "--api-key", "k1")
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    preflight = server.client.options("/models/echo", headers={"origin": ORIGIN, **asked})
    assert preflight.status_code == 200  # a browser sends no key with it
    refused = server.client.post("/models/echo", json=1, headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    assert server.client.post("/models/echo", json=1, headers={"origin": ORIGIN, "x-api-key": "k1"}).json() == 1
