# SPDX-License-Identifier: Apache-2.0
"""All files that are written for a project: they are the templates beside this, filled with what its recipe says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from forebay.errors import ConfigError
from forebay.surfaces.container.context_files import ignoring
from forebay.surfaces.container.dockerfile import WHEELS, dockerfile
from forebay.surfaces.container.generate_options import Wanted
from forebay.surfaces.container.install_steps import steps
from forebay.surfaces.container.manifests import MOST, kustomization, scrape, whole
from forebay.surfaces.container.pod import (
    BUCKET,
    KEYS,
    SHARED_MEMORY,
    TLS,
    WIRE_SECRET,
    Role,
    image_of,
    pod,
    ports_of,
    slug,
    stop_s,
)
from forebay.surfaces.container.ray_cluster import ray_cluster
from forebay.surfaces.container.recipe import Recipe, Sidecar
from forebay.surfaces.container.split import certificates_script, split
from forebay.surfaces.container.template_filling import block, filled, scalar, shown

CERTIFICATES: Final = "wire-certificates.sh"
IGNORED: Final = "Dockerfile.dockerignore"


def files_of(recipe: Recipe, wanted: Wanted) -> dict[str, str | bytes]:
    """Return the files, by their names below the output's folder.

    Raises:
        ConfigError: If the project cannot be split, and that is wanted.
    """
    output, image, replicas, *_ = wanted
    context = output if recipe.folder is None else recipe.folder
    common = {
        "name": recipe.name,
        "image": scalar(image),
        "replicas": str(replicas),
        "most_replicas": str(MOST * replicas),
        "stop_s": f"{stop_s(recipe):.0f}",
    }
    speaks = {"PROTOCOL": recipe.protocol} if recipe.protocol and recipe.http_port is not None else {}
    predictor = Role("kserve-container", environment=speaks, cpu=recipe.workers, gpus=recipe.gpus)

    def deployed(name: str, **values: str | Sequence[str]) -> str:
        return filled(name, common, {"file": shown(output / name), **values})

    manifests = _manifests(recipe, wanted)
    texts: dict[str, str | bytes] = {
        "Dockerfile": dockerfile(recipe, next_commands(recipe, wanted)[0]),
        **{_dockerfile_of(one): one.dockerfile for one in recipe.sidecars},
        "kubernetes/kustomization.yaml": kustomization(wanted, [*manifests]),
        **{f"kubernetes/{name}": text for name, text in manifests.items()},
    }
    if not wanted.is_kubernetes_only:
        texts["compose.yaml"] = deployed("compose.yaml", **_compose(recipe, wanted, context))
        texts["kserve.yaml"] = deployed("kserve.yaml", pod=pod(recipe, image, predictor), scrape=block(scrape(recipe)))
    if wanted.split is not None:
        texts["prometheus-adapter.yaml"] = filled("queue-adapter.yaml")
        if wanted.split.tls == "secret":
            texts[CERTIFICATES] = certificates_script(recipe, shown(output / CERTIFICATES))
    elif recipe.http_port is not None and not wanted.has_ray:
        texts["prometheus-adapter.yaml"] = deployed("prometheus-adapter.yaml")
    own = [os.path.relpath(output / name.partition("/")[0], context) for name in texts]
    more = own if output == context else [os.path.relpath(output, context)]
    more += wanted.environments
    more += [os.path.relpath(file, context) for file in recipe.tls or ()]
    if recipe.index is not None and not any("pip.conf" in step.text for step in steps(context, recipe.files)):
        more.append(recipe.index.name)
    more += [os.path.relpath(file, context) for file in wanted.secrets]
    inside = sorted({ignoring(one) for one in more if not f"{one}/".startswith("../")})
    inside += [] if recipe.step else ["**/.env"]
    texts[IGNORED] = filled("dockerignore", {"own": _own_ignored(context), "more": inside})
    if recipe.wheel is not None:
        texts[f"{WHEELS}/{recipe.wheel.name}"] = recipe.wheel.content
    if recipe.requirements:
        texts[Path(os.path.relpath(context / recipe.files[2], output)).as_posix()] = recipe.requirements
    return texts


def _manifests(recipe: Recipe, wanted: Wanted) -> dict[str, str]:
    if wanted.has_ray:
        return ray_cluster(recipe, wanted)
    return whole(recipe, wanted) if wanted.split is None else split(recipe, wanted, wanted.split)


def _own_ignored(context: Path) -> list[str]:
    """Return the lines of the project's own `.dockerignore`: builders read it no more once there is a generated one."""
    try:
        text = (context / ".dockerignore").read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return []
    return ["# From .dockerignore:", *text.splitlines(), "# In addition:"]


def write(files: Mapping[str, str | bytes], folder: Path, *, force: bool) -> list[Path]:
    """Write files below a folder, and return their paths; binary files are always replaced.

    Raises:
        ConfigError: If one of them is there with another text and nobody forces it, or they cannot be written; then
            none has changed, unless the disk is at fault.
    """
    paths = {Path(os.path.normpath(folder / name)): text for name, text in files.items()}
    try:
        if dangling := next((path for path in paths if path.is_symlink() and not path.exists()), None):
            raise ConfigError(f"{dangling} is a link to no file; remove it, or give it a target")
        others = [
            path
            for path, text in paths.items()
            if isinstance(text, str) and path.exists() and path.read_text(errors="replace") != text
        ]
        if others and not force:
            msg = f"{', '.join(map(shown, others))} would be overwritten; say --force, or --output with another folder"
            raise ConfigError(msg)
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    return list(paths)


def next_commands(recipe: Recipe, wanted: Wanted) -> list[str]:
    """Return what may be run next, in its order; comments say what no command does."""
    context = wanted.output if recipe.folder is None else recipe.folder
    index = "" if recipe.index is None else f" --secret id=pip.conf,src={shown(recipe.index)}"
    wheels = "" if recipe.wheel is None else f" --build-context {WHEELS}={shown(wanted.output / WHEELS)}"
    keys = {Path(KEYS).name: wanted.keys_file} if recipe.has_keys else {}
    missing = [
        f"# write the API keys to {shown(file)}, one in each line" for file in keys.values() if not file.exists()
    ]
    keys |= {one.name: Path(one.path) for one in recipe.key_files}
    sources = [f"--from-file={name}={shown(file)}" for name, file in keys.items()]
    secrets = [f"generic {recipe.name}-keys {' '.join(sources)}"] if keys else []
    secrets += [f"generic {recipe.name}-bucket --from-env-file={BUCKET}"] if recipe.reads_bucket else []
    if recipe.tls is not None:
        certificate, key = (shown(Path(file)) for file in recipe.tls)
        secrets.append(f"tls {recipe.name}-tls --cert={certificate} --key={key}")
    if wanted.split is not None:
        secrets.append(f'generic {recipe.name}-wire --from-literal={Path(WIRE_SECRET).name}="$(openssl rand -hex 32)"')
    makes_certificates = wanted.split is not None and wanted.split.tls == "secret"
    compose, kserve = (shown(wanted.output / name) for name in ("compose.yaml", "kserve.yaml"))
    return [
        f"docker build -f {shown(wanted.output / 'Dockerfile')} -t {wanted.image}{wheels}{index} {shown(context)}",
        *missing,
        *([] if wanted.is_kubernetes_only else [f"docker compose -f {compose} up --build --wait"]),
        *(f"kubectl create secret {secret}" for secret in secrets),
        *([f"sh {shown(wanted.output / CERTIFICATES)} ~/{recipe.name}-wire"] if makes_certificates else []),
        f"kubectl apply -k {shown(wanted.output / 'kubernetes')}",
        *([] if wanted.is_kubernetes_only else ["# or, with KServe:", f"kubectl apply -f {kserve}"]),
    ]


def _dockerfile_of(sidecar: Sidecar) -> str:
    return f"{sidecar.name}.Dockerfile"


def _compose(recipe: Recipe, wanted: Wanted, context: Path) -> dict[str, str | Sequence[str]]:
    output = wanted.output
    where = Path(os.path.relpath(context, output)).as_posix()
    environment: dict[str, str] = {}
    secrets: list[Any] = []
    files: dict[str, str] = {}
    if recipe.has_keys:
        environment["FOREBAY_API_KEY"] = f"@{KEYS}"
        secrets.append("api_keys")
        files["api_keys"] = os.path.relpath(wanted.keys_file, output)
    for one in recipe.key_files:
        secrets.append({"source": one.name, "target": one.target})
        files[one.name] = os.path.relpath(one.path, output)
    for (name, target), file in zip(TLS.items(), recipe.tls or (), strict=False):
        environment[name] = target
        secrets.append({"source": Path(target).name, "target": target})
        files[Path(target).name] = os.path.relpath(file, output)
    build: dict[str, Any] = {} if recipe.wheel is None else {"additional_contexts": {WHEELS: f"./{WHEELS}"}}
    if recipe.index is not None:
        build["secrets"] = ["pip.conf"]
        files["pip.conf"] = os.path.relpath(recipe.index, output)
    top: dict[str, Any] = {"secrets": {name: {"file": file} for name, file in files.items()}} if files else {}
    told: dict[str, Any] = {"environment": environment, "secrets": secrets} if secrets else {}
    if recipe.reads_bucket:
        told["env_file"] = [{"path": f"./{BUCKET}", "required": False}]
    volumes = {path: slug(path) for path in recipe.writes if path != SHARED_MEMORY}
    service: dict[str, Any] = {}
    if volumes:
        service["volumes"] = [f"{name}:{path}" for path, name in volumes.items()]
        top["volumes"] = {name: {} for name in volumes.values()}
    if SHARED_MEMORY in recipe.writes:
        service["shm_size"] = "1g"
    sidecars: dict[str, Any] = {}
    for one in recipe.sidecars:
        sidecars[one.host or one.name] = {
            "build": {"context": ".", "dockerfile": _dockerfile_of(one)},
            "image": image_of(one, wanted.image),
            "volumes": [f"{slug(recipe.writes[0])}:{recipe.writes[0]}"],
            **({} if one.host else {"network_mode": "service:model"}),
        }
    gpu = {"driver": "nvidia", "count": recipe.gpus, "capabilities": ["gpu"]}
    devices = {"deploy": {"resources": {"reservations": {"devices": [gpu]}}}} if recipe.gpus else {}
    return {
        "context": json.dumps(where) if " " in where else where,
        "dockerfile": Path(os.path.relpath(output / "Dockerfile", context)).as_posix(),
        "published": json.dumps([f"{port}:{port}" for port in ports_of(recipe).values()]),
        "build": block(build),
        "environment": block(told),
        "volumes": block(service),
        "devices": block(devices),
        "sidecars": ["", *block(sidecars)] if sidecars else [],
        "top": ["", *block(top)] if top else [],
    }
