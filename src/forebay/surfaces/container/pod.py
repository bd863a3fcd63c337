# SPDX-License-Identifier: Apache-2.0
"""The pod of a container: what the recipe of its project asks for, and what its role does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.surfaces.container.dockerfile import health
from forebay.surfaces.container.recipe import AFTER_DRAIN_S, PRE_STOP_S, Recipe, Sidecar
from forebay.surfaces.container.template_filling import block, filled, flow, inline, scalar

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - what it is called
KEYS: Final = "/run/secrets/api_keys"
BUCKET: Final = "bucket.env"
"""The file that has the credentials of a bucket, as variables; the manifests name a secret that is made of it."""
TLS: Final = {"FOREBAY_CERTFILE": "/run/tls/tls.crt", "FOREBAY_KEYFILE": "/run/tls/tls.key"}
"""Where a container finds its certificate and the key, by the settings that say so; names are those of Kubernetes."""
WIRE_SECRET: Final = "/run/wire/secret"  # noqa: S105 - a path
"""Where the pods of a split deployment find the secret that they share."""
WIRE_TLS: Final = "/run/wire-tls"
"""Where they find a certificate, its key and the authority; the names of the files are those of cert-manager."""
WIRE_CERTFILE, WIRE_KEYFILE, WIRE_CAFILE = (f"{WIRE_TLS}/{name}" for name in ("tls.crt", "tls.key", "ca.crt"))
HEALTH_FILE: Final = "/tmp/health"  # noqa: S108 - a volume of the pod's own
"""Where a worker says how it is."""


class Role(NamedTuple):
    """What a pod does.

    Attributes:
        container: Name of its container.
        command: What it runs; empty for the command of the image.
        environment: Variables of its own.
        cpu: Cores that it asks for.
        gpus: GPUs that it needs.
        has_port: Whether it is a server: it has ports, which are probed, keys and certificates.
        has_clients: Whether new requests come to it until every node has heard that it goes.
        has_wire: Whether it shares the secret of a split deployment.
        certificate: What it is there, by its certificate: owner or client; empty if it needs none.
        startup: Probe that holds until it has started; empty for the one that says whether it is ready.
    """

    container: str
    command: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    cpu: int = 1
    gpus: int = 0
    has_port: bool = True
    has_clients: bool = True
    has_wire: bool = False
    certificate: str = ""
    startup: str = ""


class Given(NamedTuple):
    """What a container finds beside its image, as lines: variables, secrets that hold some, and files in volumes."""

    environment: list[str]
    env_from: list[str]
    mounts: list[str]
    volumes: list[str]


def given(recipe: Recipe, role: Role) -> Given:
    """Return what a container finds beside its image."""
    volumes = {"tmp": "/tmp", **{slug(path): path for path in recipe.writes}}  # noqa: S108 - the server's own
    mounts: list[dict[str, Any]] = [{"name": name, "mountPath": path} for name, path in volumes.items()]
    kinds: list[dict[str, Any]] = [
        {"name": name, "emptyDir": {"medium": "Memory"} if path == SHARED_MEMORY else {}}
        for name, path in volumes.items()
    ]
    environment = [{"name": name, "value": value} for name, value in role.environment.items()]
    if recipe.has_keys and role.has_port:
        environment.append({"name": "FOREBAY_API_KEY", "value": f"@{KEYS}"})
        mounts.append({"name": "keys", "mountPath": str(Path(KEYS).parent), "readOnly": True})
    if (recipe.has_keys or recipe.key_files) and role.has_port:
        mounts += [
            {"name": "keys", "mountPath": one.target, "subPath": one.name, "readOnly": True} for one in recipe.key_files
        ]
        kinds.append({"name": "keys", "secret": {"secretName": f"{recipe.name}-keys"}})
    if recipe.tls is not None and role.has_port:
        environment += [{"name": name, "value": path} for name, path in TLS.items()]
        mounts.append({"name": "tls", "mountPath": str(Path(TLS["FOREBAY_CERTFILE"]).parent), "readOnly": True})
        kinds.append({"name": "tls", "secret": {"secretName": f"{recipe.name}-tls"}})
    if role.has_wire:
        mounts.append({"name": "wire", "mountPath": str(Path(WIRE_SECRET).parent), "readOnly": True})
        kinds.append({"name": "wire", "secret": {"secretName": f"{recipe.name}-wire"}})
    if role.certificate:
        mounts.append({"name": "wire-tls", "mountPath": WIRE_TLS, "readOnly": True})
        kinds.append({"name": "wire-tls", "secret": {"secretName": f"{recipe.name}-wire-{role.certificate}"}})
    # Where the pod has a role in the cloud, or the bucket is public, there need be no secret.
    named = {"name": f"{recipe.name}-bucket", "optional": True}
    env_from = block({"envFrom": [{"secretRef": named}]} if recipe.reads_bucket else {})
    return Given(_items(environment), env_from, _items(mounts), _items(kinds))


def _items(items: Sequence[Mapping[str, Any]]) -> list[str]:
    return [flow(one) for one in items]


def pod(recipe: Recipe, image: str, role: Role) -> list[str]:
    """Return the lines of a pod's `spec`."""
    found = given(recipe, role)
    ports = [flow({"name": name, "containerPort": port}) for name, port in ports_of(recipe).items()]
    names = [one.host for one in recipe.sidecars if one.host]
    return filled(
        "pod.yaml",
        {
            "container": role.container,
            "image": scalar(image),
            "user": str(recipe.user),
            "grace": _grace(recipe, role),
            "command": [f"command: {_listed(role.command)}"] if role.command else [],
            "ports": ["ports:", *(f"  {port}" for port in ports)] if role.has_port else [],
            "environment": found.environment,
            "env_from": found.env_from,
            "mounts": found.mounts,
            "volumes": found.volumes,
            "resources": [
                f"requests: {inline({'cpu': str(role.cpu), 'memory': '2Gi'})}",
                f"limits: {inline({'memory': '2Gi', **({'nvidia.com/gpu': role.gpus} if role.gpus else {})})}",
            ],
            "probes": _probes(recipe, role) if role.has_port else _lines("worker-probes.yaml", {"file": HEALTH_FILE}),
            "lifecycle": _lines("pre-stop.yaml", {"pre_stop_s": str(PRE_STOP_S)}) if role.has_clients else [],
            "sidecars": block([_sidecar(recipe, one, image) for one in recipe.sidecars]),
            # In a pod, all containers are on one network.
            "aliases": block({"hostAliases": [{"ip": "127.0.0.1", "hostnames": names}]} if names else {}),
        },
    ).splitlines()


def ports_of(recipe: Recipe) -> dict[str, int]:
    """Return the ports of a server by their names."""
    ports = {"http": recipe.http_port, "grpc": recipe.grpc_port}
    return {name: port for name, port in ports.items() if port is not None}


def stop_s(recipe: Recipe) -> float:
    """Return how long a container has from SIGTERM on."""
    return recipe.drain_s + AFTER_DRAIN_S


def image_of(sidecar: Sidecar, image: str) -> str:
    """Return the name of a sidecar's image."""
    repository, _, tag = image.rpartition(":")
    return f"{repository}-{sidecar.name}:{tag}"


def slug(path: str) -> str:
    """Return the name of the volume that holds a folder."""
    return path.strip("/").replace("/", "-").lower()


def _grace(recipe: Recipe, role: Role) -> list[str]:
    if role.has_clients:
        comment, seconds = "preStop, --drain-s and some seconds more", PRE_STOP_S + stop_s(recipe)
    else:
        comment, seconds = "--drain-s and some seconds more", stop_s(recipe)
    return [f"# {comment}; then the kubelet kills.", f"terminationGracePeriodSeconds: {seconds:.0f}"]


def _listed(words: Sequence[str]) -> str:
    return inline(list(words))


def _sidecar(recipe: Recipe, sidecar: Sidecar, image: str) -> dict[str, Any]:
    return {
        "name": sidecar.name,
        "image": image_of(sidecar, image),
        "ports": [{"containerPort": sidecar.port}],
        "volumeMounts": [{"name": slug(recipe.writes[0]), "mountPath": recipe.writes[0]}],
    }


def _probes(recipe: Recipe, role: Role) -> list[str]:
    scheme = {"scheme": "HTTPS"} if recipe.tls else {}
    alive: dict[str, Any] = {"tcpSocket": {"port": "grpc"}}
    ready: dict[str, Any] = {"exec": {"command": health(recipe)}}
    if recipe.http_port is not None:
        alive = {"httpGet": {"path": "/healthz", "port": "http", **scheme}}
        ready = {"httpGet": {"path": "/readyz", "port": "http", **scheme}}
    elif not recipe.tls:
        ready = {"grpc": {"port": recipe.grpc_port}}
    if recipe.ready:
        ready = {"exec": {"command": list(recipe.ready)}}
    starts = "Loading may take long; the other probes wait for it."
    values = {"why": role.startup or starts, "started": block(alive if role.startup else ready)}
    return _lines("probes.yaml", {**values, "ready": block(ready), "alive": block(alive)})


def _lines(template: str, values: Mapping[str, str | Sequence[str]]) -> list[str]:
    return filled(template, values).splitlines()
