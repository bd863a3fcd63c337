# SPDX-License-Identifier: Apache-2.0
"""Four classifiers behind one address, two of them in memory at a time."""

from pathlib import Path

import joblib
from starlette.responses import JSONResponse


class Handler:
    def __init__(self, config, model_client):
        self.client = model_client
        self.loaded = []

    def load_model(self, model_path):
        """Called for what is not in memory; the path ends in the model's name and version."""
        self.loaded.append(Path(model_path).parent.name)
        return joblib.load(Path(model_path) / "model.joblib")

    def handle_post(self, payload, query_params):
        model = self.client.get_model(query_params["model"])
        if len(payload) != model.n_features_in_:
            return JSONResponse({"error": f"{model.n_features_in_} numbers are needed"}, status_code=400)
        return {"class": model.predict([payload])[0], "loaded so far": self.loaded}
