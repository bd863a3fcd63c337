# SPDX-License-Identifier: Apache-2.0
"""Profile lines: when each op and each call began and ended, one line each, for `Analyst` and for other scripts.

    PROFILE<tab>pid:4711<tab>prep#[bow|0]_0:1700000000000000 prep#[bow|0]_1:1700000000000150 midp#[bow|0]_0:...

`_0` begins and `_1` ends an event; the numbers are microseconds since 1970. The lines are made in the server from the
timeline, also those of ops that run in processes, so that two lines never run into each other.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, MutableMapping
from typing import Any, Final

import msgspec

from forebay.observe.metrics.node_totals import runs_of
from forebay.observe.traces.timeline import BatchListener, BatchRecord, Timeline

KEY: Final = "pipeline.profile"
"""Key by which a client asks for the lines of its request, and under which they stand in the answer."""
STEPS: Final = ("prep", "midp", "postp")
"""The stages of an op, in order."""
_CALLER: Final = "@DAGExecutor"


class CallTimes(msgspec.Struct):
    """When one request reached each stage, in seconds of `time.monotonic`; the server fills it in along the way.

    Attributes:
        started: It came in.
        entered: It came to the process with the graph; 0 where that is the one it came in by.
        unpacked: Its inputs were read, and it entered the graph.
        packing: It left the graph.
        ended: Its answer was ready.
    """

    started: float
    entered: float = 0.0
    unpacked: float = 0.0
    packing: float = 0.0
    ended: float = 0.0


class Profile:
    """Makes profile lines of one graph of ops.

    Attributes:
        timeline: Where its batches are told; None until the server starts.
    """

    def __init__(self, graph: str, *, in_threads: bool) -> None:
        """Describe the graph.

        Args:
            graph: Its name; the endpoints of its ops are named `graph/op`.
            in_threads: Whether its ops run in threads of the server; the original names calls otherwise if not.
        """
        self.timeline: Timeline | None = None
        self._prefix = f"{graph}/"
        self._in_threads = in_threads
        self._epoch_s = time.time() - time.monotonic()

    def batch_line(self, record: BatchRecord) -> str:
        """Return the line of one batch of an op, or the lines of the requests that came together and ran one by one.

        Empty if it is not an op of the graph or ran no stage.
        """
        if not record.endpoint.name.startswith(self._prefix):
            return ""
        op = token(f"[{record.endpoint.name.removeprefix(self._prefix)}|{record.worker}]")
        lines: list[str] = []
        for run in runs_of(record.phases):
            events: list[tuple[str, float, float]] = []
            for step in STEPS:
                times = [(started, ended) for _, phase, started, ended, _ in run if phase == step]
                if times:  # the stage of a batch is that of all of its samples
                    events.append((f"{step}#{op}", min(times)[0], max(ended for _, ended in times)))
            lines.append(self._line(record.pid, events))
        return "".join(lines)

    def call_line(self, data_id: int, times: CallTimes) -> str:
        """Return the line of one request; one that did not reach the graph has no unpacking and no packing."""
        dag = "DAG" if self._in_threads else f"DAG-{data_id}"
        events = [(f"call_{data_id}#{dag}", times.started, times.ended)]
        if times.unpacked:
            events.append((f"prepack_{data_id}#{_CALLER}", times.entered or times.started, times.unpacked))
        if times.packing:
            events.append((f"postpack_{data_id}#{_CALLER}", times.packing, times.ended))
        return self._line(os.getpid(), events)

    def _line(self, pid: int, events: list[tuple[str, float, float]]) -> str:
        if not events:
            return ""
        marks = [
            f"{name}_{end}:{round((self._epoch_s + moment) * 1e6)}"
            for name, *moments in events
            for end, moment in enumerate(moments)
        ]
        return f"PROFILE\tpid:{pid}\t{' '.join(marks)}\n"


class ProfileWriter(BatchListener):
    """Writes the lines of all requests while it is open: `dag.use_profile`.

    It is open for the life of the server; call `called` for each request that ended.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def called(self, data_id: int, times: CallTimes) -> None:
        """Write the line of a request that has ended."""
        _to_stderr(self._profile.call_line(data_id, times))

    def hear(self, record: BatchRecord) -> None:
        """Write the line of a batch of its ops."""
        line = self._profile.batch_line(record)
        if line:
            _to_stderr(line)


class RequestProfile(BatchListener):
    """Collects the lines of one request for its client, while it is open around the request's way through the graph."""

    def __init__(self, profile: Profile, data_id: int) -> None:
        self.timeline = profile.timeline
        self._profile = profile
        self._data_id = data_id
        self._lines: list[str] = []

    def text(self, times: CallTimes) -> str:
        """Return the lines of its ops, then that of the call."""
        return "".join([*self._lines, self._profile.call_line(self._data_id, times)])

    def hear(self, record: BatchRecord) -> None:
        """Keep the line of a batch that it was in."""
        if any(phase[4] == self._data_id for phase in record.phases):
            self._lines.append(self._profile.batch_line(record))


def take_wish(inputs: MutableMapping[str, Any]) -> bool:
    """Tell whether a request asks for its profile, and take the key out so that no op sees it."""
    wish = inputs.pop(KEY, None)
    return wish is not None and str(wish) not in {"", "0", "False", "false"}


def token(name: str) -> str:
    """Return a name in a form that fits into a line: nothing in it ends the line, or a word of the line."""
    return "".join(letter if letter.isprintable() and letter != " " else f"\\x{ord(letter):02x}" for letter in name)


def _to_stderr(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


def events_in(text: str) -> Iterator[tuple[int, str, int, int]]:
    """Yield the process, name, begin and end (microseconds) of every event in profile lines; ignores all else."""
    for line in _LINE.finditer(text):
        begun: dict[str, int] = {}
        for mark in _MARK.finditer(line["marks"]):
            name, moment = mark["name"], int(mark["us"])
            if mark["end"] == "0":
                begun[name] = moment
            elif name in begun:
                yield int(line["pid"]), name, begun.pop(name), moment


_LINE: Final = re.compile(r"PROFILE\tpid:(?P<pid>\d{1,18})\t(?P<marks>[^\n]*)")
_MARK: Final = re.compile(r"(?P<name>[^\s#]+#\S+)_(?P<end>[01]):(?P<us>\d{1,18})(?=\s|$)")
