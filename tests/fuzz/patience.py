# SPDX-License-Identifier: Apache-2.0
"""Time as fuzzers count it: while they are let run, so that a machine that is busy or stopped makes no difference."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from typing import Self

TICK_S = 0.05
HANG_S = 120.0
"""Who has owed an answer for this time will not give one."""
NEVER_S = 86_400.0
"""What servers and clients are told instead of a time of their own: a pause would look like somebody's fault."""
UNHURRIED = [
    *("--keep-alive-s", f"{NEVER_S:g}", "--read-timeout-s", f"{NEVER_S:g}", "--write-timeout-s", f"{NEVER_S:g}"),
    *("--min-bytes-per-s", "0", "--stuck-s", f"{NEVER_S:g}", "--timeout-ms", "3600000"),
    *("--deadline-ms", "3600000"),  # requests leave by their deadlines
]


class _Clock(threading.Thread):
    """Counts how long this process has run: a tick that comes late counts as one that does not."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds = 0.0
        self._lock = threading.Lock()

    def run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            self.seconds += min(now - last, 2 * TICK_S)
            last = now

    def read(self) -> float:
        with self._lock:
            if self.ident is None:
                self.start()
        return self.seconds


awake = _Clock().read
"""How long this process was let run, in seconds; counts from the first time it is asked."""


class Watch:
    """Ends the fuzzer, and says where everybody is, if nothing has been noted for too long."""

    def __init__(self, door: str) -> None:
        self._door = door
        self._since = awake()
        self._over = threading.Event()

    def note(self) -> None:
        """Something was answered."""
        self._since = awake()

    def __enter__(self) -> Self:
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(1.0):
            if awake() - self._since > HANG_S:
                print(f"DIFFERENCE in {self._door}: no answer for {HANG_S:g} seconds", flush=True)
                faulthandler.dump_traceback(sys.stdout)
                os._exit(1)
