# SPDX-License-Identifier: Apache-2.0
"""tritonclient with TLS, a key, pings and packed messages: `python guarded.py GRPC HTTP CERTIFICATE`."""

import sys
import time

import numpy as np
import tritonclient.grpc as over_grpc  # pyright: ignore[reportMissingImports]
import tritonclient.http as over_http  # pyright: ignore[reportMissingImports]

KEY = {"x-api-key": "secret"}
ROWS = np.arange(100_000, dtype="f4").reshape(1, -1)
_, grpc_address, http_address, certificate = sys.argv
pings = over_grpc.KeepAliveOptions(
    keepalive_time_ms=20, keepalive_timeout_ms=5000, keepalive_permit_without_calls=True, http2_max_pings_without_data=0
)

for kind, client, packed, refused in (
    (
        over_grpc,
        over_grpc.InferenceServerClient(grpc_address, ssl=True, root_certificates=certificate, keepalive_options=pings),
        lambda packing: {"compression_algorithm": packing},
        "UNAUTHENTICATED",
    ),
    (
        over_http,
        over_http.InferenceServerClient(http_address, ssl=True, ssl_options={"ca_certs": certificate}),
        lambda packing: {"request_compression_algorithm": packing, "response_compression_algorithm": packing},
        "401",
    ),
):
    given = kind.InferInput("input", list(ROWS.shape), "FP32")
    given.set_data_from_numpy(ROWS)
    assert client.is_server_ready(headers=KEY)
    error = None
    try:
        client.infer("mirror", [given])
    except kind.InferenceServerException as raised:
        error = raised
    assert error is not None
    assert refused in error.status(), error
    for packing in (None, "gzip", "deflate"):
        more = packed(packing) if packing else {}
        for _ in range(5):
            answer = client.infer("mirror", [given], headers=KEY, **more)
            assert np.array_equal(answer.as_numpy("output"), ROWS)
            time.sleep(0.03)  # so that pings come in between; no more depends on it
    assert client.get_model_metadata("mirror", headers=KEY)
    client.close()
