# SPDX-License-Identifier: Apache-2.0
"""`forebay generate`: what a project imports, what its image installs, and keys that would be in it."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from tests.generated import generate, lay
from tests.waiting import PATIENCE_S

HEAD = "# The packages that this project imports, in the versions installed where `forebay generate` ran."
MODEL = """
import forebay

class Shout(forebay.Model):
    def predict(self, batch: list[str]) -> list[str]:
        return [text.upper() for text in batch]
"""
NUMPY = f"numpy=={version('numpy')}"
LACKS = f"forebay: warning: model.py:1: imports numpy, which requirements.txt does not name; add {NUMPY}"


def told(done):
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


def test_a_project_without_requirements_gets_those_that_it_imports(tmp_path):
    imports = """
    from typing import TYPE_CHECKING
    import json, numpy.linalg as linalg
    from lib import names
    from google.protobuf import message
    try:
        import cv2
        import never_installed
    except ImportError:
        cv2 = None
    if TYPE_CHECKING:
        import pandas
    """
    files = {
        "model.py": imports.replace("\n    ", "\n") + MODEL,
        "lib/names.py": "import yaml\nfrom . import more\n",
        "lib/more.py": "def later():\n    import httpx\n",
        "train.py": "import pandas\n",  # nothing that is served imports it
        "other/.venv/pyvenv.cfg": "",
        "other/.venv/site.py": "import pandas\n",
    }
    assert told(generate(lay(tmp_path, files), "model.py")) == []
    pins = ["httpx", "numpy", "opencv-python-headless", "protobuf", "PyYAML"]
    written = (tmp_path / "requirements.txt").read_text()
    assert written.splitlines() == [HEAD, *(f"{name}=={version(name)}" for name in pins)]
    assert "pip --no-cache-dir install -r requirements.txt" in (tmp_path / "deploy/Dockerfile").read_text()
    assert "other/.venv" in (tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    assert told(generate(tmp_path, "model.py")) == []  # the same again
    assert (tmp_path / "requirements.txt").read_text() == written


def test_a_project_that_imports_nothing_else_gets_no_requirements(tmp_path):
    assert told(generate(lay(tmp_path, {"model.py": "import os\n" + MODEL}), "model.py")) == []
    assert not (tmp_path / "requirements.txt").exists()


@pytest.mark.parametrize("named", ["nucleus", "pipeline", "ovms"])
def test_imports_of_projects_of_others_are_found_by_their_configuration(tmp_path, named):
    handler = "import numpy\nclass Handler:\n    def handle_get(self):\n        return 'here'\n"
    servable = """
import numpy
from pyovms import Tensor
class OvmsPythonModel:
    def execute(self, inputs):
        return inputs
"""
    script = """
import numpy
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp
server = PipelineServer("words")
server.set_response_op(ResponseOp(input_ops=[Op(name="say", input_ops=[RequestOp()])]))
server.prepare_server("config.yml")
server.run_server()
"""
    graph = """
input_stream: "OVMS_PY_TENSOR:a"
output_stream: "OVMS_PY_TENSOR:b"
node {
  name: "say"
  calculator: "PythonExecutorCalculator"
  input_side_packet: "PYTHON_NODE_RESOURCES:py"
  input_stream: "INPUT:a"
  output_stream: "OUTPUT:b"
  node_options: {
    [type.googleapis.com / mediapipe.PythonExecutorCalculatorOptions]: { handler_path: "code/servable.py" }
  }
}
"""
    files, target = {
        "nucleus": ({"nucleus.yaml": "type: python\npath: src/handler.py\n", "src/handler.py": handler}, "."),
        "pipeline": ({"server.py": script, "config.yml": "rpc_port: 18090\nhttp_port: 18080\n"}, "server.py"),
        "ovms": ({"graph.pbtxt": graph, "code/servable.py": servable}, "graph.pbtxt"),
    }[named]
    done = generate(lay(tmp_path, files), target)
    assert done.returncode == 0, done.stderr
    assert "imports" not in done.stderr
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [HEAD, NUMPY]


def test_a_pipeline_gets_what_runs_its_models(tmp_path):
    script = """
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp
server = PipelineServer("words")
paddle = Op(name="paddle", input_ops=[RequestOp()])
server.set_response_op(ResponseOp(input_ops=[Op(name="saved", input_ops=[paddle])]))
server.prepare_server("config.yml")
server.run_server()
"""
    conf = "{client_type: local_predictor, model_config: NAME}"
    ops = "".join(f"  {name}:\n    local_service_conf: {conf.replace('NAME', name)}\n" for name in ("paddle", "saved"))
    files = dict.fromkeys(("paddle/net.pdmodel", "paddle/net.pdiparams", "saved/saved_model.pb"), "")
    files |= {"server.py": script, "config.yml": f"rpc_port: 18090\nhttp_port: 18080\nop:\n{ops}"}
    done = generate(lay(tmp_path, files), "server.py")
    assert done.returncode == 0, done.stderr
    extras = ",".join(sorted(("grpc", "pipeline", "tensorflow" if find_spec("tensorflow") else "openvino")))
    assert f'"forebay[{extras}]' in (tmp_path / "deploy/Dockerfile").read_text()
    pinned = (tmp_path / "requirements.txt").read_text().splitlines()
    assert f"setuptools=={version('setuptools')}" in pinned
    assert "a model: imports paddle, which is not installed here" in done.stderr or "paddlepaddle" in str(pinned)


@pytest.mark.parametrize("required", ["", "numpy", "Scikit_Learn>=1", "xgboost"])
def test_code_that_unpickles_is_told_unless_a_library_of_pickles_is_required(tmp_path, required):
    loads = "import pickle as p\nfrom pickle import loads\n\ndef restore(file):\n    return p.load(file), loads(b'')\n"
    files = {"model.py": loads + MODEL, **({"requirements.txt": f"{required}\n"} if required else {})}
    lines = told(generate(lay(tmp_path, files), "model.py"))
    add = "unpickles; add the libraries that made the pickle, such as scikit-learn, to requirements.txt"
    expected = [f"forebay: warning: model.py:5: {add}"]
    assert lines == (expected if required in {"", "numpy"} else [])


def test_what_is_not_installed_here_has_no_version_and_is_told(tmp_path):
    text = MODEL + "\ndef later():\n    import nowhere.inner\n    import nowhere\n"
    lines = told(generate(lay(tmp_path, {"model.py": text}), "model.py"))
    more = "is not installed here, nor in the image; name it in a requirements.txt"
    assert lines == [f"forebay: warning: model.py:9: imports nowhere, which {more}"]
    assert not (tmp_path / "requirements.txt").exists()


LISTED = {
    "numpy": "NumPy>=1 ; python_version > '3'",
    "in-an-included-file": "-r more.txt\n",
    "with-hashes": "numpy==2.0.0 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n",
    "wheel": "wheels/numpy-2.0.0-cp311-cp311-linux_x86_64.whl\n",
    "url": "numpy @ https://localhost/numpy.tar.gz\n",
    "commit": "git+https://localhost/numpy.git#egg=numpy\n",
    "brought": "pandas  # which needs it\n",
    "brought-by-forebay": "forebay[onnx]\n",
    "utf-16": "numpy\r\n".encode("utf-16"),
}


@pytest.mark.parametrize("listed", LISTED.values(), ids=LISTED)
def test_what_a_requirement_brings_is_not_missed(tmp_path, listed):
    files = {
        "model.py": "import numpy\n" + MODEL,
        "requirements.txt": listed,
        "more.txt": "--requirement=sub/more.txt\n",
    }
    lay(
        tmp_path, {**files, "sub/more.txt": "-r ../more.txt\n-c ../c.txt\n-r pipe\n-r /dev/zero\nnumpy[x]==2\n"}
    )  # in a circle
    os.mkfifo(tmp_path / "sub/pipe")  # nobody writes
    assert told(generate(tmp_path, "model.py")) == []


@pytest.mark.parametrize(
    "listed, unless",
    [
        ("httpx\n# numpy\n--extra-index numpy\n-c c.txt\n", ""),
        ("", ""),
        ("-e .\nhttps://localhost/a.tar.gz\n", " (unless ., https://localhost/a.tar.gz brings it)"),
        ("a-private-package\n", " (unless a-private-package brings it)"),
    ],
)
def test_what_no_requirement_brings_is_told_with_its_place(tmp_path, listed, unless):
    lay(tmp_path, {"model.py": "import numpy\nimport numpy.linalg\n" + MODEL, "requirements.txt": listed})
    assert told(generate(tmp_path, "model.py")) == [LACKS + unless]
    assert (tmp_path / "requirements.txt").read_text() == listed


@pytest.mark.parametrize("file", ["dependencies.sh", "conda-packages.txt", "setup.py"])
def test_a_package_that_a_script_or_conda_names_is_not_missed(tmp_path, file):
    lay(tmp_path, {"model.py": "import numpy\nimport cv2\nimport yaml\n" + MODEL, file: "# numpy=2.0\n"})
    (line,) = told(generate(tmp_path, "model.py"))
    assert f"model.py:2: imports cv2 (opencv-python-headless), which {file} does not name" in line
    assert not (tmp_path / "requirements.txt").exists()


def test_files_that_cannot_be_read_are_told_and_the_rest_is_checked(tmp_path):
    imports = "def later():\n    import broken, null, huge, loop, inner.deep\n    import numpy\n"
    files = {
        "model.py": imports + MODEL,
        "broken.py": "x = 1\ndef f(:\n",
        "null.py": "a\0b",
        "huge.py": "#" * 1_100_000,
        "inner/deep.py": "x = " + "(" * 500 + ")" * 500 + "\n",
        "inner/__init__.py": "if " + "+".join("1" * 400) + ":\n    import numpy\n",  # a deep tree, but valid
        "requirements.txt": "numpy\n",
    }
    (lay(tmp_path, files) / "loop.py").symlink_to("loop.py")
    (tmp_path / "circle").symlink_to(".")
    os.mkfifo(tmp_path / "pipe.py")
    lines = told(generate(tmp_path, "model.py"))
    assert [line.split(": ")[2] for line in lines[:4]] == ["broken.py:2", "null.py:1", "huge.py", "inner/deep.py:1"]
    assert all("imports are not checked" in line for line in lines[:4])
    (loop,) = lines[4:]
    assert "model.py:2: imports loop, which requirements.txt does not name, and it is not installed here" in loop


@pytest.mark.parametrize("target", ["requirements.txt", "../outside.txt"])
def test_requirements_that_are_a_link_to_no_file_are_told(tmp_path, target):
    project = lay(tmp_path / "project", {"model.py": "import numpy\n" + MODEL})
    (project / "requirements.txt").symlink_to(target)
    done = generate(project, "model.py")
    assert done.returncode == 2
    assert f"{project / 'requirements.txt'} is a link to no file; remove it" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


def test_requirements_lie_in_the_project_where_its_output_is_a_link(tmp_path):
    project = lay(tmp_path / "project", {"model.py": "import numpy\n" + MODEL})
    (tmp_path / "elsewhere/deploy").mkdir(parents=True)
    (project / "deploy").symlink_to(tmp_path / "elsewhere/deploy")
    assert told(generate(project, "model.py")) == []
    assert NUMPY in (project / "requirements.txt").read_text()
    assert not (tmp_path / "elsewhere/requirements.txt").exists()


def test_a_requirement_whose_file_cannot_be_there_is_no_defect(tmp_path):
    files = {"model.py": "import numpy\n" + MODEL, "requirements.txt": f"-r {'a' * 300}\nnumpy\n"}
    assert told(generate(lay(tmp_path, files), "model.py")) == []


def test_what_the_user_may_not_read_is_told(tmp_path):
    lay(tmp_path, {"model.py": MODEL, "private/data": "x", "requirements.txt": "numpy\n"})
    command = [sys.executable, "-P", "-m", "forebay", "generate", "model.py"]
    if os.geteuid() == 0:  # to whom nothing is closed otherwise
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    (tmp_path / "private").chmod(0)
    assert told(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)) == []
    (tmp_path / "requirements.txt").chmod(0)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"forebay: {tmp_path / 'requirements.txt'} cannot be read: Permission denied\n"


def test_of_a_folder_with_very_many_files_a_part_is_looked_at(tmp_path):
    lay(tmp_path, {"model.py": "import numpy\n" + MODEL, "requirements.txt": "numpy\n"})
    (tmp_path / "many").mkdir()
    for number in range(10_001):
        (tmp_path / f"many/{number}").touch()
    (line,) = told(generate(tmp_path, "model.py"))
    assert "has more than 10,000 files" in line


def test_the_image_gets_the_forebay_that_wrote_its_files_and_an_index_is_asked_for_a_release(tmp_path):
    lay(tmp_path, {"model.py": MODEL})
    assert told(generate(tmp_path, "model.py")) == []
    (wheel,) = (tmp_path / "deploy/wheels").iterdir()
    name = f"forebay-{version('forebay')}"
    assert wheel.name == f"{name}-py3-none-any.whl"
    dockerfile = tmp_path / "deploy/Dockerfile"
    assert f"COPY --from=wheels {wheel.name} /opt/wheels/\n" in dockerfile.read_text()

    # The wheel is installed as installers do, which hold it to its RECORD.
    site = tmp_path / "site"
    installs = ("uv", "pip", "install", "--no-deps", "--offline", "--no-config", "--target", site, wheel)
    done = subprocess.run(
        [sys.executable, "-m", *map(str, installs)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    first = wheel.read_bytes()

    def again(folder):
        shutil.rmtree(tmp_path / "deploy")
        command = [sys.executable, "-P", "-m", "forebay", "generate", "model.py"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert json.loads((site / f"{name}.dist-info/direct_url.json").read_text())["url"].startswith("file:")
    assert "--build-context wheels=deploy/wheels" in again(site)
    assert wheel.read_bytes() == first  # from an installed wheel as from the tree
    (site / f"{name}.dist-info/direct_url.json").unlink()  # as from an index
    assert "--build-context" not in again(site)
    assert not (tmp_path / "deploy/wheels").exists()
    assert "--from=" not in dockerfile.read_text()


KEYS = {
    "model.py": 'API_KEY = "abcdef123456"\nheaders = {"Authorization": "Bearer " + "hf_' + "a1" * 17 + '"}\n',
    "forebay.yaml": "target: model.py\nenv: {AWS_SECRET_ACCESS_KEY: abcdefgh12345}\n",
    "compose.yaml": "services:\n  db:\n    environment:\n      POSTGRES_PASSWORD: hunterhunter\n",
    "conf/settings.toml": 'auth_token = "0123456789abcdef"\n',
    "key.sh": "cat <<E\n-----BEGIN RSA PRIVATE KEY-----\n",
}
NO_KEYS = {
    "model.py": (
        'import os\nAPI_KEY = os.environ["API_KEY1"]\neos_token = "<|endoftext|>"\npassword: str = ""\n'
        'key = Header(alias="x-api-key-v1")\ntokenizer = "bert-base-uncased1"\npassword = "change-me-1"\n'
        'password_file = "/run/secrets/one1"\ntoken_type = "bearer-token-1"\n'
    ),
    "compose.yaml": "services:\n  db:\n    environment:\n      A_PASSWORD: ${PASSWORD}\n      max_tokens: 4096000\n",
    "deployment.yaml": "secretName: my-model-keys-1\nsecret_name: my-model-keys-2\n",
    "secrets.yaml": "password: hunterhunter\n",  # in no image
    "ignored/a.py": 'password = "hunterhunter"\n',
    ".dockerignore": "ignored\n",
}


def test_keys_in_plain_text_are_told_with_their_places_and_not_shown(tmp_path):
    lay(tmp_path, {**KEYS, "model.py": KEYS["model.py"] + MODEL})
    lines = told(generate(tmp_path, "."))
    places = [line.split(": ")[2:4] for line in lines]
    assert sorted(place for place, *_ in places) == sorted(
        ["model.py:1", "model.py:2", "forebay.yaml:2", "compose.yaml:4", "conf/settings.toml:1", "key.sh:2"]
    )
    names = {"API_KEY", "AWS_SECRET_ACCESS_KEY", "POSTGRES_PASSWORD", "auth_token", "a key"}
    assert {said.partition(" is in plain text")[0] for _, said in places} == names
    shown = "".join(lines)
    assert all(secret not in shown for secret in ("abcdef", "hunter", "a1a1", "0123"))


def test_a_variable_of_a_nucleus_project_is_in_its_image_and_told(tmp_path):
    files = {
        "nucleus.yaml": "type: python\npath: handler.py\npy_version: '3.11'\n",
        "handler.py": "class Handler: ...\n",
    }
    lines = told(generate(lay(tmp_path, {**files, ".env": "API_KEY=abcdef123456\n", ".env.local": "B=1\n"}), "."))
    assert [line.split(" is in plain text")[0] for line in lines] == ["forebay: warning: .env:1: API_KEY"]
    ignored = (tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    assert ("**/.env" in ignored, "**/.env?*" in ignored) == (False, True)


def test_placeholders_names_and_what_no_image_has_are_no_keys(tmp_path):
    header = "def Header(alias):\n    return alias\nimport os\nos.environ.setdefault('API_KEY1', '')\n"
    lay(tmp_path, {**NO_KEYS, "model.py": header + NO_KEYS["model.py"] + MODEL})
    assert told(generate(tmp_path, "model.py")) == []
