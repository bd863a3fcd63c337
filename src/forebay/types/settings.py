# SPDX-License-Identifier: Apache-2.0
"""What a setting is: an attribute of a class, declared once, from which everything else about it is made.

    port: Annotated[int, Meta(ge=0, le=65535), Written("--http-port", "PORT")] = 8080

The docstring of the class says what it means, its type the range, the end of its name the unit. Flags, keys of files,
variables of the environment, checks of class attributes and the reference page follow from that. Nothing is read here.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Concatenate, Final, Literal, ParamSpec, TypeVar

import msgspec
from msgspec import Meta
from msgspec import inspect as types

from forebay.errors import ConfigError
from forebay.types.amounts import EXAMPLES, amount_of, size_of
from forebay.types.did_you_mean import either, meant, nearest
from forebay.types.first_use import known

PREFIX: Final = "FOREBAY_"
"""How variables of the environment begin that are settings."""

P = ParamSpec("P")
First = TypeVar("First")
R = TypeVar("R")

MAX_WORKERS: Final = 1024
"""Most workers of a model, and most threads of a worker: a number beyond that is a slip, and would take the memory."""

Count = Annotated[int, Meta(ge=1)]
Workers = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
WorkersOrNone = Annotated[int, Meta(ge=0, le=MAX_WORKERS)]
Seconds = Annotated[float, Meta(ge=0)]
Milliseconds = Annotated[float, Meta(ge=0)]
SomeSeconds = Annotated[float, Meta(gt=0)]
SomeMilliseconds = Annotated[float, Meta(gt=0)]
DeadlineMilliseconds = Annotated[float, Meta(ge=1.0, le=86_400_000.0)]
Sharing = Literal["off", "tenant", "all"]
"""Which equal requests run once, if they are open at the same time."""

_UNITS: Final = {"_bytes_per_s": "bytes a second", "_ms": "milliseconds", "_s": "seconds", "_bytes": "bytes"}
_YES: Final = frozenset({"true", "1", "yes", "on"})
_KINDS: Final[dict[type, type]] = {
    types.IntType: int,
    types.FloatType: float,
    types.BoolType: bool,
    types.StrType: str,
    types.LiteralType: str,
    types.BytesType: str,
}
_NO: Final = frozenset({"false", "0", "no", "off"})


class Written(msgspec.Struct, frozen=True):
    """How a setting is written, stands in its `Annotated`.

    Attributes:
        flag: Its flag, which its variable is named after; None where only files say it.
        metavar: What its help calls the value.
        usual: What holds where it is None, for the help.
        variable: Its variable, if the flag does not say.
        is_path: Whether it names a file, relative to the file that says so.
        key: Its key in files, if that is not its name.
        older_key: Another key for it, of older files.
        is_secret: Whether its value lets callers in. An empty one is an error, and processes should not show it.
        other_flags: Other names of its flag.
        is_verbatim: Whether a number in a file counts as it is written there: the version 1.10 is not 1.1.
        missing: The error for a file that omits it, if the usual one does not do.
    """

    flag: str | None = None
    metavar: str = ""
    usual: str = ""
    variable: str = ""
    is_path: bool = False
    key: str = ""
    older_key: str = ""
    is_secret: bool = False
    other_flags: tuple[str, ...] = ()
    is_verbatim: bool = False
    missing: str = ""


class Checked(msgspec.Struct, frozen=True):
    """What a value must be beside what its type says, stands in the `Annotated` of a setting.

    Attributes:
        check: Returns the value as it is used; raises `ValueError` with what was expected, see `with_value`.
        needed: The error for values that the type rejects; empty for the usual words.
    """

    check: Callable[[Any], Any] = lambda value: value
    needed: str = ""


def one_line(text: str) -> str:
    """Return a text, if it is one line that says something.

    Raises:
        ValueError: If it is not.
    """
    if not text or not text.isprintable():
        raise ValueError(_LINE)
    return text


_LINE: Final = "expected a string of one line"
Line = Annotated[str, Checked(one_line, _LINE)]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, as it was declared.

    Attributes:
        name: Of the attribute.
        doc: What it means.
        hint: Its annotation, which values are converted to.
        type: What msgspec tells of that, without None.
        kind: What its value is, or its values if it is a list; `object` for anything else.
        is_list: Whether there may be several.
        is_optional: Whether None may be said.
        is_required: Whether it has no default.
        choices: The only values, if there are so few.
        lowest: The least value.
        above: A value that is already too little.
        highest: The greatest value.
        default: What holds where nobody says anything.
        written: How it is written.
        also: What it must be beside that.
    """

    name: str
    doc: str
    hint: Any
    type: types.Type
    kind: type
    is_list: bool
    is_optional: bool
    is_required: bool
    choices: tuple[str, ...]
    lowest: float | None
    above: float | None
    highest: float | None
    default: Any
    written: Written
    also: Checked | None = None

    @property
    def key(self) -> str:
        """What files call it."""
        return self.written.key or self.name

    @property
    def variable(self) -> str | None:
        """The variable of the environment that sets it."""
        flag = self.written.flag
        if self.written.variable or flag is None:
            return self.written.variable or None
        return PREFIX + flag.removeprefix("--").removeprefix("no-").replace("-", "_").upper()

    @property
    def unit(self) -> str:
        """The unit of its values, if they have one."""
        return _UNITS.get(self.ending, "")

    @property
    def ending(self) -> str:
        """The end of its name that says the unit, if there is one."""
        return next((end for end in _UNITS if self.name.endswith(end)), "")

    @property
    def usual(self) -> str:
        """Its default, as text; empty if it has none."""
        default = self.default
        if self.written.usual or default is None or default == ():
            return self.written.usual
        if isinstance(default, bool):
            return "on" if default else ""
        if self.unit == "bytes":
            return size_of(default)
        return f"{default:g}" if isinstance(default, float) else str(default)

    @property
    def range(self) -> str:
        """What values are allowed, in few words; empty if all are."""
        if self.choices:
            return ", ".join(self.choices)
        if self.above is not None:
            return f"above {_shown(self.above)}"
        if self.highest is not None:
            return f"{_shown(self.lowest or 0)} to {_shown(self.highest)}"
        return "" if self.lowest is None else f"at least {_shown(self.lowest)}"

    def needed(self, *, in_python: bool = False) -> str:
        """Return the error for a value that the type rejects: `expected a whole number >= 1`."""
        if self.also is not None and self.also.needed:
            return self.also.needed
        none = ["None"] if in_python and self.is_optional else []
        if self.choices:
            return f"expected {either([*map(repr, self.choices), *none])}"
        return f"expected {either([self._noun(in_python=in_python), *none])}"

    def _noun(self, *, in_python: bool) -> str:
        if self.kind is bool:
            return "True or False" if in_python else "true or false"
        if isinstance(self.type, types.DictType):
            return "a mapping of keys to values"
        if self.kind not in {int, float}:
            return "a list of strings" if self.is_list else "a string"
        bounds = ""
        if self.above is not None:
            bounds = f" > {_shown(self.above)}"
        elif self.range:
            bounds = f" from {self.range}" if self.highest is not None else f" >= {_shown(self.lowest or 0)}"
        if self.kind is float:
            return (self.unit or "a number") + bounds
        what = "a list of whole numbers" if self.is_list else "a whole number"
        return what + (f" of {self.unit}" if self.unit else "") + bounds

    def check(self, value: Any, *, in_python: bool = False) -> Any:
        """Return a value, if it is allowed.

        Raises:
            ValueError: With what was expected; `with_value` completes it.
        """
        if self.kind is object and not isinstance(self.type, types.DictType):
            return value if self.also is None else self.also.check(value)
        if self.is_list and isinstance(value, str):
            value = [value]
        if self.ending and isinstance(value, str) and not in_python:
            value = value if (amount := amount_of(value, self.ending)) is None else amount
        try:
            found = msgspec.convert(value, known(self.hint), dec_hook=_path)
        except msgspec.ValidationError:
            found = math.nan
        if isinstance(found, float) and not math.isfinite(found):
            hint = nearest(str(value), self.choices) if self.choices else None
            unit = f", such as {EXAMPLES[self.ending]}" if self.ending and not in_python else ""
            raise ValueError(self.needed(in_python=in_python) + (f"; did you mean '{hint}'?" if hint else unit))
        if in_python and isinstance(value, int):  # it is shown as it was written
            found = value
        return found if self.also is None or found is None else self.also.check(found)

    def read(self, text: str) -> Any:
        """Return the value that a text means, of a flag or a variable.

        Raises:
            ValueError: With what was expected; `with_value` completes it.
        """
        value: Any = text
        if self.kind in {int, float}:
            try:
                value = self.kind(text)
            except ValueError:
                value = text
        elif self.kind is bool:
            value = True if text.lower() in _YES else False if text.lower() in _NO else text
        elif self.is_list:
            value = [one.strip() for one in text.split(",") if one.strip()]
            if not value and (text or self.written.is_secret):  # no keys would let everybody in
                raise ValueError("expected at least one value; check that the variables it comes from are set")
        return self.check(value)


def checked(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords that a program gives for the settings that a class declares.

    Raises:
        ConfigError: With the keyword, what was found and what is allowed or the nearest right spelling.
    """
    known = declared(kind)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            did_you_mean = meant(name, known) or f"; allowed: {', '.join(known)}"
            raise ConfigError(f"unknown setting '{name}'{did_you_mean}")
        try:
            found[name] = known[name].check(value, in_python=True)
        except ValueError as error:
            raise ConfigError(f"{name}: {with_value(error, repr(value))}") from error
    return found


def with_value(expected: object, found: str) -> str:
    """Return the text of an error with the rejected value: `expected a whole number >= 1, got 'three'`.

    Args:
        expected: The text, or an error with it; behind a semicolon it says what to do. A text that quotes the value
            itself stays as it is.
        found: The value, as users wrote it.
    """
    text, semicolon, hint = str(expected).partition("; ")
    return f"{text}{'' if ', got ' in text else f', got {found}'}{semicolon}{hint}"


def described(hint: Any, name: str = "") -> Setting:
    """Return a setting that is nothing but an annotation, and perhaps a name that ends with its unit."""
    return _setting(name, hint, "", None, is_required=True)


def keywords_of(
    _struct: Callable[P, object], /
) -> Callable[[Callable[Concatenate[First, ...], R]], Callable[Concatenate[First, P], R]]:
    """Let a method take what a struct declares, for editors and type checkers: it is called with these keywords."""

    def same(method: Callable[Concatenate[First, ...], R]) -> Callable[Concatenate[First, P], R]:
        return method

    return same


def only_keywords_of(_struct: Callable[P, object], /) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Let a function take only these keywords."""

    def same(function: Callable[..., R]) -> Callable[P, R]:
        return function

    return same


@cache
def declared(cls: type[Any]) -> Mapping[str, Setting]:
    """Return the settings that a class declares, by name: fields of a struct, class variables of others."""
    docs = _documented(cls)
    hints = typing.get_type_hints(cls, include_extras=True)
    required: set[str] = set()
    if issubclass(cls, msgspec.Struct):
        defaults = {field.name: field.default for field in msgspec.structs.fields(cls)}
        required = {field.name for field in msgspec.structs.fields(cls) if field.required}
    else:
        defaults = {name: getattr(cls, name) for name, hint in hints.items() if typing.get_origin(hint) is ClassVar}
    return MappingProxyType(
        {
            name: _setting(name, hints[name], docs.get(name, ""), default, is_required=name in required)
            for name, default in defaults.items()
        }
    )


def _setting(name: str, hint: Any, doc: str, default: Any, *, is_required: bool) -> Setting:
    if typing.get_origin(hint) is ClassVar:
        (hint,) = typing.get_args(hint)
    extras = _extras(hint)
    told = types.type_info(hint)
    inner = list(told.types) if isinstance(told, types.UnionType) else [told]
    is_optional = any(isinstance(one, types.NoneType) for one in inner)
    (found, *others) = [one for one in inner if not isinstance(one, types.NoneType)]
    is_list = isinstance(found, types.VarTupleType | types.ListType)
    scalar = found.item_type if is_list else found
    kind = object if others else _KINDS.get(type(scalar), object)
    if isinstance(scalar, types.CustomType) and scalar.cls is Path:
        kind = Path
    is_number = isinstance(scalar, types.IntType | types.FloatType)
    return Setting(
        name=name,
        doc=doc,
        hint=str if isinstance(scalar, types.BytesType) else hint,  # a secret, which others encode
        type=found,
        kind=kind,
        is_list=is_list,
        is_optional=is_optional,
        is_required=is_required,
        choices=tuple(map(str, scalar.values)) if isinstance(scalar, types.LiteralType) else (),
        lowest=scalar.ge if is_number else None,
        above=scalar.gt if is_number else None,
        highest=scalar.le if is_number else None,
        default=None if default is msgspec.NODEFAULT else default,
        written=next((extra for extra in extras if isinstance(extra, Written)), Written()),
        also=next((extra for extra in extras if isinstance(extra, Checked)), None),
    )


def _extras(hint: Any) -> list[Any]:
    """Return what stands in the `Annotated` of an annotation, and of what it is made of."""
    inner = [extra for one in typing.get_args(hint) for extra in _extras(one)]
    return [*getattr(hint, "__metadata__", ()), *inner]


def _path(kind: type, value: Any) -> Any:
    """Make a path, which msgspec does not know, of a text."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"expected {kind.__name__}, got {value!r}")


def _shown(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def _documented(cls: type) -> dict[str, str]:
    """Return what the docstrings of a class and of those it is made of say about their attributes."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        _, _, section = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("\nAttributes:\n")
        for name, text in re.findall(r"^    (\w+): ((?:.|\n(?!    \w+: ))*)", section, re.MULTILINE):
            found[name] = " ".join(text.split())
    return found
