# SPDX-License-Identifier: Apache-2.0
"""Three classifiers behind one address."""

from cortex_internal.lib.exceptions import UserException
from starlette.responses import JSONResponse


class Handler:
    def __init__(self, config, tensorflow_client):
        self.client = tensorflow_client
        self.classes = config["classes"]

    def handle_post(self, payload, query_params):
        model, version = query_params.get("model"), query_params.get("version", "latest")
        try:
            found = self.client.predict({"numbers": [payload]}, model, version)
        except UserException as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        number = int(found["class_ids"][0])  # 64 bits come as a text
        return {"class": self.classes.get(model, range(10))[number], "model": model, "version": version}
