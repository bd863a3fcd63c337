# SPDX-License-Identifier: Apache-2.0
"""How a function of the user's is called, whatever its annotations name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, Final

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


_REFERENCE: Final = re.compile(r"ForwardRef\('([^']*)'(?:, [^)]*)?\)")


def as_written(annotations: object) -> str:
    """Return the text of a signature or an annotation in which forward references are the names that were written."""
    return _REFERENCE.sub(r"\1", str(annotations))
