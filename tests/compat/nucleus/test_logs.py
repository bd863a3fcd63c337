# SPDX-License-Identifier: Apache-2.0
"""The project's logger, in processes of their own: the lines on stdout are the contract."""

import json
import os
import re
import subprocess
import sys

import pytest
from tests.waiting import PATIENCE_S

START = "from forebay.surfaces.nucleus import shim\nshim.install()\nfrom cortex_internal.lib.log import logger\n"


@pytest.fixture
def script():
    """Runs a bare script and returns what it wrote to stdout."""

    def run(code, **env):
        base = {name: value for name, value in os.environ.items() if name != "CORTEX_LOG_LEVEL"}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env={**base, **env},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


@pytest.fixture
def lines(script):
    """Runs code with `logger` at hand and returns its lines, parsed."""
    return lambda code, **env: [json.loads(line) for line in script(START + code, **env).splitlines()]


def test_the_logger_of_a_bare_script_is_a_standard_one_named_cortex(script):  # N146
    code = """
import logging
mine = logging.getLogger("cortex")
from forebay.surfaces.nucleus import shim
shim.install()
shim.install()
from cortex_internal.lib.log import logger, configure_logger
import cortex_internal, cortex_internal.lib.log as module, types, sys
assert isinstance(logger, logging.Logger) and logger is mine and logger.name == "cortex"
assert configure_logger("cortex", "/src/cortex/log_config.yaml") is logger
assert isinstance(module, types.ModuleType) and sys.modules["cortex_internal.lib.log"] is module
assert cortex_internal.lib.log is module
logger.info("one line")
"""
    assert script(code).count("\n") == 1


def test_the_names_are_not_there_without_the_shim(script):  # N146
    code = """
import forebay.surfaces.nucleus.logs
try:
    import cortex_internal
except ImportError:
    print("absent")
"""
    assert script(code) == "absent\n"


def test_exceptions_have_the_texts_of_the_original(script):  # N100
    code = """
from forebay.surfaces.nucleus import shim
shim.install()
from cortex_internal.lib.exceptions import CortexException, UserException, UserRuntimeException
import pickle
assert issubclass(UserRuntimeException, UserException) and issubclass(UserException, CortexException)
error = UserRuntimeException("model a", "not found")
print(error)
print(pickle.loads(pickle.dumps(error)))
error.wrap("outer", "inner")
print(repr(error))
print(UserException("x"))
print(CortexException("a", "b"))
"""
    assert script(code).splitlines() == [
        "error: model a: not found: runtime exception",
        "error: model a: not found: runtime exception",
        "error: outer: inner: model a: not found: runtime exception",
        "error: x",
        "error: a: b",
    ]


def test_a_line_has_the_four_keys_and_then_extra(lines):  # N147
    (line,) = lines("logger.info('received %s', 'payload', extra={'payload': {'a': 1}, 'n': [1, 2.5, None, True]})")
    assert list(line) == ["asctime", "levelname", "message", "process", "payload", "n"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", line["asctime"])
    assert (line["levelname"], line["message"]) == ("INFO", "received payload")
    assert (line["payload"], line["n"]) == ({"a": 1}, [1, 2.5, None, True])
    assert isinstance(line["process"], int)


def test_an_exception_is_one_line(lines):  # N147
    code = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logger.exception('bad\\nluck \\u00e9')\n"
    (line,) = lines(code, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert line["message"] == "bad\nluck é"
    assert line["levelname"] == "ERROR"
    assert line["exc_info"].startswith("Traceback (most recent call last):\n")
    assert line["exc_info"].endswith("ZeroDivisionError: division by zero")


def test_values_that_json_cannot_hold_become_their_text(lines):  # N148
    code = """
import numpy
class Broken:
    def __str__(self):
        raise RuntimeError("no text")
circle = []
circle.append(circle)
extra = {"set": {1}, "bytes": b"x", "array": numpy.array([1, 2]), "nan": float("nan"), "in": [{(1, 2): {3}}]}
logger.info("values", extra=extra)
logger.info("worse", extra={"broken": Broken(), "circle": circle, "large": 10**5000, "surrogate": "\\ud800"})
"""
    first, second = lines(code)
    assert {name: first[name] for name in ("set", "bytes", "array", "nan", "in")} == {
        "set": "{1}",
        "bytes": "b'x'",
        "array": "[1 2]",
        "nan": "nan",
        "in": [{"(1, 2)": "{3}"}],
    }
    assert second["broken"] == "<Broken without a text: RuntimeError>"
    assert second["message"] == "worse"


@pytest.mark.parametrize("key", ["asctime", "levelname", "message", "process", "labels", "name", "args", "exc_info"])
def test_no_key_of_extra_raises(lines, key):  # N148
    (line,) = lines(f"logger.info('mine', extra={{{key!r}: 'theirs', 'other': 1}})")
    assert line["message"] == "mine"
    assert line["levelname"] == "INFO"
    fixed = key in {"asctime", "levelname", "message", "process", "exc_info"}
    assert line[key + "_" if fixed else key] == "theirs"
    assert line["other"] == 1


def test_arguments_that_do_not_fit_the_text_cost_no_line(lines):
    (line,) = lines("logger.info('%d of %s', 'x')")
    assert line["message"].startswith("%d of %s ('x',) (TypeError:")


@pytest.mark.parametrize(
    "level, seen",
    [
        ("debug", ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ("info", ["INFO", "WARNING", "ERROR"]),
        ("warning", ["WARNING", "ERROR"]),
        ("error", ["ERROR"]),
    ],
)
def test_log_level_filters(lines, level, seen):  # N149
    code = "for name in ('debug', 'info', 'warning', 'error'):\n    getattr(logger, name)('x')\n"
    assert [line["levelname"] for line in lines(code, CORTEX_LOG_LEVEL=level.upper())] == seen
    assert [line["levelname"] for line in lines(f"shim.install({level!r})\n" + code)] == seen


ACCESS = """
from forebay.surfaces.nucleus.logs import log_access
log_access("127.0.0.1:5000", "POST", "/", 200)
log_access("127.0.0.1:5001", "GET", "/info?a=%s", 499)
"""


def test_an_access_line(lines):  # N150
    first, second = lines(ACCESS)
    assert list(first) == ["asctime", "levelname", "message", "process", "method", "status_code", "path"]
    assert first["message"] == '127.0.0.1:5000 - "POST / HTTP/1.1" 200'
    assert (first["method"], first["status_code"], first["path"]) == ("POST", "200 OK", "/")
    assert (second["path"], second["status_code"]) == ("/info?a=%s", "499")


def test_access_lines_obey_the_level(lines):  # N149
    assert lines(ACCESS, CORTEX_LOG_LEVEL="WARNING") == []


SERVED = """
import sys, time
from cortex_internal.lib.log import logger

logger.info("at module level")

class Handler:
    def handle_post(self, payload):
        print("printed", payload)
        logger.info("received payload", extra={"payload": payload})
        logger.debug("absent")
        time.sleep(0.3)
        return "ok"
"""


def test_a_served_handler_logs_and_prints_to_stdout(serve, eventually):  # N146, N147, N149, N150
    server = serve(SERVED)
    with server.client() as client:
        answer = client.post("/", json={"a": 1})
    assert answer.text == "ok"
    eventually(lambda: [line for line in server.logged if "status_code" in line])
    messages = {line["message"]: line for line in server.logged}
    assert "at module level" in messages
    assert messages["received payload"]["payload"] == {"a": 1}
    assert "absent" not in messages
    (access,) = [line for line in server.logged if "status_code" in line]
    assert re.fullmatch(r'127\.0\.0\.1:\d+ - "POST / HTTP/1\.1" 200', access["message"])
    assert "printed {'a': 1}\n" in server.out.read_text()


def test_a_printed_line_is_seen_before_the_request_ends(serve, eventually, parallel):  # N150
    server = serve(SERVED.replace("0.3", "1.5"))
    seen = []

    def post(_):
        server.request("POST", json=2)
        seen.append("answer")

    def look(_):
        eventually(lambda: "printed 2\n" in server.out.read_text())
        seen.append("line")

    parallel(lambda step: step(None), [post, look])
    assert seen == ["line", "answer"]


def test_nothing_is_sent_anywhere(script):  # N151
    code = """
import sys
def hook(event, arguments):
    if event in {"socket.connect", "socket.getaddrinfo", "socket.sendto"}:
        raise RuntimeError(f"{event} {arguments}")
sys.addaudithook(hook)
from forebay.surfaces.nucleus import config, environment, handler_image, shim
import forebay.surfaces.nucleus
shim.install()
try:
    raise ValueError("told nobody")
except ValueError:
    from cortex_internal.lib.log import logger
    logger.exception("x")
"""
    assert script(code).count("\n") == 1
