// SPDX-License-Identifier: Apache-2.0
// Records what every worker does for some seconds, for Perfetto or chrome://tracing.

import { choice, h, say } from "./dom.js";
import { lanesOf } from "./lanes.js";
import { bytes, several } from "./numbers.js";
import { ask, Problem, reason } from "./server.js";

export class Trace {
  constructor(host) {
    this.seconds = 5;
    this.choices = h("div", { class: "choice", role: "group", "aria-label": "Seconds to record" });
    this.button = h("button", { type: "button", class: "primary record", onclick: () => (this.control ? this.control.abort() : this.#record()) }, "Record");
    this.progress = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Recording" });
    this.status = h("p", { class: "status", role: "status" });
    this.result = h("div", { class: "result" });
    host.replaceChildren(
      h("header", {}, h("h2", { id: "trace-title" }, "Trace")),
      h("p", { class: "teach" }, "Records every batch of every worker, and each request through the nodes of a graph. Open the file in ",
        h("a", { href: "https://ui.perfetto.dev", rel: "noreferrer noopener", target: "_blank" }, "Perfetto"), " or chrome://tracing. ", h("code", {}, "forebay trace"), " summarizes where the time goes."),
      h("div", { class: "row" }, this.choices, this.button), this.progress, this.status, this.result);
    choice(this.choices, [[1, "1 s"], [5, "5 s"], [10, "10 s"], [30, "30 s"]], this.seconds, (seconds) => { this.seconds = seconds; });
  }

  async #record() {
    const { seconds } = this;
    this.control = new AbortController();
    const began = performance.now();
    this.progress.hidden = false;
    this.result.replaceChildren();
    say(this.button, "Stop");
    const timer = setInterval(() => {
      const passed = (performance.now() - began) / 1000;
      this.progress.value = Math.min(passed / seconds, 1);
      say(this.status, passed < seconds ? `recording, ${Math.ceil(seconds - passed)} s left` : "writing the trace");
    }, 100);
    try {
      const answer = await ask(`trace?seconds=${seconds}`, { signal: this.control.signal });
      if (!answer.ok) throw new Problem(answer.status, await reason(answer));
      await this.#offer(await answer.blob(), seconds);
    } catch (error) {
      say(this.status, error.name === "AbortError" ? "stopped; nothing was saved" : `no trace: ${error.message}`);
    } finally {
      clearInterval(timer);
      this.control = null;
      this.progress.hidden = true;
      say(this.button, "Record");
    }
  }

  async #offer(blob, seconds) {
    const trace = JSON.parse(await blob.text());
    const batches = trace.traceEvents.filter((event) => event.cat === "batch");
    const stamp = new Date().toISOString().slice(0, 19).replaceAll(":", "-");
    if (this.address) URL.revokeObjectURL(this.address);
    this.address = URL.createObjectURL(blob);
    say(this.status, batches.length ? `${several(batches.length, "batch", "batches")} in ${seconds} s` : `no batches in ${seconds} s; send requests while it records`);
    const picture = lanesOf(trace);
    this.result.replaceChildren(...(picture ? [picture] : []), h("a", { class: "primary", href: this.address, download: `forebay-${stamp}.trace.json` }, `Save the trace, ${bytes(blob.size)}`));
  }
}
