# SPDX-License-Identifier: Apache-2.0
"""All files that are written for a project: they are the templates beside this, filled with what its recipe says."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, Final, NamedTuple

import yaml

from forebay.errors import ConfigError
from forebay.surfaces.container.dockerfile import USER, dockerfile, health
from forebay.surfaces.container.recipe import AFTER_DRAIN_S, PRE_STOP_S, Recipe, Sidecar
from forebay.surfaces.container.steps import steps

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - what it is called
KEYS: Final = "/run/secrets/api_keys"
TLS: Final = {"FOREBAY_CERTFILE": "/run/tls/tls.crt", "FOREBAY_KEYFILE": "/run/tls/tls.key"}
"""Where a container finds its certificate and the key, by the settings that say so; names are those of Kubernetes."""
_TEMPLATES: Final = Path(__file__).with_name("templates")
_MOST: Final = 4
"""How many times as many pods there may be under load."""


class Wanted(NamedTuple):
    """What a person may say of the files.

    Attributes:
        output: The folder that they go to.
        image: What the image is called, with its tag.
        replicas: How many pods there are at least.
        secrets: Files of keys, which no image may have.
    """

    output: Path
    image: str
    replicas: int
    secrets: Sequence[str] = ()


def files_of(recipe: Recipe, wanted: Wanted) -> dict[str, str]:
    """Return the files, by their names below the output's folder."""
    output, image, replicas, _ = wanted
    context = output if recipe.folder is None else recipe.folder
    repository, _, tag = image.rpartition(":")
    common = {
        "name": recipe.name,
        "image": image,
        "replicas": str(replicas),
        "most_replicas": str(_MOST * replicas),
        "user": str(USER),
        "pre_stop_s": str(PRE_STOP_S),
        "stop_s": f"{recipe.drain_s + AFTER_DRAIN_S:.0f}",
        "grace_s": f"{PRE_STOP_S + recipe.drain_s + AFTER_DRAIN_S:.0f}",
    }
    shared = _of_pod(recipe, image)
    scrape = {}
    if recipe.http_port is not None:
        scrape = {"prometheus.io/scrape": "true", "prometheus.io/port": str(recipe.http_port)}
        scrape |= {"prometheus.io/scheme": "https"} if recipe.tls else {}
    speaks = [_flow({"name": "PROTOCOL", "value": recipe.protocol})] if recipe.protocol and scrape else []

    def pod(container: str, *more: str) -> Sequence[str]:
        told = {**shared, "container": container, "environment": [*more, *shared["environment"]]}
        return _filled("pod.yaml", common, told).splitlines()

    def deployed(name: str, **values: str | Sequence[str]) -> str:
        return _filled(name, common, {"file": _shown(output / name), **values})

    texts = {
        "Dockerfile": dockerfile(recipe, next_commands(recipe, wanted)[0]),
        **{_dockerfile_of(one): one.dockerfile for one in recipe.sidecars},
        "compose.yaml": deployed("compose.yaml", **_compose(recipe, wanted, context)),
        "kubernetes/kustomization.yaml": deployed(
            "kustomization.yaml", folder=_shown(output / "kubernetes"), repository=repository, tag=tag
        ),
        "kubernetes/deployment.yaml": deployed(
            "deployment.yaml", pod=pod("model"), scrape=_block({"annotations": scrape} if scrape else {})
        ),
        "kubernetes/service.yaml": deployed("service.yaml", ports=[_flow(one) for one in _service_ports(recipe)]),
        "kubernetes/autoscaling.yaml": deployed("autoscaling.yaml", metrics=_metrics(recipe)),
        "kserve.yaml": deployed("kserve.yaml", pod=pod("kserve-container", *speaks), scrape=_block(scrape)),
    }
    if recipe.http_port is not None:
        texts["prometheus-adapter.yaml"] = deployed("prometheus-adapter.yaml")
    own = [os.path.relpath(output / name.partition("/")[0], context) for name in texts]
    more = own if output == context else [os.path.relpath(output, context)]
    more += [] if recipe.step else ["**/.env"]
    more += [os.path.relpath(file, context) for file in recipe.tls or ()]
    if recipe.index is not None and not any("pip.conf" in step.text for step in steps(context, recipe.files)):
        more.append(recipe.index.name)
    more += [os.path.relpath(file, context) for file in wanted.secrets]
    inside = sorted({one for one in more if not one.startswith("..")})
    texts["Dockerfile.dockerignore"] = _filled("dockerignore", {"own": _own_ignored(context), "more": inside})
    return texts


def _own_ignored(context: Path) -> list[str]:
    """Return the lines of the project's own `.dockerignore`: builders read it no more once there is a generated one."""
    try:
        text = (context / ".dockerignore").read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return []
    return ["# As .dockerignore says:", *text.splitlines(), "# Beside that:"]


def write(files: Mapping[str, str], folder: Path, *, force: bool) -> list[Path]:
    """Write files below a folder; returns which.

    Raises:
        ConfigError: If one of them is there with another text and nobody forces it, or they cannot be written; then
            none has changed, unless the disk is at fault.
    """
    paths = {folder / name: text for name, text in files.items()}
    try:
        others = [path for path, text in paths.items() if path.exists() and path.read_text(errors="replace") != text]
        if others and not force:
            msg = f"{', '.join(map(_shown, others))} would be overwritten; say --force, or --output with another folder"
            raise ConfigError(msg)
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    return list(paths)


def next_commands(recipe: Recipe, wanted: Wanted) -> list[str]:
    """Return what may be run next, in its order."""
    context = wanted.output if recipe.folder is None else recipe.folder
    index = "" if recipe.index is None else f" --secret id=pip.conf,src={_shown(recipe.index)}"
    secrets = [f"generic {recipe.name}-keys --from-file={Path(KEYS).name}=keys.txt"] if recipe.has_keys else []
    if recipe.tls is not None:
        certificate, key = (_shown(Path(file)) for file in recipe.tls)
        secrets.append(f"tls {recipe.name}-tls --cert={certificate} --key={key}")
    return [
        f"docker build -f {_shown(wanted.output / 'Dockerfile')} -t {wanted.image}{index} {_shown(context)}",
        f"docker compose -f {_shown(wanted.output / 'compose.yaml')} up --build --wait",
        *(f"kubectl create secret {secret}" for secret in secrets),
        f"kubectl apply -k {_shown(wanted.output / 'kubernetes')}",
        f"kubectl apply -f {_shown(wanted.output / 'kserve.yaml')}",
    ]


def _of_pod(recipe: Recipe, image: str) -> dict[str, Sequence[str]]:
    """Return what a pod has because of its recipe."""
    volumes = {"tmp": "/tmp", **{_slug(path): path for path in recipe.writes}}  # noqa: S108 - the server's own
    mounts: list[dict[str, Any]] = [{"name": name, "mountPath": path} for name, path in volumes.items()]
    kinds: list[dict[str, Any]] = [
        {"name": name, "emptyDir": {"medium": "Memory"} if path == SHARED_MEMORY else {}}
        for name, path in volumes.items()
    ]
    environment: list[dict[str, str]] = []
    if recipe.has_keys:
        environment = [{"name": "FOREBAY_API_KEY", "value": f"@{KEYS}"}]
        mounts.append({"name": "keys", "mountPath": str(Path(KEYS).parent), "readOnly": True})
        kinds.append({"name": "keys", "secret": {"secretName": f"{recipe.name}-keys"}})
    if recipe.tls is not None:
        environment += [{"name": name, "value": path} for name, path in TLS.items()]
        mounts.append({"name": "tls", "mountPath": str(Path(TLS["FOREBAY_CERTFILE"]).parent), "readOnly": True})
        kinds.append({"name": "tls", "secret": {"secretName": f"{recipe.name}-tls"}})
    gpus = {"nvidia.com/gpu": recipe.gpus} if recipe.gpus else {}
    ready, alive = _probes(recipe)
    names = [one.host for one in recipe.sidecars if one.host]
    sidecars = [
        {
            "name": one.name,
            "image": _image_of(one, image),
            "ports": [{"containerPort": one.port}],
            "volumeMounts": [{"name": _slug(recipe.writes[0]), "mountPath": recipe.writes[0]}],
        }
        for one in recipe.sidecars
    ]
    return {
        "environment": [_flow(one) for one in environment],
        "mounts": [_flow(one) for one in mounts],
        "volumes": [_flow(one) for one in kinds],
        "ports": [_flow({"name": name, "containerPort": port}) for name, port in _ports(recipe).items()],
        "resources": [
            f"requests: {_inline({'cpu': str(recipe.workers), 'memory': '2Gi'})}",
            f"limits: {_inline({'memory': '2Gi', **gpus})}",
        ],
        "ready": _block(ready),
        "alive": _block(alive),
        "sidecars": _block(sidecars),
        # In a pod, all containers are on one network.
        "aliases": _block({"hostAliases": [{"ip": "127.0.0.1", "hostnames": names}]} if names else {}),
    }


def _ports(recipe: Recipe) -> dict[str, int]:
    ports = {"http": recipe.http_port, "grpc": recipe.grpc_port}
    return {name: port for name, port in ports.items() if port is not None}


def _service_ports(recipe: Recipe) -> list[dict[str, Any]]:
    usual = {"http": 443 if recipe.tls else 80}
    return [
        {
            "name": name,
            "port": usual.get(name, port),
            "targetPort": name,
            **({"appProtocol": "kubernetes.io/h2c"} if name == "grpc" and not recipe.tls else {}),
        }
        for name, port in _ports(recipe).items()
    ]


def _probes(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    scheme = {"scheme": "HTTPS"} if recipe.tls else {}
    alive: dict[str, Any] = {"tcpSocket": {"port": "grpc"}}
    ready: dict[str, Any] = {"exec": {"command": health(recipe)}}
    if recipe.http_port is not None:
        alive = {"httpGet": {"path": "/healthz", "port": "http", **scheme}}
        ready = {"httpGet": {"path": "/readyz", "port": "http", **scheme}}
    elif not recipe.tls:
        ready = {"grpc": {"port": recipe.grpc_port}}
    return {"exec": {"command": list(recipe.ready)}} if recipe.ready else ready, alive


def _metrics(recipe: Recipe) -> list[str]:
    if recipe.http_port is None:
        target = {"type": "Utilization", "averageUtilization": 70}
        return ["- type: Resource", f"  resource: {_inline({'name': 'cpu', 'target': target})}"]
    return [
        "# In the cluster by the rule in prometheus-adapter.yaml. So many fill the batches of all workers of a pod.",
        "- type: Pods",
        "  pods:",
        "    metric: {name: forebay_in_flight}",
        f'    target: {{type: AverageValue, averageValue: "{recipe.capacity}"}}',
    ]


def _image_of(sidecar: Sidecar, image: str) -> str:
    repository, _, tag = image.rpartition(":")
    return f"{repository}-{sidecar.name}:{tag}"


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
        files["api_keys"] = "./keys.txt"
    for (name, target), file in zip(TLS.items(), recipe.tls or (), strict=False):
        environment[name] = target
        secrets.append({"source": Path(target).name, "target": target})
        files[Path(target).name] = os.path.relpath(file, output)
    build: dict[str, Any] = {}
    if recipe.index is not None:
        build["secrets"] = ["pip.conf"]
        files["pip.conf"] = os.path.relpath(recipe.index, output)
    top: dict[str, Any] = {"secrets": {name: {"file": file} for name, file in files.items()}} if files else {}
    told = {"environment": environment, "secrets": secrets} if secrets else {}
    volumes = {path: _slug(path) for path in recipe.writes if path != SHARED_MEMORY}
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
            "image": _image_of(one, wanted.image),
            "volumes": [f"{_slug(recipe.writes[0])}:{recipe.writes[0]}"],
            **({} if one.host else {"network_mode": "service:model"}),
        }
    gpu = {"driver": "nvidia", "count": recipe.gpus, "capabilities": ["gpu"]}
    devices = {"deploy": {"resources": {"reservations": {"devices": [gpu]}}}} if recipe.gpus else {}
    return {
        "context": json.dumps(where) if " " in where else where,
        "dockerfile": Path(os.path.relpath(output / "Dockerfile", context)).as_posix(),
        "published": json.dumps([f"{port}:{port}" for port in _ports(recipe).values()]),
        "build": _block(build),
        "environment": _block(told),
        "volumes": _block(service),
        "devices": _block(devices),
        "sidecars": ["", *_block(sidecars)] if sidecars else [],
        "top": ["", *_block(top)] if top else [],
    }


def _filled(template: str, *values: Mapping[str, str | Sequence[str]]) -> str:
    """Fill a template: `$$name` alone in its line is any number of lines there, and anywhere else a text."""
    known: dict[str, str | Sequence[str]] = {}
    for one in values:
        known |= one
    lines: list[str] = []
    for line in (_TEMPLATES / template).read_text(encoding="utf-8").splitlines():
        bare = line.strip()
        value = known.get(bare[1:]) if bare.startswith("$") else None
        if value is not None and not isinstance(value, str):
            indent = line[: len(line) - len(line.lstrip())]
            lines += [(indent + one).rstrip() for one in value]
        else:
            lines.append(Template(line).substitute(known))
    return "\n".join(lines) + "\n"


def _block(data: Any) -> list[str]:
    """Return data as lines of YAML; none for nothing."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000).splitlines() if data else []


def _flow(data: Mapping[str, Any]) -> str:
    return f"- {_inline(data)}"


def _inline(data: Mapping[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=True, allow_unicode=True, width=10_000).strip()


def _slug(path: str) -> str:
    return path.strip("/").replace("/", "-").lower()


def _shown(path: Path) -> str:
    """Return a path as it is called from where the person is, for a shell."""
    return shlex.quote(Path(os.path.relpath(path)).as_posix())
