# SPDX-License-Identifier: Apache-2.0
r"""Python literals and NumPy arrays in texts, read without evaluating anything; `array_texts` writes them.

The grammar of what is read, with any white space between tokens:

    text    = values
    values  = value ("," value)* [","]                 more than one, or a comma at the end, make a tuple
    value   = number | string | name | list | tuple | dict | set | array | scalar
    number  = what Python takes for an int or a float, with an optional sign
    string  = ['b' | 'u'] 'text' with Python's escapes but for \N
    name    = "True" | "False" | "None", and within an array "nan" | "inf" with an optional sign
    array   = ["np." | "numpy."] "array(" value ["," "dtype=" dtype] ["," "shape=" tuple] ")"
    scalar  = ("np." | "numpy.") dtype "(" value ")", as NumPy 2 prints its scalars

Whatever is not in it stays the text it was. Reading takes time linear in the length of the text. Lists of numbers, of
which large texts consist, are read without a step of ours for each element.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, Literal, NoReturn

from forebay.surfaces.pipeline.protocol.literal_limits import (
    DEFAULT,
    Budget,
    LiteralLimits,
    LiteralTooLarge,
    NotLiteral,
)
from forebay.surfaces.pipeline.protocol.number_lists import TEXT_DTYPE, bare_numbers, cast_to, made_of_numbers
from forebay.types.datatypes import BY_NUMPY

Mode = Literal["raw", "ndarray", "literal"]


_MAX_ODD_KEYS: Final = 2_000
"""Those of a text. Numbers and tuples can be chosen so that they collide, which makes a dict quadratic."""
_MAX_EQUAL_HASHES: Final = 64
"""Those of a text that have a hash of others; no other keys collide as badly."""
_MAX_KEY_VALUES: Final = 64
"""Values in a tuple that is a key: tuples of equal hash are compared value by value."""


# Repeats are possessive, so that a text of any length takes no stack; int() and float() judge the underscores.
_TOKEN: Final = re.compile(
    r"""\s*+(?:
        (?P<number>
            (?: 0[xXoObB][0-9a-fA-F_]++
              | (?: [0-9][0-9_]*+ (?:\.[0-9_]*+)? | \.[0-9][0-9_]*+ ) (?:[eE][+-]?[0-9_]++)?+ )
            (?![0-9A-Za-z_.]) )
      | (?P<string> [bBuU]?(?: '(?:[^'\\\n]++|\\[\s\S])*+' | "(?:[^"\\\n]++|\\[\s\S])*+" ) )
      | (?P<word> [A-Za-z_][A-Za-z_0-9]*+(?:\.[A-Za-z_][A-Za-z_0-9]*+)? )
      | (?P<mark> [\[\](){},:=+-] )
      | (?P<end> \Z )
    )""",
    re.VERBOSE,
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(\n)|([\s\S]))")
_ESCAPED: Final = {
    "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"
}  # fmt: skip
_IS_ARRAY: Final = re.compile(r"\s*+(?:np\.|numpy\.)?array\s*\(")
_ARRAY_WORDS: Final = frozenset({"array", "np.array", "numpy.array"})
_CONSTANTS: Final = {"True": True, "False": False, "None": None, "np.True_": True, "np.False_": False}
_FLOATS: Final = {"nan": float("nan"), "inf": float("inf")}

_DTYPES: Final = {name: name for name in BY_NUMPY} | {
    "int": "int64",
    "float": "float64",
    "bool_": "bool",
    "str_": "str",
}
_SCALARS: Final = {f"{prefix}{name}": kind for prefix in ("np.", "numpy.") for name, kind in _DTYPES.items()}


def parse(text: str, mode: Mode, limits: LiteralLimits = DEFAULT, budget: Budget | None = None) -> Any:
    """Return the value that a text spells, or the text itself where it spells none that this mode reads.

    Args:
        mode: "raw" reads nothing, "ndarray" only the text of one array, "literal" the whole grammar.
        budget: What it has in common with other texts; None if it stands alone.

    Raises:
        LiteralTooLarge: If that is used up.
    """
    if mode == "raw" or len(text) > limits.max_bytes or (mode == "ndarray" and _IS_ARRAY.match(text) is None):
        return text
    try:
        if mode == "literal":
            numbers = bare_numbers(text, limits)
            if numbers is not None:
                return numbers
        value = _Parser(text, limits, budget or Budget(len(text), limits)).whole()
    except (NotLiteral, ValueError, TypeError, OverflowError):
        return text
    except LiteralTooLarge:
        if budget is not None:
            raise
        return text
    # The text begins with "array(", so it is either one array or several values in a row.
    return text if mode == "ndarray" and type(value) is tuple else value


class _Parser:
    """Reads one text, a token ahead: every method leaves the token behind what it read as the current one."""

    def __init__(self, text: str, limits: LiteralLimits, budget: Budget) -> None:
        self._text = text
        self._limits = limits
        self._budget = budget
        self._odd_keys = self._equal_hashes = 0
        self._position = 0
        self._left: int = limits.max_tokens
        self._depth = 0
        self._in_array = False
        self._kind = ""
        self._read: str = ""
        self._next()

    def whole(self) -> Any:
        value = self._value()
        if not self._is(","):
            self._end()
            return value
        values = [value]
        while self._is(","):
            self._next()
            if self._kind == "end":
                break
            values.append(self._value())
        self._end()
        return tuple(values)

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._position)
        self._left -= 1
        if found is None or self._left < 0:
            raise NotLiteral
        self._kind = str(found.lastgroup)
        self._read = str(found[self._kind])
        self._position = found.end()

    def _end(self) -> None:
        if self._kind != "end":
            raise NotLiteral

    def _is(self, mark: str) -> bool:
        return self._read == mark and self._kind == "mark"

    def _take(self, mark: str) -> None:
        if not self._is(mark):
            raise NotLiteral
        self._next()

    def _value(self) -> Any:
        kind, read = self._kind, self._read
        if kind == "word":
            return self._word(read)
        if kind == "mark":
            return self._bracketed(read) if read in "[({" else self._signed(read)
        self._left -= read.count("\\")
        self._next()
        if kind == "number":
            return _number(read)
        if kind == "string":
            return _string(read)
        raise NotLiteral

    def _word(self, word: str) -> Any:
        self._next()
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if self._in_array:
            if word in _FLOATS:
                return _FLOATS[word]
        elif word in _ARRAY_WORDS:
            return self._array()
        elif word in _SCALARS:
            self._take("(")
            value = self._element()
            self._take(")")
            if isinstance(value, bool | int | float | str):
                import numpy as np

                return cast_to(np.asarray(value), _SCALARS[word], self._budget)[()]
        raise NotLiteral

    def _signed(self, sign: str) -> Any:
        if sign not in "+-":
            raise NotLiteral
        self._next()
        if self._kind == "number" or (self._in_array and self._read in _FLOATS):
            value = self._value()
            return -value if sign == "-" else value
        raise NotLiteral

    def _bracketed(self, opening: str) -> Any:
        self._depth += 1
        if self._depth > self._limits.max_depth:
            raise NotLiteral
        self._next()
        value = self._braces() if opening == "{" else self._sequence("]" if opening == "[" else ")")
        self._depth -= 1
        return value

    def _sequence(self, closing: str) -> Any:
        values: list[Any] = []
        ends_with_comma = False
        while not self._is(closing):
            values.append(self._value())
            ends_with_comma = self._is(",")
            if not ends_with_comma:
                break
            self._next()
        self._take(closing)
        if closing == "]":
            return values
        return values[0] if len(values) == 1 and not ends_with_comma else tuple(values)

    def _braces(self) -> Any:
        keys: list[Any] = []
        values: list[Any] = []
        while not self._is("}"):
            keys.append(self._value())
            if self._is(":"):
                self._next()
                values.append(self._value())
            if not self._is(","):
                break
            self._next()
        self._take("}")
        odd = [key for key in keys if not isinstance(key, str)]
        if odd:
            self._count_odd(odd)
        if len(values) == len(keys):
            return dict(zip(keys, values, strict=True))
        if values:
            raise NotLiteral
        return set(keys)

    def _count_odd(self, keys: list[Any]) -> None:
        """Count keys that may collide, before they do."""
        if any(type(key) is tuple and not _is_short(key) for key in keys):
            raise NotLiteral
        self._budget.take_keys(len(keys))
        self._odd_keys += len(keys)
        if self._odd_keys > _MAX_ODD_KEYS:
            raise NotLiteral
        self._equal_hashes += len(keys) - len(set(map(hash, keys)))
        if self._equal_hashes > _MAX_EQUAL_HASHES:
            raise NotLiteral

    def _array(self) -> Any:
        if not self._is("("):
            raise NotLiteral
        start = self._position
        self._next()
        if self._is("["):
            quick = self._quick_array(start)
            if quick is not None:
                return quick
        value = self._element()
        dtype, shape = self._array_options()
        return _made(value, dtype, shape, self._budget)

    def _quick_array(self, start: int) -> Any:
        """Read an array of numbers; None, with nothing read, if it holds something else or is small."""
        text = self._text
        closing = text.find(")", start)
        end = text.rfind("]", start, closing) + 1
        if closing < 0 or not end or text.count(",", start, end) < _QUICK:
            return None
        if text.find("'", start, closing) >= 0 or text.find('"', start, closing) >= 0:
            return None  # of texts, and the bracket may stand in one of them
        before = self._position, self._left, self._kind, self._read
        self._position = end
        self._next()
        dtype, shape = self._array_options()
        array = made_of_numbers(text[start:end], dtype, self._limits, self._budget)
        if array is None:
            self._position, self._left, self._kind, self._read = before
        elif shape not in {None, array.shape}:
            raise NotLiteral
        return array

    def _element(self) -> Any:
        self._in_array = True
        value = self._value()
        self._in_array = False
        return value

    def _array_options(self) -> tuple[str | None, tuple[int, ...] | None]:
        dtype: str | None = None
        shape: tuple[int, ...] | None = None
        while self._is(","):
            self._next()
            if self._is(")"):
                break
            option = self._read
            self._next()
            self._take("=")
            if option == "dtype" and dtype is None:
                dtype = self._dtype()
            elif option == "shape" and shape is None:
                shape = _shape(self._value())
            else:
                raise NotLiteral
        self._take(")")
        return dtype, shape

    def _dtype(self) -> str:
        read = self._read
        name = _string(read) if self._kind == "string" else read.removeprefix("np.").removeprefix("numpy.")
        self._next()
        if isinstance(name, str):
            if name in _DTYPES:
                return _DTYPES[name]
            if TEXT_DTYPE.fullmatch(name) is not None:
                return name
        raise NotLiteral


_QUICK: Final = 8
"""Arrays with fewer commas are read token by token."""


def _made(value: Any, dtype: str | None, shape: tuple[int, ...] | None, budget: Budget) -> Any:
    """Return the array of a value that was read element by element."""
    import numpy as np

    leaves = list(_leaves(value))
    if not leaves:
        width = TEXT_DTYPE.fullmatch(dtype or "")
        budget.take(4 * int(width[1] or 1) if width is not None else 8)  # NumPy makes room for one element
        made = np.array(value, dtype=np.float64).astype(dtype or np.float64)
        return made if shape is None else made.reshape(shape)
    kinds = set(map(type, leaves))
    if kinds == {str}:
        budget.take(max(map(len, leaves)) * len(leaves) * 4)  # every element takes the room of the longest
    elif not kinds <= {bool, int, float}:
        raise NotLiteral
    made = np.array(value, dtype=dtype if kinds == {int} and dtype == "uint64" else None)
    if made.dtype.kind == "O":
        raise NotLiteral
    if dtype is not None:
        made = cast_to(made, dtype, budget)
    if shape not in {None, made.shape}:
        raise NotLiteral
    return made


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise NotLiteral
    sizes: tuple[Any, ...] = value  # pyright: ignore[reportUnknownVariableType]
    if len(sizes) > 32 or not all(type(size) is int and 0 <= size < 1 << 31 for size in sizes):
        raise NotLiteral
    return sizes


def _leaves(value: Any) -> Iterable[Any]:
    if type(value) in {list, tuple}:
        for element in value:
            yield from _leaves(element)
    else:
        yield value


def _is_short(key: tuple[Any, ...]) -> bool:
    """Tell whether a tuple has few values, with those of tuples in it."""
    waiting, count = [key], 0
    while waiting:
        values = waiting.pop()
        count += len(values)
        if count > _MAX_KEY_VALUES:
            return False
        waiting += [value for value in values if type(value) is tuple]
    return True


def _number(text: str) -> int | float:
    if text[:2].lower() not in {"0x", "0o", "0b"} and any(mark in text for mark in ".eE"):
        return float(text)
    return int(text, 0)


def _string(text: str) -> str | bytes:
    is_bytes = text[0] in "bB"
    body = text[1 if text[0] in "'\"" else 2 : -1]
    if is_bytes and not body.isascii():
        raise NotLiteral
    if "\\" in body:
        body = _ESCAPE.sub(_unescape_bytes if is_bytes else _unescape, body)
    return body.encode("latin-1") if is_bytes else body


def _unescape(found: re.Match[str]) -> str:
    two, four, eight, octal, newline, other = found.groups()
    code = two or four or eight
    if code is not None:
        return chr(int(code, 16))
    if octal is not None:
        return chr(int(octal, 8))
    if newline is not None:
        return ""
    if other in "xuUN":
        _refuse()
    return _ESCAPED.get(other, "\\" + other)


def _unescape_bytes(found: re.Match[str]) -> str:
    two, four, eight, octal, newline, other = found.groups()
    if two is not None:
        return chr(int(two, 16))
    if octal is not None:
        return chr(int(octal, 8) & 0xFF)
    if newline is not None:
        return ""
    if four is not None or eight is not None:
        return found[0]
    if other == "x":
        _refuse()
    return _ESCAPED.get(other, "\\" + other)


def _refuse() -> NoReturn:
    raise NotLiteral
