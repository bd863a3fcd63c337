# SPDX-License-Identifier: Apache-2.0
"""Files of TensorFlow Lite, which OpenVINO runs; the answers are those of TensorFlow Lite's interpreter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import forebay.runtimes
from forebay.errors import ConfigError
from forebay.runtimes.sharing import sharing_of
from forebay.surfaces.native.repositories import is_repository

pytest.importorskip("openvino")

FILES = Path(__file__).parents[2] / "originals/lite"
GIVEN, ANSWER = "serving_default_x:0", "PartitionedCall:0"


def recorded():
    found = json.loads((FILES / "answers.json").read_text())
    return (np.array(found[name], np.float32) for name in ("measures", "chances"))


def test_a_file_of_any_number_of_rows_answers_as_the_interpreter_does_in_a_batch_and_alone():
    net = forebay.runtimes.load(FILES / "chances.tflite", threads=1, precision="exact")
    (feed,), (fetch,) = net.signature().feeds, net.signature().fetches
    assert (feed.name, feed.datatype, feed.rows, feed.shape) == (GIVEN, "FP32", -1, (4,))
    assert (fetch.name, fetch.datatype, fetch.rows, fetch.shape) == (ANSWER, "FP32", -1, (3,))
    measures, chances = recorded()
    together = net({GIVEN: measures})[ANSWER]
    alone = np.concatenate([net({GIVEN: one[None]})[ANSWER] for one in measures])
    assert np.allclose(together, chances, atol=1e-6)
    assert np.allclose(alone, chances, atol=1e-6)
    assert (sharing_of(net).has_rows, sharing_of(net).why_not) == (True, "")


def test_a_file_of_one_row_answers_as_the_interpreter_does_one_request_at_a_time():
    net = forebay.runtimes.load(FILES / "one.tflite", threads=1, precision="exact")
    measures, chances = recorded()
    assert np.allclose([net({GIVEN: one[None]})[ANSWER][0] for one in measures], chances, atol=1e-6)
    assert not sharing_of(net).has_rows


@pytest.mark.parametrize("end", [700, 1200])
def test_a_file_that_is_cut_off_is_refused(tmp_path, end):
    (tmp_path / "cut.tflite").write_bytes((FILES / "chances.tflite").read_bytes()[:end])
    with pytest.raises(ConfigError, match=r"cut.tflite cannot be loaded: .*cut\.tflite\" is corrupted or malformed"):
        forebay.runtimes.load(tmp_path / "cut.tflite")


@pytest.mark.parametrize("data", [b"", b"TFL3", b"no model at all"])
def test_another_file_is_refused(tmp_path, data):
    (tmp_path / "net.tflite").write_bytes(data)
    with pytest.raises(ConfigError, match=r"which holds no model; expected .* saved_model.pb or .tflite"):
        forebay.runtimes.load(tmp_path / "net.tflite")


def test_it_is_found_in_a_folder_and_in_a_repository(tmp_path):
    (tmp_path / "chances/1").mkdir(parents=True)
    shutil.copy(FILES / "chances.tflite", tmp_path / "chances/1/model.tflite")
    assert is_repository(str(tmp_path))
    assert forebay.runtimes.load(tmp_path / "chances/1").signature().feeds[0].shape == (4,)
