# SPDX-License-Identifier: Apache-2.0
"""Metrics of the models' authors, made with prometheus_client where the model runs, and put together for one page.

Theory of operation. A worker process looks every `PERIOD_S` at what its registry holds and, if that has changed, sends
all of it to the server, which keeps the latest from each process. They are put together when the page is read:
counters, histograms and summaries are added up, also those of processes that have ended, so that no sum ever falls. A
gauge is one series a living worker, with labels that say whose worker it is and which, unless its author has said with
`multiprocess_mode` how workers are put together. The registry of the server's own process, where models in threads
count, is treated as one more worker. If workers have a gauge too, the server's is only a copy that nobody sets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.types.failures import text_of
from forebay.types.first_use import known
from forebay.types.server_state import PROCESS
from forebay.types.user_exceptions import caught

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("forebay.models")

PERIOD_S: Final = 0.5
MAX_SERIES: Final = 5000
"""Series that one worker may have; the page takes as many of all workers together, beside what is added up."""
MAX_BYTES: Final = 1 << 20
"""Longest message about them; the protocol (workers/wire/conversation.py) takes no longer one."""
MAX_ENDED: Final = 64
"""Processes that have ended of which all is kept; the counts of older ones are in one sum."""
MAX_LEFT_BEHIND: Final = MAX_SERIES // 2
"""Series of processes that have ended; so those that live have room on the page."""
RESERVED: Final = "forebay_"
GEN_AI: Final = "gen_ai_server_"

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_KINDS: Final = frozenset(
    {"counter", "gauge", "histogram", "summary", "info", "stateset", "gaugehistogram", "unknown", "untyped"}
)
_ADDED: Final = frozenset({"counter", "histogram", "summary", "gaugehistogram"})
_WITHIN: Final = frozenset({"le", "quantile"})
"""Labels that tell the samples of one series of these apart."""

Sample = tuple[str, dict[str, str], float]

_NAMELESS: Final[Mapping[str, str]] = {}


class Family(msgspec.Struct, array_like=True):
    """A metric with all of its series, as it travels.

    Attributes:
        name: Without the endings of its samples.
        kind: Its type.
        told: Its help.
        mode: How gauges of several workers are put together, as the author said; `all` keeps them apart.
        samples: Name, labels and value of each.
    """

    name: str
    kind: str
    told: str
    unit: str
    mode: str
    samples: list[Sample]


_decoder = msgspec.msgpack.Decoder(known(list[Family]))


# In a worker


class MetricReporter:
    """Sends what the registry of this process holds, whenever it has changed; from a thread of its own."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        """Make one; `send` takes what is to be sent, and may raise `OSError` while nobody is there."""
        self._send = send
        self._last = b""
        self._has_begun = False
        self._reports = False
        self._sending = threading.Lock()  # or what was written first might be heard last

    def look(self) -> None:
        """Begin once the model has imported prometheus_client; costs nothing until then, and after that."""
        if self._has_begun or "prometheus_client" not in sys.modules:
            return
        self._has_begun = True
        # Where this is set, metrics are put together through files, by somebody else.
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            self._reports = True
            threading.Thread(target=self._run, name="forebay-metrics", daemon=True).start()

    def report(self) -> None:
        """Send what there is, if it is not what was sent last; an orderly exit calls this once more."""
        if not self._reports:
            return
        with self._sending:
            data = _written()
            if data != self._last:
                try:
                    self._send(data)
                except OSError:
                    return
                self._last = data

    def forget(self) -> None:
        """Send it all again: there is another server."""
        self._last = b""

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            self.report()


_told: set[str] = set()


def _say_once(what: str) -> None:
    if what not in _told and len(_told) < MAX_SERIES:
        _told.add(what)
        log.warning("%s", what)


def _written() -> bytes:
    families: list[Family] = []
    left = MAX_SERIES
    for family in of_registry():
        if len(family.samples) > left:
            _say_once(f"metrics from '{family.name}' on are left out: a worker may have {MAX_SERIES} series")
            break
        left -= len(family.samples)
        families.append(family)
    data = msgspec.msgpack.encode(families)
    if len(data) <= MAX_BYTES:
        return data
    _say_once(f"the metrics of this worker are omitted: expected at most {MAX_BYTES} bytes, got {len(data)}")
    return msgspec.msgpack.encode([])


def of_registry(*, is_servers: bool = False) -> Iterator[Family]:
    """Return what this process's registry holds; what the client says of the process only if it `is_servers`."""
    import prometheus_client as client
    from prometheus_client.registry import REGISTRY

    own: set[str] = set()
    if not is_servers:
        collectors = (client.GC_COLLECTOR, client.PLATFORM_COLLECTOR, client.PROCESS_COLLECTOR)
        own = {family.name for collector in collectors for family in collector.collect()}
    found, failed = caught(lambda: list(REGISTRY.collect()))
    if failed is not None:
        _say_once(f"the metrics of the model cannot be collected: {text_of(failed)}")
        return
    collectors_by_name: Mapping[str, Any] = getattr(REGISTRY, "_names_to_collectors", {})
    for family in found:
        if family.name in own or not family.samples:
            continue
        mode = getattr(collectors_by_name.get(family.name), "_multiprocess_mode", "all")
        samples = [
            (sample.name, dict(sample.labels), float(sample.value))
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]
        yield Family(family.name, family.type, family.documentation, family.unit, str(mode), samples)


# In the server


whose: Final[ContextVar[Mapping[str, str]]] = ContextVar("forebay_whose", default=_NAMELESS)
"""What the gauges of workers that are being started are labelled with, beside the worker."""


@contextlib.contextmanager
def workers_of(**labels: str) -> Generator[None]:
    """Say whose workers are started in the block."""
    token = whose.set(labels)
    try:
        yield
    finally:
        whose.reset(token)


class MetricStore:
    """The last word of each worker process of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._living: dict[Hashable, tuple[Mapping[str, str], bytes]] = {}
        self._ended: dict[Hashable, bytes] = {}
        self._sum: dict[str, Family] = {}

    def told(self, process: Hashable, names: Mapping[str, str], data: bytes) -> None:
        """Note what a process says; `names` are the labels of its gauges."""
        with self._lock:
            self._ended.pop(process, None)
            self._living[process] = names, data

    def gone(self, process: Hashable) -> None:
        """Note that a process has ended, or cannot be heard any more."""
        with self._lock:
            last = self._living.pop(process, None)
            if last is None:
                return
            _, self._ended[process] = last
            while len(self._ended) > MAX_ENDED:
                data = self._ended.pop(next(iter(self._ended)))
                _add(self._sum, _read(data), lives=False, most=MAX_LEFT_BEHIND)

    def families(self) -> list[Family]:
        """Return the metrics of all workers and of the server's own process, put together.

        Workers that belong to no server, such as those of a `Serving`, are told of by every server of their process.
        """
        found: dict[str, Family] = {}
        for store in dict.fromkeys((self, PROCESS.of(MetricStore))):
            store.add_to(found)
        of_workers = set(found)
        own = [one for one in of_registry(is_servers=True) if one.kind in _ADDED or one.name not in of_workers]
        own = [one for one in own if not _is_reserved(one.name)]
        _add(found, own)
        return [family for family in found.values() if family.samples]

    def add_to(self, found: dict[str, Family]) -> None:
        """Add the metrics of all workers to those found so far."""
        with self._lock:
            living, ended, before = list(self._living.values()), list(self._ended.values()), list(self._sum.values())
            _add(found, before, lives=False)
        for data in ended:
            _add(found, _read(data), lives=False, most=MAX_LEFT_BEHIND)
        for names, data in living:
            _add(found, _read(data), names)

    def collect(self) -> Iterable[Metric]:
        """Return them as prometheus_client wants them; the interface of its collectors."""
        from prometheus_client import Metric

        left = MAX_SERIES
        for family in self.families():
            left -= len(family.samples)
            if left < 0:
                _say_once(f"metrics from '{family.name}' on are left out: a page takes {MAX_SERIES} series of models")
                return
            metric = Metric(family.name, family.told, family.kind, family.unit)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def _read(data: bytes) -> list[Family]:
    """Return what a worker sent, as far as it can stand on a page."""
    try:
        families = _decoder.decode(data)
    except msgspec.DecodeError as error:
        _say_once(f"the metrics of a worker cannot be read: {error}")
        return []
    return [family for family in families if _is_possible(family)]


def _is_possible(family: Family) -> bool:
    return (
        not _is_reserved(family.name)
        and family.kind in _KINDS
        and _NAME.fullmatch(family.name) is not None
        and all(
            name.startswith(family.name) and _NAME.fullmatch(name) and all(map(_LABEL.fullmatch, labels))
            for name, labels, _ in family.samples
        )
    )


def _is_reserved(name: str) -> bool:
    begin = next((begin for begin in (RESERVED, GEN_AI) if name.startswith(begin)), "")
    if begin:
        _say_once(f"the metric '{name}' of a model is left out: names with {begin} are the server's; choose another")
    return bool(begin)


def _add(
    found: dict[str, Family],
    families: Iterable[Family],
    names: Mapping[str, str] = _NAMELESS,
    *,
    lives: bool = True,
    most: int = sys.maxsize,
) -> None:
    """Add a worker's metrics to those found so far.

    Args:
        found: The metrics found so far, by name; changed in place.
        names: The labels of its gauges; the server's own process has none.
        lives: Whether its gauges still mean something.
        most: How many series there may be of all metrics together; further ones are left out, but none of a histogram
            that has some.
    """
    room = most - sum(len(have.samples) for have in found.values())
    for family in families:
        if family.kind not in _ADDED and not lives:
            continue
        have = found.setdefault(family.name, msgspec.structs.replace(family, samples=[]))
        if have.kind != family.kind:
            _say_once(f"the metric '{family.name}' is a {have.kind} in one worker and a {family.kind} in another")
            continue
        put = _how(family)
        begun: set[tuple[str, str]] | None = None
        values = {(name, tuple(sorted(labels.items()))): value for name, labels, value in have.samples}
        for name, labels, value in family.samples:
            given = labels
            if put is None:
                own = {RESERVED + label if label in labels else label: value for label, value in names.items()}
                given = {**labels, **own}
            key = name, tuple(sorted(given.items()))
            before = values.get(key)
            if before is None:
                whose = {label for label in key[1] if label[0] not in _WITHIN}
                if room <= 0 and whose != begun:
                    _say_once(f"series of '{family.name}' are left out: of ended workers {most} are kept")
                    continue
                room, begun = room - 1, whose
            values[key] = value if before is None else (put or max)(before, value)
        have.samples = [(name, dict(labels), value) for (name, labels), value in values.items()]
        if not (lives or have.samples):
            del found[family.name]


def _how(family: Family) -> Callable[[float, float], float] | None:
    """Return how the values of two workers are combined; None if each stands for itself."""
    if family.kind in _ADDED:
        return float.__add__
    if family.kind != "gauge":
        return max
    return {"sum": float.__add__, "max": max, "min": min}.get(family.mode.removeprefix("live"))
