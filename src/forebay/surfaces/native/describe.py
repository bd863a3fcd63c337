# SPDX-License-Identifier: Apache-2.0
"""What a server must know of a model whose file it does not import, as plain data.

It comes from another interpreter: from a worker that attaches, in its hello, or from one that was only started to
describe a file. Either way it is checked on arrival; of what a worker says nothing else is believed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from forebay.errors import ConfigError, ForebayError, revive
from forebay.protocols.openapi import Described
from forebay.protocols.openapi import document as openapi_document
from forebay.server.served import Served, ServedMethod, contract_of
from forebay.server.wire_schema import WireSchema, wire_schema_of
from forebay.serving.models.annotations import io_types
from forebay.serving.models.further_methods import ModelMethod, check_paths
from forebay.serving.models.model import Model, ModelSettings, PlainSettings, models_in, settings_of
from forebay.serving.models.tensor_codec import codec_for
from forebay.serving.tensor_face import TensorFace
from forebay.types.first_use import known
from forebay.workers.processes.parent_death import end_with, end_with_reader

if TYPE_CHECKING:
    from forebay.protocols.openapi_components import Documented
    from forebay.serving.endpoint import Endpoint


class DescribedMethod(msgspec.Struct, frozen=True):
    """A further method of a model, described."""

    method: ModelMethod
    input: WireSchema
    output: WireSchema
    tensors: TensorFace | None = None


class Description(PlainSettings, frozen=True, kw_only=True):
    """A model, described."""

    input: WireSchema
    output: WireSchema
    is_named: bool = False
    methods: Annotated[tuple[DescribedMethod, ...], msgspec.Meta(max_length=256)] = ()
    tensors: TensorFace | None = None
    has_batch_key: bool = False

    @property
    def settings(self) -> ModelSettings:
        """The model's settings, without what only its own interpreter can use."""
        plain = {name: getattr(self, name) for name in PlainSettings.__struct_fields__}
        return ModelSettings(batch_key=None, pad=None, methods=[one.method for one in self.methods], **plain)

    def faces(self) -> tuple[ServedMethod, list[ServedMethod]]:
        """Return how it, and what it answers at further paths, is documented and how its bytes are moved."""
        return faces_of(
            self,
            (self.input, self.output),
            [(one.method, (one.input, one.output), one.tensors) for one in self.methods],
            shares_disk=False,
        )

    def differences(self, other: Description, beside: Collection[str] = ()) -> str:
        """Return how another description of the same name differs, beside these fields; empty if it does not."""
        found: list[str] = []
        for field in [name for name in self.__struct_fields__ if name not in beside]:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                long = field in {"input", "output", "description", "methods", "tensors"}
                found.append(f"its {field}" if long else f"its {field}: {theirs!r} and not {ours!r}")
        return ", ".join(found)


def faces_of(
    model: ModelSettings | Description,
    types: tuple[Documented, Documented],
    methods: Iterable[tuple[ModelMethod, tuple[Documented, Documented], TensorFace | None]],
    *,
    shares_disk: bool,
) -> tuple[ServedMethod, list[ServedMethod]]:
    """Return how a model, and each of its further methods, is documented and how its bytes are moved.

    Args:
        types: Those of a sample and of a result.
        methods: Its further methods, with theirs, and what tensors they take.
        shares_disk: Whether its workers see the files of the server.
    """

    def face(
        told: ModelSettings | Description | ModelMethod,
        types: tuple[Documented, Documented],
        tensors: TensorFace | None = None,
        **more: Any,
    ) -> ServedMethod:
        described = Described(
            name=model.name,
            version=model.version,
            description=told.description,
            input=types[0],
            output=types[1],
            streams=told.streams,
            batchable=told.batchable,
            **more,
        )
        contract = contract_of(described, has_context=told.has_context, shares_disk=shares_disk)
        return ServedMethod(contract, described, tensors)

    further = [
        face(one, types, tensors, is_named=not types[0].in_pieces, path=one.path, verbs=one.verbs, call=one.name)
        for one, types, tensors in methods
    ]
    is_named = model.is_named if isinstance(model, Description) else not types[0].in_pieces
    return face(model, types, is_named=is_named, methods=[one.described for one in further]), further


def served_by(description: Description, endpoint: Endpoint) -> Served:
    """Return a described model with what answers for it."""
    face, methods = description.faces()
    return Served(endpoint, face.contract, face.described, methods=methods, tensors=description.tensors)


def describe(model: type[Model]) -> Description:
    """Describe a model class; raises ConfigError if the class is not well-formed."""
    settings = settings_of(model)
    given, answer = io_types(model)
    plain = {name: getattr(settings, name) for name in PlainSettings.__struct_fields__}
    methods: list[DescribedMethod] = []
    for one in settings.methods:
        types = io_types(model, one)
        face = codec_for(model, *types, one.name).face
        methods.append(DescribedMethod(one, wire_schema_of(types[0]), wire_schema_of(types[1]), face))
    tensors = codec_for(model, given, answer).face
    return Description(
        input=wire_schema_of(given),
        output=wire_schema_of(answer),
        is_named=True,
        methods=tuple(methods),
        tensors=tensors,
        has_batch_key=model.batch_key is not None,
        **plain,
    )


def check(given: Any) -> Description:
    """Read a description that came from somewhere else; raises ConfigError naming what is wrong with it."""
    try:
        description = msgspec.convert(given, known(Description))
        check_paths([one.method for one in description.methods])
        described = description.faces()[0].described
    except (msgspec.ValidationError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the description of the model cannot be used: {error}") from error
    try:
        msgspec.json.encode(openapi_document("check", "1", [described]))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        msg = "the description of the model cannot be used: the schema of its input or output is not a JSON Schema"
        raise ConfigError(msg) from error
    return description


def require_no_batch_key(where: str, description: Description) -> None:
    """Refuse a model whose file the server does not import, if it needs code of its own there.

    Raises:
        ConfigError: If it has a `batch_key`.
    """
    if description.has_batch_key:
        raise ConfigError(
            f"{where}.batch_key runs in the server, which does not import the file of a model in another "
            "interpreter; leave it out, or name the model's file to the server, with workers: 0 if its workers dial in"
        )


def describe_in(python: str, target: str, env: Mapping[str, str]) -> list[tuple[str, Description]]:
    """Describe the models of a file in another interpreter; returns the description of each class by its name.

    Args:
        python: The interpreter; it must have forebay.
        target: `file.py` or `file.py:Name`.

    Raises:
        ConfigError: If the interpreter cannot be used or the file is wrong.
    """
    import subprocess

    command = [python, "-P", "-c", f"from {__name__} import main; main()", target, str(os.getpid())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env={**os.environ, **env}
        )
    except OSError as error:
        hint = ""
        inside = os.path.join(python, "bin", "python")  # noqa: PTH118 - a Path would drop the ./ of a relative one
        if os.path.isfile(inside):  # noqa: PTH113
            hint = f"; did you mean {inside}?"
        raise ConfigError(f"the interpreter {python} cannot be run: {error.strerror}{hint}") from error
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode == 0:
        sys.stderr.write(said + "\n" if said else "")
        found = msgspec.msgpack.decode(done.stdout)
        if "error" in found:
            raise revive(*found["error"])
        described = [(name, check(description)) for name, description in found["models"]]
        for name, description in described:
            require_no_batch_key(name, description)
        return described
    last = said.rpartition("\n")[2]
    if "No module named 'forebay" in last or "No module named 'msgspec'" in last:
        msg = f"{python} has no forebay, which a worker needs; install it there: {python} -m pip install forebay"
    elif "-P" in said and "option" in said:
        msg = f"{python} is too old: a worker needs Python 3.11 or newer"
    else:
        msg = f"{python} could not describe {target}: {last or f'it ended with status {done.returncode}'}"
    raise ConfigError(msg)


def main() -> None:
    """Describe the target in `sys.argv[1]` to the standard output, for the server in the argument after it.

    What the file prints goes to the other output.
    """
    from forebay.surfaces.native.compositions import compositions_of
    from forebay.surfaces.native.target_file import import_file, split_target

    answer = os.fdopen(os.dup(1), "wb")
    if not end_with(int(sys.argv[2])):
        end_with_reader(answer.fileno())
    os.dup2(2, 1)
    try:
        path, name = split_target(sys.argv[1])
        module = import_file(path)
        if compositions_of(module, name):
            msg = f"{path} composes models, which the server's own interpreter must import; leave out --python"
            raise ConfigError(msg)
        models = models_in(module, name)
        found: dict[str, Any] = {"models": [(model.__name__, describe(model)) for model in models]}
    except ForebayError as error:
        found = {"error": [error.kind, error.message]}
    answer.write(msgspec.msgpack.encode(found))
    answer.close()
