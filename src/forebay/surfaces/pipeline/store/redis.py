# SPDX-License-Identifier: Apache-2.0
"""Entries of the store in a redis server: a hash for each run, with a time to live.

Entries come back over a network, so nothing is ever unpickled: values travel as between the members of a cluster.
Requests fail while the server is away and succeed again when it is back.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from forebay.cluster.packed_values import pack_value, unpack_value
from forebay.errors import BadOutcome, ConfigError, ForebayError, InvalidRequest, Unavailable

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
    """Return plain data and arrays as bytes; raises a `BadOutcome` that says where there is something else."""
    cure = "a store of type 'shm' or 'file' takes all that pickle takes"
    try:
        return msgspec.msgpack.encode(pack_value(value, "a value", cure, "stored in redis"))
    except InvalidRequest as error:
        raise BadOutcome(error.message) from error
    except UnicodeEncodeError as error:
        raise BadOutcome(f"a value cannot be stored in redis: {error}") from error


def decode(data: bytes) -> Any:
    """Return what `encode` was given; raises a `BadOutcome` if it is something else."""
    try:
        return unpack_value(msgspec.msgpack.decode(data, type=list[bytes]), max_elements=len(data))
    except (msgspec.DecodeError, ForebayError, TypeError) as error:
        raise BadOutcome(f"what redis has under this key was not written by this server: {error}") from error


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
