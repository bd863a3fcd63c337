# SPDX-License-Identifier: Apache-2.0
"""Walks what a configuration holds: sections with known keys, and values that are checked where they stand.

A check is a function of the walker, the path and the value; it returns the value or says what is wrong with it.
Readers of other systems' files have checks of their own beside these, and say some things in other words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeGuard, cast

from forebay.server.document import Document, Path
from forebay.types.did_you_mean import meant, nearest

if TYPE_CHECKING:
    from forebay.types.settings import Setting

Check: TypeAlias = "Callable[[Walker, Path, Any], Any]"


class Walker:
    """Walks one document.

    Attributes:
        document: What is walked.
        warnings: What is odd about it but stops nothing.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.warnings: list[str] = []

    @property
    def elsewhere(self) -> Mapping[str, str]:
        """Keys of all sections, with these, that may be meant by an unknown one; and how they are written."""
        return {}

    def where(self, path: Path) -> str:
        """Return the place of a path, as messages begin with it."""
        return self.document.where(path)

    def at(self, path: Path) -> Any:
        """Return what stands at a path; what is not there is None."""
        value: Any = self.document.data
        for step in path:
            if value is None:
                return None
            value = value.get(step) if hasattr(value, "get") else value[step]
        return value

    def mapping(self, path: Path, value: Any) -> dict[Any, Any]:
        """Return a mapping; a key without a value counts as one without entries."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.wrong(path, value, "a mapping of keys to values is needed")
        return dict(cast("Mapping[Any, Any]", value))

    def section(self, path: Path, value: Any, keys: Mapping[str, Check]) -> dict[str, Any]:
        """Check the keys of a mapping and their values; a key without a value is not given."""
        found: dict[str, Any] = {}
        for key, given in self.mapping(path, value).items():
            check = keys.get(key)
            if check is None:
                self.unknown((*path, key), keys)
            elif given is not None:
                found[key] = check(self, (*path, key), given)
        return found

    def unknown(self, path: Path, known: Iterable[str]) -> None:
        """Refuse a key that is not known.

        Raises:
            ConfigError: Unless a reader sees it otherwise.
        """
        names = list(known)
        hint = nearest(str(path[-1]), [*names, *self.elsewhere])
        hint = self.elsewhere.get(hint or "", hint)
        did_you_mean = f"did you mean {hint}?" if hint else f"allowed are {', '.join(names)}"
        self.fail(path, f"{self.dotted(path)}: there is no such key; {did_you_mean}")

    def wrong(self, path: Path, value: Any, needed: str) -> NoReturn:
        """Refuse a value.

        Raises:
            ConfigError: With its place, its key, what was found and what is needed.
        """
        key = self.dotted(path)
        self.fail(path, f"{key or 'the configuration'} is {shown(value)}; {needed}")

    def fail(self, path: Path, message: str) -> NoReturn:
        """Say what is wrong at a place.

        Raises:
            ConfigError: Always.
        """
        raise self.document.error(path, message)

    def warn(self, path: Path, message: str) -> None:
        """Note what is odd at a place."""
        self.warnings.append(f"{self.where(path)}: {message}")

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


def number(walker: Walker, path: Path, value: Any) -> float:
    """Allow any finite number, `True` and `False` not being numbers."""
    if not _is_number(value):
        walker.wrong(path, value, "a number is needed")
    if not abs(value) <= sys.float_info.max:  # which NaN fails as well
        walker.wrong(path, value, "a finite number is needed")
    return value


def positive(walker: Walker, path: Path, value: Any) -> float:
    """Allow finite numbers above 0."""
    if not _is_number(value) or value <= 0:
        walker.wrong(path, value, "a number above 0 is needed")
    return number(walker, path, value)


def boolean(walker: Walker, path: Path, value: Any) -> bool:
    """Allow true and false."""
    if not isinstance(value, bool):
        walker.wrong(path, value, "true or false is needed")
    return value


def whole(lowest: int | None = None, highest: int | None = None) -> Callable[[Walker, Path, Any], int]:
    """Allow whole numbers of a range, both ends included."""
    allowed = "" if lowest is None else f" of at least {lowest}" if highest is None else f" from {lowest} to {highest}"

    def check(walker: Walker, path: Path, value: Any) -> int:
        is_low = lowest is not None and type(value) is int and value < lowest
        if type(value) is not int or is_low or (highest is not None and value > highest):
            walker.wrong(path, value, f"a whole number{allowed} is needed")
        return value

    return check


def text(walker: Walker, path: Path, value: Any) -> str:
    """Allow a text; YAML has none with a zero byte, JSON does."""
    if not isinstance(value, str) or "\0" in value:
        walker.wrong(path, value, "a text is needed" if not isinstance(value, str) else "no text has a zero byte here")
    return value


def line(walker: Walker, path: Path, value: Any) -> str:
    """Allow a text of one line, which says something."""
    if not isinstance(value, str) or not value or not value.isprintable():
        walker.wrong(path, value, "a text of one line is needed")
    return value


def words(walker: Walker, path: Path, value: Any) -> list[str]:
    """Allow a list of texts."""
    if not isinstance(value, (list, tuple)):
        walker.wrong(path, value, "a list of texts is needed")
    return [text(walker, (*path, index), one) for index, one in enumerate(cast("Sequence[Any]", value))]


def one_of(*allowed: str) -> Callable[[Walker, Path, Any], str]:
    """Allow some words."""

    def check(walker: Walker, path: Path, value: Any) -> str:
        if value not in allowed:
            walker.wrong(path, value, f"{' or '.join(allowed)} is allowed{meant(value, allowed)}")
        return value

    return check


def checked(setting: Setting) -> Check:
    """Allow what a setting does."""

    def check(walker: Walker, path: Path, value: Any) -> Any:
        try:
            return setting.check(value)
        except ValueError as error:
            walker.wrong(path, value, str(error))

    return check


def variables(walker: Walker, path: Path, value: Any) -> dict[str, str]:
    """Allow variables of an environment; a number counts as it is written, null as nothing."""
    found: dict[str, str] = {}
    for name, given in walker.mapping(path, value).items():
        here = (*path, name)
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            walker.fail(here, f"{dotted(path)}: {shown(name)} cannot be the name of a variable")
        if given is None:
            continue
        written = walker.document.text(here) if not isinstance(given, str) else given
        if isinstance(given, dict | list) or "\0" in (written or ""):
            walker.fail(here, f"{dotted(here)} is {shown(given)}; a text or a number is needed")
        found[name] = written if written is not None else str(given)
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
