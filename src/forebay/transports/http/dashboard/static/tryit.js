// SPDX-License-Identifier: Apache-2.0
// A form that asks a model, and shows what it answers: streams as they come.

import { choice, h, say } from "./dom.js";
import { bytes, span } from "./numbers.js";
import { example, field, inputOf, parse, pretty } from "./schema.js";
import { ask, events, hasKey, read, reason } from "./server.js";

const SHOWN_CHARS = 100_000;
const SHOWN_PARTS = 500;

export class TryIt {
  constructor(host) {
    this.models = [];
    this.document = null;
    this.way = "form";
    this.select = h("select", { id: "asked-model", onchange: () => this.choose(this.select.value) });
    this.ways = h("div", { class: "choice", role: "group", "aria-label": "How the request is written" });
    this.fields = h("div", { class: "fields" });
    this.send = h("button", { type: "submit", class: "primary" }, "Send");
    this.stop = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.control?.abort() }, "Stop");
    this.copy = h("button", { type: "button", class: "quiet", onclick: () => this.#copy() }, "Copy as curl");
    this.wrong = h("p", { class: "wrong", role: "alert" });
    this.command = h("div", { class: "output", tabindex: 0, role: "region", "aria-label": "The command", hidden: true });
    this.status = h("p", { class: "status", role: "status" });
    this.output = h("div", { class: "output", tabindex: 0, role: "region", "aria-label": "The answer" }, h("p", { class: "empty" }, "The answer appears here."));
    const form = h("form", { onsubmit: (event) => { event.preventDefault(); this.#run(); } },
      h("div", { class: "row" }, h("label", { class: "hidden", for: "asked-model" }, "Model"), this.select, this.ways),
      this.fields, this.wrong, h("div", { class: "row" }, this.send, this.stop, this.copy), this.command);
    host.replaceChildren(h("header", {}, h("h2", { id: "asked-title" }, "Try it")), form, this.status, this.output);
    choice(this.ways, [["form", "Form"], ["json", "JSON"]], this.way, (way) => this.#switch(way));
  }

  /** Takes the names of the models; what they take is read when it is first needed, and again if it may differ. */
  async learn(models, mayDiffer) {
    const names = models.map((one) => one.name);
    const isSame = names.join("\n") === this.models.join("\n");
    if (isSame && !mayDiffer) return;
    this.models = names;
    this.document = null;
    const chosen = names.includes(this.name) ? this.name : names[0];
    if (!isSame) this.select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (chosen !== undefined) await this.choose(chosen);
  }

  async choose(name) {
    this.name = name;
    this.select.value = name;
    try {
      this.document ??= await (await read("openapi.json")).json();
    } catch (problem) {
      say(this.wrong, `what the models take cannot be read: ${problem.message}`);
      this.document = { paths: {} };
    }
    if (this.name === name) this.#renew();
  }

  /** Makes the form anew where it is another one; what was filled in stays. */
  #renew() {
    const { paths, components } = this.document;
    const taken = JSON.stringify([paths[`/models/${this.name}`], components]);
    if (this.name === this.shown && taken === this.taken) return;
    const body = this.name === this.shown ? this.#filledIn() : undefined;
    this.shown = this.name;
    this.taken = taken;
    this.#build(body);
  }

  /** What is filled in; undefined if it is no JSON, and the form begins with an example. */
  #filledIn() {
    try {
      return this.input.isRaw ? undefined : this.readValue();
    } catch {
      return undefined;
    }
  }

  #build(body) {
    const input = inputOf(this.document, this.name) ?? { isRaw: false, schema: {}, query: [], document: this.document };
    this.input = input;
    this.ways.hidden = input.isRaw;
    say(this.wrong, "");
    this.command.hidden = true;
    this.query = input.query.map((one) => ({ name: one.name, ...field(this.document, one.schema, one.name, false, undefined, "?") }));
    const parts = this.query.map((one) => one.element);
    if (input.isRaw) {
      this.file = h("input", { type: "file", id: "asked-file" });
      this.text = h("textarea", { id: "asked-text", rows: 3, spellcheck: "false", placeholder: "or type the bytes as text" });
      this.readBody = () => this.file.files[0] ?? this.text.value;
      parts.push(h("div", { class: "field" }, h("label", { for: "asked-file" }, "Body", h("span", { class: "type" }, "a file")), this.file), h("div", { class: "field" }, h("label", { class: "hidden", for: "asked-text" }, "Body as text"), this.text));
    } else if (this.way === "json" || (input.schema.type === "object" && !input.schema.properties)) {
      const text = h("textarea", { id: "asked-json", class: "code", rows: 8, spellcheck: "false", value: pretty(body ?? example(this.document, input.schema)) });
      this.readValue = () => parse(text.value);
      this.readBody = () => JSON.stringify(this.readValue());
      parts.push(h("div", { class: "field" }, h("label", { for: "asked-json" }, "Body", h("span", { class: "type" }, "JSON")), text));
    } else if (input.schema.properties) {
      const required = input.schema.required ?? [];
      const fields = Object.entries(input.schema.properties).map(([name, schema]) => ({ name, ...field(this.document, schema, name, required.includes(name), body?.[name]) }));
      this.readValue = () => Object.fromEntries(fields.map((one) => [one.name, one.read()]).filter(([, value]) => value !== undefined));
      this.readBody = () => JSON.stringify(this.readValue());
      parts.push(...fields.map((one) => one.element));
    } else {
      const one = field(this.document, input.schema, input.schema.title ?? "sample", true, body);
      this.readValue = () => one.read();
      this.readBody = () => JSON.stringify(one.read());
      parts.push(one.element);
    }
    this.fields.replaceChildren(...parts);
  }

  #switch(way) {
    this.way = way;
    if (this.input && !this.input.isRaw) this.#build(this.#filledIn());
  }

  #request() {
    const query = new URLSearchParams();
    for (const one of this.query) {
      const value = one.read();
      if (value !== undefined && value !== "") query.set(one.name, typeof value === "string" ? value : JSON.stringify(value));
    }
    const address = `models/${encodeURIComponent(this.name)}${query.size ? `?${query}` : ""}`;
    const type = this.input.isRaw ? "application/octet-stream" : "application/json";
    return { address, type, body: this.readBody() };
  }

  async #run() {
    let request;
    try {
      request = this.#request();
    } catch (error) {
      say(this.wrong, error.message);
      return;
    }
    say(this.wrong, "");
    this.control?.abort();
    const control = (this.control = new AbortController());
    this.stop.hidden = false;
    this.output.replaceChildren();
    say(this.status, "asking …");
    const began = performance.now();
    const passed = () => span((performance.now() - began) / 1000);
    try {
      const answer = await ask(request.address, { method: "POST", body: request.body, headers: { "Content-Type": request.type }, signal: control.signal });
      const id = answer.headers.get("x-request-id");
      const told = (more) => this.#tell(answer.status, [passed(), more, id ? `request ${id}` : ""]);
      await this.#show(answer, told, began);
    } catch (error) {
      if (this.control === control) this.#tell(null, [error.name === "AbortError" ? `stopped after ${passed()}` : `no answer: ${error.message}`]);
    } finally {
      if (this.control === control) this.stop.hidden = true;
    }
  }

  #tell(status, parts) {
    const code = status === null ? [] : [h("b", { class: "tag code", "data-state": status < 400 ? "ready" : "wrong" }, String(status)), " "];
    this.status.replaceChildren(...code, parts.filter(Boolean).join(" · "));
  }

  async #show(answer, told, began) {
    const type = (answer.headers.get("content-type") ?? "").split(";")[0];
    if (type === "text/event-stream") return this.#stream(answer, told, began);
    const blob = await answer.blob();
    told(bytes(blob.size));
    if (/^image\/(png|jpeg|gif|webp|avif|bmp)$/.test(type)) {
      this.output.replaceChildren(h("img", { src: URL.createObjectURL(blob), alt: "the answer" }));
    } else if (/^(audio|video)\//.test(type)) {
      this.output.replaceChildren(h(type.slice(0, 5), { src: URL.createObjectURL(blob), controls: true }));
    } else if (type === "application/json" || type.startsWith("text/")) {
      this.output.replaceChildren(h("pre", {}, shownJson(await blob.text(), type)));
    } else {
      const head = await blob.slice(0, 4096).arrayBuffer();
      const text = new TextDecoder().decode(head);
      this.output.replaceChildren(
        h("pre", {}, /[\u0000-\u0008\u000e-\u001f\ufffd]/.test(text) ? hex(new Uint8Array(head).subarray(0, 512)) : text),
        h("a", { class: "quiet", href: URL.createObjectURL(blob), download: `${this.name}.bin` }, "Save"));
    }
  }

  async #stream(answer, told, began) {
    const parts = h("ol", { class: "parts" });
    const joined = h("p", { class: "joined" });
    this.output.replaceChildren(joined, parts);
    let number = 0;
    let isText = true;
    for await (const [kind, data] of events(answer)) {
      number += 1;
      const at = span((performance.now() - began) / 1000);
      let value = data;
      try {
        value = JSON.parse(data);
      } catch {
        // shown as it is
      }
      if (kind === "error") isText = false;
      isText &&= typeof value === "string";
      if (isText) joined.append(value);
      else joined.hidden = true;
      if (number <= SHOWN_PARTS) {
        parts.append(h("li", { "data-kind": kind }, h("time", {}, at), h("span", {}, kind === "error" ? (value.error?.message ?? data) : typeof value === "string" ? JSON.stringify(value) : data)));
        this.output.scrollTop = this.output.scrollHeight;
      }
      told(`${number} ${number === 1 ? "part" : "parts"} so far`);
    }
    told(`${number} ${number === 1 ? "part" : "parts"}`);
  }

  async #copy() {
    try {
      const { address, type, body } = this.#request();
      const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
      const data = typeof body === "string" ? `--data-raw ${quoted(body)}` : `--data-binary ${quoted(`@${body.name}`)}`;
      const key = hasKey() ? ' -H "X-API-Key: $KEY"' : "";
      const command = `curl -N ${quoted(new URL(address, document.baseURI).href)} -H 'Content-Type: ${type}'${key} ${data}`;
      if (navigator.clipboard) {
        await navigator.clipboard.writeText(command);
        say(this.copy, "Copied");
      } else {
        this.command.replaceChildren(h("p", { class: "quiet-text" }, "Over plain HTTP a browser lets no page copy; this is the command:"), h("pre", {}, command));
        this.command.hidden = false;
      }
    } catch (error) {
      say(this.wrong, error.message);
    }
    setTimeout(() => say(this.copy, "Copy as curl"), 1500);
  }
}

function shownJson(text, type) {
  if (text.length > SHOWN_CHARS) return `${text.slice(0, SHOWN_CHARS)}\n… ${bytes(text.length)} in all`;
  if (type !== "application/json") return text;
  try {
    return pretty(parse(text));
  } catch {
    return text;
  }
}

function hex(data) {
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    lines.push([...data.subarray(at, at + 16)].map((byte) => byte.toString(16).padStart(2, "0")).join(" "));
  }
  return lines.join("\n");
}
