# SPDX-License-Identifier: Apache-2.0
"""How a function of the user's is called, whatever its annotations name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

if sys.version_info >= (3, 14):
    import annotationlib

    def signature_of(function: Callable[..., Any]) -> inspect.Signature:
        """Return the signature; an annotation that cannot be evaluated stands in it as a forward reference.

        Python evaluates annotations from 3.14 on when somebody looks, and one may name what is imported for type
        checkers only: that is no reason not to call the function.

        Raises:
            TypeError, ValueError: It does not tell how it is called, as what is written in C.
        """
        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)

else:
    signature_of = inspect.signature


class Arguments(msgspec.Struct, frozen=True):
    """Which of the values that are offered a callable wants: by position, and by the names of its parameters."""

    positional: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]

    @property
    def wanted(self) -> set[str]:
        """The values it wants."""
        return {*self.positional, *(value for _, value in self.keywords)}

    def call(self, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """Call it with them."""
        keywords = {name: values[value] for name, value in self.keywords}
        return function(*[values[value] for value in self.positional], **keywords)


_REFERENCE: Final = re.compile(r"ForwardRef\('([^']*)'(?:, [^)]*)?\)")


def as_written(annotations: object) -> str:
    """Return the text of a signature or an annotation in which forward references are the names that were written."""
    return _REFERENCE.sub(r"\1", str(annotations))
