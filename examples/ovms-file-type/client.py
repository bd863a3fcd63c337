# SPDX-License-Identifier: Apache-2.0
"""Asks what some files are: their bytes lie behind the JSON of the request, and the answer's behind its own."""

import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

LENGTH = "Inference-Header-Content-Length"


def ask(url, content):
    given = {"name": "content", "shape": [len(content)], "datatype": "UINT8"}
    given["parameters"] = {"binary_data_size": len(content)}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    with urlopen(Request(f"{url}/v2/models/file_type/infer", head + content, {LENGTH: str(len(head))})) as answer:
        body, size = answer.read(), int(answer.headers[LENGTH])
    label, _ = json.loads(body[:size])["outputs"]
    return body[size:][: label["parameters"]["binary_data_size"]].decode()


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print(file, ask("http://localhost:8080", Path(file).read_bytes()))
