# SPDX-License-Identifier: Apache-2.0
"""Scripts: recognised without being run, executed up to their server, and what is said when they end otherwise."""

import sys

import pytest

from forebay.errors import ConfigError, ModelError
from forebay.surfaces.pipeline.script import Script, capture, is_pipeline

SMALLEST = """
import sys
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Echo(Op):
    def preprocess(self, input_dicts):
        return {"said": "so"}

server = PipelineServer(sys.argv[1] if len(sys.argv) > 1 else None)
server.set_response_op(ResponseOp(input_ops=[Echo(name="echo", input_ops=[RequestOp()])]))
server.prepare_server(yml_dict={"rpc_port": 18080})
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    for name in ("__main__",):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    yield
    for name in [name for name in sys.modules if name.startswith("paddle_serving")]:
        del sys.modules[name]


@pytest.fixture
def script(tmp_path):
    def write(text, *arguments):
        path = tmp_path / "server.py"
        path.write_text(text)
        return Script(str(path), arguments)

    return write


@pytest.mark.parametrize(
    "line",
    [
        "from paddle_serving_server.pipeline import Op",
        "from paddle_serving_server_gpu.web_service import WebService",
        "import paddle_serving_server.pipeline as p",
        "from paddle_serving_client.pipeline import PipelineClient",
        "from forebay.surfaces.pipeline import Op",
        "from forebay.surfaces import pipeline",
        "def later():\n    from paddle_serving_server import pipeline",
    ],
)
def test_a_file_that_imports_the_names_is_a_pipeline(tmp_path, line):
    # P1
    path = tmp_path / "a.py"
    path.write_text(f"raise SystemExit  # nothing is run to find out\n{line}\n")
    assert is_pipeline(path)


@pytest.mark.parametrize(
    "line",
    ["import forebay", "from forebay.surfaces.ventu import Ventu", "import paddle_serving_serverless", "def ("],
)
def test_other_files_are_not(tmp_path, line):
    path = tmp_path / "a.py"
    path.write_text(line)
    assert not is_pipeline(path)


@pytest.mark.parametrize(
    "end",
    [
        "server.run_server()\nraise RuntimeError('this line is never reached')",
        "if __name__ == '__main__':\n    server.run_server()",
        "try:\n    server.run_server()\nexcept Exception:\n    raise SystemExit(3)",
    ],
    ids=["unguarded", "guarded", "in a try"],
)
def test_a_script_is_executed_up_to_its_server(script, end):
    # P101, trap 28
    server = capture(script(SMALLEST + end))
    assert server.config.rpc_port == 18080
    assert server.response_op.get_input_ops()[0].name == "echo"
    assert type(server.response_op.get_input_ops()[0]).__module__ == "__main__"


def test_a_web_service_is_captured_as_well(script):
    # P3
    text = """
from paddle_serving_server.web_service import WebService, Op

class Uci(WebService):
    def get_pipeline_response(self, read_op):
        return Op(name="uci", input_ops=[read_op])

service = Uci(name="uci")
service.prepare_pipeline_config(yml_dict={"rpc_port": 18080})
service.run_service()
"""
    assert capture(script(text)).name == "uci"


def test_a_script_sees_its_arguments_and_the_modules_beside_it(script, tmp_path):
    (tmp_path / "beside_it.py").write_text("NAME = 'beside'\n")
    text = SMALLEST + "import beside_it\nserver.name += beside_it.NAME\nserver.run_server()\n"
    assert capture(script(text, "given-")).name == "given-beside"


def test_a_script_that_runs_no_server_is_told_what_is_missing(script):
    with pytest.raises(ConfigError, match="ended without a call of run_server"):
        capture(script(SMALLEST))


def test_a_script_that_exits_by_itself_is_told_so(script):
    with pytest.raises(ConfigError, match="ended with status 4 before it ran a server"):
        capture(script("import sys\nsys.exit(4)\n"))


def test_the_traceback_of_a_script_begins_in_the_script(script):
    with pytest.raises(ModelError, match="raised ZeroDivisionError") as caught:
        capture(script("def f():\n    return 1 / 0\nf()\n"))
    frames = [line.strip() for line in caught.value.trace.splitlines() if line.strip().startswith("File")]
    assert len(frames) == 2
    assert all("server.py" in frame for frame in frames)


@pytest.mark.parametrize(
    "line,told",
    [
        ("server.set_response_op(RequestOp())", "expected a ResponseOp, got RequestOp"),
        (
            "server.set_response_op(ResponseOp(input_ops=[]))",
            "expected one input op, the last op of the graph, got 0",
        ),
        (
            "r = RequestOp(); server.set_response_op(ResponseOp(input_ops=[Echo(), Echo()]))",
            "expected one input op, .* got 2",
        ),
        ("server.prepare_server()", "expected yml_file or yml_dict, got neither"),
        ("server.prepare_server('a.yml', {})", "expected yml_file or yml_dict, got both"),
        ("server.prepare_server(yml_dict={'worker_num': 1})", "expected rpc_port or http_port, got neither"),
        ("server.prepare_server('absent.yml')", "absent.yml cannot be read"),
        ("PipelineServer().run_server()", "before set_response_op"),
    ],
)
def test_the_server_object_says_what_is_wrong_with_it(script, line, told):
    # P4
    with pytest.raises(ConfigError, match=told):
        capture(script(SMALLEST + line))


def test_a_web_service_must_return_an_op(script):
    # P3
    text = """
from paddle_serving_server.web_service import WebService
WebService("empty").prepare_pipeline_config(yml_dict={"rpc_port": 18080})
"""
    with pytest.raises(ModelError, match=r"ValueError: get_pipeline_response\(\) of 'empty' returned NoneType"):
        capture(script(text))
