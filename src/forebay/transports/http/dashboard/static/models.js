// SPDX-License-Identifier: Apache-2.0
// The table of models: sorted, in groups by state, drawn in chunks; each name is a link to the page of its model.

import { Spark } from "./charts.js";
import { arrange, h, kept, mark, say } from "./dom.js";
import { quantile } from "./history.js";
import { count, percent, several, span } from "./numbers.js";

const NOW_S = 10;
const CHUNK = matchMedia("(max-width: 760px)").matches ? 15 : 50;
const PAGE = "#model/";
const AWAY = new Set(["available", "not served", "unloaded"]);
const STATES = { wrong: "Load failed", waiting: "Not ready", ready: "Ready", away: "Not in memory" };
const RANKS = Object.keys(STATES);
const order = new Intl.Collator("en", { numeric: true });

// Figures begin with their highest value, texts with the first of the alphabet.
const COLUMNS = [
  { name: "name", label: "Model", text: (model) => model.name },
  { name: "state", label: "State", text: (model) => String(RANKS.indexOf(stateOf(model))) },
  { name: "version", label: "Version", text: (model) => versionsOf(model).map((one) => one.version).join(" ") },
  { name: "rate", label: "Requests/s", title: "In the last 10 seconds", of: ({ now }) => (now.ok + now.failed) / now.dt, format: count },
  { name: "failed", label: "Errors", title: "In the window of the charts", of: ({ window }) => window.failed, format: count },
  { name: "p50", label: "p50", title: "Latency in the window of the charts", of: (figures) => figures.quantile(0.5), format: span },
  { name: "p99", label: "p99", title: "Latency in the window of the charts", of: (figures) => figures.quantile(0.99), format: span },
  { name: "waiting", label: "Queue", title: "Samples that wait now", of: ({ waiting }) => waiting, format: count },
  { name: "batch", label: "Batch", title: "Mean size in the last 10 seconds", of: ({ now }) => (now.batches ? now.rows / now.batches : null), format: count },
  { name: "workers", label: "Workers", of: ({ workers }) => workers.alive },
  { name: "total", label: "Since start", title: "Requests", of: ({ total }) => total, format: count },
];

/** The address of the page of a model. */
export const addressOf = (name) => `${PAGE}${encodeURIComponent(name)}`;

/** The model that an address names; null if it names none. */
export function modelIn(address) {
  try {
    return address.startsWith(PAGE) ? decodeURIComponent(address.slice(PAGE.length)) || null : null;
  } catch {
    return null; // no such name was ever encoded
  }
}

export class Models {
  constructor(host, history) {
    this.history = history;
    this.seconds = 300;
    this.rows = new Map();
    this.models = [];
    this.limit = CHUNK;
    const [column, direction] = (kept.get("localStorage", "sort") ?? "").split(" ");
    this.sort = COLUMNS.some((one) => one.name === column) ? { column, direction: direction === "-1" ? -1 : 1 } : null;
    this.filter = h("input", { type: "search", placeholder: "Find a model", "aria-label": "Find a model", hidden: true, oninput: () => { this.limit = CHUNK; this.arrange(); } });
    this.heads = new Map(COLUMNS.map((one) => [one.name, h("th", { scope: "col", class: one.name },
      h("button", { type: "button", title: one.title, onclick: () => this.#sortBy(one) }, one.label))]));
    this.groups = new Map(RANKS.map((state) => {
      const figure = h("span", { class: "figure" });
      return [state, { figure, element: h("tr", { class: "group", "data-state": state }, h("th", { scope: "colgroup", colspan: COLUMNS.length }, STATES[state], " ", figure)) }];
    }));
    this.body = h("tbody");
    this.count = h("span", { class: "figure" });
    this.cut = h("span", { class: "figure" });
    this.more = h("button", { type: "button", class: "quiet", onclick: () => { this.limit += CHUNK; this.arrange(); } });
    this.rest = h("p", { class: "row rest", hidden: true }, this.cut, this.more);
    this.none = h("p", { class: "teach", hidden: true }, "No model has this in its name.");
    this.empty = h("div", { class: "teach", hidden: true });
    this.table = h("table", { class: "models" }, h("thead", {}, h("tr", {}, [...this.heads.values()])), this.body);
    host.replaceChildren(
      h("header", {}, h("h2", { id: "models-title" }, "Models"), this.count, this.filter),
      this.table, this.none, this.rest, this.empty);
  }

  /** Takes what /models tells. */
  learn({ models, repositories = [] }) {
    this.models = models;
    const names = new Set(models.map((one) => one.name));
    for (const name of [...this.rows.keys()]) if (!names.has(name)) this.rows.delete(name);
    say(this.count, models.length ? String(models.length) : "");
    this.filter.hidden = models.length <= 12;
    this.table.hidden = models.length === 0;
    this.empty.hidden = models.length > 0;
    if (!models.length) this.empty.replaceChildren(...whatToDo(repositories));
    this.arrange();
  }

  /** Shows numbers of so many seconds. */
  show(seconds) {
    this.seconds = seconds;
    for (const row of this.shown ?? []) this.#fill(row);
  }

  #sortBy({ name, text }) {
    const first = text ? 1 : -1;
    const isAgain = this.#sorted().column === name;
    this.sort = { column: name, direction: isAgain ? -this.#sorted().direction : first };
    kept.set("localStorage", "sort", `${name} ${this.sort.direction}`);
    this.arrange();
  }

  /** How the table is sorted: until somebody chooses, by name if all models fit, else the busiest first. */
  #sorted() {
    return this.sort ?? (this.models.length > CHUNK ? { column: "rate", direction: -1 } : { column: "name", direction: 1 });
  }

  arrange() {
    const wanted = this.filter.hidden ? "" : this.filter.value.trim().toLowerCase();
    const found = this.models.filter((model) => model.name.toLowerCase().includes(wanted));
    const states = new Map(found.map((model) => [model, stateOf(model)]));
    const sorted = this.#inOrder(found, states);
    const shown = sorted.slice(0, this.limit);
    this.shown = shown.map((model) => this.#row(model, states.get(model)));
    const hasGroups = new Set(states.values()).size > 1;
    const list = [];
    shown.forEach((model, at) => {
      const state = states.get(model);
      if (hasGroups && (at === 0 || states.get(shown[at - 1]) !== state)) list.push(this.#group(state, found, states));
      list.push(this.shown[at].element);
    });
    arrange(this.body, list);
    const { column, direction } = this.#sorted();
    for (const [name, head] of this.heads) mark(head, "aria-sort", name !== column ? null : direction > 0 ? "ascending" : "descending");
    this.none.hidden = found.length > 0 || this.models.length === 0;
    this.rest.hidden = shown.length === found.length;
    say(this.cut, `${shown.length} of ${found.length} are shown.`);
    say(this.more, `Show ${Math.min(CHUNK, found.length - shown.length)} more`);
    this.show(this.seconds);
  }

  #inOrder(found, states) {
    const { column, direction } = this.#sorted();
    const { of, text } = COLUMNS.find((one) => one.name === column);
    const keys = new Map(found.map((model) => [model, text ? text(model) : (of(this.#figures(model)) ?? -1)]));
    const compare = (one, other) => (text ? order.compare(keys.get(one), keys.get(other)) : keys.get(one) - keys.get(other));
    const rank = (model) => RANKS.indexOf(states.get(model));
    const byState = column === "state" ? direction : 1;
    return [...found].sort((one, other) => byState * (rank(one) - rank(other)) || direction * compare(one, other) || order.compare(one.name, other.name));
  }

  #group(state, found, states) {
    const { figure, element } = this.groups.get(state);
    say(figure, String(found.filter((model) => states.get(model) === state).length));
    return element;
  }

  /** The numbers of a model; sums are made only if they are asked for. */
  #figures({ name }) {
    const { history, seconds } = this;
    const line = history.line(name);
    const nodes = history.graphs.get(name)?.map((node) => history.line(`${name}/${node}`).state) ?? [];
    let whole = null;
    const sum = () => (whole ??= history.recent(name, seconds));
    return {
      get now() { return history.recent(name, NOW_S, false); },
      get window() { return sum(); },
      quantile: (share) => quantile(sum().request, history.bounds.seconds, share),
      waiting: [line.state, ...nodes].reduce((all, one) => all + one.waiting, 0),
      workers: (nodes.length ? nodes : [line.state]).reduce((all, one) => ({ alive: all.alive + one.alive, restarts: all.restarts + one.restarts }), { alive: 0, restarts: 0 }),
      total: Object.values(line.totals).reduce((all, number) => all + number, 0),
    };
  }

  /** The row of a model, with its texts as they are now. */
  #row(model, state) {
    const { name } = model;
    let row = this.rows.get(name);
    if (!row) this.rows.set(name, (row = newRow(name)));
    row.model = model;
    const versions = versionsOf(model);
    say(row.cells.version, versions.map((one) => (versions.length > 1 ? `${one.version} (${share(one, versions)})` : one.version)).join(", "));
    const tags = [model.nodes ? `graph of ${Object.keys(model.nodes).length}` : "", model.streams ? "streams" : ""].filter(Boolean);
    row.tags.replaceChildren(...tags.map((tag) => h("span", { class: "tag" }, tag)));
    row.isAway = state === "away";
    mark(row.element, "data-state", state);
    say(row.cells.state, STATES[state].toLowerCase());
    return row;
  }

  #fill({ model, cells, spark, isAway }) {
    const figures = this.#figures(model);
    const { columns } = this.history.columns(model.name, this.seconds, 40, false);
    spark.show(columns.map((column) => (column ? (column.ok + column.failed) / column.dt : null)));
    for (const { name, of, format } of COLUMNS) if (format) say(cells[name], format(of(figures)));
    const { alive, restarts } = figures.workers;
    say(cells.workers, restarts ? `${alive} (${restarts} restarted)` : `${alive} up`);
    mark(cells.workers.parentElement, "data-alarm", alive === 0 && !isAway);
    mark(cells.failed.parentElement, "data-alarm", figures.window.failed > 0);
  }
}

function newRow(name) {
  const row = { spark: new Spark("rate"), cells: {}, tags: h("span", { class: "tags" }) };
  const link = h("a", { class: "name", href: addressOf(name) }, name);
  const cells = COLUMNS.slice(1).map((column) => {
    row.cells[column.name] = h(column.name === "rate" ? "b" : "span", {});
    return h("td", { class: column.name, "data-label": column.label },
      column.name === "state" ? h("i", { class: "dot", "aria-hidden": "true" }) : null,
      column.name === "rate" ? row.spark.element : null, row.cells[column.name]);
  });
  row.element = h("tr", { onclick: (event) => { if (!event.target.closest("a")) link.click(); } },
    h("th", { scope: "row" }, link, row.tags), ...cells);
  return row;
}

function versionsOf(model) {
  return (model.versions ?? [model]).filter((one) => one.version !== undefined && one.state !== "failed");
}

function stateOf(model) {
  if (problemOf(model)) return "wrong";
  if (!model.ready && model.versions?.length > 0 && model.versions.every((one) => AWAY.has(one.state))) return "away";
  return model.ready === false ? "waiting" : "ready";
}

function share(version, versions) {
  const all = versions.reduce((sum, one) => sum + (one.weight ?? 0), 0);
  return all ? percent((version.weight ?? 0) / all) : "no requests";
}

function whatToDo(repositories) {
  if (repositories.length) {
    return [
      h("p", {}, `No model is served yet: ${several(repositories.length, "repository is", "repositories are")} empty. Give each model a folder with a folder for each version, and put its files there. The server finds them at its next poll.`),
      h("pre", {}, repositories.map((one) => `${one.place.replace(/\/$/, "")}/NAME/1/`).join("\n")),
    ];
  }
  return [
    h("p", {}, "No model is served yet. Start a worker: it attaches to this server and brings its model."),
    h("pre", {}, "forebay worker model.py:Model --connect ADDRESS"),
  ];
}

/** What is wrong with a model, as /models tells it: a version that could not be loaded. */
export function problemOf(model) {
  const failed = model.versions?.find((one) => one.error);
  return failed ? `Version ${failed.version} could not be loaded; ${model.ready ? "what was there before serves on" : "there is no other"}.\n${failed.error}` : "";
}
