# SPDX-License-Identifier: Apache-2.0
"""The `.proto` file of a gRPC project: compiled once by the server, made into modules in each worker.

Nothing is written to the project, and what somebody has generated there is not used. Paths of imports are meant from
the project's folder, as in the original, or from the folder of the file.

The server works on descriptors and registers none of them, so a project may call its packages and files as it likes.
Workers register them where generated code would, since that is where messages of one file meet those of another.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from forebay.surfaces.nucleus.project_settings import NucleusConfig

COMPILE_S: Final = 60.0
"""Time the compiler has."""

_OWN: Final = "google/protobuf/"
"""Files that come with protobuf, as modules."""
_SERVICES: Final = 6
"""Number of the field in a file's descriptor that lists its services."""
_MISSING: Final = re.compile(r'Import "([^"]+)" was not found')


class Rpc(msgspec.Struct, frozen=True):
    """A method of the service.

    Attributes:
        takes: Full name of the messages it takes.
        gives: Full name of the messages it gives.
        is_asked_in_parts: Whether it takes any number of messages.
        answers_in_parts: Whether it gives any number of messages.
    """

    name: str
    takes: str
    gives: str
    is_asked_in_parts: bool
    answers_in_parts: bool


class UserService(msgspec.Struct, frozen=True):
    """The service of a project.

    Attributes:
        full_name: With its package.
        file: The file it is described in, below the project's folder.
        files: Serialized descriptors of that file and all it imports, each after those it imports itself.
    """

    full_name: str
    file: str
    rpcs: tuple[Rpc, ...]
    files: tuple[bytes, ...]


def compiled(config: NucleusConfig) -> UserService:
    """Compile the file that `protobuf_path` names; raises ConfigError with file, line and cure."""
    assert config.protobuf_path is not None
    path = config.project_dir / config.protobuf_path
    if importlib.util.find_spec("grpc_tools") is None or importlib.util.find_spec("google.protobuf") is None:
        msg = f"{path} needs a compiler, which is not installed: pip install 'forebay[nucleus,grpc,protos]'"
        raise ConfigError(msg)
    from google.protobuf import descriptor_pb2

    try:
        name = path.resolve().relative_to(config.project_dir.resolve()).as_posix()
    except ValueError:
        msg = f"{config.file}: protobuf_path: {path} is not in the project's folder, from where imports are looked up"
        raise ConfigError(msg) from None
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "descriptors"
        command = [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{config.project_dir}", f"-I{path.parent}"]
        command += ["--include_imports", "--include_source_info", f"--descriptor_set_out={out}"]
        command.append(str(config.project_dir / name))
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"compiling {path} took longer than {COMPILE_S:g} s") from error
        if done.returncode:
            raise ConfigError(_complaint(path, config.project_dir, done.stderr))
        found: Any = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    (described,) = [file for file in found.file if file.name == name]  # it stands last: those it imports come first
    service = _only_service(path, described)
    for file in found.file:
        file.ClearField("source_code_info")
    return UserService(
        full_name=".".join(filter(None, (described.package, service.name))),
        file=name,
        rpcs=tuple(
            Rpc(one.name, one.input_type[1:], one.output_type[1:], one.client_streaming, one.server_streaming)
            for one in service.method
        ),
        files=tuple(file.SerializeToString() for file in found.file),
    )


def _only_service(path: Path, described: Any) -> Any:
    if len(described.service) == 1:
        return described.service[0]
    if not described.service:
        msg = f"{path}: there is no service in it; define one, such as: service Predictor {{ rpc Predict (Request) "
        raise ConfigError(msg + "returns (Response); }")
    lines = {
        place.path[1]: place.span[0] + 1
        for place in described.source_code_info.location
        if len(place.path) == 2 and place.path[0] == _SERVICES
    }
    listed = ", ".join(f"{one.name} (line {lines.get(index, '?')})" for index, one in enumerate(described.service))
    raise ConfigError(
        f"{path}:{lines.get(1, 1)}: there are {len(described.service)} services in it: {listed}; a project has exactly "
        "one, so put all methods into one, or the other services into files that are not served"
    )


def _complaint(path: Path, project: Path, told: str) -> str:
    """Return what the compiler says, with a cure where one is known."""
    lines = [line for line in told.splitlines() if re.match(r"\S+?:\d+:\d+: ", line)] or told.strip().splitlines()
    lines = [line for line in lines if not line.endswith("is not defined.")] or lines  # what follows from the others
    text = f"{path} cannot be compiled: {'; '.join(line.removeprefix(f'{project}/') for line in lines)}"
    missing = _MISSING.search(told)
    if missing is None:
        return text
    wanted = missing[1]
    there = [found.relative_to(project).as_posix() for found in project.rglob(Path(wanted).name)]
    if there:
        return f'{text}; imports are looked up from {project}: did you mean import "{there[0]}"?'
    return f"{text}; put {wanted} into {project}, from where imports are looked up"


def generated(service: UserService) -> Any:
    """Return the module that generated code for the service's file would be, in a worker; imports of it find this one.

    Raises:
        ModelError: If something else in this process has registered other messages of the same name.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool
    from google.protobuf.internal import builder

    pool: Any = descriptor_pool.Default()
    packaged = _Packaged()
    sys.meta_path.insert(0, packaged)
    for data in service.files:
        file = descriptor_pb2.FileDescriptorProto.FromString(data)
        module_name = f"{re.sub(r'[.]proto$', '', file.name).replace('-', '_').replace('/', '.')}_pb2"
        if file.name.startswith(_OWN):
            importlib.import_module(module_name)
            continue
        try:
            described: Any = pool.AddSerializedFile(data)
        except TypeError as error:
            msg = f"the messages of {file.name} cannot be used: others of the same name are there already: {error}"
            raise ModelError(msg) from error
        module = ModuleType(module_name, f"Generated from {file.name}.")
        module.__dict__["DESCRIPTOR"] = described
        builder.BuildMessageAndEnumDescriptors(described, module.__dict__)
        builder.BuildTopDescriptorsAndMessages(described, module_name, module.__dict__)
        if "." in module_name:
            packaged.modules[module_name] = module
        else:
            sys.modules[module_name] = module
        if file.name == service.file:
            return module
    raise LookupError(service.file)


class _Packaged(MetaPathFinder, Loader):
    """Finds the modules of files in folders: only what is imported becomes known to the package that it is in."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has all that it is to have."""
