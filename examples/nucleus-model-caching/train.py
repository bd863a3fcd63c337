# SPDX-License-Identifier: Apache-2.0
"""Trains a classifier for each of scikit-learn's data sets, into a folder each."""

from pathlib import Path

import joblib
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

OUT = Path(__file__).resolve().parent / "out" / "models"

for name in ("iris", "wine", "breast_cancer", "digits"):
    data = getattr(datasets, f"load_{name}")()
    train_x, test_x, train_y, test_y = train_test_split(
        data.data, data.target_names[data.target].astype(str), random_state=0
    )
    model = RandomForestClassifier(50, random_state=0).fit(train_x, train_y)
    folder = OUT / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    joblib.dump(model, folder / "model.joblib")
    print(f"{name}: {model.score(test_x, test_y):.2f} right of what it has not seen")
