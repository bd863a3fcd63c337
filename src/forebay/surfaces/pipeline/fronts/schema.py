# SPDX-License-Identifier: Apache-2.0
"""Requests and responses of the user's own: a `.proto` file or a generated module takes the place of the usual ones."""

from __future__ import annotations

import copyreg
import functools
import importlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from forebay.errors import ConfigError
from forebay.types.failures import text_of
from forebay.workers.user_calls.user_code import caught

COMPILE_S: Final = 60.0
"""Time the compiler has."""

_NEEDED: Final = (("int32", "err_no", 10000), ("string", "err_msg", "what happened"))
"""Fields of every answer, each with something that it has to take; all others may be missing."""


def load(source: str, folder: Path) -> tuple[Any, Any]:
    """Return the classes `Request` and `Response` of a schema.

    Args:
        source: A `.proto` file, a generated `_pb2.py` file, or the name of a generated module.
        folder: What relative paths start from.

    Raises:
        ConfigError: If it cannot be read, or has no such messages.
    """
    found = _compiled(source, folder / source) if source.endswith(".proto") else _imported(source, folder)
    request, response = (found.get(name) for name in ("Request", "Response"))
    if request is None or response is None:
        raise ConfigError(f"{source} has the messages {', '.join(found) or '-'}; it needs a Request and a Response")
    missing = [f"{kind} {name}" for kind, name, value in _NEEDED if caught(setattr, response(), name, value)[1]]
    if missing:
        msg = f"the Response of {source} has no {' and no '.join(missing)}, in which clients get errors"
        raise ConfigError(msg)
    return request, response


def _compiled(source: str, path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}, which `proto` names")
    if importlib.util.find_spec("grpc_tools") is None:
        raise ConfigError(f"{source} needs a compiler, which is not installed: pip install 'forebay[protos]'")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "descriptors"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{path.parent}", "--include_imports"]
        command += [f"--descriptor_set_out={out}", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"compiling {source} took longer than {COMPILE_S:g} s") from error
        if done.returncode:
            told = [line for line in done.stderr.splitlines() if line.startswith(str(path.parent))]
            raise ConfigError(f"{source} cannot be compiled: {'; '.join(told) or done.stderr.strip()}")
        descriptors = out.read_bytes()
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
    last = files[-1]  # those it imports come first
    prefix = f"{last.package}." if last.package else ""
    return {message.name: _class(descriptors, prefix + message.name) for message in last.message_type}


@functools.cache
def _class(descriptors: bytes, full_name: str) -> Any:
    """Return the class of a compiled message; the same one each time in a process."""
    pool: Any = _pool(descriptors)
    found = message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))

    def reduce(message: Any) -> tuple[Any, ...]:
        return _revive, (descriptors, full_name, message.SerializeToString())

    copyreg.pickle(found, reduce)  # no module has this class, so it travels to our workers with its description
    return found


@functools.cache
def _pool(descriptors: bytes) -> Any:
    pool: Any = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    return pool


def _revive(descriptors: bytes, full_name: str, data: bytes) -> Any:
    return _class(descriptors, full_name).FromString(data)


def _imported(source: str, folder: Path) -> dict[str, Any]:
    is_file = source.endswith(".py")
    module, error = caught(_file, folder / source) if is_file else caught(importlib.import_module, source)
    if error is not None:
        raise ConfigError(f"the schema {source} cannot be imported: {text_of(error)}") from error
    named = cast("dict[str, Any]", vars(module))
    return {name: found for name, found in named.items() if isinstance(found, type) and issubclass(found, Message)}


def _file(path: Path) -> Any:
    name = path.stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
