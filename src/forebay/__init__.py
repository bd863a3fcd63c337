# SPDX-License-Identifier: Apache-2.0
"""forebay serves Python models and model files over HTTP and gRPC.

Names are imported on first use: `import forebay` itself loads only the standard library and msgspec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from forebay._version import __version__ as __version__

if TYPE_CHECKING:
    import forebay.cluster as cluster  # noqa: PLR0402 - a module does not import from the package that names all
    from forebay.arrays.array_batch import Batch
    from forebay.arrays.compilers import jit
    from forebay.arrays.lazy import Lazy
    from forebay.arrays.tree_rows import to_host
    from forebay.arrays.value_hooks import hook, print_value
    from forebay.errors import (
        BatchMismatch,
        BatchResultMismatch,
        Cancelled,
        ConfigError,
        DeadlineExceeded,
        ForebayError,
        InvalidRequest,
        NotFound,
        NotPrepared,
        QueueFull,
        RequestError,
        ServingCrashed,
        ServingNotFound,
        ServingStopped,
        Unavailable,
        ValidationError,
    )
    from forebay.graph.composition.compose import compose
    from forebay.graph.composition.node import either, node
    from forebay.graph.values import SKIP
    from forebay.serving.models.further_methods import endpoint
    from forebay.serving.models.model import Model
    from forebay.serving.models.padding import Pad, Padded
    from forebay.serving.nx_serving.definition import Serving
    from forebay.serving.nx_serving.module import ServingModule
    from forebay.serving.nx_serving.registry import batched_run, batched_run_async
    from forebay.surfaces.embedding.mounted import asgi
    from forebay.surfaces.embedding.started_server import start
    from forebay.types.call import Failure, Last, Media
    from forebay.types.context import Context
    from forebay.types.file import File
    from forebay.types.model_answer import Answer
    from forebay.workers.user_calls.cancel import is_cancelled

_HOMES = {
    "SKIP": "forebay.graph.values",
    "Answer": "forebay.types.model_answer",
    "Batch": "forebay.arrays.array_batch",
    "Context": "forebay.types.context",
    "Failure": "forebay.types.call",
    "File": "forebay.types.file",
    "Last": "forebay.types.call",
    "Lazy": "forebay.arrays.lazy",
    "Media": "forebay.types.call",
    "Model": "forebay.serving.models.model",
    "Pad": "forebay.serving.models.padding",
    "Padded": "forebay.serving.models.padding",
    "Serving": "forebay.serving.nx_serving.definition",
    "ServingModule": "forebay.serving.nx_serving.module",
    "asgi": "forebay.surfaces.embedding.mounted",
    "batched_run": "forebay.serving.nx_serving.registry",
    "batched_run_async": "forebay.serving.nx_serving.registry",
    "cluster": "forebay.cluster",
    "compose": "forebay.graph.composition.compose",
    "either": "forebay.graph.composition.node",
    "endpoint": "forebay.serving.models.further_methods",
    "hook": "forebay.arrays.value_hooks",
    "is_cancelled": "forebay.workers.user_calls.cancel",
    "jit": "forebay.arrays.compilers",
    "node": "forebay.graph.composition.node",
    "print_value": "forebay.arrays.value_hooks",
    "start": "forebay.surfaces.embedding.started_server",
    "to_host": "forebay.arrays.tree_rows",
}
"""Where all else is than errors."""

__all__ = [
    "SKIP",
    "Answer",
    "Batch",
    "BatchMismatch",
    "BatchResultMismatch",
    "Cancelled",
    "ConfigError",
    "Context",
    "DeadlineExceeded",
    "Failure",
    "File",
    "ForebayError",
    "InvalidRequest",
    "Last",
    "Lazy",
    "Media",
    "Model",
    "NotFound",
    "NotPrepared",
    "Pad",
    "Padded",
    "QueueFull",
    "RequestError",
    "Serving",
    "ServingCrashed",
    "ServingModule",
    "ServingNotFound",
    "ServingStopped",
    "Unavailable",
    "ValidationError",
    "asgi",
    "batched_run",
    "batched_run_async",
    "cluster",
    "compose",
    "either",
    "endpoint",
    "hook",
    "is_cancelled",
    "jit",
    "node",
    "print_value",
    "start",
    "to_host",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        hint = "; a program starts a server with `forebay.start`" if name in {"run", "serve"} else ""
        raise AttributeError(f"module 'forebay' has no attribute {name!r}{hint}")
    home = _HOMES.get(name, "forebay.errors")
    module = importlib.import_module(home)
    value = module if home == f"forebay.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
