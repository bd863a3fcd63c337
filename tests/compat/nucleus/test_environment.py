# SPDX-License-Identifier: Apache-2.0
"""What worker processes find in their environment and on their import path; each in a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.processes import kill_if_noted
from tests.waiting import PATIENCE_S

from forebay.errors import ConfigError
from forebay.surfaces.nucleus import environment
from forebay.surfaces.nucleus.config import read_config
from forebay.surfaces.nucleus.environment import handler_environment, import_path, worker_environment

PROJECT = {"nucleus.yaml": "type: python\npath: handler.py\n", "handler.py": ""}
# What a worker does before and after it runs the code of a project.
WORKER = """
import json, os, sys
sys.path.extend(path for path in json.loads(sys.argv[1]) if path not in sys.path)
from forebay.surfaces.nucleus import shim
shim.install()
result = None
exec(sys.argv[2])
print(json.dumps(result))
"""


@pytest.fixture
def project(tmp_path):
    """Writes a project and reads its configuration."""

    def make(files, folder="project"):
        for name, text in {**PROJECT, **files}.items():
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return read_config(tmp_path / folder / "nucleus.yaml", serving=False)[0]

    return make


@pytest.fixture
def work(project):
    """Runs code in a worker of a project and returns what it left in `result`."""

    def run(code, config, base=None):
        environment = worker_environment(config, 8080, {**os.environ, **(base or {})})
        done = subprocess.run(
            [sys.executable, "-P", "-c", WORKER, json.dumps(import_path(config)), code],
            env=environment,
            cwd=config.project_dir,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def yaml_with(lines):
    return {"nucleus.yaml": PROJECT["nucleus.yaml"] + lines}


def test_values_of_env_arrive_byte_for_byte(work, project):  # N9
    value = 'it\'s  $x "q" `a` \\ \n\n*  ü'
    config = project(yaml_with("env: {A: " + json.dumps(value) + ", B: 1, C: true, D: }\n"))
    found = work("result = [os.environ.get(name) for name in 'ABCD']", config)
    assert found == [value, "1", "True", None]


def test_dot_env_is_read_by_bash_and_wins(work, project):  # N10
    text = "# a comment\nexport A=file\nB=\"$A-x\"\nC='a  b'\nD=$FROM_YAML!\nMULTI='1\n2'\nA+=2\necho hello\nfalse\n"
    config = project({**yaml_with("env: {A: yaml, FROM_YAML: y}\n"), ".env": text})
    found = work("result = {name: os.environ[name] for name in ('A', 'B', 'C', 'D', 'MULTI')}", config)
    assert found == {"A": "file2", "B": "file-x", "C": "a  b", "D": "y!", "MULTI": "1\n2"}


def test_dot_env_takes_nothing_from_bash_and_may_unset(project):  # N10
    config = project({".env": "unset GONE\nset +a\nNOT_EXPORTED=1\n"})
    base = {"PATH": os.environ["PATH"], "GONE": "1", "SHLVL": "7", "BASH_ENV": "/nonexistent", "a.b": "odd name"}
    found = handler_environment(config, 8080, base)
    assert "GONE" not in found
    assert "NOT_EXPORTED" not in found
    assert (found["SHLVL"], found["BASH_ENV"]) == ("7", "/nonexistent")
    assert "PWD" not in found
    assert "_" not in found


def test_a_broken_dot_env_is_an_error_with_the_line(project):  # N10
    config = project({".env": "A=1\nB='never closed\n"})
    with pytest.raises(ConfigError, match=r"\.env: .*line \d"):
        worker_environment(config, 8080, os.environ)


def test_a_dot_env_that_ends_its_shell_is_an_error(project):  # N10
    with pytest.raises(ConfigError, match="ends the shell"):
        worker_environment(project({".env": "exit 3\n"}), 8080, os.environ)


def test_a_dot_env_that_hangs_is_given_up(project, monkeypatch):  # N10
    monkeypatch.setattr(environment, "DOT_ENV_TIMEOUT_S", 0.3)
    with pytest.raises(ConfigError, match="was not done with it"):
        worker_environment(project({".env": "sleep 60\n"}), 8080, os.environ)


def test_what_dot_env_leaves_in_the_background_is_not_waited_for(project, eventually):  # N10
    config = project({".env": "sleep 600 &\nA=$!\n"})
    child = int(worker_environment(config, 8080, os.environ)["A"])
    eventually(lambda: has_ended(child))


def has_ended(pid):
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()  # nobody asked for its status yet
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_reads_dot_env_ends_with_a_server_that_is_killed(project, eventually):  # F26
    config = project({".env": "sleep 600 &\necho $$ $! > pids.tmp\nmv pids.tmp pids\nsleep 600\n"})
    code = (
        "import os, pathlib, sys\nfrom forebay.surfaces.nucleus.config import read_config\n"
        "from forebay.surfaces.nucleus.environment import worker_environment\n"
        "config, _ = read_config(pathlib.Path(sys.argv[1]), serving=False)\n"
        "worker_environment(config, 8080, os.environ)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, config.project_dir / "nucleus.yaml"]) as server:
        eventually((config.project_dir / "pids").exists)
        pids = [int(pid) for pid in (config.project_dir / "pids").read_text().split()]
        noted_at = time.time()
        server.kill()
    try:
        eventually(lambda: all(map(has_ended, pids)))
    finally:
        for pid in pids:
            kill_if_noted(pid, noted_at)


def test_what_dot_env_writes_to_stderr_is_a_warning(project, caplog):  # N10
    config = project({".env": "A = 1\nB=2\n"})
    assert worker_environment(config, 8080, os.environ)["B"] == "2"
    (record,) = caplog.records
    assert "A: command not found" in record.getMessage()


def test_python_path_is_appended_and_what_was_there_comes_first(work, project):  # N12
    config = project({**yaml_with("python_path: lib\n"), "lib/x.py": "y = 1\n"})
    code = "import x; result = [os.environ['PYTHONPATH'], x.y, os.getcwd()]"
    lib = str(config.project_dir / "lib")
    assert work(code, config, {"PYTHONPATH": ""}) == [lib, 1, str(config.project_dir)]
    assert work(code, config, {"PYTHONPATH": "/first:/second"})[0] == f"/first:/second:{lib}"
    code = "result = [path for path in sys.path if path in ('/first', sys.argv[-1]) or path.endswith('/lib')]"
    assert work(code, config, {"PYTHONPATH": "/first"}) == ["/first", lib]


def test_data_files_lie_in_the_working_folder(work, project):  # N12
    config = project({"my-data.json": "[1]", **yaml_with("python_path: lib\n")})
    assert work("result = json.load(open('my-data.json'))", config) == [1]


def test_folders_that_env_adds_to_pythonpath_can_be_imported_from(work, project):  # N12
    config = project({**yaml_with("env: {PYTHONPATH: more}\n"), "more/deep.py": "z = 3\n"})
    assert work("import deep; result = deep.z", config) == 3


def test_siblings_of_the_root_and_of_the_handler_stay_importable(work, project):  # N13
    files = {
        "nucleus.yaml": "type: python\npath: src/handler.py\npython_path: lib\n",
        "lib/inlib.py": "",
        "rootmod.py": "",
        "src/handler.py": "",
        "src/sibling.py": "",
    }
    config = project(files)
    root = config.project_dir
    assert import_path(config) == [str(root / "lib"), str(root), str(root / "src")]
    assert work("import inlib, rootmod, sibling; result = 'all'", config) == "all"


def test_the_folders_are_named_once(project):  # N13
    config = project({})
    assert import_path(config) == [str(config.project_dir)]


def test_the_variables_of_the_original_are_there(work, project):  # N152
    lines = "log_level: debug\nprocesses: 2\nthreads_per_process: 3\nmax_concurrency: 4\npython_path: lib\n"
    config = project(yaml_with(lines + "dependencies: {pip: reqs.txt}\n"))
    code = "result = {name: value for name, value in os.environ.items() if name.startswith(('CORTEX_', 'FOREBAY_'))}"
    root = str(config.project_dir)
    assert work(code, config) == {
        "CORTEX_PROJECT_DIR": root,
        "CORTEX_MODEL_DIR": "/mnt/model",
        "CORTEX_PYTHON_PATH": root + "/lib",
        "CORTEX_LOG_LEVEL": "DEBUG",
        "CORTEX_LOG_CONFIG_FILE": "/src/cortex/log_config.yaml",
        "CORTEX_SERVING_PORT": "8080",
        "CORTEX_SERVING_PROTOCOL": "http",
        "CORTEX_PROCESSES": "2",
        "CORTEX_THREADS_PER_PROCESS": "3",
        "CORTEX_MAX_CONCURRENCY": "4",
        "CORTEX_DEPENDENCIES_PIP": "reqs.txt",
        "CORTEX_DEPENDENCIES_CONDA": "conda-packages.txt",
        "CORTEX_DEPENDENCIES_SHELL": "dependencies.sh",
        "CORTEX_MODEL_SERVER_CONFIG": root + "/nucleus.yaml",
    }


def test_the_variables_of_grpc_and_tensorflow(project):  # N152
    config = project(yaml_with("protobuf_path: protos/a.proto\n"))
    found = handler_environment(config, 1, {})
    assert found["CORTEX_SERVING_PROTOCOL"] == "grpc"
    assert found["CORTEX_PROTOBUF_FILE"] == str(config.project_dir / "protos/a.proto")
    text = "type: tensorflow\npath: handler.py\ntfs_container_dns: tfs\nmodels: {dir: s3://b/m}\n"
    found = handler_environment(project({"nucleus.yaml": text}), 1, {})
    assert (found["CORTEX_TF_BASE_SERVING_PORT"], found["CORTEX_TF_SERVING_HOST"]) == ("9000", "tfs")


def test_dot_env_sees_the_variables_of_the_original(work, project):  # N152
    config = project({".env": "SEEN=$CORTEX_PROJECT_DIR/x\n"})
    assert work("result = os.environ['SEEN']", config) == f"{config.project_dir}/x"


def test_container_then_env_then_dot_env(work, project):  # N153
    base = {"A": "container", "B": "container", "C": "container"}
    config = project({**yaml_with("env: {B: yaml, C: yaml}\n"), ".env": "C=file\n"})
    assert work("result = [os.environ[name] for name in 'ABC']", config, base) == ["container", "yaml", "file"]


def test_env_changes_what_the_handler_sees_and_not_the_server(work, project):  # N153
    lines = "log_level: debug\nenv: {CORTEX_LOG_LEVEL: error, CORTEX_PROCESSES: 9}\n"
    config = project(yaml_with(lines))
    code = (
        "from cortex_internal.lib.log import logger\n"
        "result = [os.environ['CORTEX_LOG_LEVEL'], os.environ['CORTEX_PROCESSES'], logger.level]"
    )
    assert work(code, config) == ["error", "9", 10]


def test_files_named_like_modules_of_the_server_do_no_harm(work, project):  # N154
    names = ["queue.py", "types.py", "logging.py", "uvicorn.py", "msgspec.py", "grpc/__init__.py"]
    files = dict.fromkeys(names, "raise RuntimeError('a file of the project')\n")
    files |= {"model.py": "class IrisNet: pass\n", "package/__init__.py": "from .inner import value\n"}
    files |= {"package/inner.py": "value = 5\n"}
    code = (
        "import queue, types, logging, uvicorn, msgspec\n"
        "from model import IrisNet\n"
        "from package import value\n"
        "result = [queue.__file__.endswith('lib/queue.py') or len(queue.__file__) > 0, IrisNet.__name__, value]"
    )
    for python_path in (".", "package"):
        config = project({**files, **yaml_with(f"python_path: {python_path}\n")})
        assert work(code, config) == [True, "IrisNet", 5]


def test_two_projects_do_not_mix(work, project):  # N155
    code = "import model; result = [model.name, os.environ['NAME'], os.getcwd()]"
    for name in ("one", "two"):
        config = project({**yaml_with(f"env: {{NAME: {name}}}\n"), "model.py": f"name = {name!r}\n"}, folder=name)
        assert work(code, config) == [name, name, str(config.project_dir)]
