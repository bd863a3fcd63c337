# SPDX-License-Identifier: Apache-2.0
"""The files of the log: they are put aside when they are full, and nothing is lost or broken by that."""

import logging

import pytest

from forebay.observe.logs import model_log
from forebay.observe.logs.model_log import Voice
from forebay.surfaces.pipeline import logs
from forebay.types.log_line import LogLine


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the files are, small ones."""
    monkeypatch.setattr(logs, "MAX_BYTES", 2_000)
    monkeypatch.setattr(logs, "KEPT", 30)
    monkeypatch.setattr(logging.getLogger("forebay"), "propagate", False)  # as in a server
    (tmp_path / logs.FOLDER).mkdir()
    (tmp_path / logs.FOLDER / "pipeline.log").write_text("what a server before it wrote\n" * 10)
    handlers = logs.write_to(tmp_path, "info")
    yield tmp_path / logs.FOLDER
    logs.end(handlers)


def test_a_full_file_is_put_aside(folder):  # P148
    for number in range(500):
        logs.requests.info("(data_id=%d log_id=%s) ä", number, "0")
    logging.getLogger("forebay").warning("a warning")
    aside = sorted(folder.glob("pipeline.log.[0-9]*"), key=lambda path: -int(path.suffix[1:]))
    written = [*aside, folder / "pipeline.log"]
    assert len(written) > 10
    assert max(path.stat().st_size for path in written) <= 2_000
    lines = "".join(path.read_text() for path in written).splitlines()
    assert lines[:10] == ["what a server before it wrote"] * 10
    told = [line.partition("data_id=")[2] for line in lines[10:-1]]
    assert told == [f"{number} log_id=0) ä" for number in range(500)]
    assert lines[-1].endswith("a warning")
    assert (folder / "pipeline.log.wf").read_text().endswith("a warning\n")


def test_what_is_logged_beside_the_ops_stands_there_as_well(folder):  # P148
    logging.getLogger("mine").warning("said at home")
    logging.getLogger("mine").info("not that important")
    (line,) = (folder / "pipeline.log.wf").read_text().splitlines()
    assert line.endswith("said at home")


def test_no_more_files_are_kept_than_that(folder):  # P148
    for _ in range(2_000):
        logs.requests.info("x" * 50)
    assert len(list(folder.glob("pipeline.log.[0-9]*"))) == 30


def test_a_line_longer_than_a_file_has_one_of_its_own(folder):
    logs.requests.info("y" * 5_000)
    logs.requests.info("z")
    assert (folder / "pipeline.log").read_text().endswith(" z\n")
    assert "y" * 5_000 in (folder / "pipeline.log.1").read_text()


def test_what_workers_say_is_written_once_and_with_what_the_server_knows(folder, monkeypatch):
    monkeypatch.setattr(model_log, "level", logging.INFO)
    Voice("ask", "0").say(LogLine("mine", logging.WARNING, 0.0, "from a worker"))
    (line,) = (folder / "pipeline.log.wf").read_text().splitlines()
    assert line.endswith("from a worker model=ask worker=0")
    assert (folder / "pipeline.log").read_text().count("from a worker") == 1
