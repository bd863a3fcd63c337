# SPDX-License-Identifier: Apache-2.0
"""The line that `forebay check`, and a server that is ready, tell of each model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.server.app import App


def summary(app: App, name: str) -> str:
    """Return what is told of a model: where it answers, and how it batches."""
    about = app.describe(name)
    if "nodes" in about:
        return (
            f"POST /models/{name}  version {about['version']}, a graph of {', '.join(about['nodes'])}, "
            f"{about['workers']['slots']} requests at a time, timeout {about['timeout_ms']} ms"
            + (", streams" if about["streams"] else "")
        )
    batching = about["batching"]
    waits = f"waits {batching['max_wait_ms']:g} ms" if batching["idle"] == "wait" else batching["idle"]
    if batching["auto"] is not None:
        waits = f"learns what holds {batching['auto']['latency_objective_ms']:g} ms"
    devices = list(dict.fromkeys(about["workers"]["devices"]))
    several = ""
    if len(about["versions"]) > 1:
        several = ", versions " + ", ".join(f"{one['version']} ({one['weight']})" for one in about["versions"])
    size, slots = batching["max_batch_size"], about["workers"]["slots"]
    batches = f"batches of up to {size} ({waits}), " if size > 1 or not about["streams"] else ""
    if about["workers"]["slots"] == 0:
        many = "workers dial in"
    elif about["streams"]:
        many = f"up to {slots} streams at a time"
    else:
        many = f"{slots} worker slot{'s' * (slots != 1)}"
    return (
        f"POST /models/{name}  version {about['version']}, {batches}"
        f"{many}{' on ' if devices else ''}{' and '.join(devices)}, timeout {about['timeout_ms']} ms"
        + (", arrays of samples" if about["batchable"] else "")
        + "".join(f", {' or '.join(one['methods'])} {one['path']}" for one in about.get("endpoints", ()))
        + several
    )
