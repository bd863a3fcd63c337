# SPDX-License-Identifier: Apache-2.0
"""The user's schemas, whichever pydantic they were written for: classes of pydantic 2 and of `pydantic.v1`."""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec

from forebay.errors import ConfigError

ROOT = "__root__"
"""Location of an error that belongs to the whole body."""

MAX_WARMUP = 65_536
"""Most copies of an example in a warm-up batch."""

_PYDANTIC = frozenset({"pydantic.main", "pydantic.v1.main"})
_NOT_AN_OBJECT = frozenset({"model_type", "model_attributes_type", "dataclass_type"})


class Invalid(ValueError):
    """Data does not fit a schema.

    Args:
        errors: For each problem `loc`, `msg`, `type` and perhaps `ctx`, in plain data.
    """

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors))
        self.errors = errors


class NotPossible(ConfigError, TypeError, AssertionError):
    """A schema or an example is wrong: says which, what was found and what is allowed.

    It is also what the original raises in its place: a TypeError or an AssertionError.
    """


class Schema:
    """A pydantic model class, with what its `Config` says about examples.

    Attributes:
        example: Data for warm-up and health checks, None if there is none.
        example_key: Where in the class that stands, for messages.
        batch_size: Copies of the example in a warm-up batch.
    """

    def __init__(self, model: Any) -> None:
        """Read the class; raises TypeError if it is not a pydantic model class, or its example is none."""
        self.model = model
        self.name: str = getattr(model, "__name__", type(model).__name__)
        self._is_v1 = not hasattr(model, "model_validate")
        parse = getattr(model, "parse_obj" if self._is_v1 else "model_validate", None)
        if parse is None or not isinstance(model, type) or model.__module__ in _PYDANTIC:
            raise NotPossible(f"a schema has to be a pydantic model class of the project, not {model!r}")
        self._parse = parse
        extra = self._extra()
        examples = extra.get("examples")
        first = cast("list[Any]", examples)[0] if isinstance(examples, list) and examples else None
        self.example = extra.get("example", first)
        self.example_key = "example" if "example" in extra else "examples[0]"
        self.batch_size: int = extra.get("batch_size", 1)
        if type(self.batch_size) is not int or not 0 < self.batch_size <= MAX_WARMUP:
            msg = f"batch_size of {self.name}: expected a whole number from 1 to {MAX_WARMUP}, got {self.batch_size!r}"
            raise NotPossible(msg)

    def parse(self, data: Any) -> Any:
        """Return the object that plain data stands for; raises Invalid if the data does not fit."""
        try:
            return self._parse(data)
        except ValueError as error:
            read = getattr(error, "errors", None)
            if not callable(read):  # a validator of the user's broke off
                raise
            found = cast(
                "list[dict[str, Any]]", read() if self._is_v1 else read(include_url=False, include_input=False)
            )
            raise Invalid([_plain(problem) for problem in found]) from None

    def document(self, refs: str) -> dict[str, Any]:
        """Return the JSON schema, with `refs` in front of the names of the definitions it refers to."""
        template = refs + "{model}"
        if self._is_v1:
            return dict(self.model.schema(ref_template=template))  # pydantic keeps the one it returns
        return self.model.model_json_schema(ref_template=template)

    def _extra(self) -> dict[str, Any]:
        config: Any = self.model.__config__ if self._is_v1 else self.model.model_config
        for name in ("json_schema_extra", "schema_extra"):
            extra: Any = getattr(config, name, None) if self._is_v1 else config.get(name)
            if isinstance(extra, dict) and extra:
                return cast("dict[str, Any]", extra)
        return {}


def is_model_object(value: Any) -> bool:
    """Tell whether a value is an object of a pydantic model class of either kind."""
    return hasattr(value, "model_dump") or (hasattr(value, "parse_obj") and hasattr(value, "json"))


def dump(value: Any, *, for_json: bool) -> Any:
    """Return the data of a model's object: for JSON only what JSON can hold, else bytes and dates as they are."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json" if for_json else "python", by_alias=True)
    if for_json:
        return json.loads(value.json(by_alias=True))
    data = value.dict(by_alias=True)
    return data.get(ROOT, data)


def _plain(problem: dict[str, Any]) -> dict[str, Any]:
    """Write one problem as clients know it: where it is, which may be the whole body, and values that can be sent."""
    loc = list(problem["loc"]) or [ROOT]
    is_no_object = problem["type"] in _NOT_AN_OBJECT and loc == [ROOT]
    plain = {"loc": loc, "msg": problem["msg"], "type": "type_error" if is_no_object else problem["type"]}
    if problem.get("ctx"):
        plain["ctx"] = msgspec.to_builtins(problem["ctx"], enc_hook=str, builtin_types=(), str_keys=True)
    return plain
