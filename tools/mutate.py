# SPDX-License-Identifier: Apache-2.0
"""Deletes guards and conditions of the core one by one and asks whether a test notices: `python tools/mutate.py`.

It works in a copy of the project. First the tests below `TESTS` run once under coverage, which records the lines that
each test touches and how long it takes. Then each mutant is tried with the tests that touch its line, the most specific
first, for at most a minute. Run it by hand. `tests/mutants.md` is the last report, with the reason for each survivor.

    .venv/bin/python tools/mutate.py --count 60 --seed 1 --minutes 90 --report tests/mutants.md
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import coverage
import pytest

CORE = (
    "batching serving/endpoint.py serving/slices.py serving/stream_delivery.py serving/tensor_face.py "
    "serving/models/tensor_codec.py serving/models/padding.py serving/nx_serving/dispatch.py "
    "serving/nx_serving/partitions.py "
    "graph/run.py graph/pool.py protocols/samples.py protocols/kserve surfaces/pipeline/protocol/literal.py "
    "repository/shelf.py repository/settling.py repository/retries.py types/tensor.py types/tensor_proto.py "
    "workers/wire/conversation.py workers/wire/frames.py workers/pools/seats.py workers/pools/seating.py "
    "workers/memory/landing.py workers/pools/threads.py workers/pools/slot_pool.py "
    "transports/http/connection_state.py transports/http/reading.py transports/http/answering.py "
    "transports/http/same_turn.py transports/intake.py transports/refusal_pacing.py transports/grpc"
).split()
"""Where mutants are made, below src/forebay."""
TESTS = (
    "tests/unit tests/property tests/pools tests/contract tests/serving tests/graph "
    "tests/integration/grpc tests/integration/kserve tests/integration/tfserving"
).split()
"""What runs in the process that is measured, nearly all of it."""
BUDGET_S = 25.0
"""How long the tests of one mutant took together without it."""
LIMIT_S = 60.0
"""How long they may take with it; longer is a hang, which a mutant is noticed by."""
PLUGINS = ("-p", "tools.mutate", "-p", "no:cacheprovider")
EXITS = (ast.Raise, ast.Return, ast.Continue, ast.Break)


class Mutant(NamedTuple):
    """A change of one expression.

    Attributes:
        path: The module, below src/forebay.
        line: Where the statement begins.
        start: Where what is replaced begins, in bytes of the module.
        end: Where it ends.
        text: What stands in its place.
        what: The change in words.
        function: The function or class around it, as `Class.method`; empty for the module itself.
    """

    path: str
    line: int
    start: int
    end: int
    text: str
    what: str
    function: str


def _with_functions(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yield each node below one, with the function that it belongs to."""
    for child in ast.iter_child_nodes(node):
        yield child, function
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _with_functions(child, f"{function}.{child.name}".lstrip(".") if is_named else function)


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return the mutants of a module: guards that never hold, and conditions that lack one of their parts."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []

    def add(node: ast.expr, line: int, text: str, what: str, function: str) -> None:
        if any(isinstance(each, ast.NamedExpr) for each in ast.walk(node)):
            return  # what it names is needed after it
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Mutant(path, line, start, end, text, what, function))

    for node, function in _with_functions(ast.parse(source)):
        if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], EXITS) and not node.orelse:
            add(node.test, node.lineno, "False", f"without `if {ast.unparse(node.test)}`", function)
        elif isinstance(node, ast.BoolOp):
            is_and = isinstance(node.op, ast.And)
            for part in node.values:
                add(part, node.lineno, str(is_and), f"`{ast.unparse(part)}` taken for {is_and}", function)
    return [each for each in found if "TYPE_CHECKING" not in each.what]


def all_mutants(root: Path) -> list[Mutant]:
    """Return the mutants of all modules of the core, in order."""
    found: list[Mutant] = []
    for place in CORE:
        at = root / "src/forebay" / place
        for path in sorted(at.glob("*.py")) if at.is_dir() else [at]:
            found += mutants_of(str(path.relative_to(root / "src/forebay")), path.read_bytes())
    return found


def drawn(found: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """Choose so many mutants, in order, by hashes of what they change: a seed draws nearly the same from later code."""
    times: Counter[tuple[str, str, str]] = Counter()

    def lot(mutant: Mutant) -> bytes:
        change = (mutant.path, mutant.function, mutant.what)
        times[change] += 1  # the same change may be possible twice in a function
        return hashlib.sha256(repr((seed, *change, times[change])).encode()).digest()

    return sorted(sorted(found, key=lot)[:count])


# ---------------------------------------------------------------------------------------------------------------------
# Which tests touch a line. This module is a plugin of pytest then (`-p tools.mutate`).


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen tests, in their order; names that are no test any more are ignored."""
    if "MUTATE_CHOSEN" in os.environ:
        order = {name: place for place, name in enumerate(Path(os.environ["MUTATE_CHOSEN"]).read_text().splitlines())}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):  # noqa: ANN201 - a generator, as the hook wants it
    """Have coverage write the lines that come now to this test."""
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long each test took, and that it passed."""
    path = os.environ.get("MUTATE_DURATIONS")
    if path and report.when == "call" and report.passed:
        with Path(path).open("a") as file:
            file.write(f"{report.duration:.3f} {report.nodeid}\n")


def environment(copy: Path, **more: str) -> dict[str, str]:
    """Return what tests of the copy run with, so that they and their processes import it."""
    return {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "PYTHONHASHSEED": "0", **more}


def measure(copy: Path, data: Path, processes: int) -> None:
    """Run the tests once, in so many processes, and write which lines each touches and how long it takes."""
    shutil.copytree(copy / "src", data.parent / "src")
    files = sorted(str(path.relative_to(copy)) for place in TESTS for path in (copy / place).rglob("test_*.py"))
    include = ",".join(f"*/forebay/{place}/*" if "." not in place else f"*/forebay/{place}" for place in CORE)
    running: list[subprocess.Popen[bytes]] = []
    for number in range(processes):
        command = [sys.executable, "-m", "coverage", "run", f"--include={include}", f"--data-file={data}.{number}"]
        command += ["-m", "pytest", "-q", "--timeout=120", *PLUGINS, *files[number::processes]]
        told = environment(copy, MUTATE_DURATIONS=f"{data}.durations.{number}")
        running.append(subprocess.Popen(command, cwd=copy, env=told, stdout=subprocess.DEVNULL))
    for each in running:
        each.wait()


def _moved(before: Path, now: Path) -> dict[int, int]:
    """Return where the lines of a module are by now, except those that were changed."""
    versions = [path.read_text().splitlines() if path.exists() else [] for path in (before, now)]
    blocks = difflib.SequenceMatcher(None, *versions, autojunk=False).get_matching_blocks()
    return {old + n + 1: new + n + 1 for old, new, size in blocks for n in range(size)}


def touching(data: Path, copy: Path) -> tuple[dict[tuple[str, int], list[str]], dict[str, float]]:
    """Return the tests that touch each line of the copy, the most specific first, and how long each takes."""
    durations: dict[str, float] = {}
    for path in data.parent.glob(f"{data.name}.durations.*"):
        for line in path.read_text().splitlines():
            seconds, name = line.split(" ", 1)
            durations[name] = float(seconds)
    tests: dict[tuple[str, int], set[str]] = defaultdict(set)
    lines: dict[str, int] = defaultdict(int)
    for path in data.parent.glob(f"{data.name}.[0-9]*"):
        measured = coverage.CoverageData(str(path))
        measured.read()
        for file in measured.measured_files():
            below = file.rpartition("/src/forebay/")[2]
            here = _moved(data.parent / "src/forebay" / below, copy / "src/forebay" / below)
            for line, names in measured.contexts_by_lineno(file).items():
                known = [name for name in names if name in durations]
                if line in here:
                    tests[below, here[line]].update(known)
                for name in known:
                    lines[name] += 1
    return {place: sorted(names, key=lines.__getitem__) for place, names in tests.items()}, durations


# ---------------------------------------------------------------------------------------------------------------------


def chosen(names: list[str], durations: dict[str, float]) -> list[str]:
    """Return as many of the tests, the most specific first, as fit into the budget."""
    left, taken = BUDGET_S, list[str]()
    for name in names:
        left -= durations[name] + 0.01
        if left < 0 and taken:
            break
        taken.append(name)
    return taken


def noticed_by(copy: Path, mutant: Mutant, names: list[str]) -> str:
    """Return which of these tests fails with a mutant; empty if none does, or none is left."""
    files = [file for file in dict.fromkeys(name.split("::")[0] for name in names) if (copy / file).exists()]
    if not files:
        return ""
    path = copy / "src/forebay" / mutant.path
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
    listed = copy / "chosen.txt"
    listed.write_text("\n".join(names))
    command = [sys.executable, "-m", "pytest", "-q", "-x", *PLUGINS, "--no-header", *files]
    told = environment(copy, MUTATE_CHOSEN=str(listed))
    try:
        process = subprocess.Popen(
            command, cwd=copy, env=told, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "they hang"
        if process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        if process.returncode == pytest.ExitCode.USAGE_ERROR:
            raise SystemExit(f"pytest could not run {' '.join(files)}: {out}")
        failed = [
            line.split(" ", 1)[1] for line in out.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))
        ]
        return failed[0].split(" - ")[0] if failed else f"exit {process.returncode}"
    finally:
        path.write_bytes(source)
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            cached.unlink()


def main() -> int:
    """Try the mutants and print, or write, what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="how many mutants, chosen by hash")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=90.0, help="no mutant is begun after that")
    parser.add_argument("--processes", type=int, default=2, help="that measure which test touches which line")
    parser.add_argument("--data", type=Path, help="a folder for what is measured, or was measured before")
    parser.add_argument("--report", type=Path, help="a Markdown file for the table")
    given = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copy = Path(folder) / "forebay"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True)
        for name in filter(None, tracked.stdout.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
        data = (given.data or Path(folder)).resolve() / "coverage"
        if not list(data.parent.glob("coverage.[0-9]*")):
            data.parent.mkdir(parents=True, exist_ok=True)
            print("which tests touch which line? This takes some minutes", flush=True)
            measure(copy, data, given.processes)
        found = all_mutants(copy)
        tests, durations = touching(data, copy)
        rows: list[str] = []
        survivors = 0
        picked = drawn(found, given.seed, given.count)
        for number, mutant in enumerate(picked, 1):
            if time.monotonic() - began > given.minutes * 60:
                print(f"out of time before mutant {number}", flush=True)
                break
            names = chosen(tests.get((mutant.path, mutant.line), []), durations)
            result = noticed_by(copy, mutant, names) if names else ""
            survivors += not result
            told = result or (f"**nothing** ({len(names)} tests)" if names else "**nothing**: no test touches it")
            print(f"{number}. {mutant.path}:{mutant.line} {mutant.what}: {told}", flush=True)
            what = mutant.what.replace("|", "\\|")
            rows.append(f"| `{mutant.path}:{mutant.line}` | {what} | {told} |")
        print(f"{len(rows)} mutants, {len(rows) - survivors} noticed", flush=True)
        if given.report:
            head = (
                f"{len(rows)} of {len(found)} mutants, seed {given.seed}: {len(rows) - survivors} noticed.\n\n"
                "| where | what changed | noticed by |\n|---|---|---|\n"
            )
            given.report.write_text("# Mutants\n\n" + head + "\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
