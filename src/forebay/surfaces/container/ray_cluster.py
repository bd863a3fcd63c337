# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests of a project that runs on Ray: a cluster of KubeRay, and the job that deploys on it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.surfaces.container.dockerfile import health
from forebay.surfaces.container.generate_options import Wanted
from forebay.surfaces.container.manifests import MOST, scrape, service
from forebay.surfaces.container.pod import Role, given, ports_of, stop_s
from forebay.surfaces.container.recipe import PRE_STOP_S, Recipe
from forebay.surfaces.container.template_filling import block, filled, inline, scalar, shown

if TYPE_CHECKING:
    from forebay.cluster.deployment import Unit

RAY: Final = "2.60.0"
USER: Final = 1000
"""The user of Ray's own images, `ray`."""
GROUP: Final = 100
SECCOMP: Final = {"type": "RuntimeDefault"}
READY: Final = f'test ! -e /tmp/forebay-cluster-{USER} || exec "$@"'
"""Until something is deployed a pod is ready for that, or KubeRay would wait before it deploys; then the server is
asked. The folder is that in which a node of a cluster keeps what it runs."""
SERVER_CPUS: Final = 1
"""What the processes of a node need that are not workers."""
_RESOURCES: Final = ("num_cpus", "num_gpus")
DRAIN_S: Final = 120
"""How long the models of a pod may take to load elsewhere before the pod goes."""


def on_ray(recipe: Recipe, units: Sequence[Unit], nodes: int) -> Recipe:
    """Return what a container of a project needs that is a node of Ray as well: Ray's own image.

    Args:
        recipe: What it needs elsewhere.
        units: What is deployed; all of its workers find what they reserve on the nodes.
        nodes: How many there are at least.
    """
    cpus, gpus = (_share([(one.most, getattr(one.needs, name)) for one in units], nodes) for name in _RESOURCES)
    kind = "-gpu" if gpus else ""
    image = f"rayproject/ray:{RAY}-py{recipe.python.replace('.', '')}{kind}"
    return msgspec.structs.replace(
        recipe,
        base=(
            f"# Ray's own image, in which KubeRay starts Ray. To pin it: --build-arg BASE={image}@sha256:...",
            f"ARG BASE={image}",
            "FROM $BASE",
            "USER root",
        ),
        extras=tuple(sorted({*recipe.extras, "ray"})),
        user=USER,
        workers=cpus,
        gpus=gpus,
    )


def _share(reserved: Sequence[tuple[int, float]], nodes: int) -> int:
    """Return how much of a resource a node has, given how many workers there are that reserve how much each."""
    most = max((each for _, each in reserved), default=0.0)
    return math.ceil(max(most, sum(count * each for count, each in reserved) / nodes))


def ray_cluster(recipe: Recipe, wanted: Wanted) -> dict[str, str]:
    """Return the manifests by their names."""
    node = Role("node", has_clients=False, environment={"FOREBAY_HOST": "0.0.0.0"})  # noqa: S104 - in a pod of its own
    found = given(recipe, node)
    limits = {"memory": "4Gi", **({"nvidia.com/gpu": recipe.gpus} if recipe.gpus else {})}
    ports = ports_of(recipe)
    annotations = scrape(recipe)
    cluster = {
        "name": recipe.name,
        "image": scalar(wanted.image),
        "ray": RAY,
        "replicas": str(wanted.replicas),
        "most_replicas": str(MOST * wanted.replicas),
        "drain_s": str(DRAIN_S),
        "pre_stop_s": str(PRE_STOP_S),
        "stop_s": f"{PRE_STOP_S + DRAIN_S + stop_s(recipe):.0f}",
        "ready": inline(["sh", "-c", READY, "sh", *health(recipe)]),
        "security": block({"runAsNonRoot": True, "runAsUser": USER, "fsGroup": GROUP, "seccompProfile": SECCOMP}),
        "environment": found.environment,
        "env_from": found.env_from,
        "mounts": found.mounts,
        "volumes": found.volumes,
        "ports": block({"ports": [{"name": name, "containerPort": port} for name, port in ports.items()]}),
        "resources": block({"requests": {"cpu": str(recipe.workers + SERVER_CPUS), "memory": "4Gi"}, "limits": limits}),
        "scrape": block({"annotations": annotations} if annotations else {"annotations": {}}),
        "open": [f"- {{port: {name}}}" for name in ports],
    }
    target, *flags = recipe.serve
    more = ["--", *recipe.arguments] if recipe.arguments else []
    command = shlex.join(["forebay", "serve", target, "--cluster", "auto", *flags, *more])
    job = {
        "name": recipe.name,
        "file": shown(wanted.output / "kubernetes/rayjob.yaml"),
        "entrypoint": block({"entrypoint": f"cd {recipe.home} && exec {command}"}),
    }
    return {
        "raycluster.yaml": filled("raycluster.yaml", cluster),
        "service.yaml": service(recipe, {"ray.io/cluster": recipe.name, "ray.io/node-type": "worker"}),
        "rayjob.yaml": filled("rayjob.yaml", job),
    }
