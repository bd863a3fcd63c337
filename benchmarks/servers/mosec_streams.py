# SPDX-License-Identifier: Apache-2.0
"""mosec streams the numbers up to the one it is sent, to 32 clients in a batch."""

from __future__ import annotations

import sys

from mosec import Server, SSEWorker


class Numbers(SSEWorker):
    def forward(self, data: list[int]) -> list[int]:
        for number in range(1, max(data) + 1):
            for index, length in enumerate(data):
                if number <= length:
                    self.send_stream_event(str(number), index=index)
        return data


if __name__ == "__main__":
    sys.argv[1:] = f"--address 127.0.0.1 --port {sys.argv[1]} --log-level warning".split()
    server = Server()
    server.append_worker(Numbers, num=1, max_batch_size=32, max_wait_time=2, timeout=30)
    server.run()
