# SPDX-License-Identifier: Apache-2.0
"""Small models of XGBoost and LightGBM, the files that they are saved in, and what the libraries answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.later import Later

xgboost: Any = Later("xgboost")
lightgbm: Any = Later("lightgbm")

OBJECTIVES = {
    "xgboost": ("reg:squarederror", "binary:logistic", "multi:softprob", "multi:softmax", "rank:ndcg"),
    "lightgbm": ("regression", "binary", "multiclass"),
}
SUFFIXES = {"xgboost": (".ubj", ".json"), "lightgbm": (".txt",)}


def rows(many=60, seed=3):
    """Rows of four numbers, of which some are missing."""
    random = np.random.default_rng(seed)
    found = random.normal(size=(many, 4))
    found[random.random(found.shape) < 0.1] = np.nan
    return found


def frame(many=60, seed=3):
    """A DataFrame with columns of numbers, texts and codes, in each of which something is missing."""
    import pandas as pd

    random = np.random.default_rng(seed)
    found = pd.DataFrame({"area": random.normal(size=many), "floor": random.integers(0, 9, many).astype(float)})
    found["city"] = pd.Categorical(random.choice(["Bonn", "Trier", "Ulm"], many))
    found["zone"] = pd.Categorical(random.choice([7, 3, 300], many))
    for column in found:
        found.loc[random.integers(1, many), column] = None
    return found


def prices(table):
    """What a model of such a DataFrame is fitted on."""
    return table["area"].fillna(0) * 3 + (table["city"] == "Ulm") * 5 + (table["zone"] == 3) * 2


def arrays(table):
    """The columns of such a DataFrame as they are fed to a model file."""
    found = {str(name): column.astype(object) for name, column in table.items()}
    texts = [None if city != city else city for city in found.pop("city")]  # noqa: PLR0124 - NaN is unlike itself
    return {name: column.to_numpy(float) for name, column in found.items()} | {"city": np.array(texts, object)}


def samples(table):
    """The rows of such a DataFrame as they are in JSON."""
    found = {name: column.tolist() for name, column in arrays(table).items()}
    every = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    return [{name: None if one != one else one for name, one in row.items()} for row in every]  # noqa: PLR0124


def save(path, objective="", data=None, labels=None, seed=3, **more):
    """Fits a small model on data, saves it as its suffix says, and returns the path."""
    data = rows(seed=seed) if data is None else data
    labels = np.nansum(data, axis=1) if labels is None else labels
    if objective.startswith(("multi", "binary", "rank")):
        labels = (labels > 0) * 1 + ((labels > 1) * 1 if objective.startswith("multi") else 0)
    if objective.startswith("multi"):
        more["num_class"] = 3
    if path.suffix == ".txt":
        told = {"objective": objective or "regression", "verbose": -1, "num_threads": 1, "min_data_in_leaf": 3, **more}
        lightgbm.train(told, lightgbm.Dataset(data, labels), 4).save_model(path)
        return path
    group = {"group": [len(data)]} if objective.startswith("rank") else {}
    table = xgboost.DMatrix(data, labels, enable_categorical=True, **group)
    told = {"objective": objective or "reg:squarederror", "nthread": 1, **more}
    xgboost.train(told, table, 4).save_model(path)
    return path


def predicted(path, data):
    """What the library answers."""
    if path.suffix == ".txt":
        return lightgbm.Booster(model_file=path).predict(data)
    return xgboost.Booster(model_file=path).predict(xgboost.DMatrix(data, enable_categorical=True))
