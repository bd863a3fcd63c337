// SPDX-License-Identifier: Apache-2.0
// Who works: a square for each batch that could run at a time, filled while one runs.

import { h, mark, say } from "./dom.js";
import { percent, several } from "./numbers.js";

const SQUARES = 48;
const ROWS = 24;
const NOW_S = 5;

export class Workers {
  constructor(history) {
    this.history = history;
    this.rows = [];
    this.list = h("ul", { class: "crew" });
    this.more = h("p", { class: "quiet-text", hidden: true });
    this.element = h("figure", { class: "panel" },
      h("figcaption", {}, h("h3", {}, "Workers"),
        h("ul", { class: "legend" },
          h("li", {}, h("i", { class: "square", "data-state": "busy" }), "runs a batch"),
          h("li", {}, h("i", { class: "square", "data-state": "idle" }), "idle"),
          h("li", {}, h("i", { class: "square", "data-state": "down" }), "down"))),
      this.list, this.more);
  }

  learn(models) {
    const places = models.flatMap((model) =>
      model.nodes ? Object.entries(model.nodes).map(([node, facts]) => [`${model.name}/${node}`, facts]) : [[model.name, model]]);
    const shown = places.slice(0, ROWS);
    const names = shown.map(([name]) => name).join("\n");
    if (names !== this.names) {
      this.names = names;
      this.rows = shown.map(([name]) => {
        const row = { name, squares: h("span", { class: "squares", "aria-hidden": "true" }), text: h("span", { class: "told" }), devices: h("span", { class: "devices" }) };
        row.element = h("li", {}, h("b", {}, name), row.squares, row.text, row.devices);
        return row;
      });
      this.list.replaceChildren(...this.rows.map((row) => row.element));
    }
    shown.forEach(([, facts], number) => { this.rows[number].kept = facts; });
    this.more.hidden = shown.length === places.length;
    say(this.more, `and ${places.length - shown.length} more; open a model to see its workers`);
  }

  show() {
    for (const row of this.rows) {
      const { state } = this.history.line(row.name);
      const sum = this.history.recent(row.name, NOW_S);
      const slots = Math.min(state.slots, SQUARES);
      while (row.squares.children.length > slots) row.squares.lastChild.remove();
      while (row.squares.children.length < slots) row.squares.append(h("i", { class: "square" }));
      const share = slots / Math.max(state.slots, 1);
      const busy = state.alive ? Math.round((state.slots - state.idle) * share) : 0;
      [...row.squares.children].forEach((square, at) => mark(square, "data-state", !state.alive ? "down" : at < busy ? "busy" : "idle"));
      const used = state.slots ? Math.min(sum.busyS / sum.dt / state.slots, 1) : 0;
      const parts = [`${state.alive} up`, `${percent(used)} busy`];
      if (state.slots > SQUARES) parts.push(`${state.slots} at a time`);
      if (state.restarts) parts.push(several(state.restarts, "restart"));
      if (row.kept?.workers?.left) parts.push(`${row.kept.workers.left} of ${row.kept.workers.joined} left`);
      if (state.problem) parts.push(state.problem);
      say(row.text, parts.join(" · "));
      const devices = devicesOf(state);
      if (devices.join("\n") !== row.on) {
        row.on = devices.join("\n");
        row.devices.replaceChildren(...devices.map((device) => h("span", { class: "tag" }, device)));
      }
      mark(row.element, "data-alarm", state.alive === 0 || Boolean(state.problem));
    }
  }
}

/** The devices of the workers of all versions, each once, with how many work there. */
function devicesOf(state) {
  const counts = new Map();
  for (const device of state.devices) counts.set(device, (counts.get(device) ?? 0) + 1);
  return [...counts].map(([device, number]) => (number > 1 ? `${device} × ${number}` : device));
}
