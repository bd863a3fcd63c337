# SPDX-License-Identifier: Apache-2.0
"""Trains a version of the classifier and puts it where the server looks: `python train.py VERSION PICTURES`."""

import sys
from pathlib import Path

import joblib
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

version, pictures = map(int, sys.argv[1:])
digits = load_digits()
seen, unseen = slice(0, pictures), slice(1000, None)
model = KNeighborsClassifier(1).fit(digits.data[seen], digits.target[seen])
accuracy = model.score(digits.data[unseen], digits.target[unseen])
models = Path(__file__).resolve().parent / "out" / "models"
coming = models / "coming" / str(version)  # beside the model, and then by one step into its place
coming.mkdir(parents=True, exist_ok=True)
joblib.dump((model, accuracy), coming / "model.joblib")
(models / "digits").mkdir(exist_ok=True)
coming.rename(models / "digits" / str(version))
print(f"version {version} is right for {accuracy:.0%} of what it has not seen")
