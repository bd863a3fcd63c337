# SPDX-License-Identifier: Apache-2.0
"""How a handler is loaded, called and fed: section 2 of the specification."""

import pickle

import pytest
from tests.waiting import PATIENCE_S

from forebay.errors import ModelError
from forebay.surfaces.nucleus.handler_payload import MAX_PARTS

ECHO = """
    import os, pickle, threading, time

    loads = 0
    loads += 1

    class Thing:
        pass

    class Handler:
        def __init__(self, config):
            self.config = config
            self.thread = threading.get_ident()

        def handle_post(self, payload, query_params, headers):
            if isinstance(payload, bytes):
                return payload
            if hasattr(payload, "multi_items"):
                found = []
                for name, value in payload.multi_items():
                    if hasattr(value, "file"):
                        value = [value.filename, value.content_type, value.file.read().decode("latin-1")]
                    found.append([name, value])
                return {"type": type(payload).__name__, "items": found}
            return {"type": type(payload).__name__, "value": payload}

        def handle_get(self, query_params, headers):
            what = query_params.get("what")
            if what == "module":
                found = pickle.loads(pickle.dumps(Thing()))
                return [__name__, Thing.__module__, os.path.basename(__file__), loads, type(found).__name__]
            if what == "query":
                return [query_params["a"], query_params.getlist("a"), query_params.get("z", "default")]
            if what == "headers":
                return [headers["X-Foo"], headers["x-foo"], headers.get("my_key")]
            if what == "config":
                return self.config
            return threading.get_ident() == self.thread

        def handle_put(self, headers):
            return "unread"

        async def handle_patch(self, payload):
            import asyncio
            await asyncio.sleep(0.05)
            return {"awaited": payload}

        @staticmethod
        def handle_delete(payload):
            return payload
"""

CONFIG = {"a": [1, [2.5, None]], "b": {"c": True}}


@pytest.fixture(scope="module")
def server(serve):
    return serve(ECHO, {"config": CONFIG})


def post(server, body, content_type=None):
    headers = {"content-type": content_type} if content_type else {}
    return server.request("POST", content=body, headers=headers)


# How it is loaded


@pytest.mark.parametrize(
    "handler, said",
    [
        ("x = 1", "Handler class is not defined"),
        ("import surely_not_there", "surely_not_there"),
        ("class Handler(", "SyntaxError"),
        (
            "class Handler:\n    def __init__(self): raise KeyError('weights')\n    def handle_get(self): pass",
            "KeyError",
        ),
    ],
)
def test_a_broken_handler_says_what_is_wrong(open_runner, handler, said):
    # N28
    with pytest.raises(ModelError, match=said) as caught:
        open_runner(handler)
    assert "handler.py" in caught.value.message


def test_a_broken_handler_ends_the_server(serve):
    # N28
    server = serve("import json\nraise ValueError('no luck')\nclass Handler: pass", wait=False)
    assert server.process.wait(PATIENCE_S) == 1
    assert "failed to start api" in server.out.read_text()
    text = server.err.read_text()
    assert "handler.py" in text
    assert "ValueError: no luck" in text
    assert not list(server.state.rglob("*ready*"))


def test_a_missing_package_is_named_with_the_requirements_file(open_runner, tmp_path):
    # N28
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "requirements.txt").touch()
    with pytest.raises(ModelError, match=r"surely_not_there.*requirements\.txt"):
        open_runner("import surely_not_there")


def test_a_missing_package_is_named_without_a_file_that_is_not_there(open_runner):
    # F41
    with pytest.raises(ModelError, match="surely_not_there") as caught:
        open_runner("import surely_not_there")
    assert "listed in" not in caught.value.message


def test_a_pickled_class_is_a_handler(tmp_path, ask):
    # N3
    import dill

    from forebay.surfaces.nucleus.runner import build
    from forebay.workers.runner import WorkerContext

    space = {"__name__": "__main__"}
    exec("class Handler:\n    def handle_get(self): return 'pickled'", space)
    file = tmp_path / "handler.pickle"
    file.write_bytes(dill.dumps(space["Handler"], byref=False, recurse=True))
    runner = build(handler=str(file), config="{}", batched=False)
    runner.open(WorkerContext())
    assert ask(runner, "get")[2] == b"pickled"


def test_the_module_is_cortex_handler_and_its_classes_can_be_pickled(server):
    # N29
    found = server.request(params={"what": "module"}).json()
    assert found == ["cortex_handler", "cortex_handler", "handler.py", 1, "Thing"]


@pytest.mark.parametrize(
    "signature",
    [
        "self",
        "self, tensorflow_client, config",
        "self, config, model_client",
        "self, *, config",
        "self, config, /",
        "self, config=None, other=3",
        "self, **kwargs",
        "self, python_client, module_proto_pb2",
        "self, *args",
    ],
)
def test_constructor_arguments_are_matched_by_name(open_runner, ask, signature):
    # N30, N31
    handler = f"""
    class Handler:
        def __init__({signature}):
            self.seen = {{name: value for name, value in locals().items() if name != "self"}}
        def handle_get(self):
            return self.seen
    """
    _, _, body = ask(open_runner(handler, {"k": [1]}), "get")
    if "config" in signature:
        assert b'"config": {"k": [1]}' in body
    if "kwargs" in signature:
        assert b'"config": {"k": [1]}, "model_client": null, "tensorflow_client": null' in body


def test_a_handler_without_constructor_is_fine(open_runner, ask):
    # N30
    runner = open_runner("class Handler:\n    def handle_get(self): return 1")
    assert ask(runner, "get") == (200, "application/json", b"1")


def test_an_unknown_constructor_argument_is_named(open_runner):
    # N31
    with pytest.raises(ModelError, match='"foo" is not a supported argument'):
        open_runner("class Handler:\n    def __init__(self, config, foo): pass\n    def handle_get(self): pass")


def test_constructor_and_verbs_run_in_one_thread(server):
    # N32
    with server.client() as client:
        assert all(client.get("/").json() is True for _ in range(20))


def test_all_verbs_inherited_and_static_ones_too(server, open_runner, ask):
    # N33
    assert server.request("PUT", content=b"x").text == "unread"
    assert server.request("PATCH", json=[1]).json() == {"awaited": [1]}
    assert server.request("DELETE", json={"d": 1}).json() == {"d": 1}
    runner = open_runner("class Base:\n    def handle_get(self): return 'base'\nclass Handler(Base): pass")
    assert ask(runner, "get")[2] == b"base"


def test_no_verb_at_all_is_an_error(open_runner):
    # N33
    with pytest.raises(ModelError, match=r"no user-defined `handle_<verb>` method found in handler class; define at"):
        open_runner("class Handler:\n    pass")


@pytest.mark.parametrize(
    "signature, found",
    [
        ("self", b"[]"),
        ("self, headers, payload", b'["headers", "payload"]'),
        ("self, payload, extra=1", b'["extra", "payload"]'),
        ("self, *, query_params", b'["query_params"]'),
        ("self, payload, /, headers", b'["headers", "payload"]'),
        ("self, **kwargs", b'["headers", "payload", "query_params"]'),
    ],
)
def test_verb_arguments_are_matched_by_name(open_runner, ask, signature, found):
    # N34
    handler = f"""
    class Handler:
        def handle_post({signature}):
            seen = dict(locals())
            seen.pop("self")
            return sorted(seen.pop("kwargs", {{}}) or seen)
    """
    assert ask(open_runner(handler), "post", b"{}")[2] == found


def test_trap_the_signature_is_checked_at_the_start(open_runner):
    # N34
    with pytest.raises(ModelError) as caught:
        open_runner("class Handler:\n    def handle_post(self, foo): pass")
    assert 'invalid signature for method "handle_post(self, foo)"' in caught.value.message
    assert '"foo" is not a supported argument' in caught.value.message


@pytest.mark.parametrize("signature", ["", "*, payload", "**kwargs"])
def test_a_verb_without_self_is_told_at_the_start(open_runner, signature):
    # N34
    with pytest.raises(ModelError) as caught:
        open_runner(f"class Handler:\n    def handle_post({signature}): pass")
    assert 'invalid signature for method "handle_post(' in caught.value.message
    assert "it has no self" in caught.value.message


@pytest.mark.parametrize(
    "verb",
    [
        "functools.lru_cache(lambda self: 'done')",
        "functools.partialmethod(lambda self, word, headers: word, 'done')",
        "types.MethodType(lambda word, headers: word, 'done')",
    ],
)
def test_a_verb_may_be_made_by_what_is_no_function(open_runner, ask, verb):
    # N34
    handler = f"""
    import functools, types
    class Handler:
        handle_get = {verb}
    """
    assert ask(open_runner(handler), "get")[2] == b"done"


def test_coroutine_verbs_are_awaited(server):
    # N35
    assert server.request("PATCH", json={"a": 1}).json() == {"awaited": {"a": 1}}


def test_query_and_headers_are_starlettes(server):
    # N36
    assert server.request(params={"what": "query", "a": ["1", "2"]}).json() == ["2", ["1", "2"], "default"]
    assert server.request(params={"what": "headers"}, headers={"x-FOO": "bar"}).json() == ["bar", "bar", None]


def test_what_the_originals_image_has_can_be_imported(open_runner, ask):
    # N37
    handler = """
    import boto3, dill, requests, yaml
    import starlette.responses, starlette.datastructures, starlette.requests
    from fastapi import HTTPException
    class Handler:
        def handle_get(self):
            return "all there"
    """
    assert ask(open_runner(handler), "get")[2] == b"all there"


def test_config_arrives_with_its_types(server):
    # N30
    assert server.request(params={"what": "config"}).json() == CONFIG


# What it is fed


def test_a_body_nobody_wants_is_not_parsed(server):
    # N38
    assert server.request("PUT", content=b"{", headers={"content-type": "application/json"}).status_code == 200


@pytest.mark.parametrize("value", [[1], {"a": {"b": 1.5}}, "text", 3, None])
def test_json_of_any_type(server, value):
    # N39
    assert post(server, __import__("json").dumps(value), "Application/JSON; v=1").json()["value"] == value


def test_json_nan_is_accepted(server):
    # N39
    assert post(server, b"NaN", "application/json").text == '{"type": "float", "value": NaN}'


@pytest.mark.parametrize(
    "body, said",
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_bad_json_is_400_with_the_decoders_message(server, body, said):
    # N39
    answer = post(server, body, "application/json")
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.text == f'{{"error":"{said}"}}'


@pytest.mark.parametrize("body", [b"\xff", b'"\xff"', b"[" * 100_000])
def test_trap_undecodable_bodies_are_400(server, body):
    # N39
    answer = post(server, body, "application/json")
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_multipart_forms(server):
    # N40
    files = {
        "text": ("a.txt", b"hello", "text/plain"),
        "pickle": ("b.pickle", pickle.dumps({"x": 1}), "application/octet-stream"),
        "image": ("c.png", b"\x89PNG", "image/png"),
    }
    answer = server.request("POST", files=files, data={"field": "value"}).json()
    assert answer["type"] == "FormData"
    found = dict(map(tuple, answer["items"]))
    assert found["field"] == "value"
    assert found["text"] == ["a.txt", "text/plain", "hello"]
    assert pickle.loads(found["pickle"][2].encode("latin-1")) == {"x": 1}
    assert found["image"][:2] == ["c.png", "image/png"]


def test_large_files_in_forms(server):
    # N40: beyond what is kept in memory by the parser
    answer = server.request("POST", files={"f": ("f", b"x" * 3_000_000, "text/plain")}).json()
    assert len(answer["items"][0][1][2]) == 3_000_000


def test_urlencoded_forms(server):
    # N40
    answer = post(server, b"a=1&a=2&b=%C3%A9&&c+d;e&=f", "application/x-www-form-urlencoded").json()
    assert answer["items"] == [["a", "1"], ["a", "2"], ["b", "é"], ["c d;e", ""], ["", "f"]]


@pytest.mark.parametrize("kind, more", [("fields", b""), ("files", b"; filename=f")])
def test_a_form_of_too_many_parts_is_400(server, kind, more):
    # N40 F73
    part = b"--x\r\ncontent-disposition: form-data; name=a%b\r\n\r\n\r\n" % more
    assert post(server, part * MAX_PARTS + b"--x--\r\n", "multipart/form-data; boundary=x").status_code == 200
    answer = post(server, part * (MAX_PARTS + 1) + b"--x--\r\n", "multipart/form-data; boundary=x")
    assert (answer.status_code, answer.text) == (400, f"Too many {kind}. Maximum number of {kind} is {MAX_PARTS}.")


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary=x"])
def test_broken_forms_are_400(server, content_type):
    # N40
    answer = post(server, b"--y\r\nnot a form", content_type)
    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text


WHOLE_FORM = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\none\r\n--x--\r\n'


@pytest.mark.parametrize("length", [0, 10, 40, 52, 58, len(WHOLE_FORM) - 4])
def test_a_form_that_breaks_off_is_400(server, length):
    # F41: not an empty form, nor one without its last field
    answer = post(server, WHOLE_FORM[:length], "multipart/form-data; boundary=x")
    assert answer.status_code == 400
    assert "boundary" in answer.text


@pytest.mark.parametrize("body", [WHOLE_FORM, WHOLE_FORM[:-2]])
def test_a_form_may_end_with_its_last_boundary(server, body):
    # N40
    assert post(server, body, "multipart/form-data; boundary=x").json()["items"] == [["a", "one"]]


@pytest.mark.parametrize(
    "content_type, body, found",
    [
        ("text/plain", "é".encode(), "é"),
        ("text/plain; charset=latin-1", b"\xe9", "é"),
        ('TEXT/PLAIN; charset=utf-8; charset="latin-1";', b"\xe9", "é"),
    ],
)
def test_text(server, content_type, body, found):
    # N41
    assert post(server, body, content_type).json() == {"type": "str", "value": found}


@pytest.mark.parametrize(
    "content_type, said",
    [
        ("text/plain", "codec can't decode byte 0xe9"),
        ("text/plain; charset=nope", "unknown encoding: nope"),
        ("text/plain; charset=hex", "hex"),
    ],
)
def test_undecodable_text_is_400(server, content_type, said):
    # N41
    answer = post(server, b"\xe9", content_type)
    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("text/plain")
    assert said in answer.text


def test_everything_else_is_bytes(server):
    # N42
    sent = pickle.dumps({"a": 1})
    assert post(server, sent, "application/octet-stream").content == sent
    assert post(server, b"{", "application/vnd.x+json").content == b"{"
    assert post(server, b"\x00\x01").content == b"\x00\x01"
    assert server.request("DELETE").content == b""


def test_bodies_have_no_limit(server):
    # N43
    sent = b"0123456789abcdef" * (70 * 65536)  # 70 MiB: more than forebay takes by default
    assert post(server, sent, "application/octet-stream").content == sent


def test_underscores_in_header_names_and_chunked_bodies(server):
    # N43
    found = server.request(params={"what": "headers"}, headers={"x-foo": "1", "my_key": "1"}).json()
    assert found[2] == "1"
    answer = server.request("POST", content=iter([b'{"a"', b": 1}"]), headers={"content-type": "application/json"})
    assert answer.json()["value"] == {"a": 1}


def test_expect_100_continue(server):
    # N43
    import socket

    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 100 ")
        raw.sendall(b"hi")
        answer = b""
        while not answer.endswith(b"\r\n\r\nhi"):
            piece = raw.recv(4096)
            assert piece
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200 ")
        raw.sendall(b"DELETE / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
