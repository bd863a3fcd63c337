// SPDX-License-Identifier: Apache-2.0
// A recording in small: a lane for each worker, a mark for each batch that it ran.

import { h, s } from "./dom.js";
import { percent, several, span } from "./numbers.js";

const LANES = 16;
const WIDE = 1000;
const TALL = 14;

/** Draws what a trace says; null if no batch ran. */
export function lanesOf(trace) {
  const names = new Map();
  const lanes = new Map();
  for (const event of trace.traceEvents) {
    if (event.name === "process_name") names.set(event.pid, event.args.name);
    if (event.name === "thread_name") names.set(`${event.pid}/${event.tid}`, event.args.name);
    if (event.cat === "batch" && event.dur !== undefined) {
      const lane = `${event.pid}/${event.tid}`;
      if (!lanes.has(lane)) lanes.set(lane, { pid: event.pid, batches: [], busy: 0 });
      lanes.get(lane).batches.push(event);
      lanes.get(lane).busy += event.dur;
    }
  }
  if (!lanes.size) return null;
  const all = [...lanes.values()].flatMap((lane) => lane.batches);
  const from = Math.min(...all.slice(0, 1).map((event) => event.ts), ...[...lanes.values()].map((lane) => lane.batches[0].ts));
  const to = all.reduce((latest, event) => Math.max(latest, event.ts + event.dur), from + 1);
  const shown = [...lanes].sort(([, one], [, other]) => other.busy - one.busy).slice(0, LANES);
  shown.sort(([, one], [, other]) => one.pid - other.pid);
  const rows = shown.map(([name, lane]) => {
    const busy = Math.min(lane.busy / (to - from), 1);
    const marks = lane.batches.map((event) => {
      const x = ((event.ts - from) / (to - from)) * WIDE;
      return `M${x.toFixed(1)},1h${Math.max((event.dur / (to - from)) * WIDE, 0.6).toFixed(1)}v${TALL - 2}H${x.toFixed(1)}Z`;
    });
    const label = `${names.get(lane.pid) ?? lane.pid}`;
    const worker = (names.get(name) ?? "").replace(/ \(pid.*/, "");
    return h("li", {},
      h("span", { class: "lane", title: `${label} ${worker}` }, label, " ", h("small", {}, worker)),
      s("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, preserveAspectRatio: "none", role: "img", "aria-label": `${several(lane.batches.length, "batch", "batches")}, busy ${percent(busy)}` }, s("path", { d: marks.join("") })),
      h("span", { class: "figure" }, percent(busy)));
  });
  const left = lanes.size - shown.length;
  return h("div", {}, h("ol", { class: "lanes" }, rows),
    h("p", { class: "note" }, `${span((to - from) / 1e6)} from the first batch to the last${left ? `; ${several(left, "quieter worker")} in the file` : ""}`));
}
