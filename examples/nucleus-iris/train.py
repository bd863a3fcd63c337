# SPDX-License-Identifier: Apache-2.0
"""Trains the classifier of this project on the iris data of scikit-learn and writes it where nucleus.yaml looks."""

from pathlib import Path

import joblib
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

MODEL_FILE = Path(__file__).resolve().parent / "out" / "model.joblib"


def train() -> tuple[Pipeline, float]:
    """The fitted model and its share of right answers on flowers it was not fitted on."""
    iris = load_iris()
    species = iris.target_names[iris.target].astype(str)
    train_x, test_x, train_y, test_y = train_test_split(
        iris.data, species, test_size=0.3, random_state=0, stratify=species
    )
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    model.fit(train_x, train_y)
    return model, model.score(test_x, test_y)


def main() -> None:
    model, accuracy = train()
    MODEL_FILE.parent.mkdir(exist_ok=True)
    joblib.dump(model, MODEL_FILE)
    print(f"accuracy {accuracy:.3f} on unseen flowers, written to {MODEL_FILE}")


if __name__ == "__main__":
    main()
