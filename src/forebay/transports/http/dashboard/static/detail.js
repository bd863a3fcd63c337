// SPDX-License-Identifier: Apache-2.0
// One model, or all of them: how fast, how long, how many at a time, and who works.

import { Bars, TimeChart } from "./charts.js";
import { h, say } from "./dom.js";
import { Graph } from "./graph.js";
import { ALL, quantile } from "./history.js";
import { problemOf } from "./models.js";
import { count, percent, span } from "./numbers.js";
import { Workers } from "./workers.js";

const COLUMNS = 100;

export class Detail {
  constructor(host, history) {
    this.host = host;
    this.history = history;
    this.name = ALL;
    const seconds = () => history.bounds.seconds;
    this.rate = new TimeChart([
      { name: "failed", label: "errors", kind: "stack", of: (column) => column.failed / column.dt },
      { name: "ok", label: "answered", kind: "stack", of: (column) => column.ok / column.dt },
    ], { title: "Requests", format: (value) => `${count(value)}/s`, empty: "No requests in this window. Send one with the form, or with forebay bench." });
    this.latency = new TimeChart([
      { name: "p50", label: "p50", of: (column) => quantile(column.request, seconds(), 0.5), end: (value) => `p50 ${span(value)}` },
      { name: "p95", label: "p95", of: (column) => quantile(column.request, seconds(), 0.95), end: (value) => `p95 ${span(value)}` },
      { name: "p99", label: "p99", of: (column) => quantile(column.request, seconds(), 0.99), end: (value) => `p99 ${span(value)}` },
    ], {
      title: "Latency", format: span, log: true, heat: (column) => column.request, bounds: seconds,
      empty: "No responses in this window. Latency includes queue and model time.",
      note: "Shading shows how many responses fell into each step. Percentiles are read from these steps.",
    });
    this.sizes = new Bars({ title: "Batch sizes", empty: "No batches since you opened this page. Sizes of batches are counted only while it is open." });
    this.queue = new TimeChart([
      { name: "waiting", label: "waiting", kind: "area", of: (column) => column.waiting, end: (value) => `${count(value)} wait` },
      { name: "flight", label: "in flight", of: (column) => column.inFlight, end: (value) => `${count(value)} in flight` },
    ], { title: "Queue", format: count, empty: "Nothing waited in this window." });
    this.title = h("h2", { id: "detail-title", tabindex: -1 });
    this.facts = h("p", { class: "facts" });
    this.problem = h("p", { class: "notice wrong", hidden: true });
    this.about = h("p", { class: "about" });
    this.back = h("a", { class: "quiet", href: "#" }, "All models");
    this.versions = h("ul", { class: "versions", hidden: true });
    this.graph = new Graph(history);
    this.workers = new Workers(history);
    host.replaceChildren(
      h("header", {}, this.title, this.back), this.about, this.facts, this.problem, this.versions, this.graph.element,
      h("div", { class: "charts" }, this.rate.element, this.latency.element, this.sizes.element, this.queue.element),
      this.workers.element);
    host.hidden = false;
  }

  /** Shows a model; its graph is drawn anew if it may be another one than before. */
  choose(name, models, mayDiffer = false) {
    this.name = name;
    this.learn(models, mayDiffer);
  }

  learn(models, mayDiffer) {
    const model = models.find((one) => one.name === this.name);
    this.model = model;
    this.back.hidden = !model || models.length === 1;
    say(this.title, model ? model.name : "All models");
    say(this.about, model?.description ?? "");
    this.about.hidden = !this.about.textContent;
    this.facts.replaceChildren(...(model ? factsOf(model) : []));
    this.facts.hidden = !model;
    const problem = model ? problemOf(model) : "";
    this.problem.hidden = !problem;
    say(this.problem, problem);
    this.#learnVersions(model);
    this.graph.learn(model?.nodes ? model : null, mayDiffer);
    this.workers.learn(model ? [model] : models);
  }

  #learnVersions(model) {
    const versions = model?.versions ?? [];
    const all = versions.reduce((sum, one) => sum + (one.weight ?? 0), 0);
    this.versions.hidden = versions.length < 2;
    this.rates = versions.map((one) => ({ version: one.version, element: h("span", { class: "figure" }) }));
    this.versions.replaceChildren(...versions.map((one, number) => h("li", { "data-state": one.state },
      h("b", {}, `v${one.version}`),
      h("span", { class: "tag", "data-state": one.state === "failed" ? "wrong" : one.state }, one.state),
      one.state === "ready" ? h("span", { class: "weight" }, `${all ? percent(one.weight / all) : "–"} of what names no version`) : null,
      this.rates[number].element)));
  }

  show(seconds) {
    const { history } = this;
    const view = history.columns(this.name, seconds, COLUMNS);
    this.rate.show(view, seconds);
    this.latency.show(view, seconds);
    this.queue.show(view, seconds);
    const now = history.recent(this.name, 10);
    const window = history.recent(this.name, seconds);
    say(this.rate.value, `${count((now.ok + now.failed) / now.dt)}/s`);
    const middle = quantile(now.request, history.bounds.seconds, 0.5);
    say(this.latency.value, middle === null ? "" : `p50 ${span(middle)}`);
    this.sizes.show(window.sizes, history.bounds.rows, this.model?.batching?.max_batch_size);
    say(this.sizes.value, window.batches ? `mean ${count(window.rows / window.batches)}` : "");
    const queued = quantile(now.queue, history.bounds.seconds, 0.5);
    say(this.queue.value, queued === null ? "" : `${span(queued)} wait`);
    for (const { version, element } of this.rates ?? []) {
      const sum = history.recentOf(this.name, version, 10);
      say(element, `${count((sum.ok + sum.failed) / sum.dt)}/s`);
    }
    this.graph.show();
    this.workers.show();
  }
}

function factsOf(model) {
  const { batching } = model;
  const facts = document.body.dataset.beside === undefined ? [h("code", {}, `POST /models/${model.name}`)] : [];
  if (!model.nodes && batching) {
    const waits = batching.auto ? `learns what holds ${count(batching.auto.latency_objective_ms)} ms`
      : { gather: "gathers returning clients", go: "goes at once", wait: `waits ${batching.max_wait_ms} ms` }[batching.idle] ?? batching.idle;
    facts.push(`batches of up to ${batching.max_batch_size}, ${waits}`, `${count(batching.max_queue)} may wait`);
    if (batching.auto) facts.push(batching.auto.objective_held === false ? "objective not held" : `${percent(batching.auto.late)} late`);
  }
  if (model.timeout_ms) facts.push(`timeout ${span(model.timeout_ms / 1000)}`);
  if (model.batchable) facts.push("arrays of samples");
  return facts.flatMap((fact, number) => (number ? [h("span", { class: "sep", "aria-hidden": "true" }, " · "), fact] : [fact]));
}
