# SPDX-License-Identifier: Apache-2.0
"""Write the records as a page of Markdown."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from benchmarks.criteria import criteria
from benchmarks.records import CLOSED, OPEN, Record, Records, line, spread
from benchmarks.servers import SERVERS

PACKAGES = (
    "forebay",
    "mosec",
    "litserve",
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "msgspec",
    "numpy",
    "scikit-learn",
)


def write(path: Path, records: Records, facts: dict[str, str]) -> None:
    blocks = [
        "# Benchmark results",
        "Written by `make bench`; `benchmarks/README.md` says how it measures.",
        table(["", ""], [[name, value] for name, value in facts.items()]),
        "\n".join(criteria_section(records)),
        "\n".join(curve_section(records)),
        *closed_sections(records),
        *open_sections(records),
    ]
    if records.failures:
        blocks.append("## Servers that failed\n\n" + "\n\n".join(f"```\n{text}\n```" for text in records.failures))
    path.write_text("\n\n".join(blocks) + "\n")


def machine() -> dict[str, str]:
    cpu = next(text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name"))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    wrk = "missing"
    if shutil.which("wrk"):
        wrk = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout.split()[1]
    return {
        "machine": f"{os.cpu_count()} cores, {cpu.partition(':')[2].strip()}, {memory_gib:.0f} GiB",
        "system": f"Linux {platform.release()}, Python {platform.python_version()}, wrk {wrk}",
        "versions": ", ".join(f"{name} {installed(name)}" for name in PACKAGES),
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def table(head: list[str], rows: list[list[str]]) -> str:
    rule = "|---|" + "--:|" * (len(head) - 1)
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def criteria_section(records: Records) -> Iterator[str]:
    yield "## Criteria\n"
    rows = []
    for one in criteria(records):
        measured = "" if one.measured is None else f"{one.measured:.2f}"
        rows.append([one.text, measured, f"{'>=' if one.at_least else '<='} {one.bar:g}", one.verdict])
    yield table(["criterion", "measured", "bar", ""], rows)


def curve_section(records: Records) -> Iterator[str]:
    curve = records.curve()
    a, b = line(curve)
    yield "## The batchmodel job alone\n"
    yield f"T(n) = {a:.2f} ms + {b:.1f} us n; medians of a tight loop on the server's core.\n"
    head = ["rows", *map(str, curve)]
    times = ["ms", *(f"{ms:.2f}" for ms in curve.values())]
    rates = ["rows/s", *(f"{1e3 * rows / ms:,.0f}" for rows, ms in curve.items())]
    yield table(head, [times, rates])
    for kind in ("thread", "process"):
        if (limit := records.limit(kind)) is not None:
            yield f"\nAttainable with forebay:{kind} serving on the same core: {limit:,.0f} rows/s."


def groups(records: Records, loop: str) -> list[tuple[str, int]]:
    return sorted({(record.job, record.load) for record in records.all if record.loop == loop})


def measured_servers(records: Records, job: str, loop: str, load: int) -> Iterator[tuple[str, list[Record]]]:
    for server in SERVERS:
        if found := records.of(server.name, job, loop, load):
            yield server.name, found


def closed_sections(records: Records) -> Iterator[str]:
    head = ["server", "rounds", "req/s", "spread", "p50 ms", "p99 ms", "errors", "CPU us/req", "mean batch"]
    head += ["PSS MiB", "of front", "start s", "x mosec", "x raw"]
    for job, load in groups(records, CLOSED):
        rows = []
        for name, found in measured_servers(records, job, CLOSED, load):
            ratios = [
                records.ratio("rate", (name, other), job, load) for other in ("mosec", f"raw:{name.partition(':')[2]}")
            ]
            rows.append(
                [
                    name,
                    str(len(found)),
                    f"{middle(found, 'rate'):,.0f}{soft(found)}",
                    f"{spread(record.rate for record in found):.0%}",
                    f"{middle(found, 'p50_ms'):.2f}",
                    f"{middle(found, 'p99_ms'):.2f}",
                    str(sum(record.errors for record in found)),
                    f"{middle(found, 'cpu_us'):.1f}",
                    f"{middle(found, 'batch'):.1f}",
                    f"{middle(found, 'pss_mib'):.0f}",
                    f"{middle(found, 'front_pss_mib'):.0f}",
                    f"{middle(found, 'start_s'):.1f}",
                    *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                ]
            )
        yield f"## {job}, {load} connection{'s' * (load > 1)}\n\n{table(head, rows)}"


def open_sections(records: Records) -> Iterator[str]:
    head = ["server", "rounds", "answers/s", "mean ms", "p50 ms", "p99 ms", "errors", "mean batch", "mean x mosec"]
    for job, load in groups(records, OPEN):
        rows = []
        for name, found in measured_servers(records, job, OPEN, load):
            ratio = records.ratio("mean_ms", (name, "mosec"), job, load, OPEN)
            rows.append(
                [
                    name,
                    str(len(found)),
                    f"{middle(found, 'rate'):,.0f}{soft(found)}",
                    f"{middle(found, 'mean_ms'):.2f}",
                    f"{middle(found, 'p50_ms'):.2f}",
                    f"{middle(found, 'p99_ms'):.2f}",
                    str(sum(record.errors for record in found)),
                    f"{middle(found, 'batch'):.1f}",
                    "" if ratio is None else f"{ratio:.2f}",
                ]
            )
        yield f"## {job}, open loop, {load:,} requests a second\n\n{table(head, rows)}"


def middle(found: list[Record], field: str) -> float:
    return median(getattr(record, field) for record in found)


def soft(found: list[Record]) -> str:
    """Mark figures of which a round was disturbed."""
    return " ~" if any(record.is_disturbed for record in found) else ""
