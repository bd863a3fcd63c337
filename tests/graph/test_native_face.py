# SPDX-License-Identifier: Apache-2.0
"""Compositions over HTTP: a graph is called like a model, and each of its nodes batches and fails like one."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

SCANS = Path(__file__).parent / "scans.py"


@pytest.fixture(scope="module")
def scans(launch):
    return launch(SCANS)


def post(server, model, body, **headers):
    return server.client.post(f"/models/{model}", content=body, headers=headers)


def test_a_graph_of_threads_processes_and_the_loop_answers_like_a_model(scans):
    answer = post(scans, "ocr", b"abcdef")
    assert answer.status_code == 200
    page = answer.json()
    assert page["words"] == ["AB", "CD", "EF"]
    assert page["boxes"][1] == {"left": 2, "right": 4}
    assert page["processes"] != [scans.process.pid]


def test_elements_of_several_requests_share_batches(scans, at_once):
    before = scans.client.get("/models/ocr").json()["nodes"]["read"]["batching"]["batches"]
    bodies = [bytes([97 + number]) * 20 for number in range(12)]
    answers = at_once(*(lambda body=body: post(scans, "ocr", body).json()["words"] for body in bodies))
    assert answers == [[body[:2].decode().upper()] * 10 for body in bodies]
    batches = scans.client.get("/models/ocr").json()["nodes"]["read"]["batching"]["batches"] - before
    assert batches < 12  # 120 elements in batches of 32; one request alone has 10


def test_an_empty_list_is_mapped_to_an_empty_list(scans):
    assert scans.call("keyed", []).json() == []


def test_elements_with_unlike_keys_do_not_share_a_batch(scans):
    rows = scans.call("keyed", ["a", "bb", "c", "dd", "eee"]).json()
    assert [set(row) for row in rows] == [{1}, {2}, {1}, {2}, {3}]


@pytest.mark.parametrize("number,expected", [(8, 4), (7, 22)])
def test_either_takes_the_branch_that_was_taken(scans, number, expected):
    assert scans.call("collatz", {"number": number}).json() == expected


def test_an_input_with_a_default_may_be_left_out_or_given(scans):
    assert scans.call("collatz", {"number": 7, "plus": 5}).json() == 26


def test_without_any_branch_the_only_result_is_null(scans):
    assert scans.call("collatz", {"number": 0}).json() is None


@pytest.mark.parametrize("number,expected", [(8, {"even": 4}), (7, {"odd": 7}), (0, {})])
def test_a_branch_that_was_not_taken_leaves_its_field_out(scans, number, expected):
    assert scans.call("branches", number).json() == expected


def test_one_node_used_three_times_has_one_endpoint(scans):
    assert post(scans, "mirror", b"abc").content == b"cba"
    assert list(scans.client.get("/models/mirror").json()["nodes"]) == ["swap"]


def test_raw_bytes_come_and_go_as_they_are(scans):
    answer = post(scans, "mirror", bytes(range(256)), content_type="image/png")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.content == bytes(range(255, -1, -1))


@pytest.mark.parametrize("count", [1, 40_000])
def test_small_and_large_bodies_in_both_formats(scans, count):
    texts = ["abc"] * count
    assert scans.call("echo", texts).json() == texts
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    answer = scans.client.post("/models/echo", content=msgspec.msgpack.encode(texts), headers=headers)
    assert msgspec.msgpack.decode(answer.content) == texts


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


@pytest.mark.parametrize("place", [1, 40_000])
def test_a_body_of_the_wrong_type_is_422_with_the_path(scans, place):
    answer = scans.call("echo", ["a"] * place + [1])
    assert answer.status_code == 422
    assert answer.json()["error"]["detail"]["path"] == f"$[{place}]"


def test_a_missing_field_is_named(scans):
    answer = scans.call("collatz", {"plus": 3})
    assert answer.status_code == 422
    assert "number" in answer.json()["error"]["message"]


def test_a_body_that_is_no_json_is_400(scans):
    assert post(scans, "echo", b"[", content_type="application/json").status_code == 400


def test_what_a_node_refuses_is_the_answer(scans):
    answer = post(scans, "ocr", b"")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the picture is empty")


def test_a_node_that_raises_fails_its_request_and_the_log_has_the_trace(scans, eventually):
    answer = post(scans, "ocr", b"ab!!cd", via="a proxy")
    assert answer.status_code == 500
    assert "cannot read that" not in answer.text
    eventually(lambda: "cannot read that" in scans.log, "the trace")
    assert post(scans, "ocr", b"ab").json()["words"] == ["AB"]


@pytest.mark.parametrize(
    "model, body, told", [("picked", "long", "KeyError: 'long'"), ("risked", "raise", "as you wished")]
)
def test_what_fails_in_a_node_is_logged_once_by_the_id_its_client_has(scans, eventually, model, body, told):
    mine = f"once-{model}"
    assert scans.call(model, body, x_request_id=mine).status_code == 500
    (record,) = eventually(lambda: [one for one in scans.records if mine in one.get("request_ids", [])])
    assert told in record["message"]
    answer = scans.call(model, body)  # without an id: the server makes one
    made = answer.json()["error"]["request_id"]
    (record,) = eventually(lambda: [one for one in scans.records if made in one.get("request_ids", [])])
    assert sum(told in one["message"] for one in scans.records if "request_ids" in one) == 2


def test_the_time_of_a_request_spans_all_nodes(scans):
    assert scans.call("slow", 30.0, x_request_timeout_ms="60").status_code == 504
    assert scans.call("slow", 0.0).json() == 0.0  # the slot of the one that was given up is free again


def test_a_full_queue_is_429_at_once(scans, eventually):
    def told():
        return scans.client.get("/models/slow").json()

    threads = [
        threading.Thread(target=scans.call, args=("slow", 30.0), kwargs={"x_request_timeout_ms": "3000"})
        for _ in range(2)
    ]
    threads[0].start()
    eventually(lambda: told()["nodes"]["wait"]["in_flight"] == 1)
    threads[1].start()
    eventually(lambda: told()["waiting"] == 1)
    assert scans.call("slow", 0.0).status_code == 429
    for thread in threads:
        thread.join()


# ---------------------------------------------------------------------------------------------------------------------
# What it tells


def test_a_graph_tells_about_its_nodes(scans):
    nodes = scans.client.get("/models/ocr").json()["nodes"]
    assert list(nodes) == ["decode", "detect", "crop", "read", "layout"]
    assert nodes["detect"]["batching"]["max_batch_size"] == 8
    assert nodes["detect"]["workers"]["alive"] == 2


def test_nodes_have_metrics_of_their_own(scans):
    before = scans.metric("forebay_requests_total", endpoint="ocr/decode", code="ok")
    post(scans, "ocr", b"ab")
    assert scans.metric("forebay_requests_total", endpoint="ocr/decode", code="ok") == before + 1
    assert scans.metric("forebay_workers", endpoint="ocr/detect") == 2


def test_the_document_describes_inputs_and_results(scans):
    document = scans.client.get("/openapi.json").json()
    request = document["paths"]["/models/collatz"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][request["$ref"].rpartition("/")[2]]
    assert fields["required"] == ["number"]
    assert set(fields["properties"]) == {"number", "plus"}
    ocr = document["paths"]["/models/ocr"]["post"]
    assert "application/octet-stream" in ocr["requestBody"]["content"]
    assert ocr["description"] == "Read a picture."
    answer = ocr["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer == {"$ref": "#/components/schemas/Page"}


def test_a_node_without_a_worker_is_named_until_it_is_back(serve, eventually):
    server = serve(f"{SCANS}:keyed")
    tasks = Path(f"/proc/{server.process.pid}/task")  # each process is started by a thread of its own
    children = [child for found in tasks.glob("*/children") for child in found.read_text().split()]
    assert len(children) == 1
    seen = []

    def watch():
        answer = server.client.get("/readyz")
        seen.append(answer.json().get("problems", []))
        return answer.status_code == 503

    subprocess.run(["kill", "-9", *children], check=True)
    eventually(watch, "the loss of the worker")
    assert seen[-1] == ["model 'keyed': its node 'lengths' has no worker"]
    eventually(lambda: server.client.get("/readyz").status_code == 200, "its return")
    assert server.call("keyed", ["a"]).json() == [[1]]


@pytest.mark.parametrize("fault", ["raise", "die"])
def test_requests_that_share_the_way_to_a_worker_do_not_share_a_fault(scans, at_once, fault):
    def calls():
        texts = [f"text {number}" for number in range(24)]
        texts[10] = fault
        answers = at_once(*(lambda text=text: scans.call("risked", text) for text in texts))
        return [
            answer.status_code if text == fault else answer.json() for text, answer in zip(texts, answers, strict=True)
        ]

    before = scans.client.get("/models/risked").json()["nodes"]["risky"]["batching"]["batches"]
    expected: list[object] = [f"TEXT {number}" for number in range(24)]
    expected[10] = {"raise": 500, "die": 503}[fault]
    assert calls() == expected
    batching = scans.client.get("/models/risked").json()["nodes"]["risky"]["batching"]
    assert batching["max_batch_size"] == 1
    assert batching["mean_batch_size"] == 1  # a function of one sample is called for each, however they came
    assert batching["batches"] >= before + 23


def test_draining_answers_what_is_inside_the_graph(serve):
    server = serve(f"{SCANS}:slow")
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.call("slow", 0.4).json()))
    thread.start()
    while not server.client.get("/models/slow").json()["in_flight"]:
        pass
    server.signal()
    thread.join()
    assert answers == [0.4]
    assert server.wait() == 0


# ---------------------------------------------------------------------------------------------------------------------
# What the command line says

FILE = """
import os
import forebay

class Up(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        return [text.upper() for text in batch]

class Alone(forebay.Model):
    def predict(self, batch):
        return batch

@forebay.node
def pid(text: str) -> int:
    return os.getpid()

@forebay.node
def unused(text: str) -> str:
    return text

up = forebay.node(Up, max_batch_size=3)

@forebay.compose(timeout_ms=7000, deadline_ms=800)
def shout(text: str):
    return {"text": up(text), "pid": pid(text)}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "shout.py"
    path.write_text(FILE)
    return path


def test_a_file_with_a_composition_serves_that_and_says_what_it_leaves_out(cli, file):
    result = cli("check", file)
    assert result.returncode == 0
    assert result.stdout == (
        "POST /models/shout  version 1, a graph of up, pid, 64 requests at a time, timeout 7000 ms\n"
    )
    assert "no composition calls the node 'unused'" in result.stderr
    assert "the model Alone is in no composition and is not served" in result.stderr
    assert "Up" not in result.stderr.replace("forebay", "")


def test_a_model_beside_a_composition_is_served_by_its_name(cli, file):
    result = cli("check", f"{file}:Alone")
    assert (result.stdout.split("  ")[0], result.stderr) == ("POST /models/alone", "")


def test_a_misspelt_composition_gets_the_nearest_name(cli, file):
    assert "did you mean shout?" in cli("check", f"{file}:shuot").stderr


def labels(cli, *arguments):
    lines = cli("check", *arguments, "--draw", "mermaid").stdout.splitlines()
    boxes = [line.split('"')[1].split("<br/>") for line in lines if "<br/>" in line]
    return {name: rest for name, *rest in boxes}


def test_options_hold_for_nodes_that_do_not_say_otherwise(cli, file):
    assert labels(cli, file) == {"up": ["1 process", "batches of 3"], "pid": ["1 thread"]}
    options = ["--worker-kind", "inline", "--workers", "2", "--max-batch-size", "9"]
    assert labels(cli, file, *options) == {"up": ["inline", "batches of 3"], "pid": ["inline"]}
    options = ["--worker-kind", "process", "--workers", "2"]
    assert labels(cli, file, *options) == {"up": ["2 processes", "batches of 3"], "pid": ["2 processes"]}


def test_a_configuration_file_says_it_as_well(cli, file, tmp_path):
    (tmp_path / "forebay.yaml").write_text("models:\n  - target: shout.py\n    worker_kind: process\n")
    assert labels(cli, tmp_path)["pid"] == ["1 process"]


def test_functions_run_in_processes_where_the_person_says_so(serve, file):
    server = serve(file, "--worker-kind", "process", "--timeout-ms", "9000")
    answer = server.call("shout", "hey").json()
    assert answer["text"] == "HEY"
    assert answer["pid"] != server.process.pid
    about = server.client.get("/models/shout").json()
    assert (about["timeout_ms"], about["deadline_ms"]) == (9000, 800)


def test_another_interpreter_cannot_compose(cli, file):
    assert "leave out --python" in cli("check", file, "--python", sys.executable).stderr


def test_what_is_wrong_with_a_graph_is_one_sentence_with_the_place(cli, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(FILE + "\n@forebay.compose\ndef wrong(text: str):\n    return up(pid(text))\n")
    result = cli("check", path)
    place = f"{path}:{len(path.read_text().splitlines())}"
    assert result.returncode == 2
    assert result.stderr == (
        f"forebay: {place}: the result of 'pid' does not fit 'up': its type is int, and 'batch' takes str\n"
    )


def test_a_terminal_without_the_lines_of_a_drawing_is_sent_them_escaped(file):
    command = [sys.executable, "-m", "forebay", "check", str(file), "--draw"]
    drawn = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert rb"\u250c" in drawn.stdout


def test_drawings_of_a_command(cli, file, tmp_path):
    assert "┌" in cli("check", file, "--draw").stdout
    picture = tmp_path / "shout.svg"
    assert cli("check", file, "-o", picture).stdout == ""
    assert picture.read_text().startswith("<svg")
    result = cli("check", file, "-o", tmp_path / "shout.png")
    assert "shout.png: expected the ending .svg, .mmd, .md or .txt" in result.stderr
    assert (result.returncode, (tmp_path / "shout.png").exists()) == (2, False)
    assert cli("check", file, "--draw", "-o", tmp_path / "shout").returncode == 0
    result = cli("check", f"{file}:Alone", "--draw")
    assert (result.returncode, result.stdout) == (2, "")
    assert "no graph to draw" in result.stderr
