# SPDX-License-Identifier: Apache-2.0
"""The names of the original: found where scripts look for them, and nothing happens by importing them."""

import os
import subprocess
import sys

import pytest
from tests.waiting import PATIENCE_S

IMPORTS = """
from {server}.pipeline import Op, RequestOp, ResponseOp, PipelineServer, PipelineClient, LocalServiceHandler, Analyst
from {server}.pipeline.channel import ChannelData, ChannelDataType, ChannelDataErrcode, ChannelDataEcode, ProductErrCode
from {server}.pipeline.error_catch import CustomException, CustomExceptionCode
from {server}.pipeline.error_catch import ProductErrCode as AsWell
from {server}.pipeline.proto import pipeline_service_pb2
from {server}.pipeline.proto.pipeline_service_pb2 import Request, Response, Tensor
from {server}.web_service import WebService, Op as SameOp
from {server}.pipeline.operator import Op as InnerOp
from {server}.pipeline.analyse import Analyst as InnerAnalyst
from {server}.pipeline.local_service_handler import LocalServiceHandler as InnerHandler
from paddle_serving_client.pipeline import PipelineClient as SameClient
from paddle_serving_client.pipeline.channel import ChannelDataErrcode as SameCode
from {server} import pipeline
assert (InnerOp, InnerAnalyst, InnerHandler, SameCode) == (Op, Analyst, LocalServiceHandler, ChannelDataErrcode)
assert pipeline.Op is Op
assert SameOp is Op and AsWell is ProductErrCode and SameClient is PipelineClient
assert pipeline_service_pb2.Response is Response
"""
INSTALL = "from forebay.surfaces.pipeline import shim; shim.install()\n"


def run(code, **options):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **options,
    )


@pytest.mark.parametrize("server", ["paddle_serving_server", "paddle_serving_server_gpu"])
def test_every_name_of_the_original_is_there_once_the_hook_is(server):
    # P1
    found = run(INSTALL + IMPORTS.format(server=server))
    assert found.returncode == 0, found.stderr


def test_nothing_of_the_original_is_there_without_the_hook():
    # P1: nothing is installed under its names
    assert "ModuleNotFoundError" in run("import paddle_serving_server").stderr


def test_a_name_that_is_not_there_is_missed_as_python_says_it():
    found = run(INSTALL + "from paddle_serving_server.pipeline import Opp")
    assert "ImportError: cannot import name 'Opp' from 'paddle_serving_server.pipeline'" in found.stderr


def test_importing_writes_prints_and_configures_nothing(tmp_path):
    # P5
    code = (
        INSTALL
        + "import logging, sys\nbefore = logging.getLogger().handlers[:], logging.getLogger().level\n"
        + "from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp\n"
        + "assert (logging.getLogger().handlers, logging.getLogger().level) == before\n"
        + "assert 'numpy' not in sys.modules and 'grpc' not in sys.modules\n"
    )
    folder = tmp_path / "empty"
    folder.mkdir()
    folder.chmod(0o555)
    found = run(code, cwd=folder, env={**os.environ, "HOME": str(folder)})
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    assert list(folder.iterdir()) == []


REVIEWS = """
from paddle_serving_app.reader import IMDBDataset
data = IMDBDataset()
data.load_resource(sys.argv[1])
print(data.get_words_and_label("I am very, very SAD | 0"))
print(data.get_words_only("am"))
"""


def test_without_the_package_of_readers_there_is_the_one_the_classic_example_needs(tmp_path):
    # P2
    vocab = tmp_path / "imdb.vocab"
    vocab.write_text("i\nam\nvery\n,\n")
    code = INSTALL + "import sys; sys.argv.append(" + repr(str(vocab)) + ")\n" + REVIEWS
    found = run(code)
    assert found.stdout == "([0, 1, 2, 3, 2, 4], [0])\n[1]\n", found.stderr


def test_an_installed_package_of_readers_is_not_shadowed(tmp_path):
    # P2
    package = tmp_path / "paddle_serving_app"
    (package / "reader").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "reader" / "__init__.py").write_text("class IMDBDataset:\n    mine = True\n")
    code = INSTALL + "from paddle_serving_app.reader import IMDBDataset\nprint(IMDBDataset.mine)"
    found = run(code, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found.stdout == "True\n", found.stderr


@pytest.mark.parametrize("broken", ["__init__.py", "reader/__init__.py"])
def test_an_installed_package_that_cannot_be_imported_gives_way(tmp_path, broken):
    # F108, P2
    package = tmp_path / "paddle_serving_app"
    (package / "reader").mkdir(parents=True)
    for file in ("__init__.py", "reader/__init__.py"):
        (package / file).write_text("from nowhere import Image" if file == broken else "")
    if broken == "__init__.py":
        (package / "reader/__init__.py").write_text("from nowhere import Image")
    vocab = tmp_path / "imdb.vocab"
    vocab.write_text("i\nam\nvery\n,\n")
    code = INSTALL + "import sys; sys.argv.append(" + repr(str(vocab)) + ")\n" + REVIEWS
    found = run(code, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found.stdout == "([0, 1, 2, 3, 2, 4], [0])\n[1]\n", found.stderr
    assert "paddle_serving_app.reader is installed and cannot be imported" in found.stderr


def test_the_reader_is_also_in_the_module_that_scripts_of_the_original_name(tmp_path):
    # F42: without it the original's ensemble does not start
    vocab = tmp_path / "imdb.vocab"
    vocab.write_text("i\nam\nvery\n,\n")
    code = INSTALL + "import sys; sys.argv.append(" + repr(str(vocab)) + ")\n"
    found = run(code + REVIEWS.replace("paddle_serving_app.reader", "paddle_serving_app.reader.imdb_reader"))
    assert found.stdout == "([0, 1, 2, 3, 2, 4], [0])\n[1]\n", found.stderr


def test_another_reader_is_missed_with_what_to_install():
    # F42
    found = run(INSTALL + "from paddle_serving_app.reader import Sequential")
    assert "ImportError: forebay offers only IMDBDataset of paddle_serving_app" in found.stderr
    assert "pip install paddle-serving-app" in found.stderr
