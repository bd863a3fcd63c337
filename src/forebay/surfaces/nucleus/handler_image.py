# SPDX-License-Identifier: Apache-2.0
"""What a container of a Nucleus project needs, and the same steps for the interpreter at hand.

In an image each step goes through `forebay nucleus exec`, which gives it the project's folder and variables; a shell
could not hand on a value with quotes or newlines unharmed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from forebay.errors import ConfigError
from forebay.surfaces.container.dockerfile import CONDA_IMAGE, conda_base, dockerfile
from forebay.surfaces.container.install_steps import InstallStep, steps
from forebay.surfaces.container.recipe import OLDEST_PYTHON, Recipe, Sidecar, called, inside
from forebay.surfaces.nucleus.environment import LOG_CONFIG_FILE, TFS_PORT, handler_environment
from forebay.surfaces.nucleus.project_settings import DEFAULT_TFS_HOST, NucleusConfig, ServerSideBatching
from forebay.surfaces.nucleus.readiness import DEFAULT_FOLDER, READY_FILE

PROJECT = "/src/project"
SHARED = "/mnt"
TFS_MODELS_FILE = "/etc/tfs/model_config_server.conf"
TFS_BATCHING_FILE = "/etc/tfs/batch_config.conf"

_LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}


def recipe(config: NucleusConfig, state: Path = DEFAULT_FOLDER) -> Recipe:
    """Return what a container of a project needs; the folder `state` tells when it is ready.

    Raises:
        ConfigError: If a file that says what to install lies outside the project.
    """
    version, warnings = _python_version(config)
    _steps(config)  # what is wrong with them is said now
    base: tuple[str, ...] = ()
    if config.gpu_version is not None:
        kind = "devel" if config.gpu_version.development_image else "runtime"
        cuda, cudnn = config.gpu_version.cuda, config.gpu_version.cudnn
        image = f"FROM nvidia/cuda:{cuda}-cudnn{cudnn}-{kind}-ubuntu18.04"
        base = tuple(conda_base(version, image, f"COPY --from={CONDA_IMAGE} /opt/conda /opt/conda"))
    local = ("COPY pyproject.toml LICENSE /src/forebay/", "COPY src/ /src/forebay/src/", "/src/forebay")
    models = config.served_models
    sources = [] if models is None else [models.path, models.dir, *(one.path for one in models.paths or ())]
    host = config.tfs_container_dns or DEFAULT_TFS_HOST
    tfs = Sidecar(
        name="tfs",
        # On localhost, the handler finds TensorFlow Serving in its own network, as in a pod.
        host="" if host in _LOCAL_HOSTS else host,
        dockerfile=_tfs_dockerfile(config),
        port=int(TFS_PORT),
    )
    variables = {
        "PYTHONUNBUFFERED": "1",
        "CORTEX_IMAGE_TYPE": _image_type(config),
        "CORTEX_TF_SERVING_HOST": config.tfs_container_dns or "",
        "CORTEX_LOG_CONFIG_FILE": LOG_CONFIG_FILE,
        **({"CORTEX_TFS_VERSION": config.tfs_version or ""} if config.type == "tensorflow" else {}),
        "CORTEX_MODEL_SERVER_CONFIG": _config_path(config),
    }
    batch = 1 if config.server_side_batching is None else config.server_side_batching.max_batch_size
    is_grpc = config.protobuf_path is not None
    return Recipe(
        name=called(config.project_dir.name),
        folder=config.project_dir,
        home=PROJECT,
        serve=("." if config.file.name == "nucleus.yaml" else config.file.name,),
        base=base,
        python=version,
        variables=variables,
        extras=(
            "nucleus",
            *(["grpc", "protos"] if is_grpc else []),
            *(["buckets"] if any("://" in (source or "") for source in sources) else []),
        ),
        forebay=local if config.use_local_cortex_libs else (),
        files=(config.dependencies.shell, config.dependencies.conda, config.dependencies.pip),
        step=("forebay", "nucleus", "exec", "--config", _config_path(config), "--"),
        http_port=None if is_grpc else config.serve_port,
        grpc_port=config.serve_port if is_grpc else None,
        ready=("ls", str(state / READY_FILE)),
        writes=(SHARED, str(state)),
        gpus=int(config.gpu),
        workers=config.processes,
        capacity=config.processes * max(config.threads_per_process, batch),
        sidecars=(tfs,) if config.type == "tensorflow" and "tfs_container_dns" in config.given else (),
        warnings=tuple(warnings),
    )


def generate(config: NucleusConfig, context: Path) -> tuple[dict[str, str], list[str]]:
    """Return the Dockerfiles of a project as the original names them, and warnings.

    Args:
        context: The folder the image is built from; if the project is not in it, the project's folder.
    """
    needed = recipe(config)
    warnings = [*needed.warnings]
    try:
        root, source = context, inside(config.project_dir, context)
    except ConfigError:
        root, source = config.project_dir, "."
        warnings.append(f"{root} is not in {context}: build the image from {root}")
    where = Path(os.path.relpath(root, context)).as_posix()
    build = f"docker build -f nucleus.Dockerfile -t {needed.name} {where}"
    files = {"nucleus.Dockerfile": dockerfile(needed, build, source)}
    if config.type == "tensorflow":
        build = f"# docker build -f nucleus-tfs.Dockerfile -t {needed.name}-tfs ."
        files["nucleus-tfs.Dockerfile"] = f"{build}\n{_tfs_dockerfile(config)}"
    return files, warnings


def defaulted(config: NucleusConfig) -> str:
    """Return the configuration with every default filled in, as YAML."""
    return yaml.safe_dump(config.defaulted(), sort_keys=False, allow_unicode=True)


def prepare(config: NucleusConfig, tell: Callable[[str], None]) -> None:
    """Install what the project depends on for the interpreter at hand.

    Raises:
        ConfigError: If a step fails; those after it are not run.
    """
    # -P: the working folder is the project's, and a `types.py` in it must not end pip.
    for step in _steps(config, (sys.executable, "-P", "-m", "pip")):
        if shutil.which(step.commands[0][0]) is None:
            raise ConfigError(f"{step.file}: {step.commands[0][0]}, which installs it, is not in PATH")
        for command in step.commands:
            tell(" ".join(command))
            status = execute(config, command)
            if status != 0:
                raise ConfigError(f"{step.file}: {command[0]} ended with status {status}; nothing after it was run")


def execute(config: NucleusConfig, command: Sequence[str]) -> int:
    """Run a command in the project's folder with the project's variables; returns its exit status."""
    env = handler_environment(config, config.serve_port, os.environ)
    # Installers are Python programs as well: a `types.py` of the project must not end them.
    env.pop("PYTHONPATH", None)
    if os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    is_path = os.sep in command[0]  # meant from the folder that it runs in
    program = shutil.which(config.project_dir / command[0] if is_path else command[0], path=env.get("PATH"))
    if program is None:
        raise ConfigError(f"{command[0]} is not to be found in {config.project_dir if is_path else 'PATH'}")
    try:
        ran = subprocess.run(list(command), executable=program, cwd=config.project_dir, env=env, check=False)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from error
    return ran.returncode


def _steps(config: NucleusConfig, pip: tuple[str, ...] = ("pip",)) -> list[InstallStep]:
    files = config.dependencies
    try:
        return steps(config.project_dir, (files.shell, files.conda, files.pip), pip)
    except ConfigError as error:
        raise ConfigError(f"{config.file}: {error.message}") from error


def _image_type(config: NucleusConfig) -> str:
    if config.type == "tensorflow":
        return "tensorflow-handler"
    return "python-handler-gpu" if config.gpu else "python-handler-cpu"


def _python_version(config: NucleusConfig) -> tuple[str, list[str]]:
    """Return the Python of the image, and a warning if it cannot be the one asked for."""
    parts = [int(part) for part in re.findall(r"\d+", config.py_version)[:2]]
    if len(parts) == 1:
        parts.append(OLDEST_PYTHON[1] if parts[0] == OLDEST_PYTHON[0] else 0)
    if tuple(parts) >= OLDEST_PYTHON:
        return config.py_version, []
    oldest = ".".join(str(part) for part in OLDEST_PYTHON)
    return oldest, [f"py_version: forebay needs Python {oldest}, the image has that instead of {config.py_version}"]


def _tfs_dockerfile(config: NucleusConfig) -> str:
    streams = config.processes * config.threads_per_process + 10
    flags = [
        f"--port={TFS_PORT}",
        f"--model_config_file={TFS_MODELS_FILE}",
        "--max_num_load_retries=0",
        "--load_retry_interval_micros=30000000",
        f"--grpc_channel_arguments=grpc.max_concurrent_streams={streams}",
    ]
    lines = [
        f"FROM tensorflow/serving:{config.tfs_version}{'-gpu' if config.gpu else ''}",
        "",
        f"RUN mkdir -p /etc/tfs && printf 'model_config_list {{\\n}}\\n' > {TFS_MODELS_FILE}",
    ]
    start = ["tensorflow_model_server"]
    if config.server_side_batching is not None:
        lines += _tfs_batching(config.server_side_batching, config.processes)
        flags += ["--enable_batching=true", f"--batching_parameters_file={TFS_BATCHING_FILE}"]
        # Written when the container starts, so that the variables may be changed from outside.
        names = ("max_batch_size", "batch_timeout_micros", "num_batch_threads")
        lines_of_file = "".join(f"{name} {{ value: %s }}\\n" for name in names)
        values = '"$TF_MAX_BATCH_SIZE" "$TF_BATCH_TIMEOUT_MICROS" "$TF_NUM_BATCHED_THREADS"'
        write = f"printf '{lines_of_file}' {values} > {TFS_BATCHING_FILE}"
        start = ["/bin/sh", "-c", f'{write} && exec tensorflow_model_server "$@"', "tfs-run"]
    return "\n".join([*lines, "", f"EXPOSE {TFS_PORT}", f"ENTRYPOINT {json.dumps([*start, *flags])}", ""])


def _tfs_batching(batching: ServerSideBatching, processes: int) -> list[str]:
    return [
        "",
        f"ENV TF_MAX_BATCH_SIZE={batching.max_batch_size} \\",
        f"    TF_BATCH_TIMEOUT_MICROS={round(batching.batch_interval_seconds * 1_000_000)} \\",
        f"    TF_NUM_BATCHED_THREADS={processes}",
    ]


def _config_path(config: NucleusConfig) -> str:
    return f"{PROJECT}/{config.file.name}"
