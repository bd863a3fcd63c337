# SPDX-License-Identifier: Apache-2.0
"""An array that is made when its batch is realised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from forebay.arrays.libraries import Spec, find_kind, kind_of
from forebay.errors import BatchMismatch


class Lazy:
    """A leaf of an entry whose array is made by the worker, once, when the batch is realised.

    Args:
        template: What `fn` will return: an array of the same shape and dtype, a `Spec`, or anything else with a
            `shape` and a numpy `dtype` (such as `jax.ShapeDtypeStruct`).
        fn: Called without arguments, on the thread that realises the batch; at most once, also when the rows of the
            array are spread over several batches.
    """

    __slots__ = ("_array", "_fn", "_lock", "spec")

    def __init__(self, template: Any, fn: Callable[[], Any]) -> None:
        if not callable(fn):
            raise TypeError(f"the second argument of Lazy is a function without parameters, got {fn!r}")
        self.spec: Spec = _read(template)
        self._fn: Callable[[], Any] | None = fn
        self._array: Any = None
        self._lock = threading.Lock()

    def realize(self) -> Any:
        """Return the array; the first call makes it.

        Raises:
            BatchMismatch: `fn` returned something that does not look like the template.
        """
        with self._lock:
            if self._fn is not None:
                array = self._fn()
                spec = kind_of(array).spec(array)
                if (spec.shape, spec.dtype, spec.kind) != (self.spec.shape, self.spec.dtype, self.spec.kind):
                    raise BatchMismatch(f"a Lazy was declared as {self.spec}, its function returned {spec}")
                self._array, self._fn = array, None
            return self._array

    def __repr__(self) -> str:
        return f"Lazy({self.spec})"


def _read(template: Any) -> Spec:
    if isinstance(template, Spec):
        return template
    kind = find_kind(template)
    if kind is not None:
        return kind.spec(template)
    try:
        shape, dtype = template.shape, template.dtype
    except AttributeError:
        raise TypeError(
            f"the template of a Lazy is an array or something with a shape and a dtype, got {template!r}; "
            "each leaf of an entry has a Lazy of its own"
        ) from None
    import numpy as np

    return Spec(tuple(shape), np.dtype(dtype))
