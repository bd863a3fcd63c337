# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests of a project whose fronts, owners and workers are pods of their own.

Fronts have the ports for clients, and no models. Each model has one owner with its queue, and workers that dial in.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from forebay.errors import ConfigError
from forebay.surfaces.container.generate_options import SplitFlags, Wanted
from forebay.surfaces.container.manifests import autoscaling, by_cpu, deployment, scrape, service
from forebay.surfaces.container.pod import (
    HEALTH_FILE,
    WIRE_CAFILE,
    WIRE_CERTFILE,
    WIRE_KEYFILE,
    WIRE_SECRET,
    Role,
    pod,
    ports_of,
)
from forebay.surfaces.container.recipe import Recipe, SplitModel, called
from forebay.surfaces.container.template_filling import block, filled

WIRE_PORT: Final = 9100
TARGET_QUEUE_MS: Final = 20
_LONGEST: Final = 42
"""Letters of a name; Kubernetes adds up to 21 and makes a label of it, which may have 63."""
_UNREADY: Final = (
    "Without workers the owner is not ready, and they only find it once it runs: only its process is asked."
)


def split(recipe: Recipe, wanted: Wanted, flags: SplitFlags) -> dict[str, str]:
    """Return the manifests by their names.

    Raises:
        ConfigError: If the models of the project have no workers that could dial in, or no names of their own.
    """
    apps = _apps(recipe)
    front = f"{recipe.name[:_LONGEST].strip('-')}-front"
    owners = [f"- {_owner(app)}" for app in apps.values()]
    certificates = filled("wire-certificates.yaml", {"name": recipe.name, "owners": owners})
    return {
        "fronts.yaml": _fronts(recipe, wanted, front, [*apps.values()], flags),
        **{f"{app}.yaml": _model(recipe, wanted, model, app, front, flags) for model, app in apps.items()},
        **({"certificates.yaml": certificates} if flags.tls == "cert-manager" else {}),
    }


def certificates_script(recipe: Recipe, file: str) -> str:
    """Return the program that makes the certificates of a deployment; see `split`."""
    names = ",".join(f"DNS:{_owner(app)}" for app in _apps(recipe).values())
    return filled("wire-certificates.sh", {"name": recipe.name, "owners": names, "file": file})


def _owner(app: str) -> str:
    """Return what the owner of a model is called, and so its Service, which its certificate must name."""
    return f"{app}-owner"


def _apps(recipe: Recipe) -> dict[SplitModel, str]:
    """Return what the objects of each model are called.

    Raises:
        ConfigError: If the models of the project have no workers that could dial in, or no names of their own.
    """
    if not recipe.models:
        raise ConfigError(
            "--split: only forebay.Model classes have workers that dial in; give a Python file that has nothing else, "
            "or one class of it, and settings as flags instead of a forebay.yaml"
        )
    apps = {model: called(f"{recipe.name}-{model.name}")[:_LONGEST].strip("-") for model in recipe.models}
    (app, count), *_ = Counter(apps.values()).most_common(1)
    if count > 1:
        names = " and ".join(repr(model.name) for model, its_app in apps.items() if its_app == app)
        raise ConfigError(f"--split: models {names} would both be called {app} in the cluster; rename one of them")
    return apps


def _fronts(recipe: Recipe, wanted: Wanted, front: str, apps: list[str], flags: SplitFlags) -> str:
    owners = [word for app in apps for word in ("--owner", f"tcp:{_owner(app)}:{WIRE_PORT}")]
    tls = _tls_flags(flags, "--owner-")
    command = ["forebay", "serve", *owners, "--attach-secret", f"@{WIRE_SECRET}", *tls, *flags.fronts]
    role = Role("front", command, has_wire=True, certificate="client" if tls else "")
    open_ports = [f"- {{port: {name}}}" for name in ports_of(recipe)]
    return _joined(
        deployment(front, pod(recipe, wanted.image, role), scrape(recipe)),
        service(recipe, {"app": front}),
        autoscaling(
            front, wanted.replicas, by_cpu(), "Connections that are kept do not move to new pods by themselves."
        ),
        filled("front-network.yaml", {"app": front, "open": open_ports}),
    )


def _model(recipe: Recipe, wanted: Wanted, model: SplitModel, app: str, front: str, flags: SplitFlags) -> str:
    owner, workers = _owner(app), f"{app}-worker"
    secret = f"@{WIRE_SECRET}"
    owns = ("forebay", "serve", model.target, "--workers", "0", "--attach", f"tcp:0.0.0.0:{WIRE_PORT}")
    runs = ("forebay", "worker", model.target, "--connect", f"tcp:{owner}:{WIRE_PORT}", "--secret", secret)
    device = ("--device", "cuda:0") if recipe.gpus else ()
    owning = Role(
        "owner",
        (*owns, "--attach-secret", secret, *_tls_flags(flags, "--attach-"), *flags.owners),
        has_clients=False,
        has_wire=True,
        certificate="" if flags.tls == "none" else "owner",
        startup=_UNREADY,
    )
    working = Role(
        "worker",
        (*runs, *_tls_flags(flags, "--"), "--health-file", HEALTH_FILE, *device, *flags.workers),
        gpus=1 if recipe.gpus else 0,
        has_port=False,
        has_clients=False,
        has_wire=True,
        certificate="" if flags.tls == "none" else "client",
    )
    annotations = block({"annotations": scrape(recipe)})
    names = {"model": model.name, "app": owner, "front": front, "workers": workers, "wire_port": str(WIRE_PORT)}
    return _joined(
        filled("owner.yaml", names, {"pod": pod(recipe, wanted.image, owning), "scrape": annotations}),
        deployment(workers, pod(recipe, wanted.image, working), {}),
        autoscaling(
            workers,
            wanted.replicas,
            _queue_time(owner),
            "Loading a model costs more than keeping it for five minutes.",
        ),
        filled("worker-network.yaml", {"app": workers}),
    )


def _tls_flags(flags: SplitFlags, prefix: str) -> tuple[str, ...]:
    """Return the flags by which a server or a worker finds its certificate and whom it believes."""
    if flags.tls == "none":
        return ()
    files = {"cafile": WIRE_CAFILE, "certfile": WIRE_CERTFILE, "keyfile": WIRE_KEYFILE}
    return tuple(word for name, file in files.items() for word in (f"{prefix}{name}", file))


def _queue_time(owner: str) -> list[str]:
    return [
        "# By the rule in prometheus-adapter.yaml: how long requests wait in the owner's queue.",
        "- type: Object",
        "  object:",
        f"    describedObject: {{apiVersion: v1, kind: Pod, name: {owner}-0}}",
        "    metric: {name: forebay_queue_seconds_mean}",
        f"    target: {{type: Value, value: {TARGET_QUEUE_MS}m}}",
    ]


def _joined(*documents: str) -> str:
    return "---\n".join(documents)
