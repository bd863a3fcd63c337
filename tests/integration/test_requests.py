# SPDX-License-Identifier: Apache-2.0
"""Requests as people send them: forms, packed bodies, queries; in all kinds of workers."""

import base64
import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import MODELS
from tests.waiting import eventually

RUN = "import sys; from forebay.cli.main import main; sys.exit(main())"
OPTIONS = ["--form-memory-bytes", "2000", "--max-form-bytes", "200000", "--max-body-bytes", "100000"]


@pytest.fixture(scope="module", params=["process", "thread", "inline"])
def server(request, launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    found = launch("requests.py", "--worker-kind", request.param, *OPTIONS, env={"TMPDIR": str(folder)})
    found.folder = folder
    return found


def left(server):
    return [path for path in Path(server.folder).rglob("tmp*") if path.is_file()]


def leaves_nothing(server):
    """Its files go once the answer was written, which the client may have read by then."""
    eventually(lambda: left(server) == [])


def send(server, model, files, **data):
    return server.client.post(f"/models/{model}", files=files, data=data)


def test_files_and_fields_are_those_of_the_sample(server):  # F52
    answer = send(
        server,
        "pictures",
        {"image": ("a.png", b"\x01\x02", "image/png"), "mask": b"\x03"},
        label="é",
        size=7,
        tags=["x", "y"],
    )
    assert answer.json() == {
        "filename": "a.png",
        "type": "image/png",
        "size": 2,
        "sum": 3,
        "is_on_disk": False,
        "label": "é",
        "number": 7,
        "tags": ["x", "y"],
        "mask": [3],
    }
    assert send(server, "strict", {"image": b"123"}, score="2.5", is_new="true").json() == [3, 2.5, True]
    assert send(server, "anything", {"image": ("a", b"123")}, x="1").json() == {
        "image": "File('a', 'application/octet-stream', <3 bytes>)",
        "x": "1",
    }
    assert send(server, "keyed", {"image": b"123"}, label="a").json() == "a"


@pytest.mark.parametrize(
    "sent, found",
    [
        ({"size": "2"}, {"size": 2}),
        ({"is_new": "true"}, {"is_new": True}),
        ({"named": "1"}, {"named": "1"}),
        ({"named": "2"}, {"named": 2}),
        ({"size": "3"}, None),
        ({"is_new": "false"}, None),
    ],
    ids=str,
)
def test_a_text_is_the_one_of_a_few_values_that_it_writes(server, sent, found):
    for answer in (
        server.client.get("/models/chooses/asked", params=sent),
        send(server, "chooses", {name: (None, value) for name, value in sent.items()}),
    ):
        assert answer.status_code == (422 if found is None else 200), answer.text
        if found is not None:
            assert answer.json() == {"size": 1, "is_new": None, "named": "two"} | found


@pytest.mark.parametrize(
    "sent, found",
    [
        ([("wide", "1"), ("wide", "2.5"), ("wide", "-3e2")], {"wide": ["float32", [1, 2.5, -300]]}),
        ([("wide", "1")], {"wide": ["float32", [1]]}),
        ([("wide", "1"), ("high", "0"), ("high", "255")], {"wide": ["float32", [1]], "high": ["uint8", [0, 255]]}),
        ([("wide", "[[1, 2]]"), ("high", "[3]")], {"wide": ["float32", [[1, 2]]], "high": ["uint8", [3]]}),
        ([("wide", "1"), ("wide", "x")], "$.wide"),
        ([("wide", "")], "$.wide"),
        ([("wide", "1"), ("high", "256")], "$.high"),
        ([("wide", "1"), ("high", "[[1]]")], "$.high"),
    ],
    ids=str,
)
def test_an_array_takes_every_value_of_its_name(server, sent, found):
    for answer in (
        server.client.get("/models/sizer/asked", params=sent),
        send(server, "sizer", [(name, (None, value)) for name, value in sent]),
    ):
        if isinstance(found, dict):
            assert answer.json() == found
        else:
            assert (answer.status_code, answer.json()["error"]["detail"]) == (422, {"path": found}), answer.text


def test_a_model_without_types_gets_a_list_of_what_came_twice(server):
    answer = send(server, "anything", {"image": b"12"}, x=["1", "2"], y="3").json()
    assert (answer["x"], answer["y"]) == ("['1', '2']", "3")


def test_long_files_go_over_the_disk_and_leave_nothing(server):
    answer = send(server, "pictures", {"image": ("long", b"\x01" * 150_000)}, label="")
    assert (answer.json()["sum"], answer.json()["is_on_disk"]) == (150_000, True)
    leaves_nothing(server)


def test_long_files_are_taken_again_after_the_folder_for_temporary_files_was_swept(server):
    for _ in range(2):
        assert send(server, "raw", {"a": bytes(5000)}).json() == 5000
        (kept,) = server.folder.glob("forebay-*")
        shutil.rmtree(kept)
    assert send(server, "raw", {"a": bytes(5000)}).json() == 5000
    leaves_nothing(server)


def test_the_log_says_once_that_long_files_cannot_be_kept(server):
    away = server.folder.with_name("away")
    # Python chooses the folder for temporary files when it is first needed, and another one if this one is away then.
    assert send(server, "raw", {"a": bytes(5000)}).json() == 5000

    def told():
        return server.log.count("the files of a form cannot be kept: No such file or directory")

    send(server, "raw", {"a": bytes(5000)})  # the first one decides which folder there is, whichever test comes first
    for times in (1, 2):
        server.folder.rename(away)
        for _ in range(2):
            answer = send(server, "raw", {"a": bytes(5000)})
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "the files of a form cannot be kept: No such file or directory"
        away.rename(server.folder)
        assert send(server, "raw", {"a": bytes(5000)}).json() == 5000
        eventually(lambda: told() == times)  # noqa: B023 - it is over within the turn


def test_the_one_file_of_a_form_is_what_a_model_of_bytes_gets(server):  # F52
    assert send(server, "raw", {"whatever": b"12345"}).json() == 5
    assert send(server, "raw", {"whatever": bytes(5000)}).json() == 5000
    answer = send(server, "raw", {"a": b"12345", "b": b"1"})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "the form has 'a', 'b'; this model takes one value"
    leaves_nothing(server)


def test_a_file_in_json_is_base64(server):
    sample = {"image": base64.b64encode(b"\x05\x06").decode(), "label": "a", "mask": base64.b64encode(b"\x07").decode()}
    found = server.call("pictures", sample).json()
    assert (found["sum"], found["mask"], found["filename"], found["is_on_disk"]) == (11, [7], None, False)
    refused = server.call("pictures", {**sample, "image": "not base64!"})
    assert refused.status_code == 422
    assert refused.json()["error"]["message"].startswith(
        "Invalid base64 encoded string - at `$.image`; use the alphabet"
    )


@pytest.mark.parametrize(
    "model, files, data, status, why",
    [
        ("pictures", {"image": b"1"}, {}, 422, "Object missing required field `label`"),
        (
            "pictures",
            {"imgae": b"1"},
            {"label": "a"},
            422,
            "Object contains unknown field `imgae`; did you mean `image`?",
        ),
        ("pictures", {"image": b"1"}, {"label": ["a", "b"]}, 422, "'label' is there 2 times, and takes one value"),
        # What axios, jQuery and PHP make of an array.
        (
            "pictures",
            {"image": b"1"},
            {"tags[]": ["a", "b"]},
            422,
            "'tags[]', which a sample does not have; did you mean 'tags'?",
        ),
        ("pictures", {"image": b"1"}, {"label": "a", "tags[]": "a"}, 422, "did you mean 'tags'?"),
        ("pictures", {"image": b"1"}, {"label": "a", "size": "many"}, 422, "Expected `int`, got `str` - at `$.size`"),
        ("pictures", {"image": b"1", "label": b"\xff"}, {}, 422, "'label' is not UTF-8"),
        ("pictures", {"image": bytes(300_000)}, {"label": "a"}, 413, "bytes, got 300"),
        ("pictures", {"image": b""}, {"label": "a" * 3000}, 413, "the fields of the form are longer than 2000 bytes"),
        ("strict", {"image": b"1"}, {"score": "x"}, 422, "at `$.score`"),
        (
            "rows",
            {"image": b"1"},
            {},
            415,
            "expected application/json or application/msgpack for an array of samples, got a form",
        ),
    ],
)
def test_a_form_that_does_not_fit_is_told(server, model, files, data, status, why):
    answer = send(server, model, files, **data)
    assert answer.status_code == status, answer.text
    assert why in answer.json()["error"]["message"]
    leaves_nothing(server)


def test_a_form_that_is_none_is_told(server):
    for kind, body, why in [
        ("multipart/form-data", b"x", "names no boundary"),
        ("multipart/form-data; boundary=x", b"x", "cannot be read"),
        ("multipart/form-data; boundary=x", b"--x\r\n", "breaks off"),
    ]:
        answer = server.client.post("/models/pictures", content=body, headers={"content-type": kind})
        assert answer.status_code == 400
        assert why in answer.json()["error"]["message"]


def test_a_client_that_leaves_in_the_middle_of_a_file_leaves_nothing(server):
    begin = b'--x\r\ncontent-disposition: form-data; name="image"; filename=a\r\n\r\n' + bytes(50_000)
    with server.connect() as wire:
        wire.send(
            wire.head(
                "POST", "/models/pictures", "content-type: multipart/form-data; boundary=x", "content-length: 100000"
            )
        )
        wire.send(begin)
        eventually(lambda: len(left(server)) == 1)
    leaves_nothing(server)


def test_packed_bodies_are_unpacked(server):
    packed = {"content-encoding": "gzip", "content-type": "application/json"}

    def post(body, **headers):
        return server.client.post("/models/says", content=body, headers={**packed, **headers})

    plain = json.dumps({"text": "a" * 5000, "times": 1}).encode()
    assert post(gzip.compress(plain)).text == "data: " + json.dumps("a" * 5000 + " 0") + "\n\n"
    assert post(gzip.compress(bytes(10_000_000))).status_code == 413
    assert post(plain).status_code == 400
    assert post(plain, **{"content-encoding": "br"}).headers["accept-encoding"] == "gzip, deflate, identity"
    with server.connect() as wire:  # the connection is good for another request
        body = gzip.compress(plain)
        for _ in range(2):
            answer = wire.ask("POST", "/models/says", body, headers=["content-encoding: gzip"])
            assert answer.status == 200


def test_a_packed_form_is_a_form(server):
    form = b'--x\r\ncontent-disposition: form-data; name="a"; filename=a\r\n\r\n' + bytes(50_000) + b"\r\n--x--"
    headers = {"content-encoding": "gzip", "content-type": "multipart/form-data; boundary=x"}
    assert server.client.post("/models/raw", content=gzip.compress(form), headers=headers).json() == 50_000


def test_an_event_source_gets_a_stream(server):  # F50
    answer = server.client.get(
        "/models/says", params={"text": "a", "times": 3}, headers={"accept": "text/event-stream"}
    )
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text == 'data: "a 0"\n\ndata: "a 1"\n\ndata: "a 2"\n\n'
    assert server.client.get("/models/says?text=b&times=1").text == 'data: "b 0"\n\n'
    assert server.client.get("/models/says").json()["name"] == "says"
    assert server.client.get("/models/says/?text=b&times=1").text == 'data: "b 0"\n\n'
    refused = server.client.get("/models/says?times=1")
    assert refused.status_code == 422
    assert refused.json()["error"]["detail"] == {"path": "$.text"}
    for query, status in [("?text=a&times=x", 422), ("?text=%ff", 400), ("?" + "a=1&" * 200, 400), ("?txt=a", 422)]:
        assert server.client.get("/models/says" + query).status_code == status
    many = "?" + "&".join(["a=1"] * 101)
    for refused in (server.client.get(f"/models/says{many}"), server.client.post(f"/models/chooses{many}", json={})):
        assert refused.json()["error"]["message"] == "the query: expected at most 100 parameters, got 101"
    assert server.client.get("/models/raw?x=1").json()["name"] == "raw"


def test_fields_of_a_sample_may_stand_in_the_query_of_a_post(server):
    def post(target, **more):
        return server.client.post(f"/models/{target}", **more)

    assert post("says?times=1", json={"text": "a"}).text == 'data: "a 0"\n\n'
    assert post("says?times=1&text=b").text == 'data: "b 0"\n\n'  # nothing in the body
    assert post("chooses?size=2&is_new=on", json={}).json() == {"size": 2, "is_new": True, "named": "two"}
    msgpack = {"content-type": "application/msgpack"}
    assert post("chooses?size=2", content=b"\x81\xa5named\xa11", headers=msgpack).json()["size"] == 2
    assert post("sizer?wide=1&wide=2&high=3", json={"label": "a"}).json()["wide"] == ["float32", [1.0, 2.0]]
    # Whatever the sample does not have is not read, as before.
    assert post("pictures?label=b&utm=c", json={"image": "AAAA"}).json()["label"] == "b"
    assert post("raw?x=1", content=b"abc").json() == 3
    assert post("anything?b=2", json={"a": 1}).json() == {"a": "1"}
    assert post("rows?x=1", json=[1, 2]).json() == [1, 2]
    assert post("keyed?label=b", json={"image": "AAAA"}).json() == "b"

    both = post("chooses?size=2", json={"size": 1})
    assert (both.status_code, "the query and in the body" in both.text) == (400, True)
    assert post("chooses?size=3", json={}).json()["error"]["detail"]["path"] == "$.size"
    for query, status in (
        ("?size=1&size=2", 422),
        ("?named=%ff", 400),
        ("?" + "a=1&" * 200, 400),
        ("?size=" + "9" * 9000, 422),
    ):
        assert post(f"chooses{query}", json={}).status_code == status, query[:20]
    assert post("chooses?size=2", json=[1]).status_code == post("chooses?size=2", content=b"{").status_code + 22 == 422


def test_json_of_several_lines_is_one_line_of_an_event(server):
    assert server.call("quotes", 1).text == 'data: "\\n"\n\ndata: {   "a": [1,   2]   }\n\n'
    for inside in ("inside", "undeclared"):
        answer = server.client.post(f"/models/quotes/{inside}", json=1)
        assert answer.text == 'data: {"quoted":{   "a": [1,   2]   }}\n\n'


def test_json_of_somebody_else_may_be_what_a_model_declares(server):
    assert server.client.post("/models/quotes/alone", json=1).text == 'data: {   "a": [1,   2]   }\n\n'
    assert server.client.post("/models/quotes/beside", json=1).json() == {"quoted": {"a": [1, 2]}, "more": 1}


def test_pages_of_other_sites_start_no_stream(server):
    for headers in [{"sec-fetch-site": "cross-site"}, {"origin": "http://page.example"}]:
        answer = server.client.get("/models/says?text=a", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_page")


def test_forms_are_documented(server):
    content = server.client.get("/openapi.json").json()["paths"]["/models/pictures"]["post"]["requestBody"]["content"]
    assert "multipart/form-data" in content


def test_workers_that_attach_get_forms_whole_and_are_told_of_requests(launch, tmp_path):
    address = f"unix:{tmp_path}/socket"
    server = launch(None, "--attach", address, *OPTIONS, env={"TMPDIR": str(tmp_path)})
    command = [sys.executable, "-c", RUN, "worker", "--connect", address]
    with (
        subprocess.Popen([*command, str(MODELS / "requests.py:Pictures")], stderr=subprocess.DEVNULL) as worker,
        subprocess.Popen([*command, str(MODELS / "requests.py:Asks")], stderr=subprocess.DEVNULL) as other,
    ):
        try:
            eventually(lambda: server.client.get("/models/asks").status_code == 200)
            answer = server.call("asks", 1, x_tag="a")
            assert (answer.json()["tag"], answer.json()["id"]) == ("a", answer.headers["x-request-id"])
            eventually(lambda: server.client.get("/models/pictures").status_code == 200)
            answer = send(server, "pictures", {"image": ("long", b"\x01" * 50_000)}, label="")
            assert (answer.json()["sum"], answer.json()["is_on_disk"]) == (50_000, False)
            assert send(server, "pictures", {"image": bytes(150_000)}, label="").status_code == 413
            told = server.client.post("/models/pictures?label=b", json={"image": "AAAA"}).json()
            assert told["label"] == "b"
        finally:
            worker.terminate()
            other.terminate()


def test_a_model_that_asks_knows_its_requests(server, at_once):  # F52
    def ask(tag):
        return server.call("asks", tag, x_tag=str(tag))

    for number, answer in enumerate(at_once(*(lambda tag=tag: ask(tag) for tag in range(4)))):
        found = answer.json()
        assert [found[name] for name in ("sample", "pre", "tag", "post")] == [number, *[str(number)] * 3]
        assert found["id"] == answer.headers["x-request-id"]
        assert found["client"][0] == "127.0.0.1"
        assert found["device"] == "cpu"
        assert found["worker"] == 0
    assert 1 < server.call("asks", 1).json()["remaining_s"] <= 30
    assert server.call("asks", 1, x_request_timeout_ms="1000").json()["remaining_s"] <= 1
    assert server.call("asks", 1, x_request_id="mine").json()["id"] == "mine"
    assert server.call("asks", -1).status_code == 422
    assert server.call("asks-async", [1, 2], x_tag="a").json() == [[1, "a"], [2, "a"]]
    assert server.client.post("/models/asks", json=1, headers=[("x-tag", "a"), ("X-Tag", "b")]).json()["tag"] == "a, b"


def test_a_stream_that_asks_knows_its_request(server):  # F52
    answer = server.client.get("/models/tells?text=a")
    name = answer.headers["x-request-id"]
    assert answer.text == f'data: ["{name}","{name}"]\n\ndata: ["a","{name}"]\n\n'
    answer = server.call("tells", {"text": "a"})
    assert answer.headers["x-request-id"] in answer.text


def test_a_long_answer_of_a_model_that_asks_has_the_id_it_was_told(server):
    told = server.call("asks", 10**5, x_tag="a" * 40_000)
    assert told.json()["id"] == told.headers["x-request-id"]
