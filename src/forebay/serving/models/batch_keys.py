# SPDX-License-Identifier: Apache-2.0
"""Batch keys: before the front queues a sample, it asks the user's function which others the sample may run with.

The function runs on the event loop; apart from the inline pool, no other user code does. Its input is decoded for it,
and whatever it raises is the error of that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import msgspec

from forebay.errors import ForebayError, RunnerFailed
from forebay.serving.models.further_methods import CALL
from forebay.serving.models.sample_errors import refusal
from forebay.serving.models.schema import WireType
from forebay.serving.models.tensor_codec import codec_of
from forebay.serving.tensor_face import TENSORS
from forebay.types.call import Failure, Item
from forebay.workers.user_calls.user_code import attempt, caught, user_code


class SampleKeys:
    """Reads the batch key of each sample of a request."""

    def __init__(self, key_of: Callable[[Any], Hashable], name: str, given: WireType) -> None:
        """Prepare to read.

        Args:
            key_of: The user's function of one decoded sample.
            given: The type of a sample.
        """
        self._key_of = key_of
        self._name = name
        self._given = given
        self._tensors = codec_of(given, WireType(Any, "output"))

    def __call__(self, item: Item) -> list[Hashable]:
        """Return one key for each sample of a request.

        Raises:
            InvalidRequest: If a sample cannot be decoded; ValidationError if it has the wrong type.
            RunnerFailed: If the function raised, or returned what cannot be a key.
        """
        if item.params["in"] == TENSORS:
            samples = self._tensors.decode(item.body, item.params, item.size)
            return [key_of_sample(self._key_of, self._name, sample) for sample in samples]
        decode = self._given.reader(item.params)
        body: Any = item.body
        if type(body) is not list:
            return [self._read(decode, body, None)]
        return [self._read(decode, row, number) for number, row in enumerate(cast("list[Any]", body))]

    def _read(self, decode: Callable[[Any], Any], row: Any, number: int | None) -> Hashable:
        sample, error = caught(decode, row)
        if error is not None:
            try:
                raise refusal(error, row, number, self._given) from None
            finally:
                del error  # its frames hold this one, and with it the body: a circle
        try:
            return key_of_sample(self._key_of, self._name, sample)
        except ForebayError as error:
            raise refusal(error, row, number) from None


class MethodKey(msgspec.Struct, frozen=True):
    """The key of requests to a further method of a model; no key of the user's is equal to it."""

    name: str


class MethodKeys:
    """Keeps the methods of a model apart: a batch is for one of them."""

    def __init__(self, keys_of: SampleKeys | None) -> None:
        """Give what asks `predict` the keys that the model has for it."""
        self._keys_of = keys_of

    def __call__(self, item: Item) -> list[Hashable]:
        """Return one key for each sample of a request; raises as `SampleKeys` does."""
        name = item.params.get(CALL)
        if name is not None:
            return [MethodKey(name)] * item.size
        return [None] * item.size if self._keys_of is None else self._keys_of(item)


def key_of_sample(key_of: Callable[..., Hashable], name: str, *inputs: Any) -> Hashable:
    """Ask a function of the user's for a batch key.

    Args:
        name: What it is called in errors.
        *inputs: What it is given: the sample, or its inputs one by one.

    Raises:
        ForebayError: What it raised; RunnerFailed if it returned what cannot be a key.
    """
    with user_code():
        key = key_of(*inputs)
    if type(attempt(hash, key)) is Failure:
        found = type(key).__name__
        msg = f"{name} returned a {found}, which cannot be hashed; return a number, a string or a tuple"
        raise RunnerFailed(msg) from None
    return key
