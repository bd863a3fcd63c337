# SPDX-License-Identifier: Apache-2.0
"""What the KServe v2 protocol tells of models, the same over HTTP and gRPC: the names are those of its messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

from forebay._version import __version__
from forebay.errors import ForebayError, NotFound, Unavailable, UnknownModel
from forebay.observe.logs.log import JsonFormatter
from forebay.observe.traces.timeline import Timeline
from forebay.serving.tensor_face import TensorFace

if TYPE_CHECKING:
    from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
    from forebay.server.app import App
    from forebay.server.served import Served
    from forebay.types.tensor import TensorMetadata

_EXTENSIONS: Final = (
    "binary_tensor_data",
    "parameters",
    "model_configuration",
    "statistics",
    "model_repository",
    "model_repository(unload_dependents)",
)
"""What of the protocol's extensions there always is."""
_TYPES: Final = {"BYTES": "TYPE_STRING"}


def server_metadata(app: App) -> dict[str, Any]:
    """Return who answers, and what beyond the protocol itself."""
    shared = ["system_shared_memory"] if app.shared_regions is not None else []
    return {"name": "forebay", "version": __version__, "extensions": [*_EXTENSIONS, *shared]}


def find_served(app: App, name: str, version: str = "") -> Served:
    """Return the model that is meant; without a version it is the default one.

    Raises:
        NotFound: Naming the nearest there is.
        Unavailable: If it is loading, or could not be loaded.
    """
    return app.versions(name).named(version) if version else app.find(name)


def _every_version(app: App, name: str, version: str = "") -> Iterable[Served]:
    """Return what statistics are asked of: a version, all of a model, or all there are if no name is said.

    Raises:
        NotFound: Naming the nearest there is.
    """
    if not name:
        return app.every
    return [find_served(app, name, version)] if version else app.versions(name).ready.values()


def in_tritons_words(error: ForebayError) -> ForebayError:
    """Return what is said of an unknown model: Triton's clients look for these words at the beginning."""
    return NotFound(f"Request for unknown model: {error.message}") if type(error) is UnknownModel else error


def is_model_ready(app: App, name: str, version: str = "") -> bool:
    """Tell whether a model can be asked now; one that is loading or could not be loaded cannot.

    Raises:
        NotFound: Naming the nearest there is.
    """
    try:
        return is_served_ready(find_served(app, name, version))
    except Unavailable:
        return False
    except NotFound:
        if app.stock is None or not app.stock.offer.has(name):
            raise
        return app.stock.may_be_asked(name, version)


def is_served_ready(one: Served) -> bool:
    """Tell whether a version can be asked now."""
    return one.endpoint.accepting and one.endpoint.pool.statistics().can_answer


def model_metadata(app: App, name: str, version: str = "") -> dict[str, Any]:
    """Return what a model takes and gives; raises a `NotFound` naming the nearest there is."""
    one = find_served(app, name, version)
    face = one.tensors or TensorFace()
    return {
        "name": one.endpoint.name,
        "versions": [one.endpoint.config.version] if version else [*app.versions(name).ready],
        "platform": "forebay",
        "inputs": face.inputs,
        "outputs": face.outputs,
    }


def config_of(one: Served) -> dict[str, Any]:
    """Return what Triton calls the configuration of a model: what it takes and gives, and how it is batched."""
    face = one.tensors or TensorFace()
    has_rows = one.tensors is not None and face.has_rows
    return {
        "name": one.endpoint.name,
        "platform": "forebay",
        "backend": "forebay",
        "max_batch_size": one.endpoint.batching.max_size if has_rows else 0,
        "input": [_port(each, face.unranked, has_rows=has_rows, spares=face.spares_axis(each)) for each in face.inputs],
        "output": [_port(each, face.unranked_outputs, has_rows=has_rows) for each in face.outputs],
        "model_transaction_policy": {"decoupled": one.in_tensors.contract.streams or face.is_decoupled},
    }


def _port(port: TensorMetadata, unranked: Collection[str], *, has_rows: bool, spares: bool = True) -> dict[str, Any]:
    """Return what a configuration says of a tensor. Clients refuse one whose `dims` are empty.

    So a sample without axes is told as Triton tells it, with one axis of one element that the model does not see, and
    a sample of any number of axes as one of any length. An input is only told so if it may come so.
    """
    dims = port.shape
    if has_rows:
        dims = (-1,) if port.name in unranked else port.shape[1:]
    told = {"name": port.name, "data_type": _TYPES.get(port.datatype, f"TYPE_{port.datatype}"), "dims": dims}
    return told if dims or not spares else {**told, "dims": (1,), "reshape": {"shape": []}}


async def statistics(app: App, model: str = "", version: str = "") -> dict[str, Any]:
    """Return what was counted of each version of a model, or of all models, since the start.

    Raises:
        NotFound: If there is no such model.
    """
    every = _every_version(app, model, version)
    if app.clients is None:
        return {"model_stats": [_statistics(one, one.endpoint.metrics) for one in every]}
    await app.clients.refresh()
    return {"model_stats": [_statistics(one, app.clients.of(one.endpoint)) for one in every]}


def _statistics(one: Served, metrics: EndpointMetrics) -> dict[str, Any]:
    """Return what was counted of a version.

    Reading samples, the model and writing its results are one time, that of the worker: `compute_infer`; the other two
    have its count, as clients expect, and no time. Of a graph it is the time inside: of its nodes and their queues.
    """
    config = one.endpoint.config
    succeeded = metrics.codes["ok"]
    failed = sum(metrics.codes.values()) - succeeded
    sizes = sorted(metrics.sizes.items())
    succeeded_s = metrics.request_s.total - metrics.failed_s
    inside_s = succeeded_s - metrics.queue_s.total
    inferred_s = inside_s if one.nodes else sum(once_each for _, (_, _, once_each) in sizes)
    alike_s = inside_s if one.nodes and len(sizes) == 1 else None

    def told(count: float = 0, seconds: float = 0.0) -> dict[str, int]:
        return {"count": round(count), "ns": round(seconds * 1e9)}

    return {
        "name": config.name,
        "version": config.version,
        "last_inference": round((time.time() - time.monotonic() + metrics.last) * 1000) if metrics.last else 0,
        "inference_count": round(sum(rows * batches for rows, (batches, _, _) in sizes)) - metrics.failed_rows,
        "execution_count": round(sum(batches for _, (batches, _, _) in sizes)),
        "inference_stats": {
            "success": told(succeeded, succeeded_s),
            "fail": told(failed, metrics.failed_s),
            "queue": told(metrics.queue_s.count, metrics.queue_s.total),
            "compute_input": told(succeeded),
            "compute_infer": told(succeeded, inferred_s),
            "compute_output": told(succeeded),
            "cache_hit": told(),
            "cache_miss": told(),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": told(batches),
                "compute_infer": told(batches, seconds if alike_s is None else alike_s),
                "compute_output": told(batches),
            }
            for rows, (batches, seconds, _) in sizes
        ],
    }


def trace_settings(app: App, model: str = "", version: str = "") -> dict[str, list[str]]:
    """Return what is traced, in Triton's words: of all models the same.

    Raises:
        NotFound: If there is no such model.
    """
    if model:
        find_served(app, model, version)
    level = "TIMESTAMPS" if app.state.of(Timeline).told else "OFF"
    return {"trace_level": [level], "trace_mode": ["opentelemetry"], "trace_rate": ["1"], "trace_count": ["-1"]}


def log_settings() -> dict[str, bool | int | str]:
    """Return what is logged, in Triton's words."""
    log = logging.getLogger("forebay")
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in log.handlers)
    return {
        "log_file": "",  # standard error
        "log_info": log.isEnabledFor(logging.INFO),
        "log_warning": log.isEnabledFor(logging.WARNING),
        "log_error": log.isEnabledFor(logging.ERROR),
        "log_verbose_level": int(log.isEnabledFor(logging.DEBUG)),
        "log_format": "json" if is_json else "text",
    }


def unchangeable(settings: Iterable[str]) -> str:
    """Return why clients do not change settings of traces and logs."""
    return (
        f"{', '.join(settings)[:100]}: clients read settings of traces and logs; they are changed where the server is "
        "started (--log-level, --log-format, --otel)"
    )
