# SPDX-License-Identifier: Apache-2.0
"""The last 15 minutes of all endpoints in coarse steps, for people who open the dashboard after an incident.

Theory of operation. Requests count nothing for this. Every `STEP_S` a `Pulse` compares the counters with their values
of the step before, and its beats become one packed sample; endpoints without traffic take no room. A sample has at most
`SAMPLE_BYTES`: the busiest endpoints get a row each, and the others are added up in one row without a name. So the
memory is bounded by `SAMPLES * SAMPLE_BYTES` and by the counters that the pulse compares with, 2 KB an endpoint.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Final, Generic, TypeVar

import msgspec

from forebay.observe.metrics.exposition import SLICE, Reading, Source
from forebay.observe.metrics.pulse import Beat, Pulse

STEP_S: Final = 10.0
"""Time between two samples."""
SAMPLES: Final = 90
"""Samples that are kept: 15 minutes."""
SAMPLE_BYTES: Final = 10_000
"""The rows of a sample: about 400 endpoints that had traffic in the same ten seconds."""
MAX_NAMES: Final = 1000
"""Endpoints that have rows in the samples that are kept."""
_OTHERS_BYTES: Final = 200
"""The largest row of the others: 19 buckets, ten numbers."""

S = TypeVar("S", bound=Source)


class Row(msgspec.Struct, array_like=True):
    """What one endpoint did in a sample; the page reads the fields by their place.

    Attributes:
        place: Its key in `names`; 0 for all endpoints without a row of their own.
        request: Buckets of the request times that got values, each followed by how many.
        busy_ms: How long workers ran its batches.
        endpoints: How many endpoints this is.
    """

    place: int
    ok: int
    failed: int
    request: list[int]
    waiting: int
    in_flight: int
    batches: int
    rows: int
    busy_ms: int
    parts: int = 0
    endpoints: int = 1

    def add(self, other: Row) -> None:
        """Add up both."""
        counts = dict(zip(self.request[::2], self.request[1::2], strict=True))
        for bucket, more in zip(other.request[::2], other.request[1::2], strict=True):
            counts[bucket] = counts.get(bucket, 0) + more
        self.request = [number for pair in counts.items() for number in pair]
        for field in ("ok", "failed", "waiting", "in_flight", "batches", "rows", "busy_ms", "parts", "endpoints"):
            setattr(self, field, getattr(self, field) + getattr(other, field))


class EndpointHistory(Generic[S]):
    """What the endpoints of a server did of late."""

    def __init__(self, sources: Callable[[], Iterable[S]], read: Callable[[S], Reading]) -> None:
        """Begin with the first look."""
        self._pulse = Pulse(sources, read)
        self._samples: deque[tuple[float, float, bytes]] = deque(maxlen=SAMPLES)
        self._names: dict[tuple[str, str], list[int]] = {}  # the key of each endpoint, and the last look with a row
        self._places = 0
        self._looks = 0
        self._looked_s: float | None = None
        self._is_looking = False

    def look(self) -> Generator[None, None, None]:
        """Take a sample, in turns; the first look only notes where the counters are."""
        self._is_looking = True
        try:
            beats = yield from self._pulse.beat()
            now_s = time.monotonic()
            self._looks += 1
            if self._looked_s is not None:
                rows = yield from self._rows(beats)
                self._samples.append((now_s, now_s - self._looked_s, rows))
                oldest = self._looks - SAMPLES
                self._names = {name: known for name, known in self._names.items() if known[1] > oldest}
            self._looked_s = now_s
        finally:
            self._is_looking = False

    def tell(self, *, is_last: bool = False) -> Generator[None, None, bytes]:
        """Return the samples as JSON, in turns; the last one, or that one alone, goes up to this moment."""
        while self._is_looking:
            yield
        samples, looked_s = [] if is_last else list(self._samples), self._looked_s
        beats = yield from self._pulse.beat(is_noted=False)
        now_s = time.monotonic()
        if looked_s is not None and now_s > looked_s:
            rows = yield from self._rows(beats)
            samples.append((now_s, now_s - looked_s, rows))
        names = {known[0]: name for name, known in self._names.items()}
        told: list[msgspec.Raw] = []
        for at, took_s, rows in samples:
            told.append(msgspec.Raw(msgspec.json.encode((at, round(took_s, 3), msgspec.msgpack.decode(rows)))))
            yield
        return msgspec.json.encode({"names": names, "samples": told})

    def _rows(self, beats: list[Beat]) -> Generator[None, None, bytes]:
        """Pack the rows of a sample, the busiest first, as far as they have room."""
        beats.sort(key=lambda beat: -sum(beat.codes.values()))
        packed: list[msgspec.Raw] = []
        left = SAMPLE_BYTES - _OTHERS_BYTES
        others = Row(0, 0, 0, [], 0, 0, 0, 0, 0, endpoints=0)
        for number, beat in enumerate(beats, 1):
            row = _row(self._place(beat) if left > 0 else 0, beat)
            data = msgspec.msgpack.encode(row)
            left -= len(data)
            if row.place and left >= 0:
                packed.append(msgspec.Raw(data))
            else:
                others.add(row)
            if number % SLICE == 0:
                yield
        if others.endpoints:
            packed.append(msgspec.Raw(msgspec.msgpack.encode(others)))
        return msgspec.msgpack.encode(packed)

    def _place(self, beat: Beat) -> int:
        """Return the key of an endpoint; 0 if there is none left."""
        name = (beat.endpoint, beat.version)
        known = self._names.get(name)
        if known is None:
            if len(self._names) >= MAX_NAMES:
                return 0
            self._places += 1
            known = self._names[name] = [self._places, 0]
        known[1] = self._looks
        return known[0]


def _row(place: int, beat: Beat) -> Row:
    ok = beat.codes.get("ok", 0)
    return Row(
        place,
        ok,
        sum(beat.codes.values()) - ok,
        [number for pair in beat.request for number in pair],
        beat.waiting,
        beat.in_flight,
        beat.batches,
        round(beat.rows),
        round(beat.model_s * 1000),
        beat.parts,
    )
