# SPDX-License-Identifier: Apache-2.0
"""Records `twice.kserve.json` and `twice.mlserver.json` anew.

Run: python -m tests.originals.kserve.record WHICH URL VERSION, with a server of `servers.py` behind the URL. What
differs deliberately is kept from the recording that is there.
"""

import base64
import json
import struct
import sys
from pathlib import Path

import httpx
from tests.originals.replay import recorded

HERE = Path(__file__).parent
ROWS = [[1.0, 2.5, -3.0], [0.0, 0.1, 1e6]]
FLAT = [one for row in ROWS for one in row]
X = {"name": "x", "datatype": "FP32", "shape": [2, 3]}
INFER = "/v2/models/twice/infer"


def infer(path=INFER, **body):
    return {"method": "POST", "path": path, "json": body}


def in_binary(shape=(2, 3), values=FLAT, **parameters):
    data = struct.pack(f"<{len(values)}f", *values)
    tensor = {"name": "x", "datatype": "FP32", "shape": list(shape), "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"id": "7", "inputs": [tensor], **({"parameters": parameters} if parameters else {})}).encode()
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    return {"method": "POST", "path": INFER, "headers": headers, "base64": base64.b64encode(head + data).decode()}


REQUESTS = {
    "server live": {"method": "GET", "path": "/v2/health/live"},
    "server ready": {"method": "GET", "path": "/v2/health/ready"},
    "model ready": {"method": "GET", "path": "/v2/models/twice/ready"},
    "model metadata": {"method": "GET", "path": "/v2/models/twice"},
    "data in a flat list": infer(inputs=[{**X, "data": FLAT}]),
    "data in nested lists": infer(inputs=[{**X, "data": ROWS}]),
    "an id": infer(id="my id", inputs=[{**X, "data": FLAT}]),
    "a wanted output": infer(inputs=[{**X, "data": FLAT}], outputs=[{"name": "y"}]),
    "no such model": infer("/v2/models/nope/infer", inputs=[{**X, "data": FLAT}]),
    "metadata of no such model": {"method": "GET", "path": "/v2/models/nope"},
    "readiness of no such model": {"method": "GET", "path": "/v2/models/nope/ready"},
    "no JSON": {"method": "POST", "path": INFER, "headers": {"content-type": "application/json"}, "text": "{no"},
    "no inputs": infer(),
    "less data than the shape says": infer(inputs=[{**X, "data": FLAT[:5]}]),
    "another method": {"method": "GET", "path": INFER},
}
ON_KSERVE = {
    **REQUESTS,
    "binary data, answered in JSON": in_binary(binary_data_output=False),
    "binary data, answered so": in_binary(binary_data_output=True),
    "first version: readiness": {"method": "GET", "path": "/v1/models/twice"},
    "first version: no such model": {"method": "POST", "path": "/v1/models/nope:predict", "json": {"instances": [[1]]}},
}


def main(which, url, version):
    path = HERE / f"twice.{which}.json"
    before = {one["name"]: one for one in json.loads(path.read_text())["exchanges"]} if path.exists() else {}
    lines = []
    for name, request in (ON_KSERVE if which == "kserve" else REQUESTS).items():
        with httpx.Client(base_url=url) as client:  # some errors end their connection
            answer = recorded(client, request)
            kept = {key: before[name][key] for key in ("varies", "differs") if key in before.get(name, {})}
            lines.append(json.dumps({"name": name, "request": request, "answer": answer, **kept}, default=float))
    source = f"tests/originals/kserve/record.py against {which} {version} (servers.py)"
    body = ",\n    ".join(lines)
    path.write_text(f'{{\n  "source": {json.dumps(source)},\n  "exchanges": [\n    {body}\n  ]\n}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
