// SPDX-License-Identifier: Apache-2.0
// The last errors, with their reasons; equal ones are one line with their number.

import { arrange, h, mark, say } from "./dom.js";
import { ago, count } from "./numbers.js";

const KEPT = 60;

export class Faults {
  constructor(host, onChoose) {
    this.onChoose = onChoose;
    this.faults = new Map();
    this.clearedAt = 0; // what happened until then is told again where a connection begins
    this.skew = 0; // the server's clock minus ours
    this.list = h("ol", { class: "faults" });
    this.empty = h("p", { class: "teach" }, "No errors since the server started. A failed request appears here with its reason. Exceptions of models have a traceback.");
    this.count = h("span", { class: "figure" });
    this.clear = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.#clear() }, "Clear");
    host.replaceChildren(h("header", {}, h("h2", { id: "errors-title" }, "Errors"), this.count, this.clear), this.list, this.empty);
  }

  hear(now) {
    this.skew = now - Date.now() / 1000;
  }

  /** Takes errors; `number` of them are new. */
  take(fault, number) {
    if (number === null && fault.at <= this.clearedAt) return;
    const name = [fault.endpoint, fault.code, fault.kind, fault.message ?? ""].join("\n");
    const known = this.faults.get(name);
    if (known && known.at === fault.at && number === null) return;
    this.faults.delete(name); // so that the newest is the last
    this.faults.set(name, { ...known, ...fault, number: (known?.number ?? 0) + (number ?? 1) });
    while (this.faults.size > KEPT) this.faults.delete(this.faults.keys().next().value);
  }

  #clear() {
    this.clearedAt = Math.max(...[...this.faults.values()].map((fault) => fault.at));
    this.faults.clear();
    this.show();
  }

  /** Shows the errors of a model and its nodes, or of all models. */
  show(model = this.model) {
    this.model = model;
    const isShown = ([, { endpoint }]) => !model || endpoint === model || endpoint.startsWith(`${model}/`);
    const newest = [...this.faults.entries()].filter(isShown).sort(([, one], [, other]) => other.at - one.at);
    const rows = new Map([...this.list.children].map((row) => [row.dataset.name, row]));
    const wanted = newest.map(([name, fault]) => this.#fill(rows.get(name) ?? this.#row(name), fault));
    arrange(this.list, wanted);
    this.empty.hidden = wanted.length > 0;
    this.clear.hidden = wanted.length === 0;
    say(this.count, wanted.length ? String(wanted.length) : "");
  }

  #row(name) {
    const row = h("li", { "data-name": name });
    row.when = h("time", {});
    row.where = h("button", { type: "button", class: "name" });
    row.code = h("span", { class: "tag code" });
    row.number = h("span", { class: "number" });
    row.message = h("p", { class: "message" });
    row.request = h("p", { class: "quiet-text" });
    row.trace = h("details", { hidden: true }, h("summary", {}, "Traceback"), h("pre", {}));
    row.where.addEventListener("click", () => this.onChoose(row.where.textContent));
    row.append(h("div", { class: "line" }, row.when, row.where, row.code, row.number), row.message, row.trace, row.request);
    return row;
  }

  #fill(row, fault) {
    say(row.when, ago(Math.max(Date.now() / 1000 + this.skew - fault.at, 0)));
    mark(row.when, "datetime", new Date(fault.at * 1000).toISOString());
    mark(row.when, "title", new Date(fault.at * 1000).toLocaleString());
    say(row.where, fault.endpoint);
    say(row.code, fault.code);
    say(row.number, fault.number > 1 ? `× ${count(fault.number)}` : "");
    say(row.message, fault.message || `${fault.kind}: the message is shown only on the server's own machine or with an API key. It is also in the log.`);
    say(row.request, fault.request_id ? `request ${fault.request_id}` : "");
    row.trace.hidden = !fault.trace;
    if (fault.trace) say(row.trace.lastChild, fault.trace);
    return row;
  }
}
