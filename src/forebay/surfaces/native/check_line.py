# SPDX-License-Identifier: Apache-2.0
"""What `forebay check`, and a server that is ready, tell of each model."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from forebay.protocols.openai.audio import TRANSCRIPTS
from forebay.protocols.openai.request_reading import CHAT
from forebay.protocols.openapi_components import COMPONENTS
from forebay.protocols.schema_example import example_of

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.config import HttpConfig

_LONGEST: Final = 1000
"""Characters of an example; a longer one is not shown."""


def first_steps(app: App, http: HttpConfig) -> list[str]:
    """Return why no model of a repository is there, the pages of the server, and a command that asks its first model.

    `{address}` stands for the server's URL.
    """
    pages = ["API {address}/docs"]
    if http.dashboard:
        pages.insert(0, "dashboard {address}/ui")
    missing = [] if app.stock is None else app.stock.problems()
    return [*(f"not ready: {problem}" for problem in missing), ", ".join(pages), *_curl(app, http)]


def _curl(app: App, http: HttpConfig) -> list[str]:
    described = next((one.described for one in app.served.values()), None)
    if described is None:
        return []
    spoken = described.input.openai
    is_chat = spoken == CHAT
    path = f"/v1/{spoken}" if spoken in {CHAT, TRANSCRIPTS} else f"/models/{quote(described.name)}"
    words = ["curl", f"{{address}}{path}"]
    if http.api_keys:
        words += ["-H", "'X-API-Key: KEY'"]
    if described.input.raw:
        return [" ".join([*words, "--data-binary", "@FILE"])]
    if spoken == TRANSCRIPTS:
        return [" ".join([*words, "-F", f"model={described.name}", "-F", "file=@FILE"])]
    if is_chat:
        sample = {"model": described.name, "messages": [{"role": "user", "content": "Hello"}]}
    else:
        try:
            sample = example_of(*described.input.json_schema(COMPONENTS + "{name}"))
        except ValueError:  # it would be too long
            return []
    body = msgspec.json.encode([sample] if described.batchable and not is_chat else sample).decode()
    return (
        [" ".join([*words, "-H", "'content-type: application/json'", "-d", shlex.quote(body)])]
        if len(body) <= _LONGEST
        else []
    )


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
