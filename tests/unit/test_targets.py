# SPDX-License-Identifier: Apache-2.0
"""What a target is called, and what is said of one that nothing here serves."""

import pytest

from forebay.surfaces.lookup import _why_unknown
from forebay.surfaces.native.model_files import is_model_file
from forebay.surfaces.native.project_image import _extras_of
from forebay.surfaces.native.repositories import is_repository, model_files, model_problem, name_of


@pytest.mark.parametrize(
    "address, name",
    [("s3://models/big/1", "big"), ("/srv/big/1/", "big"), ("big", "big"), ("1", "1"), ("s3://models/v1", "v1")],
)
def test_a_folder_that_is_a_version_is_called_as_the_one_above(address, name):  # F89
    assert name_of(address) == name


def lay(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return str(folder)


@pytest.mark.parametrize("network", ["model.onnx", "onnx/model.onnx"])
def test_the_folder_of_an_encoder_is_a_file_and_one_of_such_folders_a_repository(tmp_path, network):
    files = ("config.json", "tokenizer.json", "1_Pooling/config.json", network)
    one = lay(tmp_path / "models/mini/1", *files)
    assert is_model_file(one)
    assert not is_repository(one)
    assert is_repository(str(tmp_path / "models"))
    assert not is_model_file(str(tmp_path / "models"))
    assert (model_files(files), model_problem(files)) == ([""], "")
    assert _extras_of(one) == _extras_of(str(tmp_path / "models")) == ("onnx", "openvino", "tokenizers")


def test_a_folder_is_no_encoder_for_one_of_its_files_alone(tmp_path):
    net = lay(tmp_path / "net", "tokenizer.json", "model.onnx")
    assert is_repository(net)
    assert not is_model_file(net)
    project = lay(tmp_path / "project", "model.py", "weights/config.json", "weights/tokenizer.json")
    assert not is_repository(project)
    assert "did you mean" in _why_unknown(project)
    assert _extras_of(lay(tmp_path / "other", "model.onnx")) == ("onnx", "openvino")


@pytest.mark.parametrize("file", ["flowers.pkl", "flowers.onnx", "flowers.txt"])
def test_a_model_file_that_is_named_without_its_suffix_is_suggested(tmp_path, file):
    (tmp_path / file).write_text("tree\nversion=v4\n")
    assert _why_unknown(str(tmp_path / "flowers")).endswith(f"does not exist; did you mean {tmp_path / file}?")
    assert "give a Python file" in _why_unknown(str(tmp_path / "flower"))


def test_a_text_is_not_suggested_for_a_model(tmp_path):
    (tmp_path / "flowers.txt").write_text("roses\n")
    assert "give a Python file" in _why_unknown(str(tmp_path / "flowers"))
