# SPDX-License-Identifier: Apache-2.0
"""Reads documents into structs: a struct says which keys there are, of which types and in which ranges.

What settings declare (`types/settings.py`) is all that a reader needs. What hangs on several keys is checked by whoever
reads, with the places that the document knows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import msgspec
from msgspec import inspect as types

from forebay.server.config_document import Document, Path
from forebay.types.did_you_mean import meant, nearest
from forebay.types.settings import Setting, declared, with_value

S = TypeVar("S", bound=msgspec.Struct)


class StructReader:
    """Reads one document.

    Attributes:
        document: What is read.
        warnings: What is odd about it but stops nothing.
        is_lenient: Whether a key that nothing reads is a warning: files for other versions of an original load
            unchanged.
        elsewhere: Keys of all sections, with these, that may be meant by an unknown one; and how they are written.
    """

    is_lenient: ClassVar[bool] = False
    elsewhere: ClassVar[Mapping[str, str]] = {}

    def __init__(self, document: Document) -> None:
        self.document = document
        self.warnings: list[str] = []

    def struct(self, path: Path, value: Any, kind: type[S]) -> S:
        """Read a mapping into a struct.

        Raises:
            ConfigError: With the place and the key, what was expected and what was found.
        """
        found = self.fields(path, value, declared(kind))
        for setting in declared(kind).values():
            if setting.is_required and setting.name not in found:
                missing = setting.written.missing or f"the key '{setting.key}' is missing"
                self.fail(path, f"{self.dotted(path)}: {missing}" if path else missing)
        return kind(**found)

    def fields(self, path: Path, value: Any, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Return the settings that a mapping gives, by their names; a key without a value is not given.

        Raises:
            ConfigError: With the place and the key, what was expected and what was found.
        """
        by_key = {one.written.older_key: one for one in settings.values() if one.written.older_key}
        by_key |= {one.key: one for one in settings.values()}
        found: dict[str, Any] = {}
        for key, given in self.mapping(path, value).items():
            if key not in by_key:
                self.unknown((*path, key), by_key)
            elif given is not None:
                found[by_key[key].name] = self.value((*path, key), given, by_key[key])
        return found

    def value(self, path: Path, value: Any, setting: Setting) -> Any:
        """Read the value of one setting."""
        match setting.type:
            case types.StructType(cls=kind):
                return self.struct(path, value, kind)
            case types.VarTupleType(item_type=types.StructType(cls=kind)):
                if not isinstance(value, list):
                    self.wrong(path, value, "expected a list")
                items = cast("list[Any]", value)
                return tuple(self.struct((*path, index), one, kind) for index, one in enumerate(items))
            case types.DictType(value_type=types.StructType(cls=kind)):
                entries = self.mapping(path, value).items()
                return {str(key): self.struct((*path, key), one, kind) for key, one in entries}
            case types.DictType(value_type=types.StrType()):
                return self._texts(path, value)
            case _:
                pass
        if setting.written.is_verbatim and type(value) in {int, float}:
            value = self.document.text(path) or str(value)
        if value is False and "off" in setting.choices:  # YAML takes the word for that
            value = "off"
        if _has_zero(value):  # YAML has no such text, JSON and Python do
            self.wrong(path, value, "expected a string without a zero byte")
        try:
            return setting.check(value)
        except ValueError as error:
            self.wrong(path, value, str(error))

    def mapping(self, path: Path, value: Any) -> dict[Any, Any]:
        """Return a mapping; a key without a value counts as one without entries."""
        if not isinstance(value, Mapping | None):
            self.wrong(path, value, "expected a mapping of keys to values")
        return dict(cast("Mapping[Any, Any]", value or {}))

    def _texts(self, path: Path, value: Any) -> dict[str, str]:
        """Read variables of an environment; a number counts as it is written, null as nothing."""
        found: dict[str, str] = {}
        for name, given in self.mapping(path, value).items():
            here = (*path, name)
            if not isinstance(name, str) or not name or "=" in name or "\0" in name:
                hint = "" if isinstance(name, str) else "; put it in quotes"
                self.fail(here, f"{self.dotted(path)}: expected the name of a variable, got {shown(name)}{hint}")
            if given is None:
                continue
            if isinstance(given, dict | list) or _has_zero(given):
                self.wrong(here, cast("Any", given), "expected a string or a number")
            found[name] = given if isinstance(given, str) else self.variable(here, given)
        return found

    def variable(self, path: Path, value: Any) -> str:
        """Return the text that is meant by a value which is none."""
        return self.document.text(path) or str(value)

    def unknown(self, path: Path, known: Iterable[str]) -> None:
        """Refuse a key that is not known by a `ConfigError`, or warn of it if the reader is lenient."""
        if self.is_lenient:
            self.warn(path, f"nothing reads the key '{self.dotted(path)}'{meant(path[-1], known)}")
            return
        names = list(known)
        hint = nearest(str(path[-1]), [*names, *self.elsewhere])
        hint = self.elsewhere.get(hint or "", hint)
        did_you_mean = f"did you mean {hint}?" if hint else f"allowed: {', '.join(names)}"
        self.fail(path, f"{self.dotted(path)}: unknown key; {did_you_mean}")

    def wrong(self, path: Path, value: Any, expected: str) -> NoReturn:
        """Reject a value by a `ConfigError` with its place, its key, what was expected and what was found."""
        self.fail(path, f"{self.dotted(path)}: {with_value(expected, shown(value))}".removeprefix(": "))

    def fail(self, path: Path, message: str) -> NoReturn:
        """Say what is wrong at a place, by a `ConfigError`."""
        raise self.document.error(path, message)

    def warn(self, path: Path, message: str) -> None:
        """Note what is odd at a place."""
        self.warnings.append(f"{self.document.where(path)}: {message}")

    def dotted(self, path: Path) -> str:
        """Return a key with those above it, as people write it."""
        return dotted(path)


def dotted(path: Sequence[Hashable]) -> str:
    """Return a key with those above it, as people write it."""
    return ".".join(map(str, path))


def shown(value: Any) -> str:
    """Return a value as it may have been written, shortened."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        value = cast("list[Any]", value)
        if any(isinstance(one, dict | list) for one in value):
            return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _has_zero(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_zero, cast("list[Any]", value)))
    return isinstance(value, str) and "\0" in value
