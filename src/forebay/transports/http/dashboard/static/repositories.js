// SPDX-License-Identifier: Apache-2.0
// Where models come from, what of it is on the disk and in memory, and what is wrong there.

import { h, say } from "./dom.js";
import { ago, bytes, count, percent, several, span } from "./numbers.js";

const PROBLEMS = 5;

export class Repositories {
  constructor(host) {
    this.host = host;
    this.list = h("ul", { class: "places" });
    this.memory = h("p", { class: "quiet-text" });
    host.replaceChildren(h("header", {}, h("h2", { id: "repositories-title" }, "Repositories")), this.list, this.memory);
  }

  /** Takes what /models tells. */
  learn(told) {
    const { repositories = [], memory } = told;
    this.host.hidden = repositories.length === 0;
    this.list.replaceChildren(...repositories.map(placeOf));
    if (!memory) return;
    const asked = memory.hits + memory.misses;
    say(this.memory, [
      `${count(memory.loaded)} in memory (${bytes(memory.bytes)})`,
      asked ? `${percent(memory.hits / asked)} of requests found their model in memory` : "",
      `${count(memory.loads)} loaded`,
      memory.evictions ? `${count(memory.evictions)} evicted` : "",
      memory.failures ? `${count(memory.failures)} failed to load` : "",
      memory.waiting ? `${several(memory.waiting, "request")} waiting for a load` : "",
    ].filter(Boolean).join(" · "));
  }
}

function placeOf(one) {
  const facts = [
    `${several(one.models, "model")} with ${several(one.versions, "version")}`,
    one.looked_s ? `polled ${ago(Date.now() / 1000 - one.looked_s)} in ${span(one.look_s)}` : "not polled yet",
    one.disk ? `${count(one.disk.count)} on disk (${bytes(one.disk.bytes)}), ${count(one.disk.misses)} downloaded` : "read in place",
    one.failures ? `${several(one.failures, "poll")} failed` : "",
  ];
  const more = one.problems.length - PROBLEMS;
  return h("li", {},
    h("b", {}, one.place), h("p", { class: "quiet-text" }, facts.filter(Boolean).join(" · ")),
    one.problem ? h("p", { class: "wrong" }, one.problem) : null,
    one.problems.slice(0, PROBLEMS).map((text) => h("p", { class: "quiet-text" }, text)),
    more > 0 ? h("p", { class: "quiet-text" }, `and ${count(more)} more; /models lists all`) : null);
}
