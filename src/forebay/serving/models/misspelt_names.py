# SPDX-License-Identifier: Apache-2.0
"""Finds what a model class writes in other words than forebay's: misspelt names, methods of other servers.

Nobody would call or read them, and nobody would say so. A name that the class's own code uses is the author's business,
whatever it looks like.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any, Final

from forebay.errors import ConfigError
from forebay.serving.models.further_methods import is_marked
from forebay.types.call_signature import signature_of
from forebay.types.did_you_mean import distance

HOOKS: Final = ("load", "predict", "preprocess", "postprocess", "unload", "healthy")
"""Methods that are called if a class has them."""
STEPS: Final = ("start", "step", "finish")
"""Methods of a model whose streams share their steps."""
FOREIGN: Final = {
    "setup": "write `load`, which is called once in each worker",
    "initialize": "write `load`, which is called once in each worker",
    "teardown": "write `unload`, which is called when a worker ends",
    "finalize": "write `unload`, which is called when a worker ends",
    "decode_request": "annotate the samples of `predict`, or write `preprocess`, which is called with each of them",
    "deserialize": "annotate the samples of `predict`, or write `preprocess`, which is called with each of them",
    "encode_response": "annotate what `predict` returns, or write `postprocess`, which is called with each result",
    "serialize": "annotate what `predict` returns, or write `postprocess`, which is called with each result",
    "unbatch": "let `predict` return a list with one result for each sample",
    "reconfigure": "read its configuration in `load`; a reload (SIGHUP) loads the model again",
    **dict.fromkeys(
        ("check_health", "health", "__is_alive__", "__is_ready__"),
        "write `healthy`, which returns whether the model can answer: /readyz says so",
    ),
}
"""What other servers call, and what there is instead."""
OUTSIDE: Final = (
    *("workers", "worker_kind", "threads", "idle", "stuck_s", "max_timeout_ms"),
    *("health_s", "max_health_failures"),
)
"""What only who serves a model may say."""
_LIKE_PREDICT: Final = ("forward", "inference", "infer", "run", "__call__", "handle", "execute")
_LONG: Final = 12
"""Names of this length may have two letters wrong."""


def check_spelling(model: type[Any], base: type[Any]) -> None:
    """Look at all that a class defines.

    Args:
        base: `forebay.Model`; classes that are not below it are somebody else's.

    Raises:
        ConfigError: Naming the attribute and what was probably meant.
    """
    classes = [cls for cls in model.__mro__ if issubclass(cls, base) and cls is not base]
    written = {name: value for cls in reversed(classes) for name, value in vars(cls).items()}
    known = [*_known(base), *(STEPS if any(name in written for name in STEPS[:2]) else ())]
    suspects: dict[str, str] = {}
    for name, value in written.items():
        if name in HOOKS and is_marked(value):
            does = "answers at the path of the model itself" if name == "predict" else "is called by forebay itself"
            msg = f"{model.__qualname__}.{name} {does}; leave out `@forebay.endpoint`, or name the method otherwise"
            raise ConfigError(msg)
        if name in known or is_marked(value):
            continue
        if name in FOREIGN and callable(value):
            suspects[name] = f"{model.__qualname__}.{name} is never called; {FOREIGN[name]}"
        elif name.startswith("_"):
            continue
        elif name in OUTSIDE and not callable(value):
            flag = name.replace("_", "-")
            instead = f"say --{flag}, or `{name}:` in a forebay.yaml"
            suspects[name] = f"{model.__qualname__}.{name} is nothing that a class says; {instead}"
        elif (meant := _meant(name, known)) is not None and meant not in written:
            suspects[name] = (
                f"{model.__qualname__}.{name} is nothing that forebay reads; did you mean `{meant}`? "
                "A name of your own is one that a method of the class uses, or begins with '_'"
            )
    if suspects:
        used = _names_used(model)
        for name, told in suspects.items():
            if name not in used:
                raise ConfigError(told)


def check_called_bare(model: type[Any], method: str) -> None:
    """Check that a method that forebay calls without arguments can be called so.

    Raises:
        ConfigError: If it needs some.
    """
    try:
        parameters = list(signature_of(getattr(model, method)).parameters.values())
    except (TypeError, ValueError):
        return  # a callable without a signature: found out when it is called
    rest = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if any(p.default is p.empty and p.kind not in rest for p in parameters[1:]):
        written = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        instead = "read what they say in `load`," if method == "__init__" else "read what they say"
        device = "; what the worker runs on is `self.device`" if any(p.name == "device" for p in parameters) else ""
        raise ConfigError(
            f"{model.__qualname__}.{method}({written}) is called without arguments, in each worker; give them "
            f"defaults, or {instead} from a file or the environment{device}"
        )


def like_predict(model: type[Any]) -> str | None:
    """Return the method of a class without `predict` that is probably meant to be it."""
    for name in model.__dict__:
        if _meant(name, ["predict"]) is not None:
            return name
    return next((name for name in _LIKE_PREDICT if name in model.__dict__), None)


def _known(base: type[Any]) -> list[str]:
    return [*(name for name in (*base.__annotations__, "batch_key") if not name.startswith("_")), *HOOKS]


def _meant(written: str, known: Sequence[str]) -> str | None:
    """Return the known name that a name is nearly the same as."""
    squashed = _squashed(written)
    others = {name: _squashed(name) for name in known}
    for name, other in others.items():
        unit_less = other.removesuffix("ms")
        if squashed in {other, other.removeprefix("max"), unit_less} or (
            unit_less != other and squashed == unit_less + "s"
        ):
            return name
    for name, other in others.items():
        is_close = len(other) > len("pad") and squashed[:1] == other[:1] and squashed != other + "s"
        if is_close and distance(squashed, other) <= (2 if len(other) >= _LONG else 1):
            return name
    return None


def _squashed(name: str) -> str:
    return name.replace("_", "").lower()


def _names_used(model: type[Any]) -> set[str]:
    """Return all names, and all texts, in the code of a class and its bases."""
    found: set[str] = set()
    for cls in model.__mro__[:-1]:
        for value in vars(cls).values():
            for part in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "func"))):
                code = getattr(inspect.unwrap(part) if callable(part) else part, "__code__", None)
                if isinstance(code, CodeType):
                    found.update(_names_in(code))
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant
