# SPDX-License-Identifier: Apache-2.0
"""`pyovms.Tensor`: what handlers are given and what they return.

It gives its memory to whoever asks for a buffer (`bytes`, `memoryview`, `numpy.array`). Before Python 3.12 a class
written in Python cannot do so by itself, therefore it is a NumPy array underneath; what the original has under the same
names as NumPy (`shape`, `size`, `data`) is the original's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, cast

import numpy as np

from forebay.errors import ValidationError
from forebay.types.datatypes import DATATYPES
from forebay.types.tensor import Tensor, check_size

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

_NATIVE: Final = "@=<" if sys.byteorder == "little" else "@=>"
_WHOLE: Final = {("l", 4): "INT32", ("L", 4): "UINT32", ("l", 8): "INT64", ("L", 8): "UINT64"}
_BY_FORMAT: Final = {row.struct: row.name for row in DATATYPES.values() if row.struct}
CONVERTED: Final = "OpenVINO tensors"
_TYPED: Final = {row.name: np.dtype(row.struct) for row in DATATYPES.values() if row.struct}
"""The types whose elements a handler sees; all others come as bytes."""


class PyTensor(np.ndarray[Any, Any]):
    """A name, a shape and a type beside a buffer. Neither shape nor type need fit the buffer."""

    _name: str
    _shape: tuple[int, ...]
    _datatype: str
    _is_constant: bool

    def __new__(
        cls,
        name: str,
        data: Any = None,
        shape: Sequence[int] | None = None,
        datatype: str | None = None,
        *,
        buffer: Any = None,
    ) -> Self:
        """Put a name on a buffer.

        Args:
            name: Which input or output it is.
            data: Anything with a buffer; it is kept, not copied.
            shape: Told instead of the buffer's.
            datatype: Told instead of the one that the buffer's format means.
            buffer: `data` under its other name.

        Raises:
            TypeError: If the data has no buffer.
        """
        source = data if buffer is None else buffer
        if source is None:
            raise TypeError("Tensor() takes data: bytes, a NumPy array, or anything else that has a buffer")
        array: Any = np.asarray(cast("Any", source) if isinstance(source, np.ndarray) else memoryview(source))
        self: Any = array.view(cls)
        self.flags.writeable = False
        form = memoryview(array).format
        self._name = str(name)
        self._shape = array.shape if shape is None else tuple(map(int, shape))
        self._datatype = _datatype(form, array.itemsize) if datatype is None else str(datatype)
        self._is_constant = isinstance(source, bytes)
        return self

    @property
    def name(self) -> str:
        """Which input or output it is."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """What it is said to be shaped like."""
        return self._shape

    @property
    def datatype(self) -> str:
        """What its elements are said to be."""
        return self._datatype

    @property
    def is_constant(self) -> bool:
        """Whether nobody can change the buffer."""
        return self._is_constant

    @property
    def data(self) -> memoryview:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """The buffer, as it is."""
        return memoryview(plain(self)).toreadonly()

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the buffer."""
        return plain(self).nbytes

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Compute with the buffer, as NumPy does with whatever has one."""
        return getattr(ufunc, method)(*map(plain, inputs), **kwargs)

    def __array_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """As `__array_ufunc__`, for all other functions of NumPy."""
        return func(*map(_plain_in, args), **{name: _plain_in(value) for name, value in kwargs.items()})

    def __bool__(self) -> bool:
        """Be true, whatever it holds."""
        return True

    # Equal to itself alone, as any object; beside an array, NumPy compares the elements.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        """Print what it is, not what it holds."""
        return f"Tensor({self._name!r}, shape={self._shape}, datatype={self._datatype!r}, size={self.size})"

    __str__ = __repr__

    def __getitem__(self, place: Any) -> Any:
        return plain(self)[place]

    def __copy__(self) -> PyTensor:
        """Return another one of the same buffer."""
        return PyTensor(self._name, plain(self), self._shape, self._datatype)

    def __deepcopy__(self, memo: Any) -> PyTensor:
        """Return one with a buffer of its own."""
        return PyTensor(self._name, np.array(plain(self)), self._shape, self._datatype)

    def __reduce__(self) -> Any:
        """Let it be pickled with its name, shape and type."""
        return PyTensor, (self._name, plain(self), self._shape, self._datatype)


PyTensor.__module__, PyTensor.__name__, PyTensor.__qualname__ = "pyovms", "Tensor", "Tensor"


def plain(value: Any) -> Any:
    """Return the array of a tensor, and anything else as it is."""
    return np.asarray(cast("Array", value)) if isinstance(value, PyTensor) else value


def read(tensor: Tensor, name: str) -> PyTensor:
    """Make of a request's tensor what a handler is given.

    Elements of the types that Python's buffers know can be seen as such; all else comes as bytes, with the shape and
    the type that the request says. Nothing is copied, but for elements that do not lie where their type wants them: of
    these NumPy gives away a format (`=f`) that no `memoryview` can read.

    Raises:
        ValidationError: If its length is not what type and shape say.
    """
    dtype = _TYPED.get(tensor.datatype)
    if dtype is None:
        return PyTensor(name, np.frombuffer(tensor.data, np.uint8), tensor.shape, tensor.datatype)
    check_size(tensor.name, tensor.datatype, tensor.shape, len(tensor.data))
    array = np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
    return PyTensor(name, array if array.flags.aligned else array.copy(), None, tensor.datatype)


def renamed(tensor: PyTensor, name: str) -> PyTensor:
    """Return the same tensor under another name."""
    return tensor if tensor.name == name else PyTensor(name, plain(tensor), tensor.shape, tensor.datatype)


def sealed(tensor: PyTensor) -> PyTensor:
    """Return a tensor that stays as it is whatever happens to its source, row by row in memory."""
    array = plain(tensor)
    if tensor.is_constant:
        return tensor
    return PyTensor(tensor.name, np.array(array, order="C", copy=True), tensor.shape, tensor.datatype)


def check_writable(tensor: PyTensor) -> None:
    """Check that an answer can hold a tensor, whatever its name, shape and type are said to be.

    Raises:
        ValidationError: If it cannot.
    """
    if plain(tensor).dtype.hasobject:
        hint = "an array of Python's objects; make bytes of these, or an array of numbers"
        raise ValidationError(f"the tensor '{tensor.name}' is {hint}")
    if not all(-(2**63) <= axis < 2**63 for axis in tensor.shape):
        raise ValidationError(f"the tensor '{tensor.name}' has the shape {list(tensor.shape)}; axes have 64 bits")
    try:
        tensor.datatype.encode()
    except UnicodeEncodeError:
        raise ValidationError(
            f"the tensor '{tensor.name}': expected a datatype in Unicode, got {tensor.datatype!a}"
        ) from None


def check_numbers(tensor: PyTensor) -> None:
    """Check that a tensor can become one of OpenVINO's.

    Raises:
        ValidationError: If its type holds no numbers, an axis is negative, or its buffer has another size.
    """
    known = DATATYPES.get(tensor.datatype)
    if known is None or not known.size:
        found = tensor.datatype[:80]
        raise ValidationError(f"the tensor '{tensor.name}' is of the type '{found}'; {CONVERTED} hold numbers or BOOL")
    check_size(tensor.name, tensor.datatype, tensor.shape, tensor.size)


def written(tensor: PyTensor, name: str) -> Tensor:
    """Make of a handler's tensor, which can be written, what an answer holds."""
    array = np.ascontiguousarray(plain(tensor))
    data = array.reshape(-1).view(np.uint8).data if array.nbytes else b""
    return Tensor(name, tensor.datatype, tensor.shape, data)


def _datatype(form: str, size: int) -> str:
    bare = form.lstrip(_NATIVE)
    return _WHOLE.get((bare, size)) or _BY_FORMAT.get(bare) or form


def _plain_in(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        found = [_plain_in(one) for one in cast("Sequence[Any]", value)]
        return found if isinstance(value, list) else tuple(found)
    return plain(value)
