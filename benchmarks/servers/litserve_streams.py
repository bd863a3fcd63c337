# SPDX-License-Identifier: Apache-2.0
"""LitServe streams the numbers up to the one it is sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import litserve


class Numbers(litserve.LitAPI):
    def setup(self, device: str) -> None: ...

    # LitServe looks `request` and `output` up by name, and takes an annotation of `request` for a query parameter.
    def decode_request(self, request):
        return int(request["length"])

    def predict(self, x: int) -> Iterator[int]:
        yield from range(1, x + 1)

    def encode_response(self, output: Iterator[int]) -> Iterator[str]:
        for number in output:
            yield f"data: {number}\n\n"


if __name__ == "__main__":
    api = Numbers(stream=True)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True, timeout=30)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
        loop="uvloop",
        http="httptools",
    )
