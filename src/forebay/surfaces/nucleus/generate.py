# SPDX-License-Identifier: Apache-2.0
"""Container files for a project: Dockerfiles, and on request a compose file and a pod manifest.

The steps that install what a project depends on are written down once, in `steps`: an image runs them line by line, and
`forebay nucleus prepare` runs them for the interpreter at hand. In an image each goes through `forebay nucleus exec`,
which gives it the project's folder and variables; a shell could not hand on a value with quotes or newlines unharmed.
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
from typing import Any

import msgspec
import yaml

import forebay
from forebay.errors import ConfigError
from forebay.surfaces.nucleus.config import DEFAULT_TFS_HOST, NucleusConfig, ServerSideBatching, not_yet
from forebay.surfaces.nucleus.environment import LOG_CONFIG_FILE, TFS_PORT, handler_environment

PROJECT = "/src/project"
SHARED = "/mnt"
READY_FILE = "/run/workspace/api_readiness.txt"
TFS_MODELS_FILE = "/etc/tfs/model_config_server.conf"
TFS_BATCHING_FILE = "/etc/tfs/batch_config.conf"

OLDEST_PYTHON = (3, 11)
"""What forebay itself runs on."""

CONDA_IMAGE = "condaforge/miniforge3"
CONDA_ENV = "/opt/conda/envs/env"

_LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}


class InstallStep(msgspec.Struct, frozen=True):
    """Something to install.

    Attributes:
        name: shell, conda or pip.
        file: The file that says what, relative to the project.
        commands: What does it, in the project's folder.
    """

    name: str
    file: str
    commands: tuple[tuple[str, ...], ...]


class Generated(msgspec.Struct, frozen=True):
    """A file to write, and what to tell about it."""

    name: str
    text: str


def steps(config: NucleusConfig, pip: tuple[str, ...] = ("pip",)) -> list[InstallStep]:
    """Return the installation steps of a project in their order; a file that is not there makes no step.

    Args:
        config: The project.
        pip: How pip is called.

    Raises:
        ConfigError: If a file lies outside the project, where no image could have it.
    """
    files = config.dependencies
    found = [
        InstallStep("shell", files.shell, (("bash", "-e", files.shell),)),
        InstallStep(
            "conda",
            files.conda,
            (
                ("conda", "config", "--append", "channels", "conda-forge"),
                ("conda", "install", "-y", "--file", files.conda),
            ),
        ),
        InstallStep("pip", files.pip, ((*pip, "--no-cache-dir", "install", "-r", files.pip),)),
    ]
    for step in found:
        if not _is_inside(config.project_dir / step.file, config.project_dir):
            key = f"dependencies.{step.name}"
            raise ConfigError(f"{config.file}: {key}: {step.file} is outside of the project, {config.project_dir}")
    return [step for step in found if (config.project_dir / step.file).is_file()]


def generate(config: NucleusConfig, context: Path, *, compose: bool, pod: bool) -> tuple[list[Generated], list[str]]:
    """Return the container files of a project, and warnings.

    Args:
        config: The project.
        context: The folder the image is built from; if the project is not in it, the project's folder.
        compose: Whether to make a compose file as well.
        pod: Whether to make a pod manifest as well.
    """
    warnings: list[str] = []
    root = context if _is_inside(config.project_dir, context) else config.project_dir
    if root != context:
        warnings.append(f"{config.project_dir} is not in {context}: build the image from {root}")
    version, warning = _python_version(config)
    warnings += warning
    warnings += [f"{key}: {text}, the image will not start" for key, text in not_yet(config).items()]
    files = [Generated("nucleus.Dockerfile", _handler_dockerfile(config, root, _relative(root, context), version))]
    if config.type == "tensorflow":
        files.append(Generated("nucleus-tfs.Dockerfile", _tfs_dockerfile(config)))
    if compose:
        files.append(Generated("nucleus.compose.yaml", _dump(_compose(config, root, context))))
    if pod:
        files.append(Generated("nucleus.pod.yaml", _dump(_pod(config))))
    return files, warnings


def defaulted(config: NucleusConfig) -> str:
    """Return the configuration with every default filled in, as YAML."""
    return _dump(config.defaulted())


def prepare(config: NucleusConfig, tell: Callable[[str], None]) -> None:
    """Install what the project depends on for the interpreter at hand.

    Raises:
        ConfigError: If a step fails; those after it are not run.
    """
    # -P: the working folder is the project's, and a `types.py` in it must not end pip.
    for step in steps(config, (sys.executable, "-P", "-m", "pip")):
        if shutil.which(step.commands[0][0]) is None:
            raise ConfigError(
                f"{step.file}: {step.commands[0][0]} is needed to install it and is not to be found in PATH"
            )
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
    program = shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        raise ConfigError(f"{command[0]} is not to be found in PATH")
    return subprocess.run(list(command), executable=program, cwd=config.project_dir, env=env, check=False).returncode


# The handler's image


def _handler_dockerfile(config: NucleusConfig, root: Path, context: str, version: str) -> str:
    found = steps(config)
    has_conda = any(step.name == "conda" for step in found)
    lines = [
        f"# docker build -f nucleus.Dockerfile -t {_image(config)} {context}",
        *_base(config, version, with_conda=has_conda),
        "",
        "ENV PYTHONUNBUFFERED=1 \\",
        f"    CORTEX_IMAGE_TYPE={_image_type(config)} \\",
        f"    CORTEX_TF_SERVING_HOST={_quoted(config.tfs_container_dns or '')} \\",
        f"    CORTEX_LOG_CONFIG_FILE={LOG_CONFIG_FILE} \\",
        *([f"    CORTEX_TFS_VERSION={config.tfs_version} \\"] if config.type == "tensorflow" else []),
        f"    CORTEX_MODEL_SERVER_CONFIG={_quoted(_config_path(config))}",
        "",
        *_forebay(config),
        "",
        "WORKDIR " + PROJECT,
        f"COPY {_copied(_relative(config.project_dir, root) + '/', PROJECT + '/')}",
    ]
    if any(step.name == "pip" and "git+" in _text(config, step) for step in found):
        lines.append("RUN apt-get update && apt-get install -y --no-install-recommends git ca-certificates")
    for step in found:
        lines += [f"RUN {_in_project(config, command)}" for command in step.commands]
    if found:
        lines += ["# Whatever the steps above replaced or removed, forebay has what it needs.", *_forebay_again(config)]
    target = PROJECT if config.file.name == "nucleus.yaml" else _config_path(config)
    command = ["forebay", "serve", target, "--host", "0.0.0.0"]  # noqa: S104 - in a container only it is alone
    lines += ["", f"EXPOSE {config.serve_port}", f"CMD {json.dumps(command)}", ""]
    return "\n".join(lines)


def _base(config: NucleusConfig, version: str, *, with_conda: bool) -> list[str]:
    """Choose the image to begin with: Python's own, unless CUDA or conda packages are asked for."""
    if config.gpu_version is None and not with_conda:
        return [f"FROM python:{version}-slim"]
    lines = [f"FROM {CONDA_IMAGE}"]
    if config.gpu_version is not None:
        kind = "devel" if config.gpu_version.development_image else "runtime"
        cuda, cudnn = config.gpu_version.cuda, config.gpu_version.cudnn
        lines = [
            f"FROM nvidia/cuda:{cuda}-cudnn{cudnn}-{kind}-ubuntu18.04",
            f"COPY --from={CONDA_IMAGE} /opt/conda /opt/conda",
        ]
    return [
        *lines,
        f"RUN /opt/conda/bin/conda create -y -p {CONDA_ENV} python={version} pip",
        f"ENV CONDA_PREFIX={CONDA_ENV} \\",
        f"    PATH={CONDA_ENV}/bin:/opt/conda/bin:$PATH",
    ]


def _forebay(config: NucleusConfig) -> list[str]:
    if config.use_local_cortex_libs:
        copies = ["COPY pyproject.toml LICENSE /src/forebay/", "COPY src/ /src/forebay/src/"]
        return [*copies, *_forebay_again(config)]
    return _forebay_again(config)


def _forebay_again(config: NucleusConfig) -> list[str]:
    local = config.use_local_cortex_libs
    what = "/src/forebay[nucleus]" if local else f"forebay[nucleus]=={forebay.__version__}"
    return [f'RUN python -m pip --no-cache-dir install "{what}"']


def _in_project(config: NucleusConfig, command: Sequence[str]) -> str:
    words = ["forebay", "nucleus", "exec", "--config", _config_path(config), "--", *command]
    return " ".join(word if re.fullmatch(r"[\w@%+=:,./-]+", word) else _single_quoted(word) for word in words)


def _text(config: NucleusConfig, step: InstallStep) -> str:
    return (config.project_dir / step.file).read_text(encoding="utf-8", errors="replace")


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


# The image of TensorFlow Serving


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
        f"# docker build -f nucleus-tfs.Dockerfile -t {_image(config)}-tfs .",
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


# Several containers


def _compose(config: NucleusConfig, root: Path, context: Path) -> dict[str, Any]:
    where = _relative(root, context)
    dockerfile = "nucleus.Dockerfile" if root == context else str(context / "nucleus.Dockerfile")
    handler: dict[str, Any] = {
        "build": {"context": where, "dockerfile": dockerfile},
        "image": _image(config),
        "ports": [f"{config.serve_port}:{config.serve_port}"],
        "healthcheck": {"test": ["CMD", "ls", READY_FILE], "interval": "5s"},
    }
    services: dict[str, Any] = {"handler": handler}
    compose: dict[str, Any] = {"services": services}
    if config.type == "tensorflow":
        handler["volumes"] = [f"models:{SHARED}"]
        host = config.tfs_container_dns or DEFAULT_TFS_HOST
        # On localhost, the handler finds TensorFlow Serving in its own network, as in a pod.
        near = host in _LOCAL_HOSTS
        services["tfs" if near else host] = {
            "build": {"context": ".", "dockerfile": "nucleus-tfs.Dockerfile"},
            "image": _image(config) + "-tfs",
            "volumes": [f"models:{SHARED}"],
            **({"network_mode": "service:handler"} if near else {}),
        }
        compose["volumes"] = {"models": {}}
    return compose


def _pod(config: NucleusConfig) -> dict[str, Any]:
    handler: dict[str, Any] = {
        "name": "handler",
        "image": _image(config),
        "ports": [{"containerPort": config.serve_port}],
        "readinessProbe": {"exec": {"command": ["ls", READY_FILE]}},
    }
    containers = [handler]
    spec: dict[str, Any] = {"containers": containers}
    if config.type == "tensorflow":
        mounts = [{"name": "models", "mountPath": SHARED}]
        handler["volumeMounts"] = mounts
        tfs = {
            "name": "tfs",
            "image": _image(config) + "-tfs",
            "ports": [{"containerPort": int(TFS_PORT)}],
            "volumeMounts": [dict(mount) for mount in mounts],
        }
        containers.append(tfs)
        spec["volumes"] = [{"name": "models", "emptyDir": {}}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": _image(config)}, "spec": spec}


# Words of the files


def _image(config: NucleusConfig) -> str:
    """Name the image after the project's folder, in letters that are allowed there."""
    name = re.sub(r"[^a-z0-9]+", "-", config.project_dir.name.lower()).strip("-")
    return name[:50].strip("-") or "nucleus"


def _config_path(config: NucleusConfig) -> str:
    return f"{PROJECT}/{config.file.name}"


def _copied(source: str, target: str) -> str:
    words = [source, target]
    return " ".join(words) if re.fullmatch(r"[\w./-]+", source) else json.dumps(words)


def _quoted(text: str) -> str:
    if re.fullmatch(r"[\w./:-]*", text):
        return text or '""'
    return '"' + re.sub(r'([\\"$])', r"\\\1", text) + '"'


def _single_quoted(word: str) -> str:
    return "'" + word.replace("'", "'\"'\"'") + "'"


def _relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder))


def _dump(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
