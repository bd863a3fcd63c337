# SPDX-License-Identifier: Apache-2.0
"""Trains the classifier of this project on scikit-learn's iris data."""

from pathlib import Path

import joblib
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

iris = load_iris()
model = LogisticRegression(max_iter=500).fit(iris.data, iris.target_names[iris.target])
out = Path(__file__).resolve().parent / "out"
out.mkdir(exist_ok=True)
joblib.dump(model, out / "model.joblib")
print(f"accuracy {model.score(iris.data, iris.target_names[iris.target]):.2f}")
