# SPDX-License-Identifier: Apache-2.0
"""What tenants had of late, as the dashboard tells it: windows, shares, and how much of it there can be."""

import pytest

from forebay.observe.metrics import tenant_history
from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.observe.metrics.tenant_history import LISTED, MARKS, STEP_S, TenantHistory
from forebay.types.tenant import OTHER, TenantConfig, Tenants


class Server:
    """Accounts, and a clock that the test turns."""

    def __init__(self, monkeypatch, **configs):
        self.now = 1000.0
        monkeypatch.setattr(tenant_history.time, "monotonic", lambda: self.now)
        self.tenants = Tenants(configs, are_named=True)
        self.accounts = Accounts()
        self.metrics = EndpointMetrics()
        self.history = TenantHistory(self.accounts)

    def spend(self, name, seconds, refused=0):
        account = self.accounts.of(self.metrics.tenants, ("it", "1"), self.tenants.of(name))
        account.worker_s += seconds
        if seconds:
            account.queue_s.observe(0.5)
        if refused:
            account.refused["share"] = account.refused.get("share", 0) + refused

    def turn(self, steps):
        for _ in range(steps):
            self.now += STEP_S
            list(self.history.look())

    def rows(self, **waiting):
        list(self.history.look())
        return {row.name: row for row in self.history.rows(self.tenants, waiting)}


def test_shares_are_of_the_last_minute_and_costs_of_a_quarter_of_an_hour(monkeypatch):
    server = Server(monkeypatch, a=TenantConfig(weight=3.0), urgent=TenantConfig(tier=0))
    server.spend("a", 40.0)
    server.turn(8)
    server.spend("a", 3.0, refused=2)
    server.spend("b", 9.0)
    server.spend("urgent", 5.0)
    rows = server.rows(c=4)
    assert {name: row.promised for name, row in rows.items()} == {"a": 0.6, "b": 0.2, "c": 0.2, "urgent": 1.0}
    assert {name: row.got for name, row in rows.items()} == {"a": 0.25, "b": 0.75, "c": 0.0, "urgent": 1.0}
    assert (rows["a"].worker_s, rows["a"].refused, rows["a"].queue_s) == (43.0, {"share": 2}, 0.5)
    assert rows["c"].waiting == 4
    assert rows["b"].busy == pytest.approx(9.0 / (3 * STEP_S))
    server.turn(5)
    rows = server.rows()
    assert rows["a"].got is None
    assert rows["a"].promised == 1.0, "what it would have if it came"
    assert (rows["a"].worker_s, rows["a"].queue_s) == (43.0, None)
    server.turn(MARKS)
    assert server.rows() == {}, "a quarter of an hour later"


def test_a_version_that_leaves_takes_nothing_along(monkeypatch):
    server = Server(monkeypatch)
    server.spend("a", 4.0)
    assert server.rows()["a"].worker_s == 4.0
    server.metrics = EndpointMetrics()
    assert server.accounts.every() == []
    server.spend("a", 1.0)
    assert server.rows()["a"].worker_s == 5.0


def test_the_busiest_are_listed_and_the_others_are_one_row(monkeypatch):
    server = Server(monkeypatch)
    for number in range(60):
        server.spend(f"t{number}", float(number), refused=1)
    rows = server.rows()
    assert list(rows) == [*(f"t{number}" for number in range(59, 59 - LISTED, -1)), OTHER]
    rest = 60 - LISTED
    other = rows[OTHER]
    assert (other.tenants, other.worker_s, other.refused) == (rest, sum(range(rest)), {"share": rest})
    assert (other.promised, other.tier) == (None, None)
