// SPDX-License-Identifier: Apache-2.0
// Charts over time, drawn by hand as SVG. All of them share one cursor, so that a moment is compared in all.

import { h, mark, s, say } from "./dom.js";
import { ago, several, ticks } from "./numbers.js";

const LEFT = 48;
const RIGHT = 78;
const TOP = 10;
const BOTTOM = 22;
const STEPS_S = [10, 15, 20, 30, 60, 120, 180, 300];

/** The moment that is pointed at, as seconds before now; null if none is. */
export const cursor = {
  back: null,
  charts: new Set(),
  move(back, from) {
    this.back = back;
    for (const chart of this.charts) chart.point(chart === from);
  },
};

export class TimeChart {
  /**
   * @param series [{name, label, of(column) -> number or null, kind: "line" | "area" | "stack", format}]
   * @param options {title, unit, format, log, heat(column) -> counts, bounds(), empty, note}
   */
  constructor(series, options) {
    this.series = series;
    this.options = options;
    this.columns = [];
    this.seconds = 300;
    this.heat = [0, 1, 2, 3, 4].map((level) => s("path", { class: `heat heat-${level}` }));
    this.grid = s("g", { class: "grid" });
    this.axes = s("g", { class: "axes" });
    this.paths = series.map((one) => s("path", { class: `${one.kind ?? "line"} c-${one.name}` }));
    this.ends = series.map((one) => s("text", { class: `end c-${one.name}` }));
    this.hair = s("line", { class: "hair", y1: TOP, hidden: true });
    this.svg = s("svg", { role: "img", class: "chart" }, this.grid, ...this.heat, ...this.paths, this.axes, ...this.ends, this.hair);
    this.tip = h("div", { class: "tip", hidden: true });
    this.spoken = h("div", { class: "hidden", "aria-live": "polite" });
    this.empty = h("p", { class: "empty", hidden: true }, options.empty ?? "");
    this.plot = h("div", {
      class: "plot",
      tabindex: 0,
      role: "group",
      "aria-label": `${options.title}; left and right go through its moments`,
      onpointermove: (event) => this.#hover(event),
      onpointerleave: () => cursor.move(null, this),
      onblur: () => cursor.move(null, this),
      onkeydown: (event) => this.#key(event),
    }, this.svg, this.empty, this.tip);
    const legend = h("ul", { class: "legend" }, series.map((one) => h("li", {}, h("i", { class: `swatch c-${one.name}`, "aria-hidden": "true" }), one.label)));
    this.value = h("span", { class: "figure" });
    this.element = h("figure", { class: "panel chart-panel" },
      h("figcaption", {}, h("h3", {}, options.title), this.value, series.length > 1 ? legend : null),
      this.plot, this.spoken, options.note ? h("p", { class: "note" }, options.note) : null);
    cursor.charts.add(this);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  show({ columns, width }, seconds) {
    this.columns = columns;
    this.width = width;
    this.seconds = seconds;
    this.draw();
  }

  draw() {
    const wide = this.plot.clientWidth;
    const tall = this.plot.clientHeight;
    if (!wide || !this.columns.length) return;
    this.wide = wide - LEFT - RIGHT;
    this.tall = tall - TOP - BOTTOM;
    mark(this.svg, "viewBox", `0 0 ${wide} ${tall}`);
    mark(this.svg, "width", wide);
    mark(this.svg, "height", tall);
    const values = this.series.map((one) => this.columns.map((column) => (column ? one.of(column) : null)));
    const stacked = this.#stack(values);
    const known = stacked.flat().filter((value) => value !== null);
    const isEmpty = !known.some((value) => value > 0);
    this.empty.hidden = !isEmpty;
    this.scale = this.options.log ? this.#logScale(known) : this.#linearScale(known);
    this.#drawAxes(isEmpty);
    this.#drawHeat();
    this.series.forEach((one, number) => mark(this.paths[number], "d", this.#path(one, stacked, number)));
    this.#drawEnds(values, stacked);
    mark(this.hair, "y2", TOP + this.tall);
    mark(this.svg, "aria-label", this.#summary(values));
    this.values = values;
    this.point(false);
  }

  x(at) {
    return LEFT + (at / Math.max(this.columns.length - 1, 1)) * this.wide;
  }

  #stack(values) {
    const sums = this.columns.map(() => 0);
    return this.series.map((one, number) => {
      if (one.kind !== "stack") return values[number];
      return values[number].map((value, at) => (value === null ? null : (sums[at] += value)));
    });
  }

  #linearScale(known) {
    const { top, at } = ticks(Math.max(0, ...known), this.tall > 120 ? 4 : 3);
    return { at, y: (value) => TOP + this.tall * (1 - value / top) };
  }

  #logScale(known) {
    const positive = known.filter((value) => value > 0);
    const low = Math.floor(Math.log10(Math.min(...positive, 0.01)) - 1e-9);
    const high = Math.max(Math.ceil(Math.log10(Math.max(...positive, 0.001)) + 1e-9), low + 2);
    const at = [];
    for (let power = low; power <= high; power += 1) {
      at.push(10 ** power);
      if (high - low <= 2 && power < high) at.push(3 * 10 ** power);
    }
    return {
      at,
      y: (value) => TOP + this.tall * (1 - (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low)),
    };
  }

  #drawAxes(isEmpty) {
    const { at, y } = this.scale;
    const lines = at.map((value) => s("line", { x1: LEFT, x2: LEFT + this.wide, y1: y(value), y2: y(value) }));
    const labels = isEmpty ? [] : at.map((value) => s("text", { x: LEFT - 8, y: y(value) + 4, class: "y" }, this.options.format(value)));
    const most = this.wide < 260 ? 3 : 6;
    const step = STEPS_S.find((one) => this.seconds / one <= most) ?? this.seconds;
    const times = [];
    for (let back = 0; back <= this.seconds; back += step) {
      const x = LEFT + (1 - back / this.seconds) * this.wide;
      const text = back === 0 ? "now" : back % 60 ? `−${back} s` : `−${back / 60} min`;
      times.push(s("line", { x1: x, x2: x, y1: TOP + this.tall, y2: TOP + this.tall + 4 }));
      times.push(s("text", { x, y: TOP + this.tall + 17, class: "x" }, text));
    }
    this.grid.replaceChildren(...lines);
    this.axes.replaceChildren(...labels, ...times);
  }

  #path(one, stacked, number) {
    const tops = stacked[number];
    const below = one.kind === "stack" && number > 0 ? stacked[number - 1] : null;
    const runs = [];
    let run = [];
    tops.forEach((value, at) => {
      if (value === null) {
        if (run.length) runs.push(run);
        run = [];
      } else run.push(at);
    });
    if (run.length) runs.push(run);
    const { y } = this.scale;
    const point = (at, value) => `${this.x(at).toFixed(1)},${y(value).toFixed(1)}`;
    return runs.map((places) => {
      const line = places.length === 1
        ? `M${(this.x(places[0]) - 1).toFixed(1)},${y(tops[places[0]]).toFixed(1)}h2`
        : `M${places.map((at) => point(at, tops[at])).join("L")}`;
      if (one.kind !== "stack" && one.kind !== "area") return line;
      const back = [...places].reverse().map((at) => point(at, below ? below[at] : 0)).join("L");
      return `${line}L${back}Z`;
    }).join("");
  }

  #drawHeat() {
    const { heat, bounds } = this.options;
    const paths = this.heat.map(() => "");
    if (heat) {
      const { y } = this.scale;
      const half = this.wide / Math.max(this.columns.length - 1, 1) / 2;
      const limits = bounds();
      const bottom = TOP + this.tall;
      this.columns.forEach((column, at) => {
        const counts = column && heat(column);
        if (!counts) return;
        let total = 0;
        for (const number of counts) total += number ?? 0;
        counts.forEach((number, bucket) => {
          const high = y(limits[bucket] ?? limits.at(-1) * 2);
          const low = Math.min(bucket ? y(limits[bucket - 1]) : bottom, bottom);
          if (low <= TOP || high >= low) return;
          const level = Math.min(Math.floor(5 * Math.sqrt(number / total)), 4);
          const left = Math.max(this.x(at) - half, LEFT);
          const right = Math.min(this.x(at) + half, LEFT + this.wide);
          paths[level] += `M${left.toFixed(1)},${Math.max(high, TOP).toFixed(1)}H${right.toFixed(1)}V${low.toFixed(1)}H${left.toFixed(1)}Z`;
        });
      });
    }
    this.heat.forEach((path, level) => mark(path, "d", paths[level]));
  }

  /** Labels the ends of the lines, with room between them. */
  #drawEnds(values, stacked) {
    const placed = [];
    this.series.forEach((one, number) => {
      const at = lastKnown(values[number]);
      const end = this.ends[number];
      if (at < 0 || (one.kind === "stack" && number < this.series.length - 1)) {
        say(end, "");
        return;
      }
      placed.push({ end, y: this.scale.y(stacked[number][at]) + 4, text: one.end ? one.end(values[number][at]) : (one.format ?? this.options.format)(values[number][at]) });
    });
    placed.sort((one, other) => one.y - other.y);
    placed.forEach((one, number) => {
      if (number) one.y = Math.max(one.y, placed[number - 1].y + 13);
    });
    const over = placed.length ? placed.at(-1).y - (TOP + this.tall + 4) : 0;
    for (const { end, y, text } of placed) {
      mark(end, "x", LEFT + this.wide + 7);
      mark(end, "y", (y - Math.max(over, 0)).toFixed(1));
      say(end, text);
    }
  }

  #summary(values) {
    const told = this.series.map((one, number) => {
      const format = one.format ?? this.options.format;
      const known = values[number].filter((value) => value !== null);
      if (!known.length) return `${one.label}: nothing yet`;
      return `${one.label}: now ${format(known.at(-1))}, at most ${format(Math.max(...known))}`;
    });
    return `${this.options.title}, the last ${several(Math.round(this.seconds / 60), "minute")}. ${told.join("; ")}.`;
  }

  #hover(event) {
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / this.wide;
    cursor.move(share < -0.02 || share > 1.02 ? null : Math.min(Math.max(1 - share, 0), 1), this);
  }

  #key(event) {
    const steps = { ArrowLeft: 1, ArrowRight: -1, Home: Infinity, End: -Infinity }[event.key];
    if (steps === undefined) {
      if (event.key === "Escape") cursor.move(null, this);
      return;
    }
    event.preventDefault();
    const step = 1 / Math.max(this.columns.length - 1, 1);
    cursor.move(Math.min(Math.max((cursor.back ?? -step) + steps * step, 0), 1), this);
    say(this.spoken, this.tip.textContent);
  }

  /** Shows the moment that is pointed at; only the chart that is pointed at tells its values. */
  point(isHere) {
    if (isHere !== undefined) this.isHere = isHere || (this.isHere && cursor.back !== null && isHere !== false);
    const { back } = cursor;
    const isShown = back !== null && this.columns.length > 0 && this.values;
    mark(this.hair, "hidden", !isShown);
    this.tip.hidden = !isShown;
    if (!isShown) return;
    const at = Math.round((1 - back) * (this.columns.length - 1));
    const x = this.x(at);
    mark(this.hair, "x1", x);
    mark(this.hair, "x2", x);
    const told = this.series.map((one, number) => {
      const value = this.values[number][at];
      return h("div", {}, h("i", { class: `swatch c-${one.name}`, "aria-hidden": "true" }), `${one.label} `, h("b", {}, value === null ? "–" : (one.format ?? this.options.format)(value)));
    });
    const seconds = back * this.seconds;
    this.tip.replaceChildren(h("div", { class: "when" }, seconds < 1 ? "now" : ago(seconds)), ...told);
    const left = x > LEFT + this.wide / 2 ? x - this.tip.offsetWidth - 12 : x + 12;
    this.tip.style.transform = `translate(${Math.max(left, 0)}px, ${TOP}px)`;
  }
}

function lastKnown(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return at;
  return -1;
}

/** A small line without axes; its highest value stands beside it. */
export class Spark {
  constructor(kind) {
    this.area = s("path", { class: `spark-area c-${kind}` });
    this.line = s("path", { class: `spark-line c-${kind}` });
    this.element = s("svg", { class: "spark", viewBox: "0 0 120 32", preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line);
  }

  show(values) {
    const highest = Math.max(...values.map((value) => value ?? 0), 1e-12);
    const last = Math.max(values.length - 1, 1);
    let line = "";
    let area = "";
    let begun = null;
    values.forEach((value, at) => {
      const x = ((at / last) * 120).toFixed(1);
      if (value === null) {
        if (begun !== null) area += `V31L${begun},31Z`;
        begun = null;
        return;
      }
      const y = (30 - (value / highest) * 27).toFixed(1);
      line += `${begun === null ? "M" : "L"}${x},${y}`;
      area += begun === null ? `M${x},31L${x},${y}` : `L${x},${y}`;
      begun ??= x;
      if (at === last) area += `L${x},31Z`;
    });
    mark(this.line, "d", line);
    mark(this.area, "d", area);
    return highest;
  }
}

/** How values are spread: a bar for each bucket that may be filled. */
export class Bars {
  constructor(options) {
    this.options = options;
    this.plot = h("div", { class: "bars", role: "img" });
    this.value = h("span", { class: "figure" });
    this.empty = h("p", { class: "empty" }, options.empty);
    this.element = h("figure", { class: "panel chart-panel" },
      h("figcaption", {}, h("h3", {}, options.title), this.value), h("div", { class: "plot" }, this.plot, this.empty));
  }

  show(counts, bounds, limit) {
    const used = counts.reduce((last, number, bucket) => (number ? bucket : last), -1);
    const wanted = Math.max(used, bounds.findIndex((bound) => bound >= (limit ?? 8)), 3);
    let total = 0;
    for (const number of counts) total += number ?? 0;
    const most = Math.max(...Array.from(counts, (number) => number ?? 0), 1);
    this.empty.hidden = total > 0;
    const labels = [];
    for (let bucket = 0; bucket <= Math.min(wanted, bounds.length); bucket += 1) {
      const low = bucket ? bounds[bucket - 1] + 1 : 1;
      const high = bounds[bucket];
      labels.push(high === undefined ? `>${low - 1}` : low === high ? `${low}` : `${low}–${high}`);
    }
    while (this.plot.children.length > labels.length) this.plot.lastChild.remove();
    labels.forEach((label, bucket) => {
      const number = counts[bucket] ?? 0;
      let bar = this.plot.children[bucket];
      if (!bar) {
        bar = h("div", { class: "bar" }, h("b", {}), h("i", {}), h("span", {}));
        this.plot.append(bar);
      }
      const [share, fill, name] = bar.children;
      say(share, number ? (number / total < 0.01 ? "<1%" : `${Math.round((100 * number) / total)}%`) : "");
      fill.style.height = `${(100 * number) / most}%`;
      say(name, label);
    });
    mark(this.plot, "aria-label", `${this.options.title}: ${labels.map((label, bucket) => `${label}: ${counts[bucket] ?? 0}`).join(", ")}`);
  }
}
