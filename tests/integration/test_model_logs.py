# SPDX-License-Identifier: Apache-2.0
"""What models log and print, in the server's log, from workers of every kind.  # F55"""

import datetime as dt
import os
import re

import pytest
from tests.waiting import PATIENCE_S, eventually

from forebay.observe.logs.model_log import LINES

MODEL = """
import fractions, logging, os, subprocess, sys, threading, warnings
import numpy
import forebay

log = logging.getLogger("mine")

class Mute:
    def __str__(self):
        raise ValueError("nothing")


class Talks(forebay.Model):
    name = "talks"

    def load(self):
        print("loading")

    def predict(self, batch: list[str]) -> list[str]:
        for said in batch:
            getattr(self, said)()
        return batch

    def logs(self):
        log.debug("a detail")
        log.info("seen %d", 1, extra={"shelf": 3, "model": "forged", "odd": self, "huge": 1 << 80,
                 "tags": ["a", {"b": 1}], "score": numpy.float32(0.5), "within": [self], "long": ["x"] * 5000,
                 "scores": [numpy.int64(1), numpy.float32(0.5), numpy.True_], "sure": numpy.True_,
                 "vast": fractions.Fraction(10**400), "mute": Mute()})
        try:
            raise ValueError("spoilt")
        except ValueError:
            log.exception("half of a pair: \\udc80")
        print("two", "words")
        print("to stderr", file=sys.stderr)
        warnings.warn("mind the gap", stacklevel=1)

    def fails_to(self):
        class Broken:
            def __str__(self):
                raise SystemExit("no text")
        log.info("broken: %s", Broken())

    def floods(self):
        for number in range(20_000):
            log.info("flood %d", number)

    def past_python(self):
        os.write(1, b"written\\n")
        subprocess.run(["sh", "-c", "echo from a child; printf 'cut off' >&2"])

    def floods_past_python(self):
        for _ in range(2000):
            os.write(1, b"raw flood\\n" * 100)

    def beside(self):
        thread = threading.Thread(target=log.info, args=("from a thread",))
        thread.start()
        thread.join()

    def dies(self):
        os.write(2, b"last words")
        os._exit(3)
"""


@pytest.fixture(scope="module")
def talking(launch, tmp_path_factory):
    """Servers of the model, one for each kind of worker; both formats of the log are used."""
    path = tmp_path_factory.mktemp("talks") / "model.py"
    path.write_text(MODEL)
    return lambda kind, *more: launch(path, "--worker-kind", kind, *(more or ("--log-format", "json")))


def said(server, message, start=0):
    """The record with a message, once it is there."""

    def find():
        return [one for one in server.records[start:] if one["message"] == message]

    eventually(find)
    return find()[0]


@pytest.mark.parametrize("kind", ["process", "thread", "inline"])
def test_what_a_model_logs_and_prints_has_its_worker_and_requests(talking, kind):
    server = talking(kind)
    assert said(server, "loading").items() >= {"logger": "stdout", "level": "info", "worker": "0"}.items()
    start = len(server.records)
    answer = server.call("talks", "logs")
    whose = {"model": "talks", "worker": "0", "request_ids": [answer.headers["x-request-id"]]}
    seen = said(server, "seen 1", start)
    assert seen.items() >= {"logger": "mine", "level": "info", "shelf": 3, **whose}.items()
    assert "Talks object" in seen["odd"]
    assert seen["huge"] == str(1 << 80)
    assert (seen["tags"], seen["score"]) == (["a", {"b": 1}], 0.5)
    assert "Talks object" in seen["within"]
    assert (seen["scores"], seen["sure"]) == ([1, 0.5, True], True)
    assert seen["vast"].startswith("1000")
    assert seen["mute"] == "(a Mute whose text cannot be made: ValueError)"
    assert seen["long"].startswith("['x', 'x'")
    assert len(seen["long"]) < 8300
    assert said(server, "two words", start).items() >= {"logger": "stdout", "level": "info", **whose}.items()
    assert said(server, "to stderr", start).items() >= {"logger": "stderr", "level": "warning", **whose}.items()
    assert said(server, "half of a pair: ?", start).items() >= {"level": "error", **whose}.items()
    assert "ValueError: spoilt" in said(server, "half of a pair: ?", start)["trace"]
    eventually(lambda: any("mind the gap" in one["message"] for one in server.records[start:]))
    assert "a detail" not in server.log
    assert server.call("talks", "fails_to", x_request_id="mine").status_code == 200
    eventually(lambda: any("no text" in one["message"] and one["request_ids"] == ["mine"] for one in server.records))


LAST = """
import atexit, logging, sys
import forebay


class Last(forebay.Model):
    def load(self):
        atexit.register(print, "printed at the end")
        atexit.register(lambda: sys.stderr.write("written at the end\\n"))
        atexit.register(lambda: logging.getLogger("mine").warning("logged at the end"))
        print("begun", end="")

    def predict(self, batch):
        print(", and ended", end="")
        return batch
"""


def test_what_a_model_prints_and_logs_when_its_process_ends_is_not_lost(serve, tmp_path):  # F116
    (tmp_path / "model.py").write_text(LAST)
    server = serve(tmp_path / "model.py", "--worker-kind", "process")
    assert server.call("last", 1).json() == 1
    server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 0
    server._reader.join(PATIENCE_S)
    messages = [(one["logger"], one["message"]) for one in server.records if one.get("model") == "last"]
    assert set(messages) == {
        ("stderr", "logged at the end"),
        ("stderr", "written at the end"),
        ("stdout", "begun, and endedprinted at the end"),
    }
    assert len(messages) == 3


WHOLE = """
import forebay

class Cut(forebay.Model):
    name = "cut"
    batchable = True
    max_batch_size = 2

    def predict(self, batch: list[int]) -> list[int]:
        print("of", batch)
        return batch

@forebay.node
def first(number: int) -> int:
    print("first")
    return number

@forebay.node
def second(numbers: list[int]) -> int:
    print("second")
    return 12 // numbers[0]

@forebay.compose
def chain(numbers: list[int]) -> int:
    return second(first.map(numbers))
"""


def test_lines_of_slices_and_of_nodes_have_the_id_that_the_answer_has(serve, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(WHOLE)

    def ids_of(server, start):
        return [set(one["request_ids"]) for one in server.records[start:] if one.get("request_ids")]

    for name, value, lines in (("Cut", [1, 2, 3], 2), ("chain", [3], 2), ("chain", [0], 3)):
        server = serve(f"{path}:{name}", "--worker-kind", "thread", "--log-format", "json")
        start = len(server.records)
        answer = server.call(name.lower(), value)
        eventually(lambda server=server, start=start, lines=lines: len(ids_of(server, start)) >= lines)
        assert ids_of(server, start) == [{answer.headers["x-request-id"]}] * lines


HANDLED = """
import logging, pathlib, threading
import forebay

class Collector(logging.Handler):
    def emit(self, record):
        if record.getMessage() == "printed":
            raise ConnectionError("the collector is gone")
        with pathlib.Path(__file__).with_name("collected").open("a") as file:
            file.write(f"{record.name} {record.filename} {threading.current_thread().name} {record.getMessage()}\\n")

logging.getLogger().addHandler(Collector(logging.WARNING))

class Handled(forebay.Model):
    name = "handled"

    def predict(self, batch: list[str]) -> list[str]:
        print("printed")
        logging.getLogger("mine").warning("logged by %s", threading.current_thread().name)
        return batch
"""


@pytest.mark.parametrize("kind", ["process", "thread", "inline"])
def test_handlers_of_the_models_own_get_what_it_logs_once_and_where_it_was_logged(serve, tmp_path, kind):
    model = tmp_path / "model.py"
    model.write_text(HANDLED)
    server = serve(model, "--worker-kind", kind, "--log-format", "json")
    assert server.call("handled", "x").status_code == 200
    assert said(server, "printed")["model"] == "handled"
    eventually(lambda: any(one["message"].startswith("logged by") for one in server.records))
    (line,) = (tmp_path / "collected").read_text().splitlines()
    name, file, thread, message = line.split(maxsplit=3)
    assert (name, file, message) == ("mine", "model.py", f"logged by {thread}")


@pytest.mark.parametrize("kind", ["process", "thread", "inline"])
def test_a_flood_is_cut_and_counted(talking, kind):
    server = talking(kind)
    start = len(server.records)
    assert server.call("talks", "floods").status_code == 200

    def counted():
        told = server.records[start:]
        dropped = [int(one["message"].split()[0]) for one in told if "were dropped" in one["message"]]
        passed = [dt.datetime.fromisoformat(one["time"]) for one in told if one["message"].startswith("flood ")]
        return passed if len(passed) + sum(dropped) == 20_000 else None

    passed = eventually(counted)
    seconds = int((max(passed) - min(passed)).total_seconds()) + 2  # it may begin and end within one
    assert len(passed) <= LINES * seconds, "more than in the seconds it has taken"


def test_what_a_process_writes_past_python_becomes_lines(talking):
    server = talking("process")
    start = len(server.records)
    server.call("talks", "past_python")
    assert said(server, "written", start).items() >= {"logger": "stdout", "model": "talks", "worker": "0"}.items()
    said(server, "from a child", start)
    server.call("talks", "beside")
    assert said(server, "from a thread", start).items() >= {"logger": "mine", "worker": "0"}.items()
    server.call("talks", "dies")
    assert "last words" in said(server, "cut offlast words", start)["message"]
    assert server.call("talks", "floods_past_python").status_code == 200
    eventually(lambda: re.search(r"\d+ lines of a worker were dropped", "".join(server.lines[start:])))
    assert server.log.count("raw flood") <= 20_000


def test_the_text_format_and_the_level_hold_for_models(talking):
    server = talking("process", "--log-format", "text", "--log-level", "warning")
    answer = server.call("talks", "logs")
    eventually(lambda: "to stderr" in server.log)
    whose = rf"model=talks worker=0 request_ids=\['{answer.headers['x-request-id']}'\]"
    assert re.search(rf"\d\d:\d\d:\d\d warning to stderr {whose}\n", server.log)
    assert "seen 1" not in server.log
    assert "two words" not in server.log


def test_lines_of_a_worker_that_attached_come_to_the_server_too(serve, tmp_path):
    import subprocess
    import sys

    model = tmp_path / "model.py"
    model.write_text(MODEL)
    server = serve(None, "--attach", f"unix:{tmp_path}/door", "--log-format", "json")
    run = "import sys; from forebay.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "worker", str(model), "--connect", f"unix:{tmp_path}/door"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ) as worker:
        try:
            eventually(lambda: server.client.get("/models/talks").status_code == 200)
            answer = server.call("talks", "logs")
            for message in ("two words", "seen 1", "to stderr"):
                found = said(server, message)
                assert (found["model"], found["request_ids"]) == ("talks", [answer.headers["x-request-id"]])
                assert len(found["worker"]) == 8
        finally:
            worker.terminate()
            shown, _ = worker.communicate()
    assert b"two words\n" in shown, "who started it sees it as well"
    assert b"seen 1" in shown
    assert b"ready; attached" in shown
    assert "ready; attached" not in server.log, "the model has not said it, nor is it a warning"
