// SPDX-License-Identifier: Apache-2.0
// The panel that calls a model: a form, JSON, a file or a conversation; the answer; the same call as code.

import { showAnswer } from "./answer.js";
import { bodyOf, callsOf, inferCall, partsOf } from "./calls.js";
import { Chat } from "./chat.js";
import { choice, h, say } from "./dom.js";
import { span } from "./numbers.js";
import { example, field, parse, pretty } from "./schema.js";
import { ask, hasKey, read } from "./server.js";
import { LANGUAGES, snippet } from "./snippets.js";

export class TryIt {
  constructor(host) {
    this.host = host;
    this.models = [];
    this.document = null;
    this.way = "form";
    this.select = h("select", { id: "asked-model", onchange: () => this.choose(this.select.value) });
    this.paths = h("select", { id: "asked-path", onchange: () => this.#build(this.calls[this.paths.selectedIndex]) });
    this.ways = h("div", { class: "choice", role: "group", "aria-label": "How the request is written" });
    this.fields = h("div", { class: "fields" });
    this.send = h("button", { type: "submit", class: "primary" }, "Send");
    this.stop = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.control?.abort() }, "Stop");
    this.renew = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.#build(this.call) }, "New conversation");
    this.copies = LANGUAGES.map(([language, label]) => h("button", { type: "button", class: "quiet", "data-language": language, onclick: () => this.#copy(language) }, label));
    this.wrong = h("p", { class: "wrong", role: "alert" });
    this.code = h("div", { class: "output", tabindex: 0, role: "region", "aria-label": "The request as code", hidden: true });
    this.status = h("p", { class: "status", role: "status" });
    this.output = h("div", { class: "output", tabindex: 0, role: "region", "aria-label": "The answer" });
    const form = h("form", { onsubmit: (event) => { event.preventDefault(); this.#run(); }, oninput: () => { this.code.hidden = true; } },
      h("div", { class: "row" }, h("label", { class: "hidden", for: "asked-model" }, "Model"), this.select, h("label", { class: "hidden", for: "asked-path" }, "Path"), this.paths, this.ways),
      this.fields, this.wrong, h("div", { class: "row" }, this.send, this.stop, this.renew, h("span", { class: "quiet-text" }, "Copy as"), ...this.copies), this.code);
    // A browser can point at a wrong value only where it is seen.
    form.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
    host.replaceChildren(h("header", {}, h("h2", { id: "asked-title" }, "Try it")), form, this.status, this.output);
    choice(this.ways, [["form", "Form"], ["json", "JSON"]], this.way, (way) => this.#switch(way));
  }

  /** Takes the models; what they take is read when it is first needed, and again if it may differ. Begins with `preferred`. */
  async learn(models, mayDiffer, preferred) {
    const names = models.map((one) => one.name);
    const isSame = names.join("\n") === this.models.map((one) => one.name).join("\n");
    this.models = models;
    if (isSame && !mayDiffer) return;
    this.document = null;
    const chosen = [this.name, preferred, names[0]].find((name) => names.includes(name));
    if (!isSame) this.select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    this.host.hidden = chosen === undefined;
    if (chosen !== undefined) await this.choose(chosen);
  }

  async choose(name) {
    this.name = name;
    this.select.value = name;
    let why = "";
    try {
      this.document ??= await (await read("openapi.json")).json();
    } catch (problem) {
      why = `The server's description of its models could not be read: ${problem.message}`;
      this.document = { paths: {} };
    }
    const { document } = this;
    const calls = callsOf(document, name);
    if (!calls.length) calls.push(await this.#undescribed(name));
    if (this.name !== name || this.document !== document) return; // another one was chosen meanwhile
    this.#offer(calls);
    if (why) say(this.wrong, why);
  }

  /** The call of a model that the document leaves out: in tensors if it has any, else any JSON. */
  async #undescribed(name) {
    const path = encodeURIComponent(name);
    const model = this.models.find((one) => one.name === name);
    if (model?.ready) { // asking for another one would load it
      try {
        const told = await (await read(`v2/models/${path}`)).json();
        if (told.inputs?.length) return inferCall(told);
      } catch {
        // it has none
      }
    }
    return { path: `/models/${path}`, method: "POST", query: [], isRaw: false, schema: {}, takesForm: false, answers: "bytes" };
  }

  /** Makes the form anew where the calls are others than before; what was filled in stays. */
  #offer(calls) {
    const taken = JSON.stringify([calls, this.document.components]);
    if (this.name === this.shown && taken === this.taken) return;
    const before = this.name === this.shown ? calls.find((one) => one.path === this.call.path) : undefined;
    const value = before && this.#filledIn();
    this.shown = this.name;
    this.taken = taken;
    this.calls = calls;
    this.paths.replaceChildren(...calls.map((one) => h("option", {}, `${one.method} ${one.path}${one.isChat ? " (chat)" : ""}`)));
    this.paths.hidden = calls.length < 2;
    const call = before ?? calls[0];
    this.paths.selectedIndex = calls.indexOf(call);
    this.#build(call, value);
  }

  /** What is filled in; undefined if it is no JSON, and the form begins with an example. */
  #filledIn() {
    try {
      return this.call.isRaw || this.call.isChat ? undefined : this.readValue();
    } catch {
      return undefined;
    }
  }

  #build(call, value) {
    const { document } = this;
    const { schema } = call;
    this.control?.abort();
    this.call = call;
    this.chat = call.isChat ? new Chat(document, call, this.name) : null;
    this.ways.hidden = call.isRaw || call.isChat === true || call.wrap !== undefined;
    this.renew.hidden = !this.chat;
    this.code.hidden = true;
    this.output.hidden = this.chat !== null;
    this.output.replaceChildren(h("p", { class: "empty" }, "The answer appears here."));
    say(this.wrong, "");
    say(this.status, "");
    this.host.toggleAttribute("data-chat", this.chat !== null);
    this.query = call.query.map((one) => ({ name: one.name, ...field(document, one.schema, one.name, { place: "?" }) }));
    this.fields.replaceChildren(...this.query.map((one) => one.element), ...(this.chat?.elements ?? this.#sample(call, schema, value)));
  }

  /** The fields of a sample; sets how they are read. */
  #sample(call, schema, value) {
    const { document } = this;
    if (call.isRaw) {
      const file = h("input", { type: "file", id: "asked-file" });
      const text = h("textarea", { id: "asked-text", rows: 3, spellcheck: "false", placeholder: "or type the bytes as text" });
      this.readValue = () => file.files[0] ?? text.value;
      return [labelled("asked-file", "Body", "a file", file), h("div", { class: "field" }, h("label", { class: "hidden", for: "asked-text" }, "Body as text"), text)];
    }
    const { properties, required = [] } = schema;
    if (!call.wrap && (this.way === "json" || (schema.type === "object" && !properties))) {
      const text = h("textarea", { id: "asked-json", class: "code", rows: 8, spellcheck: "false", value: pretty(value ?? example(document, schema)) });
      this.readValue = () => parse(text.value);
      return [labelled("asked-json", "Body", "JSON", text)];
    }
    const more = { takesFiles: call.takesForm };
    if (!properties) {
      const one = field(document, schema, schema.title ?? "sample", { ...more, isRequired: true, value });
      this.readValue = () => one.read();
      return [one.element];
    }
    const [first, then] = [true, false].map((wanted) => Object.keys(properties).filter((name) => required.includes(name) === wanted));
    const fields = [...first, ...then].map((name) => ({ name, ...field(document, properties[name], name, { ...more, isRequired: required.includes(name), value: value?.[name] }) }));
    this.readValue = () => Object.fromEntries(fields.map((one) => [one.name, one.read()]).filter(([, value]) => value !== undefined));
    return fields.map((one) => one.element);
  }

  #switch(way) {
    this.way = way;
    if (this.call && !this.ways.hidden) this.#build(this.call, this.#filledIn());
  }

  /** The request as it is filled in. A conversation may be asked for the last one again. */
  #request(mayRepeat) {
    const { call } = this;
    const url = new URL(call.path.slice(1), document.baseURI);
    for (const one of this.query) {
      const value = one.read();
      if (value !== undefined && value !== "") url.searchParams.set(one.name, typeof value === "string" ? value : JSON.stringify(value));
    }
    const needsKey = hasKey() || this.document.components?.securitySchemes !== undefined;
    const request = { method: call.method, url, body: null, answers: call.answers, needsKey };
    if (this.chat) return { ...request, body: { json: JSON.stringify(this.chat.sample(mayRepeat)) } };
    const value = this.readValue();
    if (call.isRaw) return { ...request, body: { raw: value } };
    if (call.method === "POST") return { ...request, body: bodyOf(call.wrap ? call.wrap(value) : value) };
    for (const [name, text] of partsOf(call.schema.properties ? value : { sample: value })) url.searchParams.append(name, text);
    return request;
  }

  async #run() {
    if (this.chat && !this.stop.hidden) return; // the answer before is still coming
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
    const { chat } = this;
    this.stop.hidden = false;
    this.output.replaceChildren();
    chat?.begin();
    say(this.status, "asking …");
    const began = performance.now();
    const passed = () => span((performance.now() - began) / 1000);
    try {
      const answer = await ask(request.url.href, { ...sent(request), signal: control.signal });
      const id = answer.headers.get("x-request-id");
      const onProgress = (more) => this.#tell(answer.status, [passed(), more, id ? `request ${id}` : ""]);
      onProgress("");
      await (chat ? chat.take(answer, onProgress) : showAnswer(this.output, answer, onProgress, this.name));
    } catch (error) {
      const isStopped = error.name === "AbortError";
      chat?.fail(isStopped ? "" : error.message);
      if (this.control === control && (isStopped || !chat)) this.#tell(null, [isStopped ? `stopped after ${passed()}` : `no answer: ${error.message}`]);
    } finally {
      if (this.control === control) this.stop.hidden = true;
    }
  }

  #tell(status, facts) {
    const code = status === null ? [] : [h("b", { class: "tag code", "data-state": status < 400 ? "ready" : "wrong" }, String(status)), " "];
    this.status.replaceChildren(...code, facts.filter(Boolean).join(" · "));
  }

  /** Shows the request as code, and copies it where the browser lets the page. */
  async #copy(language) {
    say(this.wrong, "");
    try {
      const request = this.#request(true);
      const code = snippet(language, { ...request, url: request.url.href });
      const hint = request.needsKey ? " Set FOREBAY_KEY to your API key." : "";
      const told = h("p", { class: "quiet-text" }, `Select the code to copy it.${hint}`); // over plain HTTP no page may copy
      this.code.replaceChildren(told, h("pre", {}, code));
      this.code.hidden = false;
      await navigator.clipboard?.writeText(code).then(() => say(told, `Copied.${hint}`), () => {});
    } catch (error) {
      say(this.wrong, error.message);
    }
  }
}

const labelled = (id, label, type, input) => h("div", { class: "field" }, h("label", { for: id }, label, h("span", { class: "type" }, type)), input);

/** A request as the browser takes it. */
function sent({ method, body }) {
  if (body === null) return { method };
  if (body.json !== undefined) return { method, body: body.json, headers: { "Content-Type": "application/json" } };
  if (body.raw !== undefined) return { method, body: body.raw, headers: { "Content-Type": "application/octet-stream" } };
  const form = new FormData();
  for (const [name, value] of body.form) form.append(name, value);
  return { method, body: form };
}
