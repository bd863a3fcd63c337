# SPDX-License-Identifier: Apache-2.0
"""`forebay nucleus`: the files it writes and the steps it runs, through the command."""

import json
import os
import shlex
import stat
import sys

import pytest
import yaml
from tests.waiting import PATIENCE_S

import forebay

PYTHON = "type: python\npath: handler.py\n"
TENSORFLOW = "type: tensorflow\npath: handler.py\nmodels:\n  path: s3://bucket/model/\n"
BATCHING = "server_side_batching: {max_batch_size: 2, batch_interval_seconds: 20.0}\n"
INDEX = "--mount=type=secret,id=pip.conf PIP_CONFIG_FILE=/run/secrets/pip.conf"
READY = ["ls", "/run/workspace/api_readiness.txt"]


@pytest.fixture
def project(tmp_path):
    """Writes files below a folder of the test."""

    def make(config, *empty, folder="iris", name="nucleus.yaml", **files):
        root = tmp_path / folder
        for file, text in {name: config, **dict.fromkeys(empty, ""), **files}.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text)
        return root

    return make


@pytest.fixture
def generate(cli, tmp_path):
    """Generates in a folder and returns what was done and the files that are new there."""

    def run(*arguments, cwd=tmp_path):
        before = set(cwd.iterdir())
        done = cli("nucleus", "generate", *arguments, cwd=cwd)
        assert "Traceback" not in done.stderr
        return done, sorted(file.name for file in set(cwd.iterdir()) - before)

    return run


@pytest.fixture
def dockerfile(project, generate, tmp_path):
    """The Dockerfile of a configuration."""

    def make(config, *empty, name="nucleus.Dockerfile", **files):
        project(config, *empty, **files)
        done, _ = generate("iris/nucleus.yaml")
        assert done.returncode == 0, done.stderr
        return (tmp_path / name).read_text()

    return make


def printed_config(output):
    first, *rest = output.splitlines()
    assert set(first) == {"-"}
    end = rest.index(first)
    return yaml.safe_load("\n".join(rest[:end])), rest[end + 1 :]


def test_a_python_project_makes_one_file_and_prints_its_config(project, generate):  # N1, N7
    project(PYTHON + "dependencies: {pip: reqs.txt}\nconfig: {a: [1, null]}\n")
    done, new = generate("iris/nucleus.yaml")
    assert (done.returncode, new) == (0, ["nucleus.Dockerfile"])
    config, rest = printed_config(done.stdout)
    assert rest == ["✓ generated nucleus.Dockerfile"]
    assert config["py_version"] == "3.6.9"
    assert config["serve_port"] == 8080
    assert config["config"] == {"a": [1, None]}
    assert config["use_local_cortex_libs"] is False
    assert config["dependencies"] == {"pip": "reqs.txt", "conda": "conda-packages.txt", "shell": "dependencies.sh"}
    assert "tfs_version" not in config


def test_a_tensorflow_project_makes_two_files(project, generate):  # N1
    project(TENSORFLOW)
    done, new = generate("iris/nucleus.yaml")
    assert (done.returncode, new) == (0, ["nucleus-tfs.Dockerfile", "nucleus.Dockerfile"])
    config, rest = printed_config(done.stdout)
    assert rest == ["✓ generated nucleus.Dockerfile", "✓ generated nucleus-tfs.Dockerfile"]
    assert (config["tfs_version"], config["tfs_container_dns"]) == ("2.3.0", "localhost")


def test_the_default_is_nucleus_yaml_in_the_current_folder(project, generate):  # N1
    root = project(PYTHON)
    done, new = generate(cwd=root)
    assert (done.returncode, new) == (0, ["nucleus.Dockerfile"])
    assert "COPY ./ /src/project/" in (root / "nucleus.Dockerfile").read_text()


def test_an_absolute_config_works_in_and_outside_of_the_project(project, generate, tmp_path):  # N1
    root = project(PYTHON)
    done, _ = generate(root / "nucleus.yaml")
    assert done.returncode == 0
    assert "COPY iris/ /src/project/" in (tmp_path / "nucleus.Dockerfile").read_text()
    (tmp_path / "elsewhere").mkdir()
    done, _ = generate(root / "nucleus.yaml", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0
    assert "build the image from" in done.stderr
    text = (tmp_path / "elsewhere" / "nucleus.Dockerfile").read_text()
    assert "COPY ./ /src/project/" in text
    assert text.startswith("# docker build -f nucleus.Dockerfile -t iris ../iris\n")


@pytest.mark.parametrize("config", ["", "type: nope\n", PYTHON + "models: {path: s3://b/m}\n"])
def test_an_invalid_config_writes_nothing(project, generate, config):  # N1, N15
    project(config)
    done, new = generate("iris/nucleus.yaml")
    assert done.returncode != 0
    assert new == []
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_local_libs_change_only_where_forebay_comes_from(dockerfile):  # N1
    installed = dockerfile(PYTHON).splitlines()
    local = dockerfile(PYTHON + "use_local_cortex_libs: true\n").splitlines()
    gone = [line for line in installed if line not in local]
    assert gone == [f'RUN {INDEX} pip --no-cache-dir install "forebay[nucleus]=={forebay.__version__}"']
    new = [line for line in local if line not in installed]
    assert [line.split()[0] for line in new] == ["COPY", "COPY", "RUN"]


def test_version(cli):  # N1
    done = cli("nucleus", "version")
    assert (done.returncode, done.stdout) == (0, f"nucleus cli: {forebay.__version__}\n")


def test_the_python_of_the_image(dockerfile, generate, project):  # N4
    assert "ARG BASE=python:3.12-slim\nFROM $BASE\n" in dockerfile(PYTHON + "py_version: 3.12\n")
    assert "ARG BASE=python:3.11-slim\nFROM $BASE\n" in dockerfile(PYTHON)
    done, _ = generate("iris/nucleus.yaml")
    assert "3.11" in done.stderr
    assert "3.6.9" in done.stderr
    project(PYTHON + 'py_version: "3.9\\nRUN x"\n')
    done, _ = generate("iris/nucleus.yaml")
    assert done.returncode != 0


def test_gpu_images(dockerfile):  # N6, N141
    gpu = PYTHON + "py_version: 3.11\ngpu: true\ngpu_version: {cuda: 11.0, cudnn: 8"
    text = dockerfile(gpu + "}\n")
    assert "FROM nvidia/cuda:11.0-cudnn8-runtime-ubuntu18.04\n" in text
    assert "CORTEX_IMAGE_TYPE=python-handler-gpu " in text
    assert "cudnn8-devel-ubuntu18.04\n" in dockerfile(gpu + ", development_image: true}\n")


def test_the_port_is_opened(dockerfile):  # N8
    text = dockerfile(PYTHON + "serve_port: 9123\n")
    assert "\nEXPOSE 9123\n" in text
    assert 'CMD ["forebay", "serve", "."]' in text
    assert "FOREBAY_HOST=0.0.0.0" in text


@pytest.mark.parametrize(
    "config, kind, more",
    [
        (PYTHON, "python-handler-cpu", ['CORTEX_TF_SERVING_HOST=""']),
        (TENSORFLOW, "tensorflow-handler", ["CORTEX_TF_SERVING_HOST=localhost", "CORTEX_TFS_VERSION=2.3.0"]),
        (TENSORFLOW + "tfs_container_dns: tfs\ntfs_version: 2.10\n", "tensorflow-handler", ["CORTEX_TFS_VERSION=2.10"]),
    ],
)
def test_variables_of_the_image(dockerfile, config, kind, more):  # N141
    text = dockerfile(config)
    for line in [
        f"CORTEX_IMAGE_TYPE={kind}",
        "CORTEX_LOG_CONFIG_FILE=/src/cortex/log_config.yaml",
        "CORTEX_MODEL_SERVER_CONFIG=/src/project/nucleus.yaml",
        "COPY iris/ /src/project/",
        *more,
    ]:
        assert line in text


def test_a_config_of_another_name_is_the_one_that_is_served(project, generate, tmp_path):  # N141
    project(PYTHON, name="my.yaml", folder="my project")
    done, _ = generate("my project/my.yaml")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "nucleus.Dockerfile").read_text()
    assert "CORTEX_MODEL_SERVER_CONFIG=/src/project/my.yaml " in text
    assert 'COPY ["my project/", "/src/project/"]' in text
    assert '"serve", "my.yaml"' in text


def steps_of(text):
    """The commands of the lines that install what the project wants."""
    lines = [line for line in text.splitlines() if line.startswith(f"RUN {INDEX} forebay nucleus exec")]
    return [" ".join(shlex.split(line)[9:]) for line in lines]


def test_steps_in_their_order(dockerfile):  # N139
    text = dockerfile(PYTHON, "requirements.txt", "conda-packages.txt", "dependencies.sh")
    assert steps_of(text) == [
        "bash -e dependencies.sh",
        "conda config --append channels conda-forge",
        "conda install -y --file conda-packages.txt",
        "pip --no-cache-dir install -r requirements.txt",
    ]
    assert text.rindex("forebay[nucleus]") > text.index("requirements.txt")


def test_no_files_no_steps(dockerfile):  # N139
    text = dockerfile(PYTHON)
    assert steps_of(text) == []
    assert "requirements.txt" not in text
    assert text.count("pip --no-cache-dir install") == 1


def test_the_project_is_there_before_its_steps_and_paths_may_be_nested(dockerfile):  # N140
    config = PYTHON + "dependencies: {pip: deps/my reqs.txt}\n"
    text = dockerfile(config, "deps/my reqs.txt", "setup.py", "pip.conf", "mypkg/__init__.py")
    assert (
        text.index("WORKDIR /src/project") < text.index("COPY iris/ /src/project/") < text.index("forebay nucleus exec")
    )
    assert steps_of(text) == ["pip --no-cache-dir install -r deps/my reqs.txt"]


def test_a_script_may_copy_the_pip_conf_of_its_project_to_its_usual_place(dockerfile):  # N140, F103
    script = "cp pip.conf /etc/pip.conf\n"  # the recipe of the original for a private index
    text = dockerfile(PYTHON, "requirements.txt", "pip.conf", **{"dependencies.sh": script})
    runs = [line for line in text.splitlines() if line.startswith("RUN --mount")]
    assert any("bash -e dependencies.sh" in line for line in runs)
    for line in runs:
        _, mount, config, *_ = line.split()
        assert "target" not in mount  # it is read-only there
        assert config == "PIP_CONFIG_FILE=/run/secrets/pip.conf"  # without the secret pip reads /etc/pip.conf


def test_requirements_from_git_get_git(dockerfile):  # N140
    text = dockerfile(PYTHON, **{"requirements.txt": "git+https://localhost/a.git#egg=a\n"})
    assert text.index("install -y --no-install-recommends git") < text.index("install -r requirements.txt")


def test_a_dependency_outside_of_the_project_is_refused(project, generate):  # N140
    project(PYTHON + "dependencies: {pip: ../requirements.txt}\n")
    done, new = generate("iris/nucleus.yaml")
    assert (done.returncode, new) == (2, [])
    assert "outside of the project" in done.stderr


def entrypoint_of(text):
    (line,) = [line for line in text.splitlines() if line.startswith("ENTRYPOINT ")]
    return json.loads(line.removeprefix("ENTRYPOINT "))


def test_the_image_of_tensorflow_serving(dockerfile):  # N142
    config = TENSORFLOW + "gpu: true\nprocesses: 2\nthreads_per_process: 2\n"
    text = dockerfile(config, name="nucleus-tfs.Dockerfile")
    assert "FROM tensorflow/serving:2.3.0-gpu\n" in text
    assert entrypoint_of(text) == [
        "tensorflow_model_server",
        "--port=9000",
        "--model_config_file=/etc/tfs/model_config_server.conf",
        "--max_num_load_retries=0",
        "--load_retry_interval_micros=30000000",
        "--grpc_channel_arguments=grpc.max_concurrent_streams=14",
    ]


def test_batching_of_tensorflow_serving(dockerfile, tmp_path):  # N142
    text = dockerfile(TENSORFLOW + BATCHING + "processes: 3\n", name="nucleus-tfs.Dockerfile")
    assert "FROM tensorflow/serving:2.3.0\n" in text
    assert "TF_MAX_BATCH_SIZE=2 \\\n    TF_BATCH_TIMEOUT_MICROS=20000000 \\\n    TF_NUM_BATCHED_THREADS=3\n" in text
    shell, option, script, *flags = entrypoint_of(text)
    assert flags[-2:] == ["--enable_batching=true", "--batching_parameters_file=/etc/tfs/batch_config.conf"]
    # What the container runs, with another program and another place.
    file = tmp_path / "batch.conf"
    script = script.replace("/etc/tfs/batch_config.conf", shlex.quote(str(file)))
    script = script.replace("exec tensorflow_model_server", "exec echo")
    found = os.popen(  # the shell is what is tested
        "TF_MAX_BATCH_SIZE=2 TF_BATCH_TIMEOUT_MICROS=20 TF_NUM_BATCHED_THREADS=3 "
        + shlex.join([shell, option, script, *flags])
    )
    with found:
        assert found.read().split()[0] == "--port=9000"
    assert file.read_text().splitlines() == [
        "max_batch_size { value: 2 }",
        "batch_timeout_micros { value: 20 }",
        "num_batch_threads { value: 3 }",
    ]


@pytest.fixture
def deployed(project, cli):
    """The services of the Compose file of a configuration, and the pod of its Deployment."""

    def make(config):
        root = project(config)
        done = cli("generate", root)
        assert done.returncode == 0, done.stderr
        compose = yaml.safe_load((root / "deploy/compose.yaml").read_text())
        deployment = yaml.safe_load((root / "deploy/kubernetes/deployment.yaml").read_text())
        return compose, deployment["spec"]["template"]["spec"]

    return make


def test_compose_and_pod_of_a_python_project(deployed, tmp_path):  # N143
    compose, pod = deployed(PYTHON + "serve_port: 9123\n")
    assert list(compose["services"]) == ["model"]
    assert compose["services"]["model"]["ports"] == ["9123:9123"]
    (handler,) = pod["containers"]
    assert handler["readinessProbe"]["exec"] == {"command": READY}
    assert handler["ports"] == [{"name": "http", "containerPort": 9123}]
    health = (tmp_path / "iris/deploy/Dockerfile").read_text().partition("HEALTHCHECK")[2].partition(" CMD ")[2]
    assert json.loads(health.splitlines()[0]) == READY


def test_compose_and_pod_of_a_tensorflow_project(deployed, tmp_path):  # N143, N156
    compose, pod = deployed(TENSORFLOW + "tfs_container_dns: localhost\n")
    handler, tfs = pod["containers"]
    names = {one["mountPath"]: one["name"] for one in handler["volumeMounts"]}
    assert tfs["volumeMounts"] == [{"name": names["/mnt"], "mountPath": "/mnt"}]
    assert [one["emptyDir"] for one in pod["volumes"] if one["name"] == names["/mnt"]] == [{}]
    assert tfs["ports"] == [{"containerPort": 9000}]
    handler, tfs = compose["services"]["model"], compose["services"]["tfs"]
    assert tfs["volumes"] == ["mnt:/mnt"]
    assert "mnt:/mnt" in handler["volumes"]
    assert "mnt" in compose["volumes"]
    assert tfs["network_mode"] == "service:model"
    assert (tmp_path / "iris/deploy" / tfs["build"]["dockerfile"]).read_text().startswith("FROM tensorflow/serving:")


def test_tensorflow_serving_is_called_what_the_project_calls_it(deployed):  # N143
    compose, pod = deployed(TENSORFLOW + "tfs_container_dns: my-tfs\n")
    assert "network_mode" not in compose["services"]["my-tfs"]
    assert pod["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": ["my-tfs"]}]


def test_tensorflow_serving_is_beside_those_that_name_it_alone(deployed):  # N134, N143
    compose, pod = deployed(TENSORFLOW)
    assert list(compose["services"]) == ["model"]
    assert len(pod["containers"]) == 1


@pytest.fixture
def installers(tmp_path):
    """A folder of programs that note what they were called with, for PATH."""

    def make(*names, status=0):
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in names:
            program = folder / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> "$NOTES"\nexit {status}\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        notes = tmp_path / "notes"
        notes.touch()
        return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(notes)}, notes

    return make


def test_prepare_runs_the_steps_in_the_project_with_its_variables(project, cli, installers):  # N139, N140, N144
    env, notes = installers("conda")
    script = 'echo "shell $A|$B|$CORTEX_PROJECT_DIR|$PWD" >> "$NOTES"\ncp pip.conf copied.conf\n'
    files = {"dependencies.sh": script, ".env": 'B="$A-x"\n', "conda-packages.txt": "", "pip.conf": "[global]\n"}
    root = project(PYTHON + 'env: {A: "it\'s  $x"}\n', "handler.py", **files)
    done = cli("nucleus", "prepare", root, env=env)
    assert done.returncode == 0, done.stderr
    assert notes.read_text().splitlines() == [
        f"shell it's  $x|it's  $x-x|{root}|{root}",
        "conda config --append channels conda-forge",
        "conda install -y --file conda-packages.txt",
    ]
    assert (root / "copied.conf").exists()


def test_prepare_installs_with_the_running_pip(project, cli):  # N144
    # Nothing is fetched: what is asked for is there already.
    root = project(PYTHON, "handler.py", **{"requirements.txt": "pytest\n", "types.py": "raise RuntimeError\n"})
    done = cli("nucleus", "prepare", root, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert f"{sys.executable} -P -m pip --no-cache-dir install -r requirements.txt" in done.stderr
    assert "already satisfied: pytest" in done.stdout


def test_a_step_that_fails_ends_prepare(project, cli, installers):  # N139
    env, notes = installers("conda", status=4)
    root = project(PYTHON, "handler.py", "conda-packages.txt", **{"dependencies.sh": "false\ntouch after\n"})
    done = cli("nucleus", "prepare", root, env=env)
    assert done.returncode == 2
    assert "dependencies.sh: bash ended with status 1" in done.stderr
    assert notes.read_text() == ""
    assert not (root / "after").exists()


def test_prepare_without_conda_says_so(project, cli):  # N144
    root = project(PYTHON, "handler.py", "conda-packages.txt")
    done = cli("nucleus", "prepare", root, env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 2
    assert "conda, which installs it, is not in PATH" in done.stderr


def test_exec_hands_on_the_status(project, cli):  # N139
    root = project(PYTHON + "env: {A: '7'}\n")
    done = cli("nucleus", "exec", "--config", root / "nucleus.yaml", "--", "sh", "-c", 'exit "$A"')
    assert done.returncode == 7
    assert cli("nucleus", "exec", "--config", root / "nucleus.yaml", "--").returncode == 2
    assert cli("nucleus", "exec", "--config", root, "--", "no-such-program").returncode == 2


def test_what_exec_is_to_run_is_looked_for_where_it_runs_and_told_where_it_cannot(project, cli):
    root = project(PYTHON)
    for name, text in (("installs", "#!/bin/sh\npwd\n"), ("headless", "pwd\n")):
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    asked = "nucleus", "exec", "--config", root, "--"
    assert cli(*asked, "./installs").stdout.strip() == str(root)
    assert cli(*asked, "./nowhere").stderr == f"forebay: ./nowhere is not to be found in {root}\n"
    assert cli(*asked, "./headless").stderr == "forebay: ./headless cannot be run: Exec format error\n"


def test_serving_installs_nothing_and_names_what_is_missing(project, cli):  # N144
    handler = "import a_package_nobody_has\nclass Handler:\n    def handle_get(self):\n        pass\n"
    root = project(PYTHON, **{"handler.py": handler, "requirements.txt": "a-package-nobody-has\n"})
    done = cli("serve", root, "--http-port", "0", "--state-dir", root / "state")
    assert done.returncode != 0
    assert "a_package_nobody_has" in done.stderr
    assert "requirements.txt" in done.stderr
