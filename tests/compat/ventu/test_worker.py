# SPDX-License-Identifier: Apache-2.0
"""The worker of a batching service, seen from a raw front."""

import contextlib
import json
import re
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import pydantic
import pydantic.v1
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import PATIENCE_S

from forebay.surfaces.ventu import Ventu


class Req(pydantic.BaseModel):
    text: str = pydantic.Field(min_length=2)


class Resp(pydantic.BaseModel):
    n: int = pydantic.Field(le=20)


class Lengths(Ventu):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []

    def preprocess(self, data):
        if data.text == "early":
            raise RuntimeError(data.text)
        return data.text

    def batch_inference(self, batch):
        self.batches.append(batch)
        if "all" in batch:
            raise RuntimeError("all")
        if "exit" in batch:
            sys.exit(1)
        if "few" in batch:
            return []
        if "none" in batch:
            return None
        if "unordered" in batch:
            return {len(text) for text in batch}
        if "word" in batch:
            return "w" * len(batch)
        return [len(text) for text in batch]

    def postprocess(self, data):
        if data == len("late"):
            raise RuntimeError("late")
        return {"n": data}


def body(text):
    return json.dumps({"text": text}).encode()


# B75
def test_wrong_jobs_are_told_why_and_the_model_sees_the_others(work):
    model = Lengths(Req, Resp)
    results, errors = work(model).ask(body("x"), body("hello"), b"", b'{"text')
    assert errors == [True, False, True, True]
    [error] = json.loads(results[0])
    assert error["loc"] == ["text"]
    assert set(error) <= {"loc", "msg", "type", "ctx"}
    assert results[1:] == [
        '{"n": 5}',
        '"Expecting value: line 1 column 1 (char 0)"',
        '"Unterminated string starting at: line 1 column 2 (char 1)"',
    ]
    assert model.batches == [["hello"]]


# B75
def test_a_batch_without_a_valid_job_does_not_reach_the_model(work):
    model = Lengths(Req, Resp)
    assert work(model).ask(body("x"), b"[")[1] == [True, True]
    assert model.batches == []


# B75
def test_msgpack_jobs_are_answered_in_msgpack(work):
    results, errors = work(Lengths(Req, Resp, use_msgpack=True)).ask(
        msgspec.msgpack.encode({"text": "hello"}), msgspec.msgpack.encode({"text": "x"}), b"\xc1"
    )
    assert errors == [False, True, True]
    result, invalid, garbled = map(msgspec.msgpack.decode, results)
    assert result == {"n": 5}
    assert invalid[0]["loc"] == ["text"]
    assert isinstance(garbled, str)


# B76
@pytest.mark.parametrize("use_msgpack", [False, True])
def test_no_body_ends_the_worker(use_msgpack, work):
    codec = msgspec.msgpack if use_msgpack else msgspec.json
    bad = {
        False: [b'{"text": "\xff"}', b"", b"[" * 100_000, b"nul", b'{"text": "abc"} more'],
        True: [b"\x82\xa4text", b"", b"\x81\xa4text\xa2\xff\xfe", b"\x91" * 100_000, b"\x81\x80\x01"],
    }
    front = work(Lengths(Req, Resp, use_msgpack))
    good = codec.encode({"text": "hello"})
    for one in bad[use_msgpack]:
        results, errors = front.ask(good, one, good)
        assert errors == [False, True, False], one[:20]
        assert codec.decode(results[0] if use_msgpack else results[0].encode()) == {"n": 5}


# B76
@given(bodies=st.lists(st.binary(max_size=60), max_size=4), use_msgpack=st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_a_body_is_its_neighbours_are_answered(bodies, use_msgpack):
    codec = msgspec.msgpack if use_msgpack else msgspec.json
    model = Lengths(Req, Resp, use_msgpack)
    jobs = {f"{number:036}": one for number, one in enumerate([*bodies, codec.encode({"text": "hello"})])}
    answer = msgspec.msgpack.decode(model.sock.process(msgspec.msgpack.encode(jobs))[4:])
    last = answer[f"{len(bodies):036}"]
    assert codec.decode(last if use_msgpack else last.encode()) == {"n": 5}
    assert len(answer.get("error_ids", "")) == 36 * len(bodies)


class Limited(pydantic.BaseModel):
    n: int = pydantic.Field(le=10**30)


# B76: msgpack has no word for the limit that the list of errors tells
def test_a_limit_beyond_64_bits_is_told_as_text(work, ask):
    model = Ventu(Limited, Limited, use_msgpack=True)
    over, fits = ({"n": "1" + "0" * zeros} for zeros in (31, 3))
    results, errors = work(model).ask(*map(msgspec.msgpack.encode, (over, fits)))
    assert errors == [True, False]
    [error] = msgspec.msgpack.decode(results[0])
    assert error["ctx"] == {"le": "1" + "0" * 30}
    answer = ask(model).post(msgspec.msgpack.encode(over))
    assert (answer.status_code, answer.content) == (422, results[0])


class Worded(pydantic.v1.BaseModel):
    n: int

    @pydantic.v1.validator("n")
    def refuse(cls, n):
        if n == 1:
            raise ValueError("\ud800")
        return n


# B77
def test_words_of_a_validator_that_cannot_be_sent_concern_their_job_only(work, ask):
    model = Ventu(Worded, Worded, use_msgpack=True)
    results, errors = work(model).ask(*(msgspec.msgpack.encode({"n": n}) for n in (1, 2)))
    assert (results[0], errors) == (None, [False, False])
    assert msgspec.msgpack.decode(results[1]) == {"n": 2}
    assert ask(model).post(msgspec.msgpack.encode({"n": 1})).status_code == 500


# B77
@pytest.mark.parametrize(
    "text,touches_all",
    [
        ("early", False),
        ("late", False),
        ("x" * 21, False),
        ("all", True),
        ("exit", True),
        ("few", True),
        ("none", True),
    ],
)
def test_what_fails_is_left_out_of_the_answer_and_the_worker_goes_on(text, touches_all, work):
    front = work(Lengths(Req, Resp))
    results, errors = front.ask(body("hello"), body(text), body("x"))
    assert results[0] == (None if touches_all else '{"n": 5}')
    assert results[1] is None
    assert results[2] is not None
    assert errors == [False, False, True]
    assert front.ask(body("hello"))[0] == ['{"n": 5}']


# B77
def test_a_set_is_no_list_of_results(work):
    results, errors = work(Lengths(Req, Resp)).ask(body("unordered"), body("hello"))  # who would get which?
    assert (results, errors) == ([None, None], [False, False])


def test_a_string_is_no_list_of_results(work):
    assert work(Lengths(Req, Resp)).ask(body("word"))[0] == [None]


# B78
def test_a_worker_waits_for_its_front_and_finds_it_again(tmp_path, front_at):
    model = Lengths(Req, Resp)
    address = str(tmp_path / "batch.socket")
    worker = threading.Thread(target=model.run_unix, args=(address,), daemon=True)
    worker.start()
    time.sleep(0.1)
    for _ in range(2):
        Path(address).unlink(missing_ok=True)
        front = front_at(address)
        assert front.accept().ask(body("hello"))[0] == ['{"n": 5}']
        front.close()
    model.sock.stop()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()


# B78
def test_a_front_that_sends_garbage_is_dialled_again(work):
    front = work(Lengths(Req, Resp))
    for garbage in (b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x04\x93\x01\x02\x03", b"\xff\xff\xff\xff", b"\x00\x00"):
        front.connection.sendall(garbage)
        if len(garbage) < 4:
            front.hang_up()
        else:
            with contextlib.suppress(ConnectionError), pytest.raises(EOFError):
                front.exactly(1)
        front.accept()
    assert front.ask(body("hello"))[0] == ['{"n": 5}']


# B78
def test_the_configured_address_is_taken_when_none_is_given(tmp_path, port, front_at):
    path = str(tmp_path / "configured.socket")
    model = Lengths(Req, Resp, socket=path, host="127.0.0.1", port=port)
    for run, address in ((model.run_unix, path), (model.run_tcp, ("127.0.0.1", port))):
        front = front_at(address)
        worker = threading.Thread(target=run, daemon=True)
        worker.start()
        assert front.accept().ask(body("hello"))[0] == ['{"n": 5}']
        model.sock.stop()
        worker.join(PATIENCE_S)
        assert not worker.is_alive()


# B78, B48
def test_frames_come_in_any_pieces(work):
    front = work(Lengths(Req, Resp))
    jobs = {f"{number:036}": body("hello") for number in range(3)}
    payload = msgspec.msgpack.encode(jobs)
    frame = len(payload).to_bytes(4, "big") + payload
    for start in range(0, len(frame), 7):
        front.connection.sendall(frame[start : start + 7])
    assert msgspec.msgpack.decode(front.receive()) == dict.fromkeys(jobs, '{"n": 5}')


# B78
def test_a_batch_of_megabytes_comes_through(work):
    class Echo(pydantic.BaseModel):
        text: str

    large = body("x" * 3_000_000)
    results, _ = work(Ventu(Echo, Echo)).ask(large, large)
    assert [len(result) for result in results] == [len(large)] * 2


def test_an_empty_batch_is_answered(work):
    front = work(Lengths(Req, Resp))
    assert front.ask() == ([], [])
    assert front.ask(body("hello"))[0] == ['{"n": 5}']


# B79
def test_stop_ends_an_idle_worker_at_once(front):
    model = Lengths(Req, Resp)
    worker = threading.Thread(target=model.sock.run, args=(front.listener.getsockname(), "unix"), daemon=True)
    worker.start()
    front.accept()
    model.sock.stop()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
    with pytest.raises(EOFError):
        front.exactly(1)


# B79
def test_sigterm_lets_the_running_batch_be_answered(front, run_ours, lengths, tmp_path, eventually):
    started = tmp_path / "started"
    worker = run_ours(lengths, "unix", front.listener.getsockname(), STARTED=str(started))
    front.accept()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(front.ask(body("pause 0.5"), body("hello"))))
    asking.start()
    eventually(started.exists)
    worker.process.send_signal(signal.SIGTERM)
    asking.join(PATIENCE_S)
    [(results, errors)] = answers
    assert [json.loads(result)["n"] for result in results] == [9, 5]
    assert errors == [False, False]
    assert worker.wait() == 0


# B79
@pytest.mark.parametrize("is_connected", [True, False])
def test_sigterm_ends_an_idle_worker(is_connected, front, run_ours, lengths, tmp_path):
    address = front.listener.getsockname()
    worker = run_ours(lengths, "unix", address)
    front.accept()
    if not is_connected:
        front.close()
        Path(address).unlink()
    assert worker.end() == 0


# B72
def test_a_wrong_example_ends_the_worker_before_it_dials(front, run_ours, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(
        "import sys\nfrom ventu import Ventu\nfrom pydantic.v1 import BaseModel\n"
        "class Req(BaseModel):\n    n: int\n    class Config:\n        schema_extra = {'example': {'n': 1}}\n"
        "class Resp(BaseModel):\n    n: int\n    class Config:\n        schema_extra = {'example': {'n': 2}}\n"
        "Ventu(Req, Resp).run_unix(sys.argv[1])\n"
    )
    worker = run_ours(file, front.listener.getsockname())
    assert worker.wait() != 0
    assert "does not match" in worker.log.read_text()
    front.listener.settimeout(0)
    with pytest.raises(BlockingIOError):
        front.listener.accept()


# B80
@pytest.mark.parametrize("protocol", ["unix", "tcp"])
def test_workers_are_counted_by_their_protocol(protocol, tmp_path, port, ask, front_at):
    path = str(tmp_path / "batch.socket")
    model = Lengths(Req, Resp, socket=path, host="127.0.0.1", port=port)
    front = front_at(path if protocol == "unix" else ("127.0.0.1", port))
    run = model.run_unix if protocol == "unix" else model.run_tcp
    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    front.accept().ask(body("hello"), body("x"))
    client = ask(model)
    assert client.metric(f'process_worker{{protocol="{protocol}"}}') == 1
    assert not re.search(f'protocol="{"tcp" if protocol == "unix" else "unix"}"', client.get("/metrics").text)
    for step in ("preprocess", "inference", "postprocess"):
        assert client.metric(f'batch_process_time_count{{process="{step}"}}') == 1
    assert client.metric("validation_error_counter_total") == 1
    model.sock.stop()
    worker.join(PATIENCE_S)
    assert client.metric(f'process_worker{{protocol="{protocol}"}}') == 0


# B80
def test_metrics_of_workers_without_a_port_are_read_from_their_folder(
    front, run_ours, lengths, tmp_path, ask, monkeypatch
):
    folder = tmp_path / "metrics"
    run_ours(lengths, "unix", front.listener.getsockname(), PROMETHEUS_MULTIPROC_DIR=str(folder))
    front.accept().ask(body("hello"))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    page = ask(Lengths(Req, Resp)).get("/metrics").text
    assert 'batch_process_time_count{process="inference"} 2.0' in page  # the warm-up and the one batch
    assert 'process_worker{protocol="unix"} 1.0' in page
