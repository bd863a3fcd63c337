// SPDX-License-Identifier: Apache-2.0
// The table of models; the one that is chosen is shown in detail below it.

import { Spark } from "./charts.js";
import { arrange, h, mark, say } from "./dom.js";
import { quantile } from "./history.js";
import { count, percent, span } from "./numbers.js";

const NOW_S = 10;
const SHOWN = 40;
const AWAY = new Set(["available", "not served", "unloaded"]);
const COLUMNS = [
  ["Model", "name"],
  ["Requests/s", "rate"],
  ["p50", "p50"],
  ["p99", "p99"],
  ["Batch", "batch"],
  ["Waiting", "waiting"],
  ["Workers", "workers"],
  ["Errors", "failed"],
  ["Since start", "total"],
];

export class Models {
  constructor(host, onChoose) {
    this.onChoose = onChoose;
    this.rows = new Map();
    this.models = [];
    this.chosen = null;
    this.isWhole = false;
    this.filter = h("input", { type: "search", placeholder: "Find a model", "aria-label": "Find a model", hidden: true, oninput: () => this.arrange() });
    this.body = h("tbody");
    this.more = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => { this.isWhole = true; this.arrange(); } });
    this.count = h("span", { class: "figure" });
    this.none = h("p", { class: "teach", hidden: true }, "No model has this in its name.");
    this.empty = h("div", { class: "teach", hidden: true },
      h("p", {}, "No model is served yet. Where workers attach, the first one brings its model with it:"),
      h("pre", {}, "forebay worker model.py:Model --connect ADDRESS"));
    host.replaceChildren(
      h("header", {}, h("h2", { id: "models-title" }, "Models"), this.count, this.filter),
      h("table", { class: "models" },
        h("thead", {}, h("tr", {}, COLUMNS.map(([label, name]) => h("th", { scope: "col", class: name }, label)))), this.body),
      this.none, this.more, this.empty);
  }

  /** Takes what /models tells. */
  learn(models) {
    this.models = models;
    for (const name of [...this.rows.keys()]) if (!models.some((one) => one.name === name)) this.rows.delete(name);
    for (const model of models) {
      if (!this.rows.has(model.name)) this.rows.set(model.name, this.#row(model.name));
      this.#state(this.rows.get(model.name), model);
    }
    say(this.count, models.length ? String(models.length) : "");
    this.filter.hidden = models.length <= 12;
    this.empty.hidden = models.length > 0;
    this.arrange();
  }

  choose(name) {
    this.chosen = name;
    for (const [other, row] of this.rows) {
      mark(row.element, "data-chosen", other === name);
      mark(row.button, "aria-pressed", String(other === name));
    }
  }

  arrange() {
    const wanted = this.filter.hidden ? "" : this.filter.value.trim().toLowerCase();
    const found = this.models.filter((model) => model.name.toLowerCase().includes(wanted));
    let shown = found;
    if (found.length > SHOWN && !this.isWhole) {
      const asked = new Map(found.map((model) => [model, this.history?.recent(model.name, NOW_S, false).ok ?? 0]));
      shown = [...found].sort((one, other) => asked.get(other) - asked.get(one)).slice(0, SHOWN);
    }
    arrange(this.body, shown.map((model) => this.rows.get(model.name).element));
    this.shown = shown.map((model) => model.name);
    this.none.hidden = found.length > 0 || this.models.length === 0;
    this.more.hidden = shown.length === found.length;
    say(this.more, `These are the ${shown.length} busiest; show all ${found.length}`);
  }

  #row(name) {
    const row = { name, spark: new Spark("rate"), cells: {} };
    row.button = h("button", { type: "button", class: "name", "aria-pressed": "false", onclick: () => this.onChoose(name) }, name);
    row.dot = h("i", { class: "dot", "aria-hidden": "true" });
    row.status = h("span", { class: "status" });
    row.tags = h("span", { class: "tags" });
    row.cells.rate = h("b", {});
    const cells = COLUMNS.slice(2).map(([label, key]) => {
      row.cells[key] = h("span", {});
      return h("td", { class: key, "data-label": label }, row.cells[key]);
    });
    row.element = h("tr", { onclick: (event) => { if (!event.target.closest("button, a")) this.onChoose(name); } },
      h("th", { scope: "row" }, row.dot, row.button, row.tags, row.status),
      h("td", { class: "rate", "data-label": "Requests/s" }, row.spark.element, row.cells.rate), ...cells);
    return row;
  }

  #state(row, model) {
    const versions = (model.versions ?? [model]).filter((one) => one.version !== undefined && one.state !== "failed");
    const tags = versions.map((one) => h("span", { class: "tag" }, versions.length > 1 ? `v${one.version} ${share(one, versions)}` : `v${one.version}`));
    if (model.nodes) tags.push(h("span", { class: "tag" }, `graph of ${Object.keys(model.nodes).length}`));
    if (model.streams) tags.push(h("span", { class: "tag" }, "streams"));
    row.tags.replaceChildren(...tags);
    const failed = problemOf(model);
    row.isAway = !model.ready && !failed && model.versions?.length > 0 && model.versions.every((one) => AWAY.has(one.state));
    const state = failed ? "wrong" : row.isAway ? "away" : model.ready === false ? "waiting" : "ready";
    mark(row.dot, "data-state", state);
    say(row.status, { wrong: "a version failed to load", away: "not in memory", waiting: "not ready", ready: "" }[state]);
    mark(row.element, "data-chosen", row.name === this.chosen);
  }

  show(history, seconds) {
    this.history = history;
    const { bounds } = history;
    for (const name of this.shown ?? []) {
      const { cells, spark } = this.rows.get(name);
      const sum = history.recent(name, NOW_S);
      const line = history.line(name);
      const { columns } = history.columns(name, seconds, 40, false);
      spark.show(columns.map((column) => (column ? (column.ok + column.failed) / column.dt : null)));
      const window = history.recent(name, seconds, false);
      const nodes = history.graphs.get(name)?.map((node) => history.line(`${name}/${node}`).state);
      const workers = nodes ? nodes.reduce((all, one) => ({ alive: all.alive + one.alive, restarts: all.restarts + one.restarts }), { alive: 0, restarts: 0 }) : line.state;
      say(cells.rate, count((sum.ok + sum.failed) / sum.dt));
      say(cells.p50, span(quantile(sum.request, bounds.seconds, 0.5)));
      say(cells.p99, span(quantile(sum.request, bounds.seconds, 0.99)));
      say(cells.batch, sum.batches ? count(sum.rows / sum.batches) : "–");
      say(cells.waiting, count(line.state.waiting));
      say(cells.workers, workers.restarts ? `${workers.alive} (${workers.restarts} restarted)` : `${workers.alive} up`);
      mark(cells.workers.parentElement, "data-alarm", workers.alive === 0 && !this.rows.get(name).isAway);
      say(cells.failed, count(window.failed));
      mark(cells.failed.parentElement, "data-alarm", window.failed > 0);
      const totals = Object.entries(line.totals);
      say(cells.total, count(totals.reduce((all, [, number]) => all + number, 0)));
    }
  }
}

function share(version, versions) {
  const all = versions.reduce((sum, one) => sum + (one.weight ?? 0), 0);
  return all ? percent((version.weight ?? 0) / all) : "";
}

/** What is wrong with a model, as /models tells it: a version that could not be loaded. */
export function problemOf(model) {
  const failed = model.versions?.find((one) => one.error);
  return failed ? `Version ${failed.version} could not be loaded; ${model.ready ? "what was there before serves on" : "there is no other"}.\n${failed.error}` : "";
}
