# SPDX-License-Identifier: Apache-2.0
"""`forebay.asgi`: alone, mounted, under uvicorn; its lifespan loads and drains."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tests.waiting import PATIENCE_S, reached

import forebay
from forebay.errors import ConfigError


class Shout(forebay.Model):
    loaded = 0
    unloaded = 0

    def load(self):
        Shout.loaded += 1

    def predict(self, batch: list[str]) -> list[str]:
        return [text.upper() for text in batch]

    def unload(self):
        Shout.unloaded += 1


class Slow(forebay.Model):
    begun = threading.Event()
    may_end = threading.Event()

    def predict(self, batch: list[int]) -> list[int]:
        Slow.begun.set()
        Slow.may_end.wait(PATIENCE_S)
        return batch


class Broken(forebay.Model):
    def load(self):
        raise OSError("no such weights")

    def predict(self, batch):
        return batch


def outer(kind, **more: Any) -> Any:
    if kind == "starlette":
        return Starlette(**more)
    return pytest.importorskip("fastapi").FastAPI(**more)


def test_its_bodies_have_the_budget_that_the_configuration_says(tmp_path):  # F78
    (tmp_path / "model.py").write_text(
        "import forebay\nclass Echo(forebay.Model):\n    def predict(self, batch): return batch\n"
    )
    file = tmp_path / "forebay.yaml"
    file.write_text("http: {max_buffered_bytes: 100000}\nmodels: [{target: model.py, worker_kind: thread}]\n")
    with TestClient(forebay.asgi(str(file))) as client:
        assert client.post("/models/echo", json=1).json() == 1
        answer = client.post("/models/echo", json="a" * 100_000)
    assert (answer.status_code, "--max-buffered-bytes" in answer.text) == (503, True)


def test_alone_it_is_loaded_answers_and_is_drained_again_and_again():
    app = forebay.asgi(Shout)
    before = Shout.loaded, Shout.unloaded
    for count in (1, 2):
        with TestClient(app) as client:
            assert Shout.loaded == before[0] + count
            assert client.post("/models/shout", json="a").json() == "A"
            assert client.post("/", json="a").json() == "A"
            assert client.get("/readyz").json() == {"status": "ready"}
        assert Shout.unloaded == before[1] + count


@pytest.mark.parametrize("kind", ["starlette", "fastapi"])
def test_mounted_it_answers_below_its_prefix(kind):
    models = forebay.asgi(Shout, api_keys=["key"])
    app = outer(kind, lifespan=models.lifespan)
    app.mount("/ml", models)
    key = {"x-api-key": "key"}
    with TestClient(app) as client:
        assert client.post("/ml/models/shout", json="a", headers=key).json() == "A"
        assert client.post("/ml/models/shout", json="a").status_code == 401
        assert client.get("/ml/models/shout", headers=key).json()["name"] == "shout"
        assert client.get("/ml/healthz").status_code == 200  # asks for no key below a prefix either
        assert client.get("/ml/docs").status_code == 200
        assert client.get("/ml/openapi.json").json()["servers"] == [{"url": "."}]
        lost = client.get("/ml/model/shout", headers=key)
        assert "did you mean /ml/models/shout?" in lost.json()["error"]["message"]
        assert client.post("/models/shout", json="a").status_code in {404, 405}


async def asked(app, method, path, *, root_path, raw_path, **more: Any):
    async def as_the_framework_does(scope, receive, send):
        raw = (raw_path or path).encode()
        await app({**scope, "path": path, "root_path": root_path, "raw_path": raw}, receive, send)

    transport = httpx.ASGITransport(as_the_framework_does)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **more)


def ask(app, method, path, root_path="", raw_path="", **more: Any):
    async def ask():
        async with app.lifespan():
            return await asked(app, method, path, root_path=root_path, raw_path=raw_path, **more)

    return asyncio.run(ask())


@pytest.mark.parametrize("root_path", ["/m", "/model", "/ml"])
def test_a_prefix_that_a_proxy_has_taken_off_the_path_is_not_looked_for_in_it(root_path):
    app = forebay.asgi(Shout, Slow)
    assert ask(app, "POST", "/models/shout", root_path, json="a").json() == "A"
    assert ask(app, "GET", "/models/shout", root_path).json()["name"] == "shout"


def test_the_index_names_paths_as_a_client_writes_them():
    app = forebay.asgi(Shout, Slow)
    told = ask(app, "GET", "/ml/", "/ml").json()
    assert (told["docs"], told["call"]) == ("/ml/docs", "POST /ml/models/{name}")
    assert ask(app, "GET", "/").json()["docs"] == "/docs"


def test_a_framework_that_shortens_the_path_alone_and_ends_it_with_a_slash():  # Litestar mounts in this way
    app = forebay.asgi(Shout)
    assert ask(app, "GET", "/v2/", raw_path="/ml/v2").json()["name"] == "forebay"
    assert ask(app, "GET", "/v2/models/shout/ready/", raw_path="/ml/v2/models/sh%6fut/ready").json()["ready"]
    assert ask(app, "GET", "/ui/", raw_path="/ml/ui").status_code == 200
    assert ask(app, "GET", "/ui/", raw_path="/ml/ui/").headers["location"] == "../ui"


@pytest.mark.parametrize(
    "models, path, root_path, raw_path, page",
    [
        ([Shout], "/", "", "/", "/ui"),
        ([Shout], "/", "", "/ml", "/ml/ui"),
        ([Shout], "/ml", "/ml", "/ml", "/ml/ui"),
        ([Shout], "/ml/", "/ml", "/ml/", "/ml/ui"),
        ([Shout], "/a/m:l", "/a/m:l", "/a/m:l", "/a/m:l/ui"),
        ([Shout, Slow], "/", "", "/ml", "/ml/ui"),
        ([Shout, Slow], "/ml/", "/ml", "/ml/", "/ml/ui"),
        ([Shout, Slow], "/ml", "/ml", "/ml", "/ml/"),  # Starlette adds the slash there, and the page is the next step
    ],
)
def test_a_browser_finds_the_dashboard_from_the_root_with_and_without_a_slash(models, path, root_path, raw_path, page):
    app = forebay.asgi(*models)
    answer = ask(app, "GET", path, root_path, raw_path, headers={"accept": "text/html"})
    assert answer.status_code == 307
    assert httpx.URL("http://test" + raw_path).join(answer.headers["location"]).path == page


def test_in_a_lifespan_of_the_programs_own():
    models = forebay.asgi(Shout)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async with models.lifespan():
            yield {"mine": 1}

    app = Starlette(lifespan=lifespan)
    app.mount("/ml", models)
    with TestClient(app) as client:
        assert client.post("/ml/", json="a").json() == "A"


def test_without_its_lifespan_it_says_what_to_write():
    app = Starlette()
    app.mount("/ml", forebay.asgi(Shout))
    with TestClient(app) as client, pytest.raises(ConfigError, match=r"FastAPI\(lifespan=models.lifespan\)"):
        client.post("/ml/models/shout", json="a")


def test_under_a_server_that_runs_no_lifespans_it_says_so():  # Daphne
    app = forebay.asgi(Shout)
    with pytest.raises(ConfigError, match="The server must run lifespans"):
        asyncio.run(asked(app, "GET", "/", root_path="", raw_path="/"))


def test_a_request_on_another_loop_than_its_lifespan_is_told_so_and_does_not_hang():  # fixtures of a session
    app = forebay.asgi(Shout)

    async def elsewhere():
        async with app.lifespan():
            other = asyncio.to_thread(asyncio.run, asked(app, "POST", "/models/shout", root_path="", raw_path=""))
            with pytest.raises(ConfigError, match=r"another event loop than this request came on.*`loop_scope`"):
                await other
            return await asked(app, "POST", "/models/shout", root_path="", raw_path="", json="a")

    assert asyncio.run(elsewhere()).json() == "A"


def test_where_no_loop_of_asyncio_runs_it_says_so():  # as under trio
    def begin(coroutine):
        with contextlib.suppress(StopIteration):
            coroutine.send(None)

    with pytest.raises(ConfigError, match=r"models run on asyncio.*hypercorn --worker-class asyncio"):
        begin(forebay.asgi(Shout).lifespan().__aenter__())
    sent: list[Any] = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "lifespan.startup"}

    begin(forebay.asgi(Shout)({"type": "lifespan"}, receive, send))
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert sent[0]["message"].startswith("models run on asyncio")


def test_its_lifespan_is_entered_once():
    models = forebay.asgi(Shout)

    async def twice():
        async with models.lifespan(), models.lifespan():
            pass

    with pytest.raises(ConfigError, match="has begun already"):
        asyncio.run(twice())


def test_a_model_that_does_not_load_fails_the_start_with_its_reason():
    sent: list[Any] = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "lifespan.startup"}

    asyncio.run(forebay.asgi(Broken)({"type": "lifespan"}, receive, send))
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert "no such weights" in sent[0]["message"]


def test_under_uvicorn_what_was_accepted_is_answered_before_the_end():
    async def serve():
        Slow.begun.clear()
        Slow.may_end.clear()
        listening = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(forebay.asgi(Slow), lifespan="on", log_config=None, ws="none")
        server = uvicorn.Server(config)
        running = asyncio.ensure_future(server._serve(sockets=[listening]))  # without its signal handlers
        await reached(lambda: server.started)
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            answer = asyncio.ensure_future(client.post(f"{url}/models/slow", json=3))
            await reached(Slow.begun.is_set)
            server.should_exit = True
            await reached(lambda: not server.servers[0].is_serving())
            Slow.may_end.set()
            assert (await answer).json() == 3
            await running

    asyncio.run(serve())
