# SPDX-License-Identifier: Apache-2.0
"""The environment and the import path of a project's worker processes.

What wins, from the weakest: the environment the server was started in, the CORTEX_* variables the original sets, `env`
of the configuration, `.env` of the project. Nothing here changes the server, which has its settings from the
configuration; so that a project cannot change the level of the logs either, workers get it under a name of ours.

PYTHONPATH needs two steps. A handler, and what it starts, sees the value the original would have given it. But an
interpreter puts those folders before the standard library, so that a project with a `queue.py` would break the worker
it runs in. Workers are therefore started with the PYTHONPATH the server has, carry the full one under another name,
and `settle` puts it in place once the worker is up, with its folders at the end of `sys.path`.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from forebay.errors import ConfigError
from forebay.surfaces.nucleus.project_settings import DEFAULT_TFS_HOST, NucleusConfig

DOT_ENV = ".env"
DOT_ENV_TIMEOUT_S = 30.0
MODEL_DIR = Path("/mnt/model")
LOG_CONFIG_FILE = "/src/cortex/log_config.yaml"
TFS_PORT = "9000"

PYTHONPATH = "PYTHONPATH"
PENDING_PYTHONPATH = "FOREBAY_NUCLEUS_PYTHONPATH"
LOG_LEVEL = "FOREBAY_NUCLEUS_LOG_LEVEL"

# The outputs of `.env` go to stderr, so that stdout holds the variables only; a failing command in it is not fatal,
# as it was not in the original; `command -p` finds `env` whatever `.env` made of PATH.
_SOURCE = 'set -a; . "./$1" >&2; set +a; command -p env -0'
# A second process waits for the end of the pipe that the server holds, and ends the session if the server was killed.
_LEASHED = 'exec 3<&0 </dev/null; { read -r _; kill -9 0; } <&3 >/dev/null 2>&1 & exec 3<&-; exec "$@"'
# Bash writes these for itself.
_OF_BASH = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})

_log = logging.getLogger(__name__)


def worker_environment(
    config: NucleusConfig,
    port: int,
    base: Mapping[str, str],
    *,
    model_dir: Path = MODEL_DIR,
    log_level: str | None = None,
) -> dict[str, str]:
    """Return the environment to start worker processes with; `settle`, run in them, completes it.

    Args:
        base: The environment of the server.
        log_level: What the command line says instead of the configuration.

    Raises:
        ConfigError: If `.env` cannot be read.
    """
    env = handler_environment(config, port, base, model_dir=model_dir)
    pythonpath = env.pop(PYTHONPATH, "")
    if base.get(PYTHONPATH):
        env[PYTHONPATH] = base[PYTHONPATH]
    env[PENDING_PYTHONPATH] = pythonpath
    env[LOG_LEVEL] = log_level or config.log_level
    return env


def handler_environment(
    config: NucleusConfig, port: int, base: Mapping[str, str], *, model_dir: Path = MODEL_DIR
) -> dict[str, str]:
    """Return the environment as the handler is to see it; raises ConfigError if `.env` cannot be read."""
    env = {**base, **_cortex_variables(config, port, base, model_dir), **config.env}
    existing = [folder for folder in env.get(PYTHONPATH, "").split(os.pathsep) if folder]
    env[PYTHONPATH] = os.pathsep.join([*existing, str(config.python_dir)])
    return _source(config.project_dir, env)


def import_path(config: NucleusConfig) -> list[str]:
    """Return the folders to append to `sys.path`: the project's Python folder, its root and the handler's folder."""
    folders = [config.python_dir, config.project_dir, config.handler_file.parent]
    return list(dict.fromkeys(os.path.normpath(folder) for folder in folders))


def settle() -> str | None:
    """Complete the environment of this worker process.

    PYTHONPATH gets its full value and its folders are appended to `sys.path`.

    Returns:
        The level of the logs; None in a process that was not started with `worker_environment`.
    """
    pending = os.environ.pop(PENDING_PYTHONPATH, None)
    if pending:
        os.environ[PYTHONPATH] = pending
        folders = [folder for folder in pending.split(os.pathsep) if folder]
        sys.path.extend(folder for folder in folders if folder not in sys.path)
    elif pending is not None:
        os.environ.pop(PYTHONPATH, None)
    return os.environ.pop(LOG_LEVEL, None)


def _cortex_variables(config: NucleusConfig, port: int, base: Mapping[str, str], model_dir: Path) -> dict[str, str]:
    variables = {
        "CORTEX_PROJECT_DIR": str(config.project_dir),
        "CORTEX_MODEL_DIR": str(model_dir),
        "CORTEX_PYTHON_PATH": str(config.python_dir),
        "CORTEX_LOG_LEVEL": config.log_level.upper(),
        "CORTEX_LOG_CONFIG_FILE": base.get("CORTEX_LOG_CONFIG_FILE", LOG_CONFIG_FILE),
        "CORTEX_SERVING_PORT": str(port),
        "CORTEX_SERVING_PROTOCOL": "grpc" if config.protobuf_path else "http",
        "CORTEX_PROCESSES": str(config.processes),
        "CORTEX_THREADS_PER_PROCESS": str(config.threads_per_process),
        "CORTEX_MAX_CONCURRENCY": str(config.max_concurrency),
        "CORTEX_DEPENDENCIES_PIP": config.dependencies.pip,
        "CORTEX_DEPENDENCIES_CONDA": config.dependencies.conda,
        "CORTEX_DEPENDENCIES_SHELL": config.dependencies.shell,
        "CORTEX_MODEL_SERVER_CONFIG": str(config.file),
    }
    if config.protobuf_path:
        variables["CORTEX_PROTOBUF_FILE"] = str(config.project_dir / config.protobuf_path)
    if config.type == "tensorflow":
        variables["CORTEX_TF_BASE_SERVING_PORT"] = TFS_PORT
        variables["CORTEX_TF_SERVING_HOST"] = config.tfs_container_dns or DEFAULT_TFS_HOST
    return variables


def _source(project_dir: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Let bash read the project's `.env` on top of `env`; once, for all workers."""
    file = project_dir / DOT_ENV
    if not file.is_file():
        return dict(env)
    bash = shutil.which("bash", path=env.get("PATH"))
    if bash is None:
        raise ConfigError(f"{file}: bash, which reads it, is not in PATH")
    # BASH_ENV would be read first, as if it were part of the file.
    clean = {name: value for name, value in env.items() if name != "BASH_ENV"}
    status, _, errors = _run(bash, ["-n", DOT_ENV], project_dir, clean)
    if status != 0:
        raise ConfigError(f"{file}: {(errors.splitlines() or ['bash cannot read it'])[-1]}")
    status, output, errors = _run(bash, ["--noprofile", "--norc", "-c", _SOURCE, "bash", DOT_ENV], project_dir, clean)
    if not output.endswith(b"\0"):
        raise ConfigError(f"{file}: it ends the shell that reads it (exit status {status}) {errors}".rstrip())
    if errors:
        _log.warning("%s wrote: %s", file, errors)
    pairs = (os.fsdecode(entry).partition("=") for entry in output.split(b"\0") if entry)
    sourced = {name: value for name, _, value in pairs if name not in _OF_BASH}
    return {**sourced, **{name: env[name] for name in (*_OF_BASH, "BASH_ENV") if name in env and name not in sourced}}


def _run(bash: str, arguments: list[str], folder: Path, env: Mapping[str, str]) -> tuple[int, bytes, str]:
    """Run bash in a session of its own; returns its exit status, output and errors.

    Nothing of it is left behind, even if this process is killed meanwhile. Its output goes to files: a process it left
    in the background would keep a pipe open for ever.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [bash, "--noprofile", "--norc", "-c", _LEASHED, "bash", bash, *arguments],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = process.wait(DOT_ENV_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            text = f"{folder / DOT_ENV}: bash was not done with it after {DOT_ENV_TIMEOUT_S:g} seconds"
            raise ConfigError(text) from error
        finally:
            _end(process)
        output.seek(0)
        errors.seek(0)
        return status, output.read(), errors.read().decode(errors="replace").strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
