# SPDX-License-Identifier: Apache-2.0
"""What a handler's results become: section 2 of the specification."""

import contextlib

import httpx
import pytest

HANDLER = """
    import asyncio, http, os, threading, time
    from fastapi import HTTPException
    from starlette.background import BackgroundTask
    from starlette.exceptions import HTTPException as StarletteException
    from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse

    done = []

    def chunks():
        for number in range(3):
            while not os.path.exists(f"part-{number}"):
                time.sleep(0.01)
            yield f"part {number};"

    async def async_chunks():
        for number in range(3):
            yield b"a" * number

    lock = threading.Lock()

    def held():
        with lock:
            while True:
                yield "held;"

    async def async_held():
        with lock:
            while True:
                yield "held;"

    def broken():
        yield "one"
        raise ValueError("in the middle")

    def fail():
        raise RuntimeError("callback failed on purpose")

    def raise_(error):
        raise error

    class Bytes(bytes):
        pass

    class Custom(Response):
        async def __call__(self, scope, receive, send):
            headers = [(b"x-method", scope["method"].encode())]
            await send({"type": "http.response.start", "status": 202, "headers": headers})
            await send({"type": "http.response.body", "body": b"own way"})

    class Listening(Response):
        def __init__(self, parts, at_the_end=None):
            super().__init__()
            self.parts, self.at_the_end = parts, at_the_end

        async def __call__(self, scope, receive, send):
            async def write():
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for _ in range(self.parts):
                    await send({"type": "http.response.body", "body": b"part;", "more_body": True})
                if self.at_the_end is not None:
                    await self.at_the_end()
                await send({"type": "http.response.body", "body": b""})

            writing = asyncio.ensure_future(write())
            while (message := await receive())["type"] != "http.disconnect":
                assert message == {"type": "http.request", "body": b"", "more_body": False}
            writing.cancel()
            done.append(f"heard after {self.parts}")

    def cookie():
        response = JSONResponse({"a": 1}, headers={"X-Mine": "1"})
        response.set_cookie("k", "v")
        response.set_cookie("l", "w")
        return response

    RESULTS = {
        "held": lambda: StreamingResponse(held()), "async held": lambda: StreamingResponse(async_held()),
        "is held": lambda: lock.locked(),
        "dict": lambda: {"a": 1}, "none": lambda: None, "tuple": lambda: (1, 2), "triple": lambda: (1, 2, 3),
        "pair": lambda: (1, 5), "nan": lambda: float("nan"), "unicode": lambda: {"é": "é"},
        "str": lambda: "é", "bytes": lambda: bytes(4), "set": lambda: {1}, "bytearray": lambda: bytearray(3),
        "lone": lambda: "\\ud800",
        "json": lambda: JSONResponse({"error": "unknown model: x"}, status_code=400),
        "cookie": cookie,
        "empty": lambda: Response(status_code=204),
        "redirect": lambda: RedirectResponse("/info"),
        "stream": lambda: StreamingResponse(chunks(), media_type="text/event-stream"),
        "async": lambda: StreamingResponse(async_chunks(), headers={"x-mine": "1"}),
        "broken": lambda: StreamingResponse(broken()),
        "file": lambda: FileResponse("data.txt", media_type="text/plain"),
        "bigfile": lambda: FileResponse("big.bin"),
        "nofile": lambda: FileResponse("absent.txt"),
        "custom": lambda: Custom(),
        "listening": lambda: Listening(3),
        "endless": lambda: Listening(10**9),
        "quiet": lambda: Listening(1, asyncio.Event().wait),
        "big": lambda: bytes(3_000_000),
        "callback": lambda: ({"now": 1}, lambda: (time.sleep(0.4), done.append("callback"))),
        "badcallback": lambda: (b"ok", fail),
        "strcallback": lambda: (JSONResponse([1]), lambda: done.append("response")),
        "streamcallback": lambda: (StreamingResponse(async_chunks()), lambda: (time.sleep(0.4), done.append("stream"))),
        "background": lambda: Response("x", background=BackgroundTask(done.append, "background")),
        "done": lambda: list(done),
        "subclass": lambda: Bytes(b"of bytes"),
        "bodysubclass": lambda: Response(Bytes(b"of bytes"), status_code=http.HTTPStatus.CREATED),
        "crlf": lambda: Response("x", headers={"x-mine": "1\\r\\nx-other: 2"}),
        "badname": lambda: Response("x", headers={"x mine": "1"}),
        "status": lambda: Response("x", status_code=999),
        "early": lambda: Response("x", status_code=102),
        "streamcrlf": lambda: StreamingResponse(iter("a"), headers={"x-mine": "1\\n2"}),
        "streamstatus": lambda: StreamingResponse(iter("a"), status_code=999),
        "errorstatus": lambda: raise_(HTTPException(999, "x")),
        "errorcrlf": lambda: raise_(HTTPException(400, "x", headers={"x-mine": "1\\r\\n"})),
        "errorunicode": lambda: raise_(HTTPException(400, "x", headers={"x-mine": "\\u4e2d"})),
        "interrupt": lambda: raise_(KeyboardInterrupt("by hand")),
        "exit": lambda: raise_(GeneratorExit("by hand")),
        "interruptback": lambda: (1, lambda: raise_(KeyboardInterrupt("in a callback"))),
        "interruptstream": lambda: StreamingResponse(raise_(KeyboardInterrupt("in a stream")) for _ in "a"),
        "framed": lambda: Response("x", headers={"transfer-encoding": "chunked", "connection": "close, x-mine"}),
    }

    class Handler:
        def handle_get(self, query_params):
            return RESULTS[query_params["what"]]()

        def handle_post(self, query_params):
            raise ValueError("secret detail")

        def handle_put(self):
            raise HTTPException(418, {"a": 1}, headers={"X-Tea": "pot"})

        def handle_patch(self):
            raise StarletteException(409)

        def handle_delete(self):
            raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def server(serve):
    return serve(HANDLER, data__txt="0123456789", big__bin="x" * 3_000_000)


@pytest.fixture(scope="module")
def get(server):
    with server.client() as client:
        yield lambda what, **more: client.get("/", params={"what": what}, **more)


@pytest.mark.parametrize(
    "what, body",
    [
        ("dict", b'{"a": 1}'),
        ("none", b"null"),
        ("tuple", b"[1, 2]"),
        ("nan", b"NaN"),
        ("unicode", b'{"\\u00e9": "\\u00e9"}'),
        ("triple", b"[1, 2, 3]"),
        ("pair", b"[1, 5]"),
    ],
)
def test_json_is_what_json_dumps_writes(get, what, body):
    # N44, N47
    answer = get(what)
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, "application/json", body)


@pytest.mark.parametrize("what", ["set", "bytearray", "lone"])
def test_what_cannot_be_written_is_500(get, what):
    # N44
    answer = get(what)
    assert (answer.status_code, answer.text) == (500, "internal server error")


def test_text_and_bytes(get):
    # N45
    answer = get("str")
    assert (answer.headers["content-type"], answer.content) == ("text/plain; charset=utf-8", "é".encode())
    answer = get("bytes")
    assert (answer.headers["content-type"], answer.content) == ("application/octet-stream", bytes(4))
    assert get("big").content == bytes(3_000_000)


def test_responses_go_out_as_they_are(get):
    # N46
    answer = get("json")
    assert (answer.status_code, answer.json()) == (400, {"error": "unknown model: x"})
    answer = get("cookie")
    assert answer.headers.get_list("set-cookie") == ["k=v; Path=/; SameSite=lax", "l=w; Path=/; SameSite=lax"]
    assert answer.headers["x-mine"] == "1"
    answer = get("empty")
    assert (answer.status_code, answer.content) == (204, b"")
    assert "content-length" not in answer.headers
    answer = get("redirect")
    assert (answer.status_code, answer.headers["location"]) == (307, "/info")
    answer = get("custom")
    assert (answer.status_code, answer.text, answer.headers["x-method"]) == (202, "own way", "GET")


def test_streams_arrive_chunk_by_chunk(server):
    # N46, N56
    with server.client() as client, client.stream("GET", "/", params={"what": "stream"}) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["access-control-allow-origin"] == "*"
        arriving = answer.iter_bytes()
        for number in range(3):  # each is there before the next one may be made
            (server.folder / f"part-{number}").touch()
            assert next(arriving) == b"part %d;" % number
        assert list(arriving) == []


def test_a_response_may_listen_for_the_clients_leaving_while_it_is_sent(get):
    answer = get("listening")
    assert (answer.status_code, answer.text) == (200, "part;part;part;")
    assert "heard after 3" in get("done").json()


@pytest.mark.parametrize("what, parts", [("endless", 10**9), ("quiet", 1)])
def test_a_response_that_listens_is_told_that_its_client_has_left(server, get, what, parts):
    with server.client() as client, client.stream("GET", "/", params={"what": what}) as answer:
        assert next(answer.iter_text()).startswith("part;")
    assert f"heard after {parts}" in get("done").json()  # by the one thread there is


@pytest.mark.parametrize("what", ["held", "async held"])
def test_what_a_stream_holds_is_free_once_its_client_has_left(server, get, what, eventually):
    # N46
    with server.client() as client, client.stream("GET", "/", params={"what": what}) as answer:
        assert next(answer.iter_text()).startswith("held;")
    eventually(lambda: get("is held").json() is False)


def test_async_streams_and_files(get):
    # N46
    answer = get("async")
    assert (answer.content, answer.headers["x-mine"]) == (b"aaa", "1")
    answer = get("file")
    assert (answer.text, answer.headers["content-length"]) == ("0123456789", "10")
    answer = get("file", headers={"range": "bytes=2-4"})
    assert (answer.status_code, answer.text) == (206, "234")
    assert get("nofile").status_code == 500
    assert len(get("bigfile").content) == 3_000_000  # many more parts than may be on their way at a time


def test_a_stream_that_breaks_is_cut(get):
    # N46: a client can tell that it did not get everything
    with pytest.raises(httpx.RemoteProtocolError):
        get("broken")
    assert get("dict").status_code == 200


@pytest.mark.parametrize(
    "what, word, content",
    [
        ("callback", "callback", b'{"now": 1}'),
        ("streamcallback", "stream", b"aaa"),
        ("strcallback", "response", b"[1]"),
    ],
)
def test_callbacks_run_after_the_answer(get, what, word, content, eventually):
    # N47
    assert get(what).content == content
    eventually(lambda: word in get("done").json())


def test_the_callback_holds_its_thread(get):
    # N47: with one thread the next request waits for it
    before = get("done").json().count("callback")
    get("callback")
    assert get("done").json().count("callback") == before + 1


def test_trap_a_failing_callback_is_logged(server, get, eventually):
    # N47
    assert get("badcallback").content == b"ok"
    assert get("dict").status_code == 200
    eventually(lambda: server.has_logged("callback failed on purpose", "exc_info"))


def test_background_tasks_run(get, eventually):
    # N46
    assert get("background").text == "x"
    eventually(lambda: "background" in get("done").json())


def test_an_exception_is_500_and_its_traceback_is_logged(server, eventually):
    # N48
    answer = server.request("POST")
    assert (answer.status_code, answer.text) == (500, "internal server error")
    assert answer.headers["content-type"].startswith("text/plain")
    eventually(lambda: server.has_logged("ValueError: secret detail", "exc_info"))
    assert server.request("DELETE").status_code == 500  # SystemExit is an exception like any other here
    assert server.request(params={"what": "dict"}).status_code == 200


def test_http_exceptions_keep_status_detail_and_headers(server):
    # N49
    answer = server.request("PUT")
    assert (answer.status_code, answer.text, answer.headers["x-tea"]) == (418, "{'a': 1}", "pot")
    assert server.request("PATCH").status_code == 409


def test_success_and_failure_carry_the_cors_headers(server):
    # N53
    for answer in (server.request(params={"what": "dict"}), server.request("POST"), server.request("PUT")):
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["access-control-allow-methods"] == "POST, GET, PUT, PATCH, DELETE, OPTIONS"
        assert answer.headers["access-control-allow-headers"] == "*"
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert answer.headers["access-control-expose-headers"] == "Content-Length,Content-Range"
    assert "access-control-allow-origin" not in server.request(path="/info").headers


def test_a_subclass_of_bytes_is_bytes(get):
    # F41: numpy.bytes_, for one
    answer = get("subclass")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
    assert answer.content == b"of bytes"
    answer = get("bodysubclass")
    assert (answer.status_code, answer.content) == (201, b"of bytes")


@pytest.mark.parametrize(
    "what, said",
    [
        ("crlf", "x-mine"),
        ("badname", "x mine"),
        ("status", "999"),
        ("early", "102"),
        ("streamcrlf", "x-mine"),
        ("streamstatus", "999"),
        ("errorstatus", "999"),
        ("errorcrlf", "x-mine"),
        ("errorunicode", "x-mine"),
    ],
)
def test_a_response_that_cannot_be_written_is_500_and_logged(server, get, what, said, eventually):
    # F41
    before = len(server.logged)
    answer = get(what)
    assert (answer.status_code, answer.text) == (500, "internal server error")
    eventually(lambda: any(said in line["message"] for line in server.logged[before:]))


@pytest.mark.parametrize("what", ["interrupt", "exit"])
def test_whatever_a_verb_raises_ends_its_request_alone(server, get, what, eventually):
    # F41: not the worker, and with it the server
    answer = get(what)
    assert (answer.status_code, answer.text) == (500, "internal server error")
    eventually(lambda: server.has_logged("by hand", "exc_info"))
    assert get("dict").status_code == 200


def test_whatever_follows_an_answer_raises_is_logged(server, get, eventually):
    # F41
    assert get("interruptback").content == b"1"
    with contextlib.suppress(httpx.RemoteProtocolError):  # cut, if its head has left already
        assert get("interruptstream").status_code == 500
    assert get("dict").status_code == 200
    eventually(lambda: server.has_logged("in a callback", "exc_info"))
    eventually(lambda: server.has_logged("in a stream", "exc_info"))


def test_how_an_answer_is_framed_is_the_servers_business(get):
    # F41: a handler that passes on somebody else's headers
    answer = get("framed")
    assert (answer.status_code, answer.text) == (200, "x")
    assert "transfer-encoding" not in answer.headers
    assert answer.headers["content-length"] == "1"
