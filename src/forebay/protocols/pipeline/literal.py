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
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import msgspec

from forebay.types.datatypes import BY_NUMPY

if TYPE_CHECKING:
    from collections.abc import Iterable

Mode = Literal["raw", "ndarray", "literal"]


class LiteralLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a text may contain; one that has more stays a text.

    Attributes:
        max_bytes: Characters of the text, and bytes of an array made of it.
        max_elements: Numbers in a list or array of nothing but numbers.
        max_tokens: Words, marks and escapes in all else.
        max_depth: Brackets within brackets.
    """

    max_bytes: int = 256 * 1024 * 1024
    max_elements: int = 16 * 1024 * 1024
    max_tokens: int = 200_000
    max_depth: int = 32


DEFAULT: Final = LiteralLimits()

MAX_ODD_KEYS: Final = 20_000
"""Keys that are no texts, in all texts of a request."""
_MAX_ODD_KEYS: Final = 2_000
"""Those of a text. Numbers and tuples can be chosen so that they collide, which makes a dict quadratic."""
_MAX_EQUAL_HASHES: Final = 64
"""Those of a text that have a hash of others; no other keys collide as badly."""
_FREE_BYTES: Final = 1024 * 1024
_BYTES_OF_ONE: Final = 32
"""What arrays may take for each character of the texts, beside what is free."""


class LiteralTooLarge(Exception):
    """The values of a request would take more than its texts allow for."""


class Budget:
    """What the values of one request may take together; counted before it is taken."""

    def __init__(self, characters: int, limits: LiteralLimits = DEFAULT) -> None:
        """Allow for texts of so many characters."""
        self.limits = limits
        self._left_bytes = _FREE_BYTES + _BYTES_OF_ONE * characters
        self._left_keys = MAX_ODD_KEYS

    def take(self, size: int) -> None:
        """Count an array.

        Raises:
            _NotLiteral: If it is too large for any text.
            TooMuch: If it is too large for this request.
        """
        if size > self.limits.max_bytes:
            raise _NotLiteral
        self._left_bytes -= size
        if self._left_bytes < 0:
            msg = f"arrays may take {_BYTES_OF_ONE} bytes for each character of the request, and {_FREE_BYTES} more"
            raise LiteralTooLarge(msg)

    def take_keys(self, count: int) -> None:
        """Count keys that are no texts.

        Raises:
            TooMuch: If there are too many in this request.
        """
        self._left_keys -= count
        if self._left_keys < 0:
            msg = f"at most {MAX_ODD_KEYS} keys that are no texts are read"
            raise LiteralTooLarge(msg)


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
_TEXT_DTYPE: Final = re.compile(r"<?U(\d{0,9})")

_BLANK: Final = b" \t\n\r\f\v"
# Each byte of a list of numbers as the kind of thing it is part of: a number, a bracket, a comma; "x" is none of them.
_KINDS: Final = bytes(
    byte if byte in b"[]," else ord("0") if byte in b"0123456789.eE+-nainf" else ord("x") for byte in range(256)
)
_NO_BRACKETS: Final = bytes(32 if byte in b"[]" else byte for byte in range(256))
_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]")
# JSON wants digits behind a point and has no word for what is not finite; texts are read as numbers there.
_AS_JSON: Final = [
    *((b"." + mark, b".0" + mark) for mark in (b",", b" ", b"\n", b"e")),
    (b"nan", b'"nan"'),
    (b"inf", b'"inf"'),
    (b'-"inf"', b'"-inf"'),
]


class _NotLiteral(Exception):
    """The text is outside of the grammar or over a limit."""


def parse(text: str, mode: Mode, limits: LiteralLimits = DEFAULT, budget: Budget | None = None) -> Any:
    """Return the value that a text spells, or the text itself where it spells none that this mode reads.

    Args:
        text: The text.
        mode: "raw" reads nothing, "ndarray" only the text of one array, "literal" the whole grammar.
        limits: What is read at most.
        budget: What it has in common with other texts; None if it stands alone.

    Raises:
        TooMuch: If that is used up.
    """
    if mode == "raw" or len(text) > limits.max_bytes or (mode == "ndarray" and _IS_ARRAY.match(text) is None):
        return text
    try:
        if mode == "literal":
            numbers = _bare_numbers(text, limits)
            if numbers is not None:
                return numbers
        value = _Parser(text, limits, budget or Budget(len(text), limits)).whole()
    except (_NotLiteral, ValueError, TypeError, OverflowError):
        return text
    except LiteralTooLarge:
        if budget is not None:
            raise
        return text
    # The text begins with "array(", so it is either one array or several values in a row.
    return text if mode == "ndarray" and type(value) is tuple else value


# ---------------------------------------------------------------------------------------------------------------------
# Lists of numbers


def _bare_numbers(text: str, limits: LiteralLimits) -> list[Any] | tuple[Any, ...] | None:
    """Read a list or a bare tuple of nothing but numbers in the grammar of JSON; None if it is something else."""
    first = text[:1]
    if not first or first not in "[0123456789-+. \t\n" or not text.isascii():
        return None
    stripped = text.strip()
    is_list = stripped.startswith("[")
    data = (stripped if is_list else f"[{stripped}]").encode()
    kinds = data.translate(_KINDS, _BLANK)
    if b"x" in kinds or b"," not in kinds or not _is_within(data, limits):
        return None
    if kinds.count(b",") >= limits.max_elements or kinds.count(b"[") > limits.max_tokens:
        raise _NotLiteral
    try:
        values: list[Any] = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    return values if is_list else tuple(values)


def _is_within(data: bytes, limits: LiteralLimits) -> bool:
    """Tell whether brackets are balanced and no deeper than the limit."""
    brackets = data.translate(None, _NOT_BRACKETS)
    for _ in range(limits.max_depth):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _numbers(region: str, dtype: str | None, limits: LiteralLimits, budget: Budget) -> Any:
    """Return the array of a nested list of numbers or booleans; None if it is something else.

    Raises:
        _NotLiteral, OverflowError: If it is one, but cannot be made.
    """
    import numpy as np

    if not region.isascii():
        return None
    data = region.encode()
    if b"..." in data:  # what NumPy puts in the place of what it leaves out
        raise _NotLiteral
    is_bool = b"r" in data or b"l" in data
    if is_bool:
        if any(mark in data for mark in b"0123456789+-."):
            return None
        data = data.replace(b"True", b"1").replace(b"False", b"0")
    kinds = data.translate(_KINDS, _BLANK)
    if b"x" in kinds or b"0[" in kinds or b"]0" in kinds:
        return None
    structure = kinds.translate(None, b"0")
    if structure.count(b",") >= limits.max_elements:
        raise _NotLiteral
    shape = _shape_of(structure, limits)
    is_float = any(mark in data for mark in b".eEni")
    if is_float and is_bool:
        return None
    is_float = is_float or (dtype is not None and dtype.startswith("float"))
    flat = _flat(data, float if is_float else int)
    if flat is None:
        return None
    budget.take(8 * len(flat))
    try:
        made = np.array(flat, dtype=np.float64 if is_float else np.int64)
    except OverflowError:
        if dtype != "uint64":
            return None
        made = np.array(flat, dtype=np.uint64)
    if is_bool:
        made = made.astype(bool)
    return made.reshape(shape) if dtype is None else _cast(made, dtype, budget).reshape(shape)


def _flat(data: bytes, kind: Any) -> list[Any] | None:
    """Return the numbers of a list that is almost JSON, and is rewritten as such; None if it is not even that."""
    data = data.translate(_NO_BRACKETS)
    if kind is float:
        for ours, json in _AS_JSON:
            data = data.replace(ours, json)
    try:
        return msgspec.json.decode(b"[" + data + b"]", type=list[kind], strict=False)
    except msgspec.DecodeError:
        return None


def _shape_of(structure: bytes, limits: LiteralLimits) -> tuple[int, ...]:
    """Return the shape of an array by its brackets and commas.

    Raises:
        _NotLiteral: If its rows differ in length, or it is too deep.
    """
    depth = len(structure) - len(structure.lstrip(b"["))
    if not 0 < depth <= limits.max_depth:
        raise _NotLiteral
    shape: list[int] = []
    row = b""
    for level in range(1, depth + 1):
        start = depth - level
        end = structure.find(b"]" * level, start) + level
        length, rest = divmod(end - start - 1, len(row) + 1)
        if end < level or rest:
            raise _NotLiteral
        row = b"[" + b",".join([row] * length) + b"]"
        shape.append(length)
    if row != structure:
        raise _NotLiteral
    return tuple(reversed(shape))


def _cast(array: Any, dtype: str, budget: Budget) -> Any:
    """Convert an array to the type that its text names.

    Raises:
        _NotLiteral: If values get lost by it.
    """
    import numpy as np

    width = _TEXT_DTYPE.fullmatch(dtype)
    if width is not None:
        if array.dtype.kind != "U":
            raise _NotLiteral
        budget.take(max(array.size * int(width[1] or 1) * 4 - array.nbytes, 0))
        return array.astype(f"<U{width[1]}")
    if array.dtype.kind == "U" or dtype == "str":
        if array.dtype.kind != "U" or dtype != "str":
            raise _NotLiteral
        return array
    target = np.dtype(dtype)
    if target.kind in "iu":
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise _NotLiteral
        bounds = np.iinfo(target)
        if (
            array.size
            and array.dtype.kind != "b"
            and not bounds.min <= int(array.min()) <= int(array.max()) <= bounds.max
        ):
            raise _NotLiteral
    budget.take(max(array.size * target.itemsize - array.nbytes, 0))
    with np.errstate(over="ignore"):
        return array.astype(target)


# ---------------------------------------------------------------------------------------------------------------------
# All else


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
        """Read all of it."""
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
            raise _NotLiteral
        self._kind = str(found.lastgroup)
        self._read = str(found[self._kind])
        self._position = found.end()

    def _end(self) -> None:
        if self._kind != "end":
            raise _NotLiteral

    def _is(self, mark: str) -> bool:
        return self._read == mark and self._kind == "mark"

    def _take(self, mark: str) -> None:
        if not self._is(mark):
            raise _NotLiteral
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
        raise _NotLiteral

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

                return _cast(np.asarray(value), _SCALARS[word], self._budget)[()]
        raise _NotLiteral

    def _signed(self, sign: str) -> Any:
        if sign not in "+-":
            raise _NotLiteral
        self._next()
        if self._kind == "number" or (self._in_array and self._read in _FLOATS):
            value = self._value()
            return -value if sign == "-" else value
        raise _NotLiteral

    def _bracketed(self, opening: str) -> Any:
        self._depth += 1
        if self._depth > self._limits.max_depth:
            raise _NotLiteral
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
            raise _NotLiteral
        return set(keys)

    def _count_odd(self, keys: list[Any]) -> None:
        """Count keys that may collide, before they do."""
        self._budget.take_keys(len(keys))
        self._odd_keys += len(keys)
        if self._odd_keys > _MAX_ODD_KEYS:
            raise _NotLiteral
        self._equal_hashes += len(keys) - len(set(map(hash, keys)))
        if self._equal_hashes > _MAX_EQUAL_HASHES:
            raise _NotLiteral

    def _array(self) -> Any:
        if not self._is("("):
            raise _NotLiteral
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
        array = _numbers(text[start:end], dtype, self._limits, self._budget)
        if array is None:
            self._position, self._left, self._kind, self._read = before
        elif shape not in {None, array.shape}:
            raise _NotLiteral
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
                raise _NotLiteral
        self._take(")")
        return dtype, shape

    def _dtype(self) -> str:
        read = self._read
        name = _string(read) if self._kind == "string" else read.removeprefix("np.").removeprefix("numpy.")
        self._next()
        if isinstance(name, str):
            if name in _DTYPES:
                return _DTYPES[name]
            if _TEXT_DTYPE.fullmatch(name) is not None:
                return name
        raise _NotLiteral


_QUICK: Final = 8
"""Arrays with fewer commas are read token by token."""


def _made(value: Any, dtype: str | None, shape: tuple[int, ...] | None, budget: Budget) -> Any:
    """Return the array of a value that was read element by element."""
    import numpy as np

    leaves = list(_leaves(value))
    if not leaves:
        width = _TEXT_DTYPE.fullmatch(dtype or "")
        budget.take(4 * int(width[1] or 1) if width is not None else 8)  # NumPy makes room for one element
        made = np.array(value, dtype=np.float64).astype(dtype or np.float64)
        return made if shape is None else made.reshape(shape)
    kinds = set(map(type, leaves))
    if kinds == {str}:
        budget.take(max(map(len, leaves)) * len(leaves) * 4)  # every element takes the room of the longest
    elif not kinds <= {bool, int, float}:
        raise _NotLiteral
    made = np.array(value, dtype=dtype if kinds == {int} and dtype == "uint64" else None)
    if made.dtype.kind == "O":
        raise _NotLiteral
    if dtype is not None:
        made = _cast(made, dtype, budget)
    if shape not in {None, made.shape}:
        raise _NotLiteral
    return made


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise _NotLiteral
    sizes: tuple[Any, ...] = value  # pyright: ignore[reportUnknownVariableType]
    if len(sizes) > 32 or not all(type(size) is int and 0 <= size < 1 << 31 for size in sizes):
        raise _NotLiteral
    return sizes


def _leaves(value: Any) -> Iterable[Any]:
    if type(value) in {list, tuple}:
        for element in value:
            yield from _leaves(element)
    else:
        yield value


def _number(text: str) -> int | float:
    if text[:2].lower() not in {"0x", "0o", "0b"} and any(mark in text for mark in ".eE"):
        return float(text)
    return int(text, 0)


def _string(text: str) -> str | bytes:
    is_bytes = text[0] in "bB"
    body = text[1 if text[0] in "'\"" else 2 : -1]
    if is_bytes and not body.isascii():
        raise _NotLiteral
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
    raise _NotLiteral
