# SPDX-License-Identifier: Apache-2.0
"""Reads digits with the latest version there is, or with the one that is asked for."""

from pathlib import Path

import joblib
from starlette.responses import JSONResponse


class Handler:
    def __init__(self, config, model_client):
        self.client = model_client

    def load_model(self, model_path):
        return int(Path(model_path).name), *joblib.load(Path(model_path) / "model.joblib")

    def handle_post(self, payload, query_params):
        version, model, accuracy = self.client.get_model(model_version=query_params.get("version", "latest"))
        if len(payload) != 64:
            return JSONResponse({"error": "64 numbers from 0 to 16 are needed, row by row"}, status_code=400)
        return {"digit": int(model.predict([payload])[0]), "version": version, "accuracy": round(accuracy, 2)}
