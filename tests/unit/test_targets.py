# SPDX-License-Identifier: Apache-2.0
"""What a target is called, and what is said of one that nothing here serves."""

import pytest

from forebay.surfaces.lookup import _why_unknown
from forebay.surfaces.native.repositories import name_of


@pytest.mark.parametrize(
    "address, name",
    [("s3://models/big/1", "big"), ("/srv/big/1/", "big"), ("big", "big"), ("1", "1"), ("s3://models/v1", "v1")],
)
def test_a_folder_that_is_a_version_is_called_as_the_one_above(address, name):  # F89
    assert name_of(address) == name


def test_a_model_of_tensorflow_lite_is_told_what_to_do(tmp_path):  # F89
    (tmp_path / "m.tflite").touch()
    assert "is a model of TensorFlow Lite, which nothing here runs" in _why_unknown(str(tmp_path / "m.tflite"))
