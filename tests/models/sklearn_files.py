# SPDX-License-Identifier: Apache-2.0
"""Small models of scikit-learn, and the files that they are saved in."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.later import Later

sklearn: Any = Later("sklearn")
skops: Any = Later("skops.io")
joblib: Any = Later("joblib")
TREE = "sklearn.tree._tree.Tree"
"""What trees consist of, which skops does not trust."""
DTYPE = "numpy.dtype"
"""What imputers have in them, which skops does not trust either."""


def rows(many=40):
    """Rows of three numbers."""
    return np.random.default_rng(7).normal(size=(many, 3))


def classifier():
    """A logistic regression whose classes are texts."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression().fit(rows(), np.where(rows()[:, 0] > 0, "high", "low"))


def forest():
    """A random forest, which consists of trees."""
    from sklearn.ensemble import RandomForestRegressor

    return RandomForestRegressor(4, random_state=0).fit(rows(), rows() @ [1, 2, 3])


def houses():
    """A pipeline that was fitted on a DataFrame of numbers, texts and codes, and accepts no other texts and codes."""
    import pandas as pd
    from sklearn.compose import make_column_transformer
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    frame = pd.DataFrame(
        {
            "area": [50.0, 75.0, 90.0, 140.0],
            "city": ["Bonn", "Köln", "Bonn", "Köln"],
            "zone": [3, 5, 5, 3],
            "about": ["with a garden", "dark", "quiet", "with a view"],
        }
    )
    encoded = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder())
    prepare = make_column_transformer(
        (SimpleImputer(), ["area"]), (encoded, [1, 2]), (CountVectorizer(), "about"), ("drop", slice(0, 0))
    )
    return make_pipeline(prepare, Ridge()).fit(frame, [200.0, 310.0, 350.0, 560.0])


def comments():
    """A pipeline of texts."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    return make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["good b", "bad c", "good d"], [1, 0, 1])


def save(model, path):
    """Saves a model as its suffix says; returns the path."""
    (skops.dump if path.suffix == ".skops" else joblib.dump)(model, path)
    return path
