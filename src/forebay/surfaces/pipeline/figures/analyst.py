# SPDX-License-Identifier: Apache-2.0
"""`Analyst`: what profile lines say, as a trace for a browser and as numbers. Reads the original's files as well."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from forebay.errors import ConfigError
from forebay.observe.metrics import capacity
from forebay.observe.traces.trace_lanes import lanes
from forebay.surfaces.pipeline.figures.profile import STEPS, events_in
from forebay.types.did_you_mean import nearest

_Event: TypeAlias = tuple[int, str, int, int]

_CALLS: Final = ("call", "prepack", "postpack")
_CALLS_THREAD: Final = "DAG"


class OpAnalyst:
    """What ops cost, learned from the events of their runs."""

    def __init__(self, events: Iterable[_Event]) -> None:
        """Pick out the events of ops.

        Args:
            events: Process, name, begin and end in microseconds.
        """
        self._durations: dict[str, dict[str, list[int]]] = {}
        self._workers: dict[str, set[tuple[int, str]]] = {}
        self._calls = 0
        for pid, name, begun, ended in events:
            step, _, where = name.partition("#")
            self._calls += step.startswith("call_")
            op, bar, worker = where.strip("[]").rpartition("|")
            if step in STEPS and bar:
                self._durations.setdefault(op, {}).setdefault(step, []).append(ended - begun)
                self._workers.setdefault(op, set()).add((pid, worker))

    def __str__(self) -> str:
        """Return the times of all ops as JSON."""
        return json.dumps(self.times(), indent=2, separators=(", ", ":"))

    @property
    def ops(self) -> list[str]:
        """The ops that ran."""
        return list(self._durations)

    def times(self, op: str | None = None) -> dict[str, Any]:
        """Return the mean time of each stage of an op in milliseconds; of all ops, by name, if none is given.

        Raises:
            ConfigError: If there is no such op.
        """
        if op is None:
            return {name: self.times(name) for name in self._durations}
        durations = self._of(op)
        return {step: sum(found) / len(found) / 1000 for step in STEPS if (found := durations.get(step))}

    def qps(self, op: str | None = None) -> dict[str, Any]:
        """Return how many times a second one worker could run each stage of an op, if it ran nothing else.

        Raises:
            ConfigError: If there is no such op.
        """
        if op is None:
            return {name: self.qps(name) for name in self._durations}
        return {step: 1000 / time_ms if time_ms else float("inf") for step, time_ms in self.times(op).items()}

    def cost(self, op: str) -> capacity.NodeCost:
        """Return what a run of an op costs its worker.

        Raises:
            ConfigError: If there is no such op.
        """
        times = self.times(op)
        return capacity.NodeCost(*(times.get(step, 0.0) / 1000 for step in STEPS))

    def calls_per_run(self, op: str) -> float:
        """Return how many calls there were for each run of an op, at least 1: those of a batch share one.

        Raises:
            ConfigError: If there is no such op.
        """
        return max(self._calls / max(map(len, self._of(op).values())), 1.0)

    def workers(self, op: str) -> int:
        """Return how many workers of an op were seen.

        Raises:
            ConfigError: If there is no such op.
        """
        self._of(op)
        return len(self._workers[op])

    def concurrency_analysis(self, op_config_yaml: str | os.PathLike[str]) -> dict[str, float]:
        """Return how many workers each op needs to keep the slowest stage busy.

        Args:
            op_config_yaml: A file `{op: {prep|midp|postp: cards}}`: which cards run a stage, as `0` or `"0,1"`.

        Raises:
            ConfigError: If the file is not of that form, or puts the models of two ops on one card.
        """
        cards = _cards(Path(op_config_yaml))
        slowest_ms = 0.0
        owners: dict[str, str] = {}
        for op, steps in cards.items():
            times = self.times(op)
            for step, used in steps.items():
                for card in used:
                    if owners.setdefault(card, op) != op:
                        msg = f"card {card} is given to '{owners[card]}' and to '{op}'; give each op cards of its own"
                        raise ConfigError(msg)
                slowest_ms = max(slowest_ms, times.get(step, 0.0) / len(used))
        if slowest_ms <= 0:
            raise ConfigError(f"{op_config_yaml} names no stage that takes time; there are {', '.join(STEPS)}")
        return {op: round(sum(times.values()) / slowest_ms, 3) for op, times in self.times().items()}

    def _of(self, op: str) -> Mapping[str, Sequence[int]]:
        found = self._durations.get(op)
        if found is None:
            hint = nearest(op, self._durations)
            known = f"did you mean '{hint}'?" if hint else f"there is {', '.join(self._durations) or 'none'}"
            raise ConfigError(f"the profile has no op '{op}'; {known}")
        return found


class Analyst:
    """Reads a file of profile lines, whatever else is in it."""

    def __init__(self, profile_file: str | os.PathLike[str]) -> None:
        """Read the file.

        Raises:
            ConfigError: If that is not possible.
        """
        try:
            text = Path(profile_file).read_text(errors="replace")
        except OSError as error:
            raise ConfigError(f"{profile_file} cannot be read: {error.strerror}") from error
        self._events = list(events_in(text))

    def get_trace(self) -> list[dict[str, Any]]:
        """Return the events as Chrome trace events: a begin and an end each, by time; the thread is the op's worker.

        Calls are on the thread `DAG`. Viewers treat the events of a thread as a stack, so events that overlap are on
        threads of their own: `DAG-2`, `DAG-3`, as many as there were at a time.
        """
        threads: dict[tuple[int, str], list[tuple[str, int, int]]] = {}
        for pid, name, begun, ended in self._events:
            kind, _, where = name.partition("#")
            thread = _CALLS_THREAD if where.startswith(f"{_CALLS_THREAD}-") else where
            threads.setdefault((pid, thread), []).append((kind, begun, max(ended, begun)))
        trace: list[dict[str, Any]] = []
        for (pid, thread), events in threads.items():
            for lane, (kind, begun, ended) in lanes(events, itemgetter(1, 2)):
                tid = f"{thread}-{lane + 1}" if lane else thread
                for phase, moment in (("B", begun), ("E", ended)):
                    trace.append({"name": kind, "ph": phase, "ts": moment, "pid": pid, "tid": tid})
        return sorted(trace, key=itemgetter("ts"))

    def save_trace(self, trace_file: str | os.PathLike[str]) -> None:
        """Write the trace as a file that chrome://tracing and Perfetto show."""
        Path(trace_file).write_bytes(msgspec.json.encode(self.get_trace()))

    def get_profile(self) -> tuple[float, float, float, OpAnalyst]:
        """Return the mean time of a call, of reading one and of writing its answer in milliseconds, and the ops."""
        call, prepack, postpack = (self._mean_ms(kind) for kind in _CALLS)
        return call, prepack, postpack, OpAnalyst(self._events)

    def get_op_analyst(self) -> OpAnalyst:
        """Return what the ops cost."""
        return self.get_profile()[3]

    def print_profile(self) -> None:
        """Print the mean times, and those of each stage of each op."""
        call, prepack, postpack, ops = self.get_profile()
        lines = (f"graph engine call: {call}", f"rpc prepack: {prepack}", f"rpc postpack: {postpack}", f"OP: {ops}")
        sys.stdout.write("\n".join(lines) + "\n")

    def _mean_ms(self, kind: str) -> float:
        found = [ended - begun for _, name, begun, ended in self._events if name.startswith(f"{kind}_")]
        return sum(found) / len(found) / 1000 if found else 0.0


def _cards(path: Path) -> dict[str, dict[str, list[str]]]:
    import yaml

    expected = f"expected a map of ops, each a map of {', '.join(STEPS)} to cards such as 0 or '0,1'"
    try:
        given = msgspec.convert(yaml.safe_load(path.read_text()), dict[str, dict[str, int | str]], str_keys=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be used: {error}; {expected}") from error
    cards: dict[str, dict[str, list[str]]] = {}
    for op, steps in given.items():
        for step, used in steps.items():
            split = [card.strip() for card in str(used).split(",")]
            if step not in STEPS or not all(split):
                raise ConfigError(f"{path}: op '{op}' has {step}: {used!r}; {expected}")
            cards.setdefault(op, {})[step] = split
    return cards
