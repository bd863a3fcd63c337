# SPDX-License-Identifier: Apache-2.0
"""Models that tell what bytes they got, twice, with time between; some end in the middle of them."""

import hashlib
import json
import os
import time

from forebay import Model


class Digest(Model):
    """Takes a line of JSON, and any bytes behind it."""

    def predict(self, batch: list[bytes]) -> list[str]:
        before = [digest(body) for body in batch]
        for body in batch:
            how = json.loads(body[: body.index(b"\n")])
            time.sleep(how.get("seconds", 0))
            if how.get("exits"):
                os._exit(3)
        after = [digest(body) for body in batch]
        return [
            f"{one} {os.getpid()}" if one == other else f"changed: {len(body)}"
            for one, other, body in zip(before, after, batch, strict=True)
        ]


class Mortal(Digest):
    """Whose worker ends now and then."""


class Threaded(Digest):
    """Another one, with memory of its own."""


def digest(body: bytes) -> str:
    return f"{len(body)} {hashlib.sha1(body).hexdigest()}"
