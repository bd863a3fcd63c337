# SPDX-License-Identifier: Apache-2.0
"""A model file as a `Model`: its types are those that the file declares.

Where samples can share a run, a sample is an input of the file without its first axis. Samples with axes of any length
are padded, or run only with others of the same shape. Where samples cannot share a run, each request goes to the model
as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypedDict, cast

import msgspec

from forebay.errors import BadOutcome, ConfigError, ValidationError
from forebay.openai import Embedding, EmbeddingRequest, RerankRequest, Score
from forebay.runtimes.library import OpenVinoOptions, RunOptions, Trust, accelerator
from forebay.runtimes.model_file import KINDS, ModelFile, load_with
from forebay.runtimes.sharing import SignaturePlan
from forebay.runtimes.signature import Signature, Value, Var
from forebay.serving.models.array_types import SCALARS, ArrayType, array_of, objects_of
from forebay.serving.models.further_methods import endpoint, methods_of, path_like
from forebay.serving.models.model import Model
from forebay.serving.models.model_runner import MethodsRunner, ModelRunner, runner_for
from forebay.serving.models.padding import Pad, Padded
from forebay.serving.models.tensor_codec import TensorCodec, TensorPort, TensorSide
from forebay.types.first_use import known
from forebay.workers.processes.cores import usable_cores
from forebay.workers.user_calls.user_code import caught

_BOUNDED: Final = 32
"""Whole numbers of more bits are not bounded in the type: JSON schemas and msgspec end there."""


class TextRequest(EmbeddingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text whose vector is wanted; encoders take no tokens, which clients number otherwise."""

    input: str


_SPOKEN: Final = {"embeddings": (TextRequest, Embedding), "rerank": (RerankRequest, Score)}


class FilePlan(msgspec.Struct, frozen=True):
    """How a model file is served; plain data, for worker processes.

    Attributes:
        main: What its own path asks.
        threads: Threads that compute one batch; None takes one for each processor that the worker has.
        name: What the file calls that; empty if there is no other.
        others: Its other signatures by name, each of which has a path below.
        trust: What the file may hold although loading it can run code.
        openvino: What OpenVINO is told, where it is to run the file.
    """

    path: str
    main: SignaturePlan
    threads: int | None = None
    name: str = ""
    others: dict[str, SignaturePlan] = {}
    trust: Trust = Trust()
    openvino: OpenVinoOptions | None = None


class FileModel(Model):
    """What all model files have in common; `class_of` makes the class of one."""

    isolate_errors = True
    borrows_input = True
    check_outputs = False
    plan: ClassVar[FilePlan]
    tensor_codecs: ClassVar[Mapping[str, TensorCodec]]
    loaded: ClassVar[Any] = None
    """Returns the model, if it is in memory already."""

    def load(self) -> None:
        """Load the file, or take the model that is in memory."""
        threads = self.plan.threads or usable_cores()
        device, own = accelerator(self.device), self.plan.openvino
        options = RunOptions(
            threads=threads, device=device, signature=self.plan.name, trust=self.plan.trust, openvino=own
        )
        file: ModelFile = load_with(Path(self.plan.path), options) if self.loaded is None else self.loaded()
        others = file.signatures()[1] if self.plan.others else {}
        self._main = _Asked(file, self.plan.main)
        self._others = {name: _Asked(others[name], one) for name, one in self.plan.others.items()}

    def preprocess(self, sample: Any) -> dict[str, Any]:
        """Make arrays of what the client sent, with the types of the file."""
        return _arrays(self.plan.main, sample)

    def predict(self, batch: Any) -> list[Any]:
        """Run the model once for all samples that go together."""
        return self._main.answers(batch)

    def ask(self, name: str, batch: Sequence[Any]) -> list[Any]:
        """Do both with another signature; a sample of which no arrays can be made fails alone."""
        asked = self._others[name]
        made = [caught(_arrays, asked.plan, sample) for sample in batch]
        answers = iter(asked.answers([arrays for arrays, error in made if error is None]))
        return [next(answers) if error is None else error for _, error in made]


class _Asked:
    """A signature that is asked."""

    def __init__(self, file: ModelFile, plan: SignaturePlan) -> None:
        self._file = file
        self.plan = plan

    def answers(self, batch: Any) -> list[Any]:
        """Run it once for all samples that go together."""
        if not self.plan.sharing.has_rows:
            return [self._run(sample) for sample in batch]
        if self.plan.sharing.why_not:
            return [self._stacked([sample])[0] for sample in batch]
        if isinstance(batch, Padded):
            return self._rows(batch.arrays, len(cast("list[Any]", batch)))
        groups: dict[Any, list[int]] = {}
        for place, sample in enumerate(batch):
            groups.setdefault(tuple([array.shape for array in sample.values()]), []).append(place)
        answers: list[Any] = [None] * len(batch)
        for places in groups.values():
            for place, answer in zip(places, self._stacked([batch[place] for place in places]), strict=True):
                answers[place] = answer
        return answers

    def _stacked(self, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        import numpy as np

        if len(samples) == 1:  # the memory of a single sample is used as it is
            return self._rows({name: array[np.newaxis] for name, array in samples[0].items()}, 1)
        return self._rows({name: np.stack([one[name] for one in samples]) for name in samples[0]}, len(samples))

    def _rows(self, arrays: Mapping[str, Any], count: int) -> list[Any]:
        found = self._run(arrays)
        for name, array in found.items():
            if array.shape[:1] != (count,):
                raise BadOutcome(f"the output '{name}' has the shape {list(array.shape)} for {count} samples")
        rows = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
        spoken = _SPOKEN.get(self.plan.signature.speaks)
        return [spoken[1](**row) for row in rows] if spoken else rows

    def _run(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        signature = self.plan.signature
        feed = [(var, Value(arrays[var.alias])) for var in signature.feeds]
        values = self._file.run(feed, signature.fetches)
        return {var.alias: value.array for var, value in zip(signature.fetches, values, strict=True)}


def _arrays(plan: SignaturePlan, sample: Any) -> dict[str, Any]:
    given: Mapping[str, Any] = msgspec.structs.asdict(sample) if isinstance(sample, msgspec.Struct) else sample
    return {var.alias: _array(var, given[var.alias]) for var in plan.signature.feeds}


def class_of(plan: FilePlan, loaded: Callable[[], ModelFile] | None = None) -> type[FileModel]:
    """Make the class of a model file.

    Args:
        loaded: Returns the model, for workers in a process that has it in memory already; else each loads its own.

    Raises:
        ConfigError: If it takes or gives something that requests cannot carry.
    """
    path, sharing = Path(plan.path), plan.main.sharing
    if problem := unserved(plan.main.signature):
        raise ConfigError(f"the model is '{path}', and its {problem}")
    stem = stem_of(path)
    title = "".join(word[:1].upper() + word[1:] for word in re.split(r"[^A-Za-z0-9]+", stem)) or "Model"
    given, answer = _types(title, plan.main)

    def preprocess(self: FileModel, sample: Any) -> Any:
        return FileModel.preprocess(self, sample)

    def predict(self: FileModel, batch: Any) -> Any:
        return FileModel.predict(self, batch)

    preprocess.__annotations__["sample"] = given
    predict.__annotations__["return"] = list[answer]
    for method in (preprocess, predict):
        method.__module__ = path.name  # annotations of what is ours are not read
    members: dict[str, Any] = {
        "__doc__": f"The model in {path.name}.",
        "plan": plan,
        "tensor_codecs": {"": _codec(plan.main, plan.name)},
        "name": re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]+", "-", stem))[:128] or "model",
        "preprocess": preprocess,
        "predict": predict,
        "pad": Pad(dict(sharing.feeds), outputs=dict(sharing.fetches)) if sharing.is_padded else None,
    }
    if not sharing.has_rows or sharing.why_not:
        members["max_batch_size"] = 1
    if loaded is not None:
        members["loaded"] = staticmethod(loaded)
    for name, one in plan.others.items():
        method = f"{name}_signature" if name in members or hasattr(FileModel, name) else name
        taken = [each.path for each in methods_of(type(title, (FileModel,), members))]
        asked = endpoint(path_like(name, taken))(_method(name, *_types(f"{title}-{name}", one), path.name))
        members[method], members["tensor_codecs"][method] = asked, _codec(one, name)
    made = type(title, (FileModel,), members)
    made.__module__ = made.__qualname__ = path.name
    return made


def stem_of(path: Path) -> str:
    """Return what a model is called: like its file or folder, or like the folder of its versions."""
    return path.parent.name if path.name.isdigit() else path.stem if path.suffix in KINDS else path.name


def runner_of(plan: Any, *, isolate_errors: bool = True) -> ModelRunner | MethodsRunner:
    """Build the runner of a model file; the reference that worker processes are given."""
    return runner_for(class_of(msgspec.convert(plan, known(FilePlan))), isolate_errors=isolate_errors)


def unserved(signature: Signature) -> str:
    """Return what of a signature requests cannot carry; empty if they can carry all of it."""
    for what, side in (("input", signature.feeds), ("output", signature.fetches)):
        for var in side:
            if var.datatype in {None, "BF16"}:
                # What converters make of the probabilities of scikit-learn's classifiers, unless they are told.
                hint = "; skl2onnx makes tensors with options={'zipmap': False}" if "seq(map(" in var.type else ""
                return (
                    f"{what} '{var.name}' is of the type {var.type}, which cannot be served; tensors of bool, int8 to "
                    f"uint64, float16 to float64 and string can{hint}"
                )
    return ""


def _method(name: str, given: Any, answer: Any, module: str) -> Callable[..., Any]:
    """Make the method that asks another signature."""

    def ask(self: FileModel, batch: Any) -> Any:
        return self.ask(name, batch)

    ask.__name__, ask.__module__, ask.__doc__ = name, module, f"The signature '{name}'."
    ask.__annotations__ = {"batch": list[given], "return": list[answer]}
    return ask


def _types(title: str, plan: SignaturePlan) -> tuple[Any, Any]:
    """Return the types of a sample and of a result."""
    if plan.signature.speaks:
        return _SPOKEN[plan.signature.speaks]
    sides = {"Input": plan.signature.feeds, "Output": plan.signature.fetches}
    given, answer = (_record(title + what, side, has_rows=plan.sharing.has_rows) for what, side in sides.items())
    return given, answer


def _codec(plan: SignaturePlan, name: str) -> TensorCodec:
    has_rows = plan.sharing.has_rows
    given = _side(plan.signature.feeds, has_rows=has_rows)
    answer = _side(plan.signature.fetches, has_rows=has_rows)
    return TensorCodec(given, answer, has_rows=has_rows, signature=name)


def _record(name: str, side: Sequence[Var], *, has_rows: bool) -> Any:
    """Return the type of an object with a field for each input or output."""
    fields = {var.alias: _type(var, has_rows=has_rows) for var in side}
    return TypedDict(name, fields)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]


def _side(side: Sequence[Var], *, has_rows: bool) -> TensorSide:
    """Return the tensors of one side, with the types and shapes of the file."""

    def port(var: Var) -> TensorPort:
        rows = () if has_rows or var.rows is None else (var.rows,)
        shape = None if var.rows is None and not var.is_scalar else (*rows, *var.shape)
        return TensorPort(var.alias, var.datatype or "BYTES", shape, "array", tensor=var.tensor)

    return TensorSide([port(var) for var in side], is_record=True)


def _type(var: Var, *, has_rows: bool) -> Any:
    """Return lists in lists, as deep and as long as the shape says, of elements as the type says."""
    if var.rows is None:
        return Any  # a single value, or a shape that the file does not say
    found = _element(str(var.dtype))
    found = found | None if var.is_nullable else found
    for size in reversed(var.shape if has_rows else (var.rows, *var.shape)):
        found = list[found] if size < 0 else Annotated[list[found], msgspec.Meta(min_length=size, max_length=size)]
    return found


def _element(dtype: str) -> Any:
    if dtype == "str":
        return str
    import numpy as np

    kind = np.dtype(dtype)
    found = SCALARS[kind.kind]
    if found is int and kind.itemsize * 8 <= _BOUNDED:
        limits = np.iinfo(kind)
        return Annotated[int, msgspec.Meta(ge=int(limits.min), le=int(limits.max))]
    return found


def _array(var: Var, value: Any) -> Any:
    import numpy as np

    if var.dtype == "str":
        return _texts(var, value)
    if isinstance(value, np.ndarray):  # of a tensor, whose type is known to fit
        return cast("Any", value).astype(var.dtype, copy=False)
    try:
        with np.errstate(over="raise"):
            array = _unheld(var, value) if var.rows is None else np.array(value, var.dtype)
    except (ValueError, TypeError, OverflowError, FloatingPointError) as problem:
        msg = f"'{var.alias}': expected an array of {var.dtype}: {problem}"
        raise ValidationError(msg, detail={"path": f"$.{var.alias}"}) from None
    return array


def _unheld(var: Var, value: Any) -> Any:
    """Read what the annotation holds to no type: a single value, or lists of a shape that the file does not say.

    Raises:
        ValueError: If it is of another type, which `numpy.array` would make something of.
    """
    array = ArrayType(str(var.datatype), None).read(value)
    if var.datatype != "BOOL" and array_of(value).dtype.kind == "b":
        raise ValueError("got true or false instead of a number")
    return array


def _texts(var: Var, value: Any) -> Any:
    """Return an array of Python's strings: numpy's own are of one length, and no library takes them."""
    try:
        array = objects_of(value)
        if var.rows is None and not all(isinstance(one, str | bytes) for one in array.flat):
            raise ValueError("each element must be a string")
        for one in array.flat if var.max_characters else ():
            if isinstance(one, bytes) or len(one) > var.max_characters:
                found = f"{len(one):,} {'bytes' if isinstance(one, bytes) else 'characters'}"
                raise ValueError(f"up to {var.max_characters:,} characters of UTF-8 each, got {found}")
    except ValueError as problem:
        msg = f"'{var.alias}': expected an array of strings: {problem}"
        raise ValidationError(msg, detail={"path": f"$.{var.alias}"}) from None
    return array
