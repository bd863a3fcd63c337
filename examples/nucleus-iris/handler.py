# SPDX-License-Identifier: Apache-2.0
"""Names the species of an iris flower from four measures of it, for many requests in one call."""

from pathlib import Path

import joblib
import numpy as np
from cortex_internal.lib.log import logger
from starlette.responses import JSONResponse

MEASURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


class Handler:
    """With server-side batching each argument of `handle_post` is a list, and so is the answer."""

    def __init__(self, config):
        model_file = Path(config["model_file"])
        if not model_file.is_file():
            raise FileNotFoundError(f"there is no {model_file.resolve()} yet: run `python train.py` of this project")
        self.model = joblib.load(model_file)
        logger.info("model loaded", extra={"species": list(self.model.classes_)})

    def handle_post(self, payload, query_params):
        """Scores all flowers that make sense in one run; only the others are refused."""
        flowers = [measures_of(flower) for flower in payload]
        rows = [flower for flower in flowers if flower is not None]
        scores = iter(self.model.predict_proba(np.array(rows)) if rows else ())
        logger.info("batch", extra={"size": len(payload), "refused": len(payload) - len(rows)})
        return [
            refusal() if flower is None else self.answer(next(scores), query)
            for flower, query in zip(flowers, query_params, strict=True)
        ]

    def answer(self, scores, query):
        """The most likely species, and with `?scores=true` how likely each of them is."""
        species = [str(name) for name in self.model.classes_]
        best = {"species": species[int(scores.argmax())]}
        if query.get("scores") != "true":
            return best
        return best | {"scores": dict(zip(species, scores.tolist(), strict=True))}


def measures_of(flower):
    """The four numbers in the order of training, or None if they cannot be read out of the payload."""
    try:
        row = [float(flower[name]) for name in MEASURES]
    except (TypeError, KeyError, ValueError):
        return None
    return row if np.isfinite(row).all() else None


def refusal():
    return JSONResponse({"error": f"expected a JSON object with the numbers {', '.join(MEASURES)}"}, status_code=400)
