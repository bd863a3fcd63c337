# SPDX-License-Identifier: Apache-2.0
"""Boosted trees: `.ubj` and `.json` files of XGBoost, `.txt` files of LightGBM.

The only output is `predict`, what the library's `Booster.predict` returns. A model that knows the names of its columns
has an input for each; any other has `x`, all features of a sample. A missing value is null in JSON and NaN elsewhere.
Where the file lists the categories of a column, its input takes these, and the model gets their codes.

One thread computes a batch: threads of OpenMP wait for each other, which takes longer than the trees where others use
the cores. Both libraries end the process on some damaged files, so files are checked first as far as that is cheap.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from operator import ge
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from forebay.arrays.numpy_tensors import texts_or_bytes
from forebay.errors import ConfigError, InvalidRequest
from forebay.runtimes.library import RunOptions, Runtime, library, ordinary, runs_on_cpu
from forebay.runtimes.signature import Signature, Value, Var
from forebay.types.datatypes import BY_NUMPY, DATATYPES

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array

    Categories = Mapping[str, Sequence[str | float]]

_ONE_INPUT: Final = "x"


class _Booster(NamedTuple):
    """A model in memory.

    Attributes:
        predict: Predicts the rows of a matrix.
        datatype: The type of the matrix.
        size: How many features it has.
        names: What their columns are called; empty if they have no names.
        categories: The categories of some columns, in the order of their codes.
        is_shared: Whether several threads may run it at the same time.
        ignores_unknown: Whether a category that it does not know is a missing value.
    """

    predict: Callable[[Array], Array]
    datatype: str
    size: int
    names: Sequence[str]
    categories: Categories
    is_shared: bool = True
    ignores_unknown: bool = False


class BoostedTrees(Runtime):
    """A model of XGBoost or LightGBM: each sample goes through the trees by itself, on the CPU."""

    def __init__(self, model: Path, options: RunOptions) -> None:
        """Load the file and predict one sample."""
        import numpy as np

        self._np = np
        read = _read_lightgbm if model.suffix == ".txt" else _read_xgboost
        found = self._booster = read(model.name, model.read_bytes())
        if options.device is not None:
            runs_on_cpu(model, "tree library", options.device)
        self.is_shared = found.is_shared
        self._codes = {name: {one: code for code, one in enumerate(each)} for name, each in found.categories.items()}
        answer = self._predicted(np.full((1, found.size), np.nan))
        output = Var("predict", "predict", BY_NUMPY[answer.dtype.name].name, answer.shape[1:], rows=-1)
        self.signature = Signature(tuple(self._input(name) for name in found.names or (_ONE_INPUT,)), (output,))

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Predict all samples."""
        names = self._booster.names or (_ONE_INPUT,)
        columns = [self._numbers(name, ordinary(name, feed[name])) for name in names]
        return [Value(self._predicted(self._np.column_stack(columns)))] * len(fetch)

    def _predicted(self, matrix: Array) -> Array:
        return self._booster.predict(matrix.astype(DATATYPES[self._booster.datatype].numpy, copy=False))

    def _input(self, name: str) -> Var:
        categories = self._booster.categories.get(name)
        if not categories:
            shape = () if self._booster.names else (self._booster.size,)
            return Var(name, name, self._booster.datatype, shape, rows=-1, is_nullable=True)
        datatype = "BYTES" if isinstance(categories[0], str) else "FP64"
        examples = tuple(one if datatype == "BYTES" else float(one) for one in (categories[0], categories[-1]))
        return Var(name, name, datatype, rows=-1, examples=examples, is_nullable=True)

    def _numbers(self, name: str, column: Array) -> Array:
        """Return a column as numbers: categories become their codes.

        Raises:
            InvalidRequest: If the model does not know a category, and the library does not ignore that.
        """
        codes = self._codes.get(name)
        if not codes:
            return column
        values: list[Any] = (texts_or_bytes(column) if column.dtype.kind in "OS" else column).tolist()
        unknown = [one for one in values if one not in codes and one is not None and one == one]  # noqa: PLR0124
        if unknown and not self._booster.ignores_unknown:
            known, got = reprlib.repr([*codes]), reprlib.repr(unknown[0])
            raise InvalidRequest(f"'{name}': expected a category of the model, one of {known}, got {got}")
        return self._np.array([codes.get(value, self._np.nan) for value in values])


def _read_xgboost(file: str, data: bytes) -> _Booster:
    """Load a model of XGBoost; raises a `ConfigError` if that is missing, or the file is cut off."""
    xgboost = library("xgboost", f"{file} is run by XGBoost", "forebay[xgboost]")
    if not data[-16:].rstrip().endswith(b"}"):
        raise ConfigError(f"{file} is cut off: a model of XGBoost ends with a brace; save it again")
    booster = xgboost.Booster({"nthread": 1})
    booster.load_model(bytearray(data))
    names: Sequence[str] = booster.feature_names or ()
    categories: Categories = {}
    if names and "c" in (booster.feature_types or ()):
        saved = msgspec.json.decode(booster.save_raw("json"))
        model = saved["learner"]["gradient_booster"]
        # Files of releases before 3.1 have none, and take codes.
        listed = model.get("gbtree", model)["model"].get("cats", {}).get("enc", ())
        categories = {name: _categories_of(one) for name, one in zip(names, listed, strict=False)}
        if saved["version"] < [3, 4] and not "".join(map(str, chain(*categories.values()))).isascii():
            raise ConfigError(
                f"{file} has categories that are not ASCII, which XGBoost before 3.4 saves incompletely; fit and serve "
                "it with a newer XGBoost, or encode them as numbers before"
            )

    def predict(matrix: Array) -> Array:
        table = xgboost.DMatrix(matrix, missing=float("nan"), nthread=1)
        return booster.predict(table, validate_features=False)

    learner = msgspec.json.decode(booster.save_config())["learner"]
    are_trees = learner["learner_train_param"]["booster"] != "gblinear"  # threads may share only these
    return _Booster(predict, "FP32", booster.num_features(), names, categories, is_shared=are_trees)


def _categories_of(column: Mapping[str, Any]) -> Sequence[str | float]:
    """Return what XGBoost writes as numbers, or as the bytes of all texts with the places where they begin."""
    if "offsets" not in column:
        return column["values"]
    texts = bytes(value & 0xFF for value in column["values"])
    return [texts[at:end].decode(errors="replace") for at, end in pairwise(column["offsets"])]


def _read_lightgbm(file: str, data: bytes) -> _Booster:
    """Load a model of LightGBM; raises a `ConfigError` if that is missing, or the file is cut off or ambiguous."""
    lightgbm = library("lightgbm", f"{file} is run by LightGBM", "forebay[lightgbm]")
    head, _, trees = data.partition(b"\n\n")
    fields = {key: value for key, _, value in (line.partition(b"=") for line in head.splitlines())}
    at = 0
    for size in fields.get(b"tree_sizes", b"").split():
        at += int(size) if trees.startswith(b"Tree=", at) else len(trees)
    if not trees.startswith(b"end of trees", at):
        raise ConfigError(f"{file} is cut off or was edited: its trees are not as long as its head says; save it again")
    booster = lightgbm.Booster(model_str=data.decode())
    names: Sequence[str] = booster.feature_name()
    ranges = [one.split(b":") for one in fields[b"feature_infos"].split()]
    coded = {name: codes for name, codes in zip(names, ranges, strict=True) if codes[1:] and codes[0][:1] != b"["}
    listed: Sequence[Sequence[str | float]] = booster.pandas_categorical or ()
    largest = [max(map(int, codes)) for codes in coded.values()]
    if listed and (len(coded) != len(listed) or any(map(ge, largest, map(len, listed)))):
        raise ConfigError(
            f"{file} was fitted on columns of categories ({len(listed)}), and does not say which columns they are; "
            "encode them as numbers before fitting"
        )
    predict, size = partial(booster.predict, num_threads=1), len(names)
    is_named = names != [f"Column_{at}" for at in range(size)]
    categories = dict(zip(coded, listed, strict=False))
    return _Booster(predict, "FP64", size, names if is_named else (), categories, ignores_unknown=True)
