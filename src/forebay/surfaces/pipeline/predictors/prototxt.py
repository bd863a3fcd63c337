# SPDX-License-Identifier: Apache-2.0
"""Protobuf's text format, as far as descriptions of models use it: fields, messages, lists, comments."""

from __future__ import annotations

import re
from typing import Any, Final

from forebay.errors import ConfigError

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 16

Fields = dict[str, list[Any]]
"""The values of each field in order: texts, numbers, truths, words, and messages as `Fields`."""

_TOKEN: Final = re.compile(
    r"""(?:\s|\#[^\n]*)*(?:(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<word>[^\s#"'{}<>\[\]:,;]+)"""
    r"""|(?P<mark>[{}<>\[\]:,;])|(?P<end>\Z))"""
)
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}
_CLOSING: Final = {"{": "}", "<": ">"}


def parse(text: str, where: str) -> Fields:
    """Read a message.

    Args:
        text: At most `MAX_BYTES` long and `MAX_DEPTH` messages deep.
        where: What messages call it, a path.

    Raises:
        ConfigError: With the line of what is wrong.
    """
    if len(text) > MAX_BYTES:
        msg = f"{where} is longer than {MAX_BYTES} bytes; is it the description of a model?"
        raise ConfigError(msg)
    return _Parser(text, where).message("", 0)


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where
        self._at = 0
        self._kind, self._seen = "", ""
        self._step()

    def message(self, closing: str, depth: int) -> Fields:
        if depth > MAX_DEPTH:
            raise self._wrong(f"messages are nested more than {MAX_DEPTH} deep")
        fields: Fields = {}
        while self._seen != closing:
            if self._kind != "word":
                raise self._wrong(f"{self._shown()} stands where a field's name is needed")
            values = fields.setdefault(self._take(), [])
            if self._seen == ":":
                self._step()
            elif self._seen not in _CLOSING:
                raise self._wrong(f"{self._shown()} stands where ':' or '{{' is needed")
            if self._seen == "[":
                self._step()
                while not self._skip("]"):
                    values.append(self._value(depth))
                    self._skip(",")
            else:
                values.append(self._value(depth))
            self._skip(",", ";")
        if closing:
            self._step()
        return fields

    def _value(self, depth: int) -> Any:
        if self._seen in _CLOSING:
            return self.message(_CLOSING[self._take()], depth + 1)
        if self._kind == "text":
            parts: list[str] = []
            while self._kind == "text":  # texts side by side are one
                parts.append(_ESCAPE.sub(_unescaped, self._take()[1:-1]))
            return "".join(parts)
        if self._kind != "word":
            raise self._wrong(f"{self._shown()} stands where a value is needed")
        return _scalar(self._take())

    def _take(self) -> str:
        token = self._seen
        self._step()
        return token

    def _skip(self, *marks: str) -> bool:
        is_there = self._kind == "mark" and self._seen in marks
        if is_there:
            self._step()
        return is_there

    def _step(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise self._wrong("a text does not end in its line")
        self._at = found.end()
        self._kind = found.lastgroup or ""
        self._seen = found.group(self._kind)

    def _shown(self) -> str:
        return repr(self._seen[:40]) if self._seen else "the end"

    def _wrong(self, what: str) -> ConfigError:
        line = self._text.count("\n", 0, self._at) + 1
        return ConfigError(f"{self._where}, line {line}: {what}")


def _scalar(word: str) -> Any:
    if word in {"true", "True", "t"}:
        return True
    if word in {"false", "False", "f"}:
        return False
    if len(word) > 100:
        return word
    for convert in (int, float):
        try:
            return convert(word)
        except ValueError:
            continue
    return word


def _unescaped(found: re.Match[str]) -> str:
    code = found.group(1)
    if code[0] == "x":
        return chr(int(code[1:], 16))
    return chr(int(code, 8)) if code[0] in "01234567" else _ESCAPES.get(code, code)
