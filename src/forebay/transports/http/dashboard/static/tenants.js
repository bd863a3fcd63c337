// SPDX-License-Identifier: Apache-2.0
// Who shares the workers: what each tenant was promised, what it got, what it was refused, and what it cost.

import { h, say } from "./dom.js";
import { NONE, count, percent, several, span } from "./numbers.js";

const COLUMNS = [
  ["Tenant", "name", "The name of the API keys"],
  ["Class", "tier", "0 is the most urgent. A class is served while no more urgent class waits."],
  ["Promised", "promised", "Its share of the workers among the tenants of its class that called in the last minute"],
  ["Got", "got", "Its part of the worker time of its class in the last minute"],
  ["Queue", "queue", "Mean time in the queue in the last minute"],
  ["Waiting", "standing", "Samples in queues now"],
  ["Busy", "busy", "Workers that were busy for it in the last minute, on average"],
  ["15 min", "spent", "Seconds that workers were busy for it in the last 15 minutes"],
  ["Cost/h", "now", "Cost per hour at the rate of the last minute"],
  ["Cost 15 min", "cost", "Cost in the last 15 minutes"],
  ["Refused in 15 min", "refused", "Rejected requests by reason"],
];
const PRICED = new Set(["now", "cost"]);
const REASONS = { full: "full queue", share: "its share", late: "too late", unavailable: "unavailable" };

export class Tenants {
  constructor(host) {
    this.host = host;
    this.count = h("span", { class: "figure" });
    this.table = h("table", { class: "models tenants" });
    this.empty = h("div", { class: "teach", hidden: true },
      h("p", {}, "No tenant has called in the last 15 minutes. Each API key with a name is a tenant; it calls with its key:"),
      h("pre", {}, `curl -H 'X-API-Key: KEY' -d '...' ${location.origin}/models/NAME`));
    host.replaceChildren(h("header", {}, h("h2", { id: "tenants-title" }, "Tenants"), this.count), this.table, this.empty);
  }

  /** Takes what the server tells of its tenants. */
  learn({ tenants, price }) {
    this.host.hidden = false;
    this.table.hidden = tenants.length === 0;
    this.empty.hidden = tenants.length > 0;
    say(this.count, tenants.length ? String(tenants.reduce((all, one) => all + (one.tenants ?? 1), 0)) : "");
    const columns = COLUMNS.filter(([, key]) => price || !PRICED.has(key));
    this.table.replaceChildren(
      h("thead", {}, h("tr", {}, columns.map(([label, key, title]) => h("th", { scope: "col", class: key, title }, label)))),
      h("tbody", {}, tenants.map((one) => rowOf(one, columns, price))));
  }
}

const money = (value) => String(Number(value.toPrecision(3)));

function rowOf(one, columns, price) {
  const refused = Object.entries(one.refused ?? {});
  const texts = {
    tier: one.tier ?? NONE,
    promised: percent(one.promised ?? null),
    got: percent(one.got ?? null),
    queue: span(one.queue_s),
    standing: count(one.waiting ?? 0),
    busy: count(one.busy ?? 0),
    spent: span(one.worker_s ?? 0),
    now: money((one.busy ?? 0) * 3600 * price),
    cost: money((one.worker_s ?? 0) * price),
    refused: refused.map(([reason, times]) => `${count(times)} ${REASONS[reason] ?? reason}`).join(", ") || "0",
  };
  const name = one.tenants > 1 ? `other (${several(one.tenants, "tenant")})` : one.name || "no tenant";
  return h("tr", {},
    h("th", { scope: "row" }, h("b", {}, name), one.weight ? h("span", { class: "tags" }, h("span", { class: "tag" }, `weight ${count(one.weight)}`)) : null),
    columns.slice(1).map(([label, key]) => h("td", { class: key, "data-label": label, "data-alarm": key === "refused" && refused.length > 0 }, String(texts[key]))));
}
