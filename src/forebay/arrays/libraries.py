# SPDX-License-Identifier: Apache-2.0
"""What is done differently for arrays of numpy, torch and jax.

torch and jax are never imported here: an array of theirs can only be met when its library is loaded already.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from forebay.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np

    Allocator = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray[Any, Any]]
    """Gives the buffer that rows are joined in: an array of exactly this shape and dtype, with any content."""


Piece = tuple[Any, slice | None]
"""An array and which of its rows; None makes the whole array one row."""


class Spec(msgspec.Struct, frozen=True):
    """What one array looks like from outside.

    Attributes:
        shape: Its axes, the first one outermost.
        dtype: As its library names it: a `numpy.dtype` (also for jax) or a `torch.dtype`.
        kind: The library it belongs to: `numpy`, `torch` or `jax`. Python's numbers count as numpy's.
        device: Where its data is; None for numpy.
    """

    shape: tuple[int, ...]
    dtype: Any
    kind: str = "numpy"
    device: Hashable = None

    def row(self) -> Spec:
        """Return the spec of one row: the same without the first axis."""
        return Spec(self.shape[1:], self.dtype, self.kind, self.device)

    def joins(self, other: Spec) -> bool:
        """Return whether rows of both can lie in one array: of the same shape and library, and of dtypes that promote.

        Numbers do with numbers and texts with texts, but never one with the other.
        """
        if (self.shape, self.kind) != (other.shape, other.kind):
            return False
        if self.dtype == other.dtype or self.kind == "torch":
            return True
        kinds = {self.dtype.kind, other.dtype.kind}
        if len(kinds) == 2 and not kinds.isdisjoint("USOmM"):
            return False
        try:
            import numpy as np

            np.result_type(self.dtype, other.dtype)
        except TypeError:
            return False
        return True

    def __str__(self) -> str:
        dtype = str(self.dtype) if self.kind != "jax" else f"jax.{self.dtype}"
        place = "" if self.device is None else f" on {self.device}"
        return f"{dtype}[{','.join(map(str, self.shape))}]{place}"


class Kind(ABC):
    """The arrays of one library; every method takes arrays of that library only."""

    name: str

    @abstractmethod
    def spec(self, array: Any) -> Spec:
        """Return what the array looks like."""

    @abstractmethod
    def join(self, pieces: Sequence[Piece], padding: int, into: Allocator | None, *, owned: bool = False) -> Any:
        """Return the rows of all pieces, then `padding` zero rows, in one contiguous array.

        Everything is copied once; a single contiguous piece without padding not at all, unless there is an allocator or
        the result is to be `owned`: then it shares no memory that anybody can write to. Pieces of several dtypes are
        promoted as the library does, and those of several devices come to the device of the first.
        """

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a numpy array of the same values."""
        import numpy as np

        return np.asarray(array)

    @abstractmethod
    def equal(self, left: Any, right: Any) -> bool:
        """Return whether shape, dtype and all values are equal."""

    @abstractmethod
    def copy(self, array: Any) -> Any:
        """Return an array of the same values that shares no memory anybody can write to, or give away."""

    def rows(self, array: Any, rows: slice) -> Any:
        """Return some rows of the array: a view where the library has views."""
        return array[rows]


class _Numpy(Kind):
    name = "numpy"

    def spec(self, array: Any) -> Spec:
        import numpy as np

        array = np.asarray(array)
        return Spec(array.shape, array.dtype)

    def join(self, pieces: Sequence[Piece], padding: int, into: Allocator | None, *, owned: bool = False) -> Any:
        import numpy as np

        blocks = [np.asarray(array)[rows] for array, rows in pieces]
        first = blocks[0]
        if into is None and padding == 0 and len(blocks) == 1:
            return np.array(first, order="C") if owned else np.ascontiguousarray(first)
        rows = sum(len(block) for block in blocks)
        shape = (rows + padding, *first.shape[1:])
        dtype = first.dtype
        if any(block.dtype != dtype for block in blocks):
            dtype = np.result_type(*[block.dtype for block in blocks])
        joined = np.empty(shape, dtype) if into is None else into(shape, dtype)
        if joined.shape != shape or joined.dtype != dtype:
            got, asked = Spec(joined.shape, joined.dtype), Spec(shape, dtype)
            raise ValueError(f"the buffer to realize into should be {asked}, it is {got}")
        np.concatenate(blocks, out=joined[:rows])
        if padding:
            joined[rows:] = np.zeros((), dtype)  # not 0: zero of a text is the empty text
        return joined

    def copy(self, array: Any) -> Any:
        import numpy as np

        # Numbers do not change.
        return cast("Any", array.copy()) if isinstance(array, np.ndarray) else array

    def equal(self, left: Any, right: Any) -> bool:
        import numpy as np

        return self.spec(left) == self.spec(right) and np.array_equal(left, right)


class _Torch(Kind):
    name = "torch"

    def spec(self, array: Any) -> Spec:
        return Spec(tuple(array.shape), array.dtype, self.name, str(array.device))

    def join(self, pieces: Sequence[Piece], padding: int, into: Allocator | None, *, owned: bool = False) -> Any:
        torch = sys.modules["torch"]
        blocks = [array[rows] for array, rows in pieces]
        first = blocks[0]
        if padding:
            zero = first.new_zeros((1, *first.shape[1:]))
            blocks.append(zero.expand(padding, *first.shape[1:]))
        if len(blocks) > 1:
            return torch.cat([block.to(first.device) for block in blocks])
        return first.clone(memory_format=torch.contiguous_format) if owned else first.contiguous()

    def copy(self, array: Any) -> Any:
        return array.detach().clone()  # without the graph by which it was computed

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        torch = sys.modules["torch"]
        if array.dtype == torch.bfloat16:  # numpy has no such type
            array = array.float()
        return array.detach().cpu().resolve_conj().resolve_neg().numpy()

    def equal(self, left: Any, right: Any) -> bool:
        return self.spec(left) == self.spec(right) and bool(sys.modules["torch"].equal(left, right))


class _Jax(Kind):
    name = "jax"

    def spec(self, array: Any) -> Spec:
        return Spec(tuple(array.shape), array.dtype, self.name, array.device)

    def join(self, pieces: Sequence[Piece], padding: int, into: Allocator | None, *, owned: bool = False) -> Any:
        first, rows = pieces[0]
        if padding == 0 and len(pieces) == 1:
            joined = first[None] if rows is None else self.rows(first, rows)
            return self.copy(joined) if owned and joined is first else joined
        if _is_in_reach(first):
            joined = _NUMPY.join(pieces, padding, None)
            return _put_beside(joined, first)
        numpy = sys.modules["jax"].numpy
        blocks = [_moved_to(first, array)[rows] for array, rows in pieces]
        if padding:
            blocks.append(numpy.zeros_like(first, shape=(padding, *blocks[0].shape[1:])))
        return numpy.concatenate(blocks)

    def copy(self, array: Any) -> Any:
        # Nobody can write to an array of jax, but its owner may donate it, which deletes it for all who hold it.
        jax = sys.modules["jax"]
        return array if isinstance(array, jax.core.Tracer) else jax.device_put(array, may_alias=False)

    def equal(self, left: Any, right: Any) -> bool:
        return self.spec(left) == self.spec(right) and bool(sys.modules["jax"].numpy.array_equal(left, right))

    def rows(self, array: Any, rows: slice) -> Any:
        if rows.start == 0 and rows.stop == len(array):
            return array
        return _put_beside(self.host(array)[rows], array) if _is_in_reach(array) else array[rows]


def _is_in_reach(array: Any) -> bool:
    """Return whether numpy can work on the memory of this jax array.

    It does where it can: jax compiles every new combination of shapes, for tens of milliseconds each, and the entries
    of two batches are rarely alike.
    """
    jax = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer) or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    return getattr(array.device, "platform", None) == "cpu"


def _moved_to(first: Any, array: Any) -> Any:
    jax = sys.modules["jax"]
    is_there = isinstance(array, jax.core.Tracer) or array.device == first.device
    return array if is_there else jax.device_put(array, first.device)


def _put_beside(host: np.ndarray[Any, Any], array: Any) -> Any:
    """Return the values as a jax array that is where `array` is, and as free to move as that."""
    jax = sys.modules["jax"]
    if array.committed:
        return jax.device_put(host, array.device)
    with jax.default_device(array.device):
        return jax.device_put(host)


_NUMPY = _Numpy()
_TORCH = _Torch()
_JAX = _Jax()

_known: dict[type, Kind | None] = {
    **dict.fromkeys((bool, int, float, complex), _NUMPY),
    **dict.fromkeys((dict, list, tuple, NoneType)),  # met too often to be looked at each time
}


def find_kind(leaf: Any) -> Kind | None:
    """Return whose array this is; None if it is neither an array nor a number."""
    cls = cast("type[Any]", type(leaf))
    try:
        return _known[cls]
    except KeyError:
        kind = _detect(leaf)
    if kind is not None:
        _known[cls] = kind
    return kind


def kind_of(leaf: Any) -> Kind:
    """Return whose array this is; raises an `InvalidRequest` if it is neither an array nor a number."""
    kind = find_kind(leaf)
    if kind is None:
        raise InvalidRequest(f"expected an array of numpy, torch or jax or a number, got a {type(leaf).__name__}")
    return kind


def _detect(leaf: Any) -> Kind | None:
    numpy, torch, jax = (sys.modules.get(name) for name in ("numpy", "torch", "jax"))
    if numpy is not None and isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return _NUMPY
    # A library that another thread is just importing has no such name yet, and nobody has an array of it.
    if torch is not None and isinstance(leaf, getattr(torch, "Tensor", ())):
        return _TORCH
    if jax is not None and isinstance(leaf, getattr(jax, "Array", ())):
        return _JAX
    return None
