// SPDX-License-Identifier: Apache-2.0
// The drawing of a graph, as the server makes it; each node fills as far as its workers are busy.

import { h, mark, s, say } from "./dom.js";
import { count, percent } from "./numbers.js";
import { headers } from "./server.js";

const NOW_S = 5;
const SMALLEST = 0.7; // what would be smaller to fit is not read, and scrolls instead

export class Graph {
  constructor(history) {
    this.history = history;
    this.name = null;
    this.nodes = new Map();
    this.canvas = h("div", { class: "canvas", tabindex: 0, role: "group", "aria-label": "The graph; scrolls sideways" });
    this.value = h("span", { class: "figure" });
    this.element = h("figure", { class: "panel graph", hidden: true },
      h("figcaption", {}, h("h3", {}, "Graph"), this.value,
        h("ul", { class: "legend" }, h("li", {}, h("i", { class: "swatch busy", "aria-hidden": "true" }), "how busy the workers of a node are"))),
      this.canvas);
  }

  learn(model, mayDiffer) {
    this.element.hidden = model === null;
    const isKnown = model?.name === this.name;
    this.name = model?.name ?? null;
    if (model === null || (isKnown && !mayDiffer)) return;
    if (!isKnown) {
      this.nodes.clear();
      this.canvas.replaceChildren();
    }
    this.#load(model);
  }

  /** Loads the drawing as a document: its shapes are taken over, its style is this page's. */
  #load(model) {
    const request = new XMLHttpRequest();
    request.open("GET", `ui/graph/${encodeURIComponent(model.name)}`);
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.responseType = "document";
    request.onload = () => {
      const drawing = request.status === 200 ? request.responseXML?.documentElement : null;
      if (this.name !== model.name) return;
      if (drawing?.localName === "svg") this.#take(drawing);
      else this.#list(Object.keys(model.nodes));
      this.show();
    };
    request.onerror = () => this.#list(Object.keys(model.nodes));
    request.send();
  }

  #take(drawing) {
    const svg = copied(drawing);
    mark(svg, "class", "drawing");
    svg.style.minWidth = `${SMALLEST * Number(drawing.getAttribute("width"))}px`;
    this.nodes.clear();
    for (const group of svg.querySelectorAll("g[data-endpoint]")) {
      const box = group.querySelector("rect");
      const number = (name) => Number(box.getAttribute(name));
      const fill = s("rect", { class: "fill", x: number("x"), y: number("y"), width: 0, height: number("height"), rx: 6 });
      box.after(fill);
      const texts = group.querySelectorAll("text");
      const line = texts[texts.length - 1];
      mark(line, "class", "line now");
      this.nodes.set(group, { name: group.dataset.endpoint, fill, line, width: number("width"), group });
    }
    this.canvas.replaceChildren(svg);
  }

  /** Where there is no drawing, the nodes stand in a row. */
  #list(nodes) {
    this.nodes.clear();
    const rows = nodes.map((node) => {
      const line = h("span", {});
      this.nodes.set(line, { name: `${this.name}/${node}`, line, group: line });
      return h("li", {}, h("b", {}, node), " ", line);
    });
    this.canvas.replaceChildren(h("ul", {}, rows));
  }

  show() {
    if (this.name === null) return;
    let busiest = null;
    const told = [...this.nodes.values()].map((node) => {
      const sum = this.history.recent(node.name, NOW_S);
      const { state } = this.history.line(node.name);
      const now = state.slots ? (state.slots - state.idle) / state.slots : 0;
      const busy = Math.min(state.slots ? sum.busyS / sum.dt / state.slots : 0, 1);
      return { node, busy: sum.batches ? busy : state.alive ? Math.min(now, 1) : 0, sum, state };
    });
    for (const one of told) if (one.busy > 0.02 && (!busiest || one.busy > busiest.busy)) busiest = one;
    for (const { node, busy, sum, state } of told) {
      if (node.fill) mark(node.fill, "width", (busy * node.width).toFixed(1));
      const parts = [state.alive ? percent(busy) : "no worker", `${count(sum.rows / sum.dt)}/s`];
      if (state.waiting) parts.push(`${count(state.waiting)} wait`);
      say(node.line, parts.join(" · "));
      mark(node.group, "data-busiest", node === busiest?.node);
      mark(node.group, "data-alarm", state.alive === 0);
    }
    const little = told.some(({ busy, sum }) => busy || sum.batches) ? "hardly busy" : "idle";
    say(this.value, busiest ? `busiest: ${busiest.node.name.slice(this.name.length + 1)}, ${percent(busiest.busy)}` : little);
  }
}

const SHAPES = new Set(["svg", "g", "rect", "text", "path", "defs", "marker"]);

/** The shapes of a drawing, and nothing else that may be in it. */
function copied(element) {
  const attributes = Object.fromEntries([...element.attributes].filter(({ name }) => !name.startsWith("on") && !name.startsWith("xmlns") && name !== "style").map(({ name, value }) => [name, value]));
  const children = element.localName === "text" ? [element.textContent] : [...element.children].filter((child) => SHAPES.has(child.localName)).map(copied);
  return s(element.localName, attributes, ...children);
}
