// SPDX-License-Identifier: Apache-2.0
// The server in six numbers.

import { Spark } from "./charts.js";
import { h, mark, say } from "./dom.js";
import { ALL, quantile } from "./history.js";
import { count, NONE, percent, several, span, time } from "./numbers.js";

const NOW_S = 10;

const rate = (sum) => (sum.ok + sum.failed) / sum.dt;

const TILES = [
  {
    name: "rate",
    label: "Requests",
    of: (column) => rate(column),
    now: ({ sum }) => [count(rate(sum)), "/s"],
    top: (value) => `${count(value)}/s`,
    more: ({ state }) => `${count(state.inFlight)} in flight`,
  },
  {
    name: "p99",
    label: "Latency p99",
    of: (column, { seconds }) => quantile(column.request, seconds, 0.99),
    now: ({ sum, bounds }) => time(quantile(sum.request, bounds.seconds, 0.99)),
    top: span,
    more: ({ sum, bounds }) => `p50 ${span(quantile(sum.request, bounds.seconds, 0.5))}`,
  },
  {
    name: "queue",
    label: "Waiting",
    of: (column) => column.waiting,
    now: ({ state }) => [count(state.waiting), state.waiting === 1 ? "sample" : "samples"],
    top: count,
    more: ({ sum, bounds }) => `${span(quantile(sum.queue, bounds.seconds, 0.5))} in the queue`,
  },
  {
    name: "batch",
    label: "Batch size",
    of: (column) => (column.batches ? column.rows / column.batches : null),
    now: ({ sum }) => [sum.batches ? count(sum.rows / sum.batches) : NONE, sum.batches ? "mean" : ""],
    top: count,
    more: ({ sum }) => `${count(sum.batches / sum.dt)} batches/s`,
  },
  {
    name: "busy",
    label: "Workers busy",
    of: (column) => (column.slots ? Math.min(column.busyS / column.dt / column.slots, 1) : 0),
    now: ({ sum, state }) => [state.slots ? percent(Math.min(sum.busyS / sum.dt / state.slots, 1)) : NONE, ""],
    top: percent,
    more: ({ state }) => `${several(state.slots, "slot")}${state.restarts ? `, ${several(state.restarts, "restart")}` : ""}`,
  },
  {
    name: "failed",
    label: "Errors",
    of: (column) => column.failed / column.dt,
    now: ({ window }) => [count(window.failed), ""],
    top: (value) => `${count(value)}/s`,
    more: ({ window }) => {
      const all = window.ok + window.failed;
      return window.failed ? `${((100 * window.failed) / all).toFixed(window.failed / all < 0.01 ? 2 : 1)} % of ${count(all)}` : "none in this window";
    },
  },
];

export class Tiles {
  constructor(host) {
    this.tiles = TILES.map((one) => {
      const tile = { ...one, spark: new Spark(one.name), value: h("b", {}), unit: h("small", {}), side: h("span", { class: "more" }), high: h("span", { class: "high" }) };
      tile.element = h("div", { class: `tile t-${one.name}` },
        h("h2", {}, one.label), h("p", { class: "value" }, tile.value, tile.unit), tile.side,
        h("div", { class: "sparkbox" }, tile.spark.element, tile.high));
      return tile;
    });
    host.replaceChildren(...this.tiles.map((tile) => tile.element));
  }

  show(history, seconds) {
    const { bounds } = history;
    const view = history.columns(ALL, seconds, 75);
    const told = {
      sum: history.recent(ALL, NOW_S),
      window: history.recent(ALL, seconds),
      state: history.line(ALL).state,
      bounds,
    };
    for (const tile of this.tiles) {
      const [value, unit] = tile.now(told);
      say(tile.value, value);
      say(tile.unit, unit);
      say(tile.side, tile.more(told));
      const values = view.columns.map((column) => (column ? tile.of(column, bounds) : null));
      const highest = tile.spark.show(values);
      say(tile.high, highest > 1e-9 ? tile.top(highest) : "");
      mark(tile.element, "data-alarm", tile.name === "failed" && told.window.failed > 0);
    }
  }
}
