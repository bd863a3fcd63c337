// SPDX-License-Identifier: Apache-2.0
// The nodes of a cluster, what they own and run, and the programs that have joined it.

import { h, say } from "./dom.js";
import { count, several } from "./numbers.js";

export class Cluster {
  constructor(host) {
    this.host = host;
    this.title = h("h2", { id: "cluster-title" }, "Cluster");
    this.nodes = h("ul", { class: "places" });
    this.programs = h("ul", { class: "places" });
    this.count = h("p", { class: "quiet-text" });
    host.replaceChildren(h("header", {}, this.title), this.nodes, this.count, this.programs);
  }

  /** Takes what the server tells of its cluster. */
  learn(told) {
    const { deployment, version, nodes, programs, program_count: known, processes = [], problems = [] } = told;
    this.host.hidden = false;
    say(this.title, deployment ? `Deployment ${deployment}, version ${version}` : "Cluster");
    this.nodes.replaceChildren(
      ...problems.map((text) => h("li", { class: "wrong" }, text)),
      ...nodes.map((node) => nodeOf(node, deployment, node.is_here ? processes : [])),
    );
    const more = known - programs.length;
    say(this.count, `${several(known, "program")} with servings${more > 0 ? `; ${count(more)} of them are not listed` : ""}`);
    this.programs.replaceChildren(...programs.map((one) => h("li", {}, one.servings.join(", "), one.address ? h("span", { class: "quiet-text" }, ` at ${one.address}`) : null)));
  }
}

function nodeOf(node, deployment, processes) {
  const facts = [
    node.is_here ? "this node" : node.away ? "away" : "here",
    node.is_draining ? "draining" : "",
    node.owns?.length ? `owns ${node.owns.join(", ")}` : "",
    node.workers ? several(node.workers, "worker") : "",
    node.door && !node.is_draining ? `programs join at ${node.door}` : "",
  ];
  const verb = node.is_draining ? "resume" : "drain";
  const named = deployment === "default" ? "" : ` --deployment ${deployment}`;
  return h("li", {},
    h("b", {}, node.name), h("p", { class: "quiet-text" }, facts.filter(Boolean).join(" · ")),
    node.away && node.away !== "away" ? h("p", { class: "wrong" }, node.away) : null,
    processes.filter((one) => !one.is_ready).map((one) => h("p", { class: "wrong" }, `${one.name}: ${one.problem || "starting"}, started ${several(one.starts, "time")}`)),
    deployment ? h("p", {}, h("code", {}, `forebay cluster ${verb} ${node.name}${named}`)) : null);
}
