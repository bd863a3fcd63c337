# SPDX-License-Identifier: Apache-2.0
"""Routes, methods, headers, disconnects, readiness and the end: section 2 of the specification."""

import asyncio
import math
import signal
import socket
import time

import pytest
from tests.waiting import PATIENCE_S

from forebay.errors import ConfigError
from forebay.server.config import HttpConfig, Overrides
from forebay.surfaces.contract import Options
from forebay.surfaces.nucleus.readiness import Readiness
from forebay.surfaces.nucleus.surface import NucleusSurface
from forebay.types.call import ALONE, Request
from forebay.workers.pools.process_pool import ProcessPool

HANDLER = """
    import os, time

    class Handler:
        def __init__(self):
            self.ran = []

        def handle_get(self, query_params, headers):
            if "until" in query_params:
                while not os.path.exists(query_params["until"]):
                    time.sleep(0.01)
            if "note" in query_params:
                self.ran.append(query_params["note"])
            if "headers" in query_params:
                return headers.items()
            return self.ran

        def handle_post(self, payload):
            return payload
"""

SLOW_START = """
    import os, time
    from pathlib import Path

    class Handler:
        def __init__(self, config):
            Path(f"constructing-{os.getpid()}").touch()
            while not Path("construct").exists():
                time.sleep(0.01)

        def handle_get(self, query_params):
            while not Path(query_params["until"]).exists():
                time.sleep(0.01)
            return "ok"
"""


@pytest.fixture(scope="module")
def server(serve):
    return serve(HANDLER)


def begin(server, until, note=""):
    """Sends a request that is answered once `until` exists."""
    wire = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    wire.sendall(f"GET /?until={until}&note={note} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    return wire


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "HEAD", "TRACE"])
def test_verbs_the_handler_has_not_are_405(server, method):
    # N50
    answer = server.request(method)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST, GET, OPTIONS"
    if method != "HEAD":
        assert answer.text == "Method Not Allowed"


def test_routes(server):
    # N51
    assert server.request(path="/info").json() == {}
    answer = server.request(path="/info/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/info")
    answer = server.request(path="/foo")
    assert answer.status_code == 404
    assert "/ and /info" in answer.text
    assert server.request(path="/metrics").status_code == 200
    assert server.request(path="/healthz").json() == {"status": "alive"}
    assert server.request(path="/readyz").json() == {"status": "ready"}
    answer = server.request(path="/ui")
    assert (answer.status_code, answer.headers["location"]) == (307, "ui/")
    assert "<title>forebay" in server.request(path="/ui/").text
    assert [one["ready"] for one in server.request(path="/ui/models").json()["models"]] == [True]
    assert server.request("POST", "/ui/models").status_code == 404


def test_a_request_whose_client_left_is_not_run(server, tmp_path, eventually):
    # N52
    go = tmp_path / "go"
    with begin(server, go, "first") as running:
        eventually(lambda: server.gauge("forebay_in_flight") == 1)
        with begin(server, go, "second"):
            eventually(lambda: server.gauge("forebay_in_flight") == 2)
        eventually(lambda: server.gauge("forebay_in_flight") == 1)
        go.touch()
        assert running.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert server.request().json() == ["first"]
    eventually(lambda: server.has_logged("499", "status_code"))


def test_preflight_requests_do_not_reach_the_handler(server):
    # N54
    for headers in ({}, {"origin": "http://page"}):
        answer = server.request("OPTIONS", headers=headers)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-max-age"] == "1728000"
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["access-control-allow-methods"] == "POST, GET, PUT, PATCH, DELETE, OPTIONS"
        assert answer.headers["access-control-allow-headers"] == "*"
        assert answer.headers["access-control-allow-credentials"] == "true"


def test_headers_a_proxy_would_add(server):
    # N55
    sent = {"x-forwarded-for": "10.0.0.9", "x-real-ip": "forged"}
    found = dict(server.request(params={"headers": "1"}, headers=sent).json())
    assert found["x-forwarded-for"] == "10.0.0.9, 127.0.0.1"
    assert found["x-real-ip"] == "127.0.0.1"
    assert found["x-forwarded-proto"] == "http"
    assert found["host"] == "127.0.0.1"


def time_given(folder, wanted_s, **overrides):
    """How many seconds a project gives to a request that wants so many."""
    (folder / "handler.py").write_text("class Handler:\n    def handle_get(self): return 1\n")
    (folder / "nucleus.yaml").write_text("type: python\npath: handler.py\n")
    options = Options(http=HttpConfig(), overrides=Overrides(**overrides), state_dir=folder / "state")
    app = NucleusSurface().build(str(folder), options).app
    assert app.only is not None
    endpoint = app.only.endpoint
    assert isinstance(endpoint.pool, ProcessPool)
    assert endpoint.pool._stuck_s is None  # nor does anybody end a worker that is at it for long

    async def run():
        await app.start()
        params = {"verb": "get", "query": b"", "headers": []}
        replied = asyncio.get_running_loop().create_future()
        reply = lambda request, _outcome: replied.set_result(request)  # noqa: E731
        endpoint.submit(Request(b"", reply, params, key=ALONE, deadline=time.monotonic() + wanted_s))
        request = await replied
        await app.drain(0.0)
        return request.deadline - request.arrived

    return asyncio.run(run())


def test_there_is_no_response_timeout(tmp_path):
    # N56: neither here nor in the connection, see test_a_request_that_is_being_answered_has_all_the_time_it_needs
    assert time_given(tmp_path, math.inf) >= 3600


@pytest.mark.parametrize("wanted_s", [math.inf, 7200.0])
def test_no_request_has_more_time_than_the_server_was_told(tmp_path, wanted_s):
    # N56
    assert time_given(tmp_path, wanted_s, timeout_ms=600_000) == pytest.approx(600)


def test_trap_info_is_answered_while_all_threads_are_busy(server, tmp_path, eventually):
    # N57
    go = tmp_path / "go"
    with begin(server, go) as running:
        eventually(lambda: server.gauge("forebay_in_flight") == 1)
        assert server.request(path="/info").json() == {}
        assert server.request("POST", "/info").status_code == 405
        go.touch()
        assert running.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_every_request_is_logged(server, eventually):
    # N52
    server.request(path="/foo")
    eventually(lambda: any('"GET /foo HTTP/1.1" 404' in line["message"] for line in server.logged))


def test_which_targets_are_nucleus_projects(tmp_path):
    # N51
    surface = NucleusSurface()
    assert not surface.detect(str(tmp_path))
    (tmp_path / "nucleus.yaml").write_text("x")
    assert surface.detect(str(tmp_path))
    mine = tmp_path / "mine.yml"
    mine.write_text("type: python\npath: handler.py\n")
    assert surface.detect(str(mine))
    for other in ("a: 1", "[1]", "{", ""):
        mine.write_text(other)
        assert not surface.detect(str(mine))
    assert not surface.detect("model.py")


def test_an_unwritable_place_for_readiness_files(tmp_path, caplog, monkeypatch):
    # N58: the default is a warning, a folder the person named is an error
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="readiness files cannot be written"):
        Readiness(blocked / "below").prepare()
    monkeypatch.setattr("forebay.surfaces.nucleus.readiness.DEFAULT_FOLDER", blocked / "below")
    readiness = Readiness(None)
    with caplog.at_level("WARNING", logger="forebay"):
        readiness.prepare()
        readiness.announce([1])
        readiness.clear()
    assert len(caplog.records) == 1


def test_a_place_for_readiness_files_that_goes_away_costs_only_the_files(tmp_path, caplog):  # N58
    folder = tmp_path / "state"
    readiness = Readiness(folder)
    readiness.prepare()
    folder.rmdir()
    with caplog.at_level("WARNING", logger="forebay"):
        readiness.announce([1])
    assert "cannot write readiness files" in caplog.text
    readiness.clear()


def test_api_keys_are_asked_for(serve):
    server = serve(HANDLER, None, "--api-key", "secret", "--max-body-bytes", "100", "--max-elements", "20")
    for path in ("/", "/info", "/metrics"):
        assert server.request(path=path).status_code == 401
        assert server.request(path=path, headers={"x-api-key": "secret"}).status_code == 200
    assert server.request(path="/healthz").status_code == 200
    assert server.request("POST", content=b"x" * 101, headers={"x-api-key": "secret"}).status_code == 413
    for kind, body, what in [  # F73
        ("json", b"[%b]" % b",".join([b"{}"] * 21), "the body: expected at most 20 objects and members of objects"),
        ("x-www-form-urlencoded", b"&".join([b"a"] * 21), "the form: expected at most 20 fields"),
    ]:
        headers = {"x-api-key": "secret", "content-type": f"application/{kind}"}
        refused = server.request("POST", content=body, headers=headers)
        assert (refused.status_code, refused.text.split(", got")[0]) == (413, what)


def test_readiness_files_and_the_end(serve, tmp_path, eventually):
    # N58, N60
    state = tmp_path / "state"
    state.mkdir()
    for stale in ("api_readiness.txt", "proc-1-ready.txt"):
        (state / stale).touch()
    server = serve(SLOW_START, {"processes": 2}, wait=False, state=state)
    eventually(lambda: not list(state.iterdir()))  # the stale ones are gone ...
    eventually(lambda: len(list(server.folder.glob("constructing-*"))) == 1)
    assert not list(state.iterdir())  # ... and none is there while a constructor runs
    (server.folder / "construct").touch()
    server.wait_ready()
    assert (state / "api_readiness.txt").exists()
    assert len(list(state.glob("proc-*-ready.txt"))) == 2
    go = tmp_path / "go"
    with begin(server, go) as running:
        eventually(lambda: server.gauge("forebay_in_flight") == 1)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: not (state / "api_readiness.txt").exists())
        assert server.process.poll() is None
        go.touch()
        assert running.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert server.process.wait(PATIENCE_S) == 0
    assert list(state.iterdir()) == []


def test_at_most_max_concurrency_in_flight(serve, tmp_path, eventually):
    # N95
    server = serve(HANDLER, {"max_concurrency": 2, "threads_per_process": 2, "processes": 1}, "--no-extra-routes")

    def is_full():
        return server.request(path="/info").status_code == 503

    go = tmp_path / "go"
    with begin(server, go) as one, begin(server, go) as two:
        eventually(is_full)
        refused = server.request()
        assert refused.status_code == 503
        assert refused.headers["content-type"].startswith("text/plain")
        go.touch()
        for running in (one, two):
            assert running.recv(4096).startswith(b"HTTP/1.1 200 ")
    # `/info` counts as well, OPTIONS does not; a client that leaves frees its place.
    go = tmp_path / "never"
    with begin(server, go), begin(server, go):
        eventually(is_full)
        assert server.request("OPTIONS").status_code == 204
    eventually(lambda: not is_full())
    # N51: the option leaves the project's own paths only.
    for path in ("/metrics", "/healthz", "/readyz", "/v2", "/v2/health/live"):
        assert server.request(path=path).status_code == 404
    go.touch()


def test_ready_means_that_the_handler_answers(tmp_path):
    # F41: not only that its worker is up
    (tmp_path / "handler.py").write_text("class Handler:\n    def handle_get(self): return 1\n")
    (tmp_path / "nucleus.yaml").write_text("type: python\npath: handler.py\n")
    app = NucleusSurface().build(str(tmp_path), Options(http=HttpConfig(), state_dir=tmp_path / "state")).app
    assert app.only is not None
    endpoint = app.only.endpoint
    ask, seen = endpoint.call, []

    async def call(*arguments, **more):
        seen.append(app.problems())
        return await ask(*arguments, **more)

    endpoint.call = call

    async def run():
        await app.start()
        seen.append(app.problems())
        await app.drain(0.0)

    asyncio.run(run())
    assert seen == [["the handler is loading"], []]
