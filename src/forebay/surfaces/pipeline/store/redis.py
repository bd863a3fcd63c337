# SPDX-License-Identifier: Apache-2.0
"""Entries of the store in a redis server: a hash for each run, with a time to live.

Entries come back over a network, so nothing is ever unpickled: values are msgpack of plain data, and arrays are their
type, shape and bytes. Requests fail while the server is away and succeed again when it is back.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from forebay.errors import BadOutcome, ConfigError, Unavailable

MAX_DEPTH: Final = 32
"""Containers within containers."""

ARRAY, SCALAR, TUPLE = 1, 2, 3
"""Codes of the msgpack extensions."""

_KINDS: Final = frozenset("biufcmMSU")
"""Kinds of numpy's types that are nothing but bytes."""

_MAX_DTYPE: Final = 32

T = TypeVar("T")


def claim(url: str, timeout_s: float) -> str:
    """Ask the server whether it is there; returns what the names of this server's keys begin with.

    Raises:
        ConfigError: If it is not, or if the package is missing.
    """
    client = _client(url, timeout_s)
    try:
        _ask(url, client.ping)
    except Unavailable as error:
        raise ConfigError(f"dag.external_store: {error.message}") from error
    finally:
        client.close()
    return f"forebay:{secrets.token_hex(8)}"


class RedisBackend:
    """Entries in redis."""

    def __init__(self, url: str, prefix: str, timeout_s: float, ttl_s: float, max_bytes: int) -> None:
        self._url = url
        self._prefix = prefix
        self._client = _client(url, timeout_s)
        self._ttl_ms = math.ceil(ttl_s * 1000)
        self._max_bytes = max_bytes

    def write(self, run: str, name: str, value: Any, readers: int) -> None:
        """Set a field in the run's hash, and another one that counts its readers."""
        data = encode(value)
        if len(data) > self._max_bytes:
            msg = f"a value of {len(data)} bytes is too large for the store, which takes {self._max_bytes} (max_mb)"
            raise BadOutcome(msg)
        key = self._key(run)
        with self._client.pipeline() as pipe:
            pipe.hset(key, mapping={name: data, **({name + ".left": readers} if readers else {})})
            pipe.pexpire(key, self._ttl_ms)
            _ask(self._url, pipe.execute)

    def read(self, run: str, name: str, readers: int) -> Any:
        """Get a field; the last reader deletes it."""
        key = self._key(run)
        if not readers:
            data = _ask(self._url, lambda: self._client.hget(key, name))
        else:
            with self._client.pipeline() as pipe:
                pipe.hget(key, name)
                pipe.hincrby(key, name + ".left", -1)
                pipe.pexpire(key, self._ttl_ms)  # counting makes the hash anew where it was forgotten
                data, left, _ = _ask(self._url, pipe.execute)
            if left <= 0:
                self.release(run, name, readers)
            if left < 0:
                data = None
        if data is None:
            raise LookupError(name)
        return decode(data)

    def release(self, run: str, name: str, readers: int) -> None:
        """Delete a field."""
        _ask(self._url, lambda: self._client.hdel(self._key(run), name, name + ".left"))

    def forget(self, runs: Sequence[str]) -> None:
        """Delete the hashes of these runs."""
        _ask(self._url, lambda: self._client.unlink(*map(self._key, runs)))

    def sweep(self) -> None:
        """Redis does it itself."""

    def close(self) -> None:
        """Close the connections of this process."""
        self._client.close()

    def _key(self, run: str) -> str:
        return f"{self._prefix}:{run}"


def encode(value: Any) -> bytes:
    """Return plain data and arrays as bytes; raises BadOutcome naming the type of what is neither."""
    try:
        return msgspec.msgpack.encode(_plain(value, 0))
    except (OverflowError, UnicodeEncodeError) as error:
        raise BadOutcome(f"a value cannot be stored in redis: {error}") from error


def decode(data: bytes) -> Any:
    """Return what `encode` was given; raises BadOutcome if it is something else."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_restored)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise BadOutcome(f"what redis has under this key was not written by this server: {error}") from error


def _plain(value: Any, depth: int) -> Any:
    if value is None or type(value) in {bool, int, float, str, bytes, bytearray}:
        return value
    if depth == MAX_DEPTH:
        raise BadOutcome(f"a value cannot be stored in redis: it is nested more than {MAX_DEPTH} deep")
    if type(value) is list:
        return [_plain(element, depth + 1) for element in cast("list[Any]", value)]
    if type(value) is tuple:
        elements = [_plain(element, depth + 1) for element in cast("tuple[Any, ...]", value)]
        return msgspec.msgpack.Ext(TUPLE, msgspec.msgpack.encode(elements))
    if type(value) is dict:
        found = cast("dict[Any, Any]", value)
        if all(type(key) in {str, int} for key in found):
            return {key: _plain(element, depth + 1) for key, element in found.items()}
        what = "dict with keys that are neither str nor int"
    else:
        what = type(value).__name__
        np = sys.modules.get("numpy")
        if np is not None and type(value) is np.ndarray and _is_plain(value.dtype):
            return msgspec.msgpack.Ext(ARRAY, _array(value))
        if np is not None and isinstance(value, np.generic) and _is_plain(np.asarray(value).dtype):
            return msgspec.msgpack.Ext(SCALAR, _array(np.asarray(value)))
        if what == "ndarray":
            what = f"array of {value.dtype}"
    raise BadOutcome(
        f"a value of type {what} cannot be stored in redis; numbers, texts, bytes, lists, dicts and arrays can, "
        "and a store of type 'shm' or 'file' takes all that pickle takes"
    )


def _is_plain(dtype: Any) -> bool:
    return dtype.kind in _KINDS and dtype.names is None


def _array(array: Any) -> bytes:
    header = msgspec.msgpack.encode([array.dtype.str, list(array.shape)])
    return len(header).to_bytes(4, "big") + header + array.tobytes()


def _restored(code: int, data: memoryview) -> Any:
    if code == TUPLE:
        return tuple(msgspec.msgpack.decode(data, ext_hook=_restored))
    if code not in {ARRAY, SCALAR}:
        raise ValueError(f"msgpack extension {code} is unknown")
    import numpy as np

    end = 4 + int.from_bytes(data[:4], "big")
    name, shape = msgspec.msgpack.decode(data[4:end], type=tuple[str, list[int]])
    dtype = np.dtype(name[:_MAX_DTYPE])
    if not _is_plain(dtype) or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data) - end:
        raise ValueError("an array does not have the size that it says")
    array = np.frombuffer(bytearray(data[end:]), np.uint8).view(dtype) if len(data) > end else np.empty(0, dtype)
    array = array.reshape(shape)
    return array if code == ARRAY else array[()]


def _client(url: str, timeout_s: float) -> Any:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigError("dag.external_store.type 'redis' needs the package redis; install forebay[redis]") from error
    # A connection that was open while the server went away fails once more when it is back: one try more hides that.
    retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    try:
        return redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType] - the package types it so
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry
        )
    except ValueError as error:
        raise ConfigError(f"dag.external_store.url: expected the address of a redis server: {error}") from None


def _ask(url: str, call: Callable[[], T]) -> Any:
    """Ask the server; an error becomes a sentence without the password."""
    import redis

    try:
        return call()
    except redis.RedisError as error:
        parts = urlsplit(url)
        where = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
        raise Unavailable(f"the store at redis {where} does not answer: {error}") from error
