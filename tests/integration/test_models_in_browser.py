# SPDX-License-Identifier: Apache-2.0
"""The dashboard's list of models as Chromium shows it: order, groups, addresses, and the past."""

import json

import pytest
from tests.browser import PROGRAM

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")

LIVE = "document.querySelector('#link').dataset.state === 'live'"
ROW = "[...document.querySelectorAll('.models tbody tr')].find(row => row.querySelector('.name')?.textContent === '{}')"
STATE = "{ in_flight: 0, waiting: 0, alive: 1, idle: 1, slots: 1, restarts: 0 }"


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory, models):
    file = tmp_path_factory.mktemp("watched") / "all.yaml"
    targets = [f"{models}/watched.py:{name}" for name in ("Iris", "Failing", "ocr")]
    file.write_text(json.dumps({"models": targets, "worker_kind": "thread"}))
    return launch(None, "--config", str(file))


SORTED = """
Promise.all([import('/ui/models.js'), import('/ui/history.js')]).then(([{ Models }, { History }]) => {
  const host = document.body.appendChild(document.createElement("section"));
  const history = new History();
  const table = new Models(host, history);
  const ready = { ready: true, version: "1" };
  const wrong = { ready: true, versions: [{ version: "1" }, { version: "2", state: "failed", error: "no" }] };
  const away = { ready: false, versions: [{ version: "1", state: "available" }] };
  const about = [away, ready, ready, wrong];
  const models = Array.from({ length: 120 }, (_, number) => ({ name: `m${number}`, ...about[number % 4] }));
  history.began({ seconds: [0.1, 1], rows: [1] }, [], 0);
  history.learn(models);
  const beat = (endpoint, ok, internal, bucket) =>
    ({ endpoint, version: "1", codes: { ok, internal }, totals: {}, request: [[bucket, ok]], ...STATE });
  history.take({ monotonic: 0, beats: [] });
  history.take({ monotonic: 1, beats: [beat("m1", 5, 0, 0), beat("m2", 50, 0, 1), beat("m5", 1, 9, 0)] });
  table.learn({ models });
  const $ = (selector) => host.querySelector(selector);
  const all = (selector) => [...host.querySelectorAll(selector)];
  const names = (count) => all("tr[data-state=ready] a.name").slice(0, count).map((link) => link.textContent).join();
  const sort = (name) => {
    $(`thead .${name} button`).click();
    return [$(`thead .${name}`).ariaSort, names(2)];
  };
  const told = { cut: $(".rest").textContent, busiest: names(3), drawn: [all("a.name").length] };
  while (!$(".rest").hidden) {
    $(".rest button").click();
    told.drawn.push(all("a.name").length);
  }
  told.groups = all("tr.group").map((row) => row.textContent);
  told.failed = sort("failed");
  told.p99 = sort("p99");
  told.name = sort("name");
  told.again = sort("name");
  told.address = $("tbody a.name").getAttribute("href");
  told.colours = ["wrong", "away"].map((state) => getComputedStyle($(`tr[data-state=${state}] td.state`)).color);
  return told;
})
""".replace("STATE", STATE)


def test_the_table_is_sorted_in_groups_and_drawn_in_chunks(browser, server):
    with browser.page() as page:
        page.open(f"{server.url}/ui").until(LIVE)
        told = page.eval(SORTED)
        assert told["drawn"] == [50, 100, 120]
        assert told["cut"] == "50 of 120 are shown.Show 50 more"
        assert told["groups"] == ["Load failed 30", "Ready 60", "Not in memory 30"]
        assert told["busiest"] == "m2,m5,m1"
        assert told["failed"] == ["descending", "m5,m1"]
        assert told["p99"][1].startswith("m2,")
        assert told["name"] == ["ascending", "m1,m2"]
        assert told["again"] == ["descending", "m118,m117"]
        assert told["address"] == "#model/m119"
        failed, away = told["colours"]
        assert failed != away, "a model that is not in memory is nothing to worry about"


def test_each_model_has_an_address(browser, server):
    shown = (
        "[...document.querySelectorAll('#models, #detail-title')].map(one => one.checkVisibility() && one.textContent)"
    )
    with browser.page() as page:
        page.open(f"{server.url}/ui#model/ocr")
        page.until(f"{shown}.join() === 'false,ocr'")
        assert page.eval("document.title").startswith("ocr")
        page.click("#detail > header a")
        page.until(f"{shown}[1] === 'All models'")
        page.eval(f"{ROW.format('iris')}.querySelector('.name').click()")
        page.until(f"{shown}.join() === 'false,iris'")
        assert page.eval("location.hash") == "#model/iris"
        assert page.eval("document.activeElement.id") == "detail-title"
        page.eval("history.back() && null")
        page.until(f"{shown}[1] === 'All models'")
        page.eval("history.back() && null")
        page.until(f"{shown}.join() === 'false,ocr'")
        page.eval("(location.hash = '#model/<b>none') && null")
        page.until("document.querySelector('#notices').textContent === \"This server has no model '<b>none'.\"")
        page.eval("(location.hash = '#model/%') && null")
        page.until("document.querySelector('#notices').textContent === ''")
        assert page.said == []


def test_who_comes_after_an_incident_sees_it(browser, server):
    for _ in range(7):
        assert server.call("failing", "x").status_code == 500
    with browser.page() as page:
        page.open(f"{server.url}/ui")
        page.until(f"{ROW.format('failing')}?.querySelector('td.failed').textContent === '7'")
        page.until("document.querySelector('.t-failed b').textContent === '7'")
        page.until("document.querySelector('#detail .c-failed.stack').getAttribute('d').length > 20")
        page.until(f"{ROW.format('failing')}.querySelector('td.p99').textContent.endsWith('s')")
        page.until("document.querySelector('#errors .message')?.textContent.startsWith('RuntimeError')")
        page.eval("(location.hash = '#model/iris') && null")
        page.until("!document.querySelector('#errors .message')")
        assert page.said == []


PAST = """
import('/ui/history.js').then(({ History }) => {
  const history = new History();
  const beat = { endpoint: "one", version: "1", codes: { ok: 6 }, totals: {}, request: [[1, 6]], ...STATE };
  const row = (place, ok, waiting) => [place, ok, 1, [1, ok], waiting, 0, 1, 2, 500, 0, 3];
  const names = { 1: ["one", "1"], 2: ["g/n", "1"] };
  history.began({ seconds: [1, 2], rows: [1] }, [], 1000, { names, samples: [[1000, 4, [row(1, 40, 0)]]] });
  history.learn([{ name: "one" }, { name: "g", nodes: { n: {} } }]);
  history.take({ monotonic: 1000, beats: [] });
  history.take({ monotonic: 1001, beats: [beat] });
  history.recall({
    names,
    samples: [[960, 10, [row(1, 40, 5), row(2, 4, 2), row(0, 10, 1)]], [970, 10, []], [1004, 8, [row(1, 80, 0)]]],
  });
  const one = history.columns("one", 60, 30).columns;
  const all = history.columns("", 60, 30).columns;
  const sum = (columns) => Math.round(columns.reduce((total, column) => total + (column?.ok ?? 0), 0));
  const highest = (columns) => Math.max(...columns.map((column) => column?.waiting ?? 0));
  const told = {
    rates: one.slice(4, 12).map((column) => column && Math.round((10 * column.ok) / column.dt)),
    counted: [sum(one), sum(all), history.recent("one", 60).ok],
    waiting: [highest(one), highest(all)],
    heard: Math.round(history.heard()),
    busy: history.recent("g", 60).busyS,
    unnamed: history.unnamed,
  };
  const clock = Date.now;
  Date.now = () => clock() + 100_000; // the tab was in the background
  history.began({ seconds: [1, 2], rows: [1] }, [], 1101);
  history.recall({ names, samples: [[960, 10, [row(1, 40, 0)]], [1060, 10, [row(1, 20, 0)]]] });
  Date.now = clock;
  return { ...told, later: history.recent("one", 200).ok };
})
""".replace("STATE", STATE)


def test_coarse_samples_fill_the_time_in_which_the_page_did_not_listen(browser, server):
    with browser.page() as page:
        page.open(f"{server.url}/ui").until(LIVE)
        told = page.eval(PAST)
        assert told["rates"] == [None, 40, 40, 40, 40, 40, 0, 0]
        # The page began to listen in the last sample. What it heard itself is too new for a column.
        assert told["counted"] == [40 + 40, 40 + 40 + 10, 40 + 40 + 6]
        assert told["waiting"] == [5, 8]
        assert (told["heard"], told["busy"], told["unnamed"]) == (51, 0.5, 3)
        assert told["later"] == 40 + 40 + 6 + 20, "what it knows already is not counted again"


@pytest.mark.parametrize("count", [0, 500])
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_a_server_without_models_and_one_with_many_can_be_read(browser, server, width, scheme, count):
    facts = [{"name": f"model-{number}-{'x' * (number % 90)}", "ready": True} for number in range(count)]
    with browser.page(width, media=[("prefers-color-scheme", scheme)]) as page:
        paths = {"/models": {"models": facts}, "/openapi.json": {"paths": {"/models/model-0-": {"post": {}}}}}
        page.make_up({path: ("application/json", json.dumps(told)) for path, told in paths.items()})
        page.open(f"{server.url}/ui")
        if count:
            page.until("document.querySelector('#models .rest')?.checkVisibility()")
            page.write("#models input", "model-89-")
            page.until("document.querySelectorAll('#models a.name').length === 1")
            name = "document.querySelector('#models a.name')"
            assert page.eval(f"{name}.scrollWidth <= {name}.parentElement.clientWidth"), "it is shown in full"
        else:
            page.until("document.querySelector('#models .teach pre')?.checkVisibility()")
            assert "forebay worker" in page.text("#models .teach pre")
        assert page.eval("document.documentElement.scrollWidth") <= width
        assert page.said == []
