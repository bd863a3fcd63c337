# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests of a server whose pods have all of it: front, queues and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.surfaces.container.generate_options import Wanted
from forebay.surfaces.container.pod import Role, pod, ports_of
from forebay.surfaces.container.recipe import Recipe
from forebay.surfaces.container.template_filling import block, filled, flow, inline, scalar, shown

MOST: Final = 4
"""How many times as many pods there may be under load."""


def whole(recipe: Recipe, wanted: Wanted) -> dict[str, str]:
    """Return the manifests by their names."""
    role = Role("model", cpu=recipe.workers, gpus=recipe.gpus)
    return {
        "deployment.yaml": deployment(recipe.name, pod(recipe, wanted.image, role), scrape(recipe)),
        "service.yaml": service(recipe, {"app": recipe.name}),
        "autoscaling.yaml": autoscaling(
            recipe.name,
            wanted.replicas,
            _metrics(recipe),
            "Loading a model costs more than keeping it for five minutes.",
        ),
    }


def kustomization(wanted: Wanted, names: Sequence[str]) -> str:
    """Return the base that has all manifests."""
    repository, _, tag = wanted.image.rpartition(":")
    resources = [f"- {name}" for name in names]
    values = {"folder": shown(wanted.output / "kubernetes"), "repository": scalar(repository), "tag": tag}
    return filled("kustomization.yaml", values, {"resources": resources})


def deployment(app: str, lines: Sequence[str], annotations: dict[str, str]) -> str:
    """Return a Deployment of pods."""
    told = {
        "pod": lines,
        "scrape": block({"annotations": annotations} if annotations else {}),
    }
    return filled("deployment.yaml", {"app": app}, told)


def service(recipe: Recipe, labels: Mapping[str, str]) -> str:
    """Return the Service that clients use, which leads to the pods with these labels."""
    usual = {"http": 443 if recipe.tls else 80}
    ports: list[dict[str, Any]] = [
        {
            "name": name,
            "port": usual.get(name, port),
            "targetPort": name,
            **({"appProtocol": "kubernetes.io/h2c"} if name == "grpc" and not recipe.tls else {}),
        }
        for name, port in ports_of(recipe).items()
    ]
    values = {"name": recipe.name, "labels": inline(labels), "ports": [flow(one) for one in ports]}
    return filled("service.yaml", values)


def autoscaling(app: str, replicas: int, metrics: Sequence[str], patience: str) -> str:
    """Return a HorizontalPodAutoscaler of a Deployment, and its PodDisruptionBudget."""
    values = {"app": app, "replicas": str(replicas), "most_replicas": str(MOST * replicas), "patience": patience}
    return filled("autoscaling.yaml", values, {"metrics": metrics})


def scrape(recipe: Recipe) -> dict[str, str]:
    """Return the annotations by which Prometheus finds a server's metrics."""
    if recipe.http_port is None:
        return {}
    scheme = {"prometheus.io/scheme": "https"} if recipe.tls else {}
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(recipe.http_port), **scheme}


def by_cpu() -> list[str]:
    """Return the metric of an autoscaler that goes by processor time."""
    target = {"type": "Utilization", "averageUtilization": 70}
    return ["- type: Resource", f"  resource: {inline({'name': 'cpu', 'target': target})}"]


def _metrics(recipe: Recipe) -> list[str]:
    if recipe.http_port is None:
        return by_cpu()
    return [
        "# By the rule in prometheus-adapter.yaml. This number fills the batches of all workers of a pod.",
        "- type: Pods",
        "  pods:",
        "    metric: {name: forebay_in_flight}",
        f'    target: {{type: AverageValue, averageValue: "{recipe.capacity}"}}',
    ]
