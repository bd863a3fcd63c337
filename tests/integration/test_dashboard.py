# SPDX-License-Identifier: Apache-2.0
"""The dashboard's paths: who may ask for what, and what it costs the server."""

import asyncio
import contextlib
import json
import re
import time

import httpx
import pytest
from tests.waiting import reached

from forebay.batching.queue import BatchConfig
from forebay.errors import RunnerFailed
from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.config import HttpConfig
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import ManualPool
from forebay.transports.http.asgi import asgi_app, beside_dashboard
from forebay.transports.http.dashboard.audience import MAX_VIEWERS, MAX_WAITING
from forebay.transports.http.pages import ServerPages

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "user-agent": "Mozilla/5.0"}
FOREIGN = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"user-agent": "Mozilla/5.0 (X11; Linux x86_64)"},  # where the connection is not secure browsers say no more
]
PAGE = {"x-forebay-page": "ui"}


@pytest.fixture(scope="module")
def zoo(launch):
    return launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")


@contextlib.contextmanager
def looking(server, **headers):
    with server.client.stream("GET", "/ui/events", headers={**PAGE, **headers}) as answer:
        yield answer, told(answer)


def told(answer):
    """The events of a stream."""
    kind = None
    for line in answer.iter_lines():
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            yield kind, json.loads(line[6:])


def until(events, endpoint):
    """The first beat of an endpoint."""
    for kind, data in events:
        for beat in data["beats"] if kind == "beat" else ():
            if beat["endpoint"] == endpoint and beat.get("codes"):
                return beat
    raise EOFError(endpoint)


def test_what_happened_before_anybody_looked_can_be_read(zoo):
    assert zoo.call("echo", 1).status_code == 200
    told = zoo.client.get("/ui/history").json()
    places = [place for place, name in told["names"].items() if name == ["echo", "7"]]
    assert sum(row[1] for _, _, rows in told["samples"] for row in rows if str(row[0]) in places) >= 1


def test_a_browser_at_the_root_is_sent_to_the_page(zoo):
    answer = zoo.client.get("/", headers=BROWSER)
    assert (answer.status_code, answer.headers["location"]) == (307, "ui")
    assert zoo.client.get("/ui").headers["content-type"].startswith("text/html")
    slash = zoo.client.get("/ui/")
    assert str(slash.url.join(slash.headers["location"])) == f"{zoo.url}/ui"


def test_a_program_at_the_root_gets_what_it_got(zoo, launch):
    assert "models" in zoo.client.get("/").json()
    assert launch("single.py").client.get("/").json()["name"]
    assert launch("single.py").client.get("/", headers=BROWSER).status_code == 307


def test_the_page_loads_only_what_the_server_has_and_nothing_inline(zoo):
    page = zoo.client.get("/ui")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page.text)
    seen, wanted = set(), set(re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text))
    assert wanted
    while wanted - seen:
        name = (wanted - seen).pop()
        seen.add(name)
        answer = zoo.client.get(f"/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-security-policy"] == policy
        wanted |= {f"ui/{found}" for found in re.findall(r'from "\./([^"]+)"', answer.text)}
        for other in re.findall(r"https?://[^\"'\s<)]+", answer.text):
            assert other in {"http://www.w3.org/2000/svg", "https://ui.perfetto.dev"}, f"{name} names {other}"
    assert "ui/history.js" in seen


def test_a_file_that_is_known_is_not_sent_again(zoo):
    tag = zoo.client.get("/ui/main.js").headers["etag"]
    assert zoo.client.get("/ui/main.js", headers={"if-none-match": tag}).status_code == 304
    assert zoo.client.get("/ui/main.js", headers={"if-none-match": '"else"'}).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "../page.py", "%2e%2e/page.py", "..%2fpage.py", "%00", "a/main.js"])
def test_the_page_has_no_other_files(zoo, name):
    with zoo.connect() as wire:
        assert wire.ask("GET", f"/ui/{name}").status in {400, 404}


def test_the_stream_tells_what_happens(zoo):
    with looking(zoo) as (answer, events):
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        kind, hello = next(events)
        assert kind == "hello"
        assert hello["bounds"]["rows"][0] == 1.0
        assert ("echo", 1) in [(one["endpoint"], one["alive"]) for one in hello["standing"]]
        assert next(events)[0] == "beat", "from here on it counts"
        assert zoo.call("echo", 1).status_code == 200
        beat = until(events, "echo")
    assert beat["codes"] == {"ok": 1}
    assert sum(count for _, count in beat["request"]) == 1
    assert (beat["batches"], beat["alive"], beat["version"]) == (1, 1, "7")


def test_an_error_is_told_with_its_reason_and_to_who_comes_later(zoo):
    with looking(zoo) as (_, events):
        assert [next(events)[0], next(events)[0]] == ["hello", "beat"]
        assert zoo.call("failing", "raise", x_request_id="mine").status_code == 500
        (fault,) = until(events, "failing")["faults"]
    assert (fault["code"], fault["message"], fault["request_id"]) == (
        "internal",
        "RuntimeError: attack at dawn",
        "mine",
    )
    assert "zoo.py" in fault["trace"]
    with looking(zoo) as (_, events):
        assert fault in next(events)[1]["faults"]


def test_where_a_key_is_needed_it_is_for_all_but_the_page_itself(launch):
    server = launch("zoo.py", "--worker-kind", "thread", "--api-key", "sesame")
    assert server.client.get("/", headers=BROWSER).status_code == 307
    assert server.client.get("/").status_code == 401
    for path in ("/ui", "/ui/main.js", "/ui/style.css"):
        assert server.client.get(path).status_code == 200, path
    for path in (
        "/ui/events",
        "/ui/history",
        "/ui/nodes",
        "/ui/graph/echo",
        "/models",
        "/metrics",
        "/trace?seconds=0.1",
    ):
        assert server.client.get(path, headers=PAGE).status_code == 401, path
        assert server.client.get(path + "?key=sesame", headers=PAGE).status_code == 401, path
    with looking(server, **{"x-api-key": "sesame"}) as (answer, events):
        assert answer.status_code == 200
        assert next(events)[1]["tells_all"]


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("path", ["/ui/events", "/ui/history", "/trace?seconds=0.1"])
def test_a_page_of_somebody_else_starts_neither_a_recording_nor_a_stream(zoo, path, headers):
    answer = zoo.client.get(path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_page")


@pytest.mark.parametrize(
    "headers", [{}, {"sec-fetch-site": "none", "user-agent": "Mozilla/5.0"}, {**FOREIGN[2], **PAGE}]
)
def test_programs_people_and_the_page_itself_may_record(zoo, headers):
    assert zoo.client.get("/trace?seconds=0.1", headers=headers).status_code == 200


def test_a_few_may_look_and_who_leaves_makes_room(zoo, eventually):
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            answer, _ = stack.enter_context(looking(zoo))
            assert answer.status_code == 200
        more = zoo.client.get("/ui/events", headers=PAGE)
        assert more.status_code == 429
        assert f"{MAX_VIEWERS} are looking" in more.json()["error"]["message"]

    def is_free():
        with looking(zoo) as (answer, _):
            return answer.status_code == 200

    eventually(is_free)


def test_only_its_head_is_asked_for_without_taking_a_place(zoo):
    with zoo.connect() as wire:
        for _ in range(MAX_VIEWERS + 1):
            answer = wire.ask("HEAD", "/ui/events", headers=["x-forebay-page: ui"])
            assert answer.status == 200


def test_a_server_that_stops_ends_the_streams(serve):
    server = serve("single.py", "--worker-kind", "thread", "--drain-s", "20")
    with looking(server) as (_, events):
        next(events)
        began = time.monotonic()
        server.signal()
        assert list(events) is not None
        assert server.wait() == 0
    assert time.monotonic() - began < 10


def test_a_setting_turns_it_off(serve):
    server = serve("zoo.py", "--worker-kind", "thread", "--no-dashboard")
    assert "models" in server.client.get("/", headers=BROWSER).json()
    for path in ("/ui", "/ui/main.js", "/ui/events"):
        assert server.client.get(path, headers=PAGE).status_code == 404


# ---------------------------------------------------------------------------------------------------------------------
# In process, where what it costs can be seen


def app_of(count):
    endpoints = [
        Endpoint(EndpointConfig(name=f"m{number}"), BatchConfig(), ManualPool(slots=1)) for number in range(count)
    ]
    return App([Served(endpoint, Contract()) for endpoint in endpoints])


async def opened(asgi, sent, *, reads=True, client="127.0.0.1", host="localhost", headers=()):
    """Ask for the stream; what comes is appended to `sent`."""
    gone = asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if not reads and len(sent) > 1:
            await gone.wait()

    given = [(b"host", host.encode()), (b"x-forebay-page", b"ui"), *headers]
    scope = {"type": "http", "method": "GET", "path": "/ui/events", "headers": given, "query_string": b""}
    return asyncio.ensure_future(asgi(scope | {"client": (client, 1), "server": None}, receive, send)), gone


def test_nothing_is_made_while_nobody_looks_and_once_for_all_who_do(monkeypatch):
    monkeypatch.setattr("forebay.transports.http.dashboard.audience.PERIOD_S", 0.01)
    made = []
    plain = ServerPages._endpoints
    monkeypatch.setattr(ServerPages, "_endpoints", lambda self: made.append(self) or plain(self))

    async def main():
        asgi = asgi_app(app_of(3), HttpConfig())
        await asyncio.sleep(0.05)
        assert made == []
        sents = [[] for _ in range(3)]
        viewers = [await opened(asgi, sent) for sent in sents]
        await reached(lambda: min(map(len, sents)) >= 12)
        # the start, the greeting (three looks each), and then what all get
        assert len(made) - 3 * len(viewers) <= max(map(len, sents))
        for _, gone in viewers:
            gone.set()
        await asyncio.gather(*[task for task, _ in viewers])
        await reached(lambda: len(asyncio.all_tasks()) == 1)
        count = len(made)
        await asyncio.sleep(0.05)
        assert len(made) == count

    asyncio.run(main())


def test_a_viewer_that_takes_nothing_is_dropped_and_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("forebay.transports.http.dashboard.audience.PERIOD_S", 0.01)

    async def main():
        asgi = asgi_app(app_of(1), HttpConfig())
        slow, quick = [], []
        slow_task, slow_gone = await opened(asgi, slow, reads=False)
        quick_task, quick_gone = await opened(asgi, quick)
        await reached(lambda: len(quick) >= 3 * MAX_WAITING)
        assert len(slow) == 2, "it has the greeting, and takes nothing more"
        slow_gone.set()
        await slow_task
        assert slow[-1] == {"type": "http.response.body", "body": b""}
        assert len(slow) == 3, "what waited for it is gone"
        assert not quick_task.done()
        quick_gone.set()
        await quick_task

    asyncio.run(main())


@pytest.mark.parametrize(
    "asked",
    [
        {"client": "203.0.113.7"},
        {"host": "models.example"},
        {"headers": [(b"x-forwarded-for", b"203.0.113.7")]},
        {"headers": [(b"forwarded", b"for=203.0.113.7")]},
        {},
    ],
)
def test_only_this_machine_is_told_what_a_model_raised(monkeypatch, asked):
    monkeypatch.setattr("forebay.transports.http.dashboard.audience.PERIOD_S", 0.01)

    async def main():
        app = app_of(1)
        metrics = app.served["m0"].endpoint.metrics
        metrics.failed(RunnerFailed("attack at dawn", trace="line 1"))
        sent = []
        task, gone = await opened(asgi_app(app, HttpConfig()), sent, **asked)
        await reached(lambda: len(sent) >= 3)
        metrics.failed(RunnerFailed("attack at noon"))
        await reached(lambda: b"RunnerFailed" in sent[-1]["body"])
        gone.set()
        await task
        return b"".join(message.get("body", b"") for message in sent)

    told = asyncio.run(main())
    assert told.count(b"RunnerFailed") == 2
    assert told.count(b"attack at") == (0 if asked else 2)
    assert (b"line 1" in told) is not bool(asked)


def test_the_loop_goes_on_while_three_hundred_models_are_looked_at(monkeypatch):
    # Each event is followed by the next, so that all turns are those of one.
    monkeypatch.setattr("forebay.transports.http.dashboard.audience.PERIOD_S", 0.0)

    async def main():
        app = app_of(300)
        asgi = asgi_app(app, HttpConfig())
        await app.start()
        sent = []
        task, gone = await opened(asgi, sent)
        await reached(lambda: len(sent) >= 3)
        for served in app.served.values():
            served.endpoint.metrics.codes["ok"] += 1
            served.endpoint.metrics.request_s.observe(0.01)
        begun, turns = len(sent), [0, 0]  # the first of these two was begun before
        while (event := len(sent) - begun) < 2:
            turns[event] += 1
            await asyncio.sleep(0)
        assert turns[1] >= 300 // 16
        gone.set()
        await task
        await app.drain(0.0)
        return [message["body"] for message in sent[begun : begun + 2]]

    told = [json.loads(event.split(b"data: ")[1])["beats"] for event in asyncio.run(main())]
    assert sum(map(len, told)) == 300


def test_the_page_is_there_where_the_application_is_mounted():
    from starlette.applications import Starlette
    from starlette.routing import Mount

    asgi = Starlette(routes=[Mount("/ml", asgi_app(app_of(2), HttpConfig(api_keys=("sesame",))))])

    async def main():
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            sent = await client.get("/ml/", headers=BROWSER)
            assert str(sent.url.join(sent.headers["location"])) == "http://x/ml/ui"
            assert (await client.get("/ml/ui")).status_code == 200
            assert (await client.get("/ml/ui/main.js")).status_code == 200
            assert (await client.get("/ml/ui/graph/m0")).status_code == 401
            assert (await client.get("/ml/ui/graph/m0", headers={"x-api-key": "sesame"})).status_code == 404

    asyncio.run(main())


def test_beside_a_project_only_reading_below_its_path_is_taken():
    from starlette.responses import PlainTextResponse

    app, keyed = app_of(1), HttpConfig(api_keys=("sesame",))
    asgi = beside_dashboard(PlainTextResponse("the project's"), ServerPages(app, keyed), keyed)
    key = {"x-api-key": "sesame"}

    async def main():
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/") as client:
            for method, path in [("GET", "/"), ("GET", "/models"), ("GET", "/uix"), ("POST", "/ui"), ("PUT", "/ui/x")]:
                assert (await client.request(method, path)).text == "the project's"
            sent = await client.get("/ui")
            page = sent.url.join(sent.headers["location"])
            assert (await client.get(page, headers=BROWSER)).status_code == 200
            assert (await client.get(page.join("ui/main.js"))).status_code == 200
            for data in ("models", "metrics", "ui/graph/m0", "ui/events", "ui/history"):
                assert (await client.get(page.join(data))).status_code == 401
            assert [one["name"] for one in (await client.get(page.join("models"), headers=key)).json()["models"]] == [
                "m0"
            ]
            assert (await client.get(page.join("nothing"), headers=key)).json()["error"]["code"] == "not_found"

    asyncio.run(main())
    off = HttpConfig(dashboard=False)
    project = PlainTextResponse("the project's")
    assert beside_dashboard(project, ServerPages(app, off), off) is project
