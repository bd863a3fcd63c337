# SPDX-License-Identifier: Apache-2.0
"""Trains a small network for each of scikit-learn's data sets, and writes its weights."""

from pathlib import Path

import numpy as np
from sklearn import datasets
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

OUT = Path(__file__).resolve().parent / "out" / "weights"
OUT.mkdir(parents=True, exist_ok=True)

for name in ("iris", "wine", "digits"):
    data = getattr(datasets, f"load_{name}")()
    train_x, test_x, train_y, test_y = train_test_split(data.data, data.target, random_state=0)
    mean, spread = train_x.mean(0), train_x.std(0) + 1e-6
    model = MLPClassifier([16], solver="lbfgs", random_state=0).fit((train_x - mean) / spread, train_y)
    (first, second), (bias, last) = model.coefs_, model.intercepts_
    # The first layer takes what is measured as it is, so the model needs no other step before it.
    first = first / spread[:, None]
    np.savez(OUT / f"{name}.npz", first=first, bias=bias - mean @ first, second=second, last=last)
    found = (np.maximum(test_x @ first + bias - mean @ first, 0) @ second + last).argmax(1)
    print(f"{name}: {(found == test_y).mean():.2f} right of what it has not seen")
