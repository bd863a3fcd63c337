# SPDX-License-Identifier: Apache-2.0
"""Who may call: TLS, API keys, and the pages of other origins."""

import asyncio
import socket
import ssl
import sys
from pathlib import Path

import httpx
import pytest
import trustme
from tests.waiting import PATIENCE_S

from forebay.server.app import App
from forebay.server.config import HttpConfig
from forebay.transports.http.asgi import asgi_app

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


@pytest.fixture(scope="module")
def secure(launch, authority, files):
    return launch(
        "zoo.py",
        *("--worker-kind", "thread", "--certfile", str(files / "cert.pem"), "--keyfile", str(files / "key.pem")),
        ca=authority,
    )


@pytest.fixture(scope="module")
def guarded(launch, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(
        "\ufefffrom-file-1\n# of the shop\nfrom-file-2\n\n  #old-key\n", encoding="utf-8"
    )  # an editor may put a mark before the text
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


def test_plain_http_to_a_tls_port_is_told_to_use_https(secure):  # F9
    for body in (b"1", b"1" * 100_000):
        answer = httpx.post(f"http://{secure.host}:{secure.port}/models/echo", content=body)
        assert answer.status_code == 400
        assert "https://" in answer.json()["error"]["message"]
    assert secure.call("echo", 1).json() == 1


def test_handshakes_that_are_left_half_way_are_connections(serve, authority, files, eventually):  # F67
    options = ("--certfile", str(files / "both.pem"), "--max-connections", "20")
    server = serve("single.py", "--worker-kind", "thread", *options, ca=authority)
    halves = [socket.create_connection((server.host, server.port)) for _ in range(40)]
    for half in halves[::2]:
        try:
            half.sendall(b"\x16\x03\x01\x02\x00\x01")
        except OSError:
            pass  # it was one too many
    eventually(lambda: sum(_is_closed(half) for half in halves) >= 20)
    assert sum(_is_closed(half) for half in halves) < 25
    for half in halves:
        half.close()
    eventually(lambda: _answers(server))
    server.signal()
    assert server.wait() == 0


def test_a_client_that_hangs_up_in_a_handshake_is_logged_so(secure, eventually):
    with socket.create_connection((secure.host, secure.port)) as half:
        half.sendall(b"\x16\x03\x01\x02\x00\x01")
    eventually(lambda: "the TLS handshake failed: the client hung up" in secure.log)


def _is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _answers(server):
    try:
        return server.client.post("/", json=0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_a_handshake_has_the_time_of_the_beginning_of_a_request(launch, authority, files):  # F67
    command = (sys.executable, str(Path(__file__).parent / "impatient.py"))
    server = launch(
        "zoo.py", "--worker-kind", "thread", "--certfile", str(files / "both.pem"), command=command, ca=authority
    )
    with (
        socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as silent,
        socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as half,
    ):
        half.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert silent.recv(1) == half.recv(1) == b""
    assert server.call("echo", 1).json() == 1


def test_strangers_get_nothing_from_a_tls_port(secure):
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
        wire.send(wire.request("POST", "/", b"1.0"))
        eventually(lambda: server.metric("forebay_in_flight") == 1)
        server.signal()
        assert wire.read().status == 200
    assert server.wait(PATIENCE_S) == 0


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
        {"x-api-key": "# of the shop"},  # F112
        {"x-api-key": "#old-key"},  # F112
        {"authorization": "Bearer #"},  # F112
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
            told = {**headers, "x-request-id": "mine"}
            answer = wire.ask(method, path, b"1", headers=[f"{name}: {value}" for name, value in told.items()])
        assert (answer.status, answer.headers["x-request-id"]) == (401, "mine"), path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "echo" not in answer.body.decode()
        kind = "unknown" if any(headers.values()) else "missing"
        assert f"API key {kind}; send it as X-API-Key" in answer.body.decode()


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused_with_a_sentence(cli, models, key):  # F6
    done = cli("serve", models / "single.py", "--http-port", "0", "--api-key", key)
    assert done.returncode == 2
    assert "--api-key: expected a key, got ''" in done.stderr


def test_a_file_of_keys_that_is_no_text_is_refused_with_a_sentence(cli, models, tmp_path):
    (tmp_path / "keys").write_bytes("schlüssel\n".encode("latin-1"))
    done = cli("serve", models / "single.py", "--http-port", "0", "--api-key", f"@{tmp_path / 'keys'}")
    assert done.returncode == 2
    assert done.stderr == f"forebay: the API keys in {tmp_path / 'keys'} cannot be read: it is not UTF-8\n"


def test_a_key_in_a_trailer_is_no_key(guarded):  # F4
    for target in ("/models/echo", "/models/%65cho"):
        with guarded.connect() as wire:
            wire.send(wire.head("POST", target, "transfer-encoding: chunked") + b"1\r\n1\r\n0\r\nx-api-key: k1\r\n\r\n")
            answer = wire.read()
        assert (answer.status, answer.error["code"]) == (401, "unauthenticated")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:80", "[::1]:8080", "a.localhost"])
def test_a_server_on_this_machine_answers_to_its_names_and_to_addresses(launch, host):  # F68
    server = launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")
    for path in ("/models/echo", "/models/%65cho"):
        assert server.client.post(path, json=1, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_a_server_on_this_machine_answers_to_no_other_name(launch, host):  # F68
    server = launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")
    for method, path in [("POST", "/models/echo"), ("POST", "/models/%65cho"), ("GET", "/healthz")]:
        answer = server.client.request(method, path, headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "wrong_host")
        assert "--allowed-host" in answer.json()["error"]["message"]


def test_a_server_that_was_told_its_names_answers_to_those(serve):  # F68
    server = serve("single.py", "--worker-kind", "thread", "--allowed-host", "models.example", "--allowed-host", "m")
    for host, status in [("models.example:8080", 200), ("M", 200), ("localhost", 200), ("evil.example", 421)]:
        assert server.client.post("/", json=0, headers={"host": host}).status_code == status


def test_a_server_that_asks_for_a_key_takes_any_name(guarded):  # F68
    assert guarded.client.post("/models/echo", json=1, headers={"host": "any", "x-api-key": "k1"}).json() == 1


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


@pytest.mark.parametrize("is_public", [True, False])
def test_the_document_says_of_metrics_what_the_server_does(is_public):
    config = HttpConfig(api_keys=("k1",), public_metrics=is_public)

    async def pages():
        transport = httpx.ASGITransport(asgi_app(App([]), config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            metrics, document = await client.get("/metrics"), await client.get("/openapi.json")
            return metrics.status_code, document.json()["paths"]["/metrics"]["get"]

    status, operation = asyncio.run(pages())
    assert status == (200 if is_public else 401)
    assert (operation.get("security") == [], "401" not in operation["responses"]) == (is_public, is_public)


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
