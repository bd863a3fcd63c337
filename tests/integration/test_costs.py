# SPDX-License-Identifier: Apache-2.0
"""What tenants have cost is written to daily files, and added up by `forebay costs`."""

import asyncio
import csv
import io
import json
import os
import re
import signal
import time

import httpx
import pytest
from tests.waiting import eventually

from forebay.cli.costs import table
from forebay.cli.server_page import page_of
from forebay.errors import ConfigError, InvalidRequest
from forebay.observe.metrics import cost_files
from forebay.observe.metrics.cost_files import CostLine, file_of, lines_since, moment, summed
from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
from forebay.observe.metrics.tenant_accounts import MAX_PAIRS, Accounts
from forebay.server.app import App
from forebay.server.cost_log import CostLog
from forebay.types.tenant import Tenant

ENDPOINT = ("costly", "1")


@pytest.fixture
def config(models, tmp_path):
    path = tmp_path / "forebay.yaml"
    settings = {
        "models": [{"target": str(models / "costly.py"), "workers": 1, "worker_kind": "thread"}],
        "http": {"api_keys": {"team-a": "key-a", "team-b": "key-b"}},
        "cost_log": "costs",
    }
    path.write_text(json.dumps(settings))
    return path


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_a_server_that_is_killed_loses_the_last_second_at_most_and_costs_adds_up(serve, config, cli, tmp_path):
    folder = tmp_path / "costs"
    options = ["--config", str(config), "--answer-cost"]
    server = serve(None, *options)
    said = {"team-a": 0.0, "team-b": 0.0}
    for name, key in [("team-a", "key-a"), ("team-b", "key-b"), ("team-a", "key-a")]:
        answer = server.client.post("/models/costly", json=1, headers={"x-api-key": key})
        said[name] += float(answer.headers["forebay-cost"].partition("=")[2].partition(";")[0]) / 1000

    def written():
        return sum(line.rows for line in lines_since(folder, time.time() - 600)) if folder.exists() else 0

    eventually(lambda: written() == 3, "what ran is written")
    shown = cli("costs", server.url, "--by", "tenant", "--csv", "--price", "10", "--api-key", "key-a")
    assert shown.returncode == 0, shown.stderr
    assert {one["tenant"]: float(one["worker_s"]) for one in rows_of(shown.stdout)} == pytest.approx(said, abs=3e-6)
    assert {one["tenant"]: float(one["cost"]) for one in rows_of(shown.stdout)} == pytest.approx(
        {name: 10 * seconds for name, seconds in said.items()}, abs=5e-5
    )
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    again = serve(None, *options)
    again.client.post("/models/costly", json=1, headers={"x-api-key": "key-a"})
    again.stop()  # what is left is written then
    table = cli("costs", folder, "--by", "model,tenant").stdout.split("\n")
    assert [line.split()[:2] for line in table[1:3]] == [["costly", "team-a"], ["costly", "team-b"]]
    assert [line.split()[3] for line in table[1:3]] == ["3", "1"]


def test_tokens_have_columns_where_a_model_counts_them_and_always_in_csv():
    plain, counted = CostLine("", "m", "1", "a", 1.0, 2), CostLine("", "words", "1", "a", 3.0, 4, 50, 60)
    assert table([plain], ["model"], None) == [["model", "worker_s", "rows", "share"], ["m", "1.000000", "2", "1.0000"]]
    assert table([plain], ["model"], None, has_tokens=True)[1][4:] == ["0", "0"]
    assert table([plain, counted, counted], ["tenant"], 2.0) == [
        ["tenant", "worker_s", "rows", "share", "prompt_tokens", "completion_tokens", "cost"],
        ["a", "7.000000", "10", "1.0000", "100", "120", "14"],
    ]


def test_a_server_without_such_a_folder_says_so(launch, cli):
    server = launch("costly.py")
    shown = cli("costs", server.url)
    assert shown.returncode == 2
    assert "--cost-log" in shown.stderr
    assert httpx.get(f"{server.url}/costs", params={"since_s": "x"}).status_code == 404


def test_no_more_of_an_answer_is_read_than_may_be(launch, monkeypatch):
    server = launch("costly.py")
    assert page_of(server.url, "models", None, dict)["models"]
    monkeypatch.setattr("forebay.cli.server_page.MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="more than 0 MiB"):
        page_of(server.url, "models", None, dict)


@pytest.mark.parametrize("flags", [["--since", "1x"], ["--since", "0h"], ["--by", "key"], ["--by", "model,model"]])
def test_what_cannot_be_meant_is_refused(cli, tmp_path, flags):
    shown = cli("costs", tmp_path, *flags)
    assert shown.returncode == 2
    assert flags[1] in shown.stderr
    assert re.search("expected|needed", shown.stderr)


def test_a_folder_that_cannot_be_written_is_found_at_the_start(serve, config, tmp_path):
    (tmp_path / "file").touch()
    server = serve(None, "--config", str(config), "--cost-log", str(tmp_path / "file" / "costs"), ready=False)
    assert server.process.wait(60) != 0
    eventually(lambda: "--cost-log" in server.log, "the reason is told")


def a_log(folder):
    """A log of costs that nothing but the test drives, and its accounts."""
    folder.mkdir(exist_ok=True)
    app = App([])
    accounts = app.state.of(Accounts)
    return CostLog(accounts, folder), accounts


def spend(accounts, metrics, tenant, seconds):
    account = accounts.of(metrics.tenants, ENDPOINT, tenant)
    account.worker_s += seconds
    account.rows += 1
    account.completion_tokens += 3
    accounts.due[account] = None


def test_what_cannot_be_written_is_written_once_it_can_and_counts_once(monkeypatch, tmp_path):
    log, accounts = a_log(tmp_path / "costs")
    metrics, one, other = EndpointMetrics(), Tenant("one"), Tenant("other-one")
    write = os.write
    fates = iter(["all", "none", "torn", "all", "all"])

    def writes(file, data):
        fate = next(fates)
        if fate == "none":
            raise OSError(28, "No space left on device")
        return write(file, data[: data.index(b"\n") + 10] if fate == "torn" else data)

    monkeypatch.setattr("forebay.server.cost_log.os.write", writes)
    for _ in range(5):
        spend(accounts, metrics, one, 0.25)
        spend(accounts, metrics, other, 0.5)
        log._note(*log._written(log._taken()))
    sums = {line.tenant: line.amounts for line in summed(lines_since(tmp_path / "costs", 0.0))}
    assert sums == {"one": (1.25, 5, 0, 15), "other-one": (2.5, 5, 0, 15)}


def test_a_long_file_is_read_from_where_the_time_begins(monkeypatch, tmp_path):
    now = 1_800_000_000.0
    lines = [CostLine(moment(now + second), "m", "1", "t", 0.5, 1) for second in range(3000)]
    path = file_of(tmp_path, lines[0].at)
    path.write_bytes(
        b"".join(json.dumps({f: getattr(x, f) for f in x.__struct_fields__}).encode() + b"\n" for x in lines)
    )
    monkeypatch.setattr(cost_files, "SKIPPED_BYTES", 500)
    read = []
    usual = cost_files._read
    monkeypatch.setattr(cost_files, "_read", lambda text: read.append(text) or usual(text))
    assert [line.at for line in lines_since(tmp_path, now + 2990)] == [
        moment(now + second) for second in range(2990, 3000)
    ]
    assert len(read) < 60
    assert len(list(lines_since(tmp_path, now + 2990, max_bytes=5000))) == 10  # what is before does not count
    monkeypatch.setattr("forebay.server.cost_log.MAX_READ_BYTES", 5000)
    log, _ = a_log(tmp_path)
    assert [(line.rows, line.worker_s) for line in log.since(now + 2990)] == [(10, 5.0)]
    with pytest.raises(InvalidRequest, match="ask for less time"):
        log.since(now)


def test_more_pairs_than_are_told_apart_share_the_account_of_the_others():
    accounts, metrics = Accounts(), EndpointMetrics()
    every = [accounts.of(metrics.tenants, ENDPOINT, Tenant(str(number))) for number in range(MAX_PAIRS + 10)]
    assert len(set(every)) == MAX_PAIRS + 1
    assert every[-1] is metrics.tenants["other"]
    assert accounts.of(metrics.tenants, ENDPOINT, Tenant("7")) is every[7]
    del every, metrics
    assert asyncio.run(_left(accounts)) == 0  # a version that is gone has none


async def _left(accounts):
    return len(accounts._all)
