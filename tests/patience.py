# SPDX-License-Identifier: Apache-2.0
"""Lists the tests that pass only after most of the time that they may wait; with `STRICT=1` they fail.

Two things count: a wait of `tests/waiting.py` that takes more than half of its own patience, and a test (its set-up or
clean-up as well) that takes more than half of `PATIENCE_S`. The latter finds each event, thread or process that was
waited for in vain and whose return value nobody looked at. A test of many steps says how long all of them may take:
`@pytest.mark.lasts(240)`, in seconds; each of its waits is looked at as any other.
"""

import os

import pytest
from tests import waiting

_KEY = "late"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note in a report what was late; reports reach the process that prints them under xdist, too."""
    report = yield
    late = waiting.long_waits[:]
    waiting.long_waits.clear()
    lasts = item.get_closest_marker("lasts")
    if lasts is not None and call.duration > lasts.args[0]:
        late.append(f"took {call.duration:.1f} seconds, and its steps may take {lasts.args[0]} together")
    elif lasts is None and call.duration > waiting.LONG_PART * waiting.PATIENCE_S:
        late.append(f"took {call.duration:.1f} seconds, and no wait may take more than {waiting.PATIENCE_S}")
    if report.passed and late:
        setattr(report, _KEY, late)
        if os.environ.get("STRICT") == "1":
            report.outcome = "failed"
            report.longrepr = "STRICT=1: it passed only after more than half of its patience: " + "; ".join(late)
    return report


def pytest_terminal_summary(terminalreporter):
    """List what was late, whether it was let pass or not."""
    reports = [
        report
        for outcome in terminalreporter.stats.values()
        for report in outcome
        if isinstance(report, pytest.TestReport) and hasattr(report, _KEY)
    ]
    if reports:
        terminalreporter.section("passed only after more than half of their patience")
        for report in reports:
            terminalreporter.line(f"{report.nodeid} ({report.when}): {'; '.join(getattr(report, _KEY))}")
