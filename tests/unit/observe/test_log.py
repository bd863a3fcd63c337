# SPDX-License-Identifier: Apache-2.0
"""One line a record: JSON for machines, text for people."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from forebay.observe.logs.log import JsonFormatter, TextFormatter


def record(message="it %s", *args, **extra):
    made = logging.makeLogRecord({"name": "forebay.x", "levelno": 30, "levelname": "WARNING", "msg": message})
    made.args = args or ("broke",)
    vars(made).update(extra)
    return made


def failed():
    try:
        raise ValueError("no")
    except ValueError:
        return record(exc_info=sys.exc_info())


def test_a_json_line_has_the_request_id():
    line = json.loads(JsonFormatter().format(record(request_id="r1", endpoint="iris")))
    assert {key: line[key] for key in ("level", "logger", "message", "request_id", "endpoint")} == {
        "level": "warning",
        "logger": "forebay.x",
        "message": "it broke",
        "request_id": "r1",
        "endpoint": "iris",
    }


@pytest.mark.parametrize("value", [object(), {1, 2}, b"\xff", float("nan"), ValueError("x")])
def test_any_extra_fits_into_json(value):
    assert "extra" in json.loads(JsonFormatter().format(record(extra=value)))


def test_line_breaks_do_not_forge_lines():
    assert "\n" not in JsonFormatter().format(record("a\nb %s"))


@pytest.mark.parametrize("name", ["forebay.access", "forebay.refusals"])
def test_what_clients_said_neither_forges_lines_of_text_nor_steers_a_terminal(name):
    text = TextFormatter().format(record("%s", "/a\nb\x1b[31m\x9b1mé", name=name, client="c\r\u2028d\x07"))
    assert text.endswith(r"/a\nb\x1b[31m\x9b1mé client=c\r\u2028d\x07")


def test_what_models_say_of_what_clients_sent_does_not_steer_a_terminal_either():  # F116
    told = TextFormatter().format(record("a\r\x1b[2J%s", "\x9b1m\x07", trace="at\n\x1b]0;title\x07\x1b[0m"))
    assert told.endswith("a\\r\\x1b[2J\\x9b1m\\x07\nat\n\\x1b]0;title\\x07\x1b[0m")


def test_what_a_model_says_in_several_lines_stays_so():
    assert TextFormatter().format(record("a\n\tb %s", "\x1b[1mc")).endswith("a\n\tb \x1b[1mc")


def test_exceptions_are_told():
    assert "ValueError: no" in json.loads(JsonFormatter().format(failed()))["exception"]
    assert TextFormatter().format(failed()).endswith("ValueError: no")


def test_text_leaves_out_what_is_not_known_and_what_the_message_says():  # F55: a person reads it
    call = record(
        "POST %s 200", "/iris", name="forebay.access", method="POST", path="/iris", status=200, model=None, ms=7
    )
    assert TextFormatter().format(call).endswith("POST /iris 200 ms=7")
    assert json.loads(JsonFormatter().format(call)).items() >= {"status": 200, "model": None}.items()


def test_what_a_library_notes_in_records_is_not_told():  # ray does so from its import on
    noted = record(_ray_timestamp_ns=7)
    assert TextFormatter().format(noted).endswith("it broke")
    assert "ray" not in JsonFormatter().format(noted)


def test_a_warning_is_one_line():  # F55: it came with the line of code, and an empty one
    said = record("%s", "model.py:10: UserWarning: mind the gap\n  log.info(1)\n", name="py.warnings")
    for formatter in (TextFormatter(), JsonFormatter()):
        assert "mind the gap" in formatter.format(said)
        assert "log.info" not in formatter.format(said)
        assert len(formatter.format(said).splitlines()) == 1


def test_the_logger_of_a_models_file_is_called_as_the_file():  # F57: forebay_target.iris_be97c555
    said = json.loads(JsonFormatter().format(record(name="forebay_target.my_iris_be97c555.deep")))
    assert said["logger"] == "my_iris.deep"


def test_text_shows_fields_and_the_trace_below():
    first, *rest = TextFormatter().format(record(request_id="r1", trace="Traceback\n  boom\n")).splitlines()
    assert first.endswith("warning it broke request_id=r1")
    assert rest == ["Traceback", "  boom"]
