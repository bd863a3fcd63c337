// SPDX-License-Identifier: Apache-2.0
// A conversation with a model that speaks OpenAI's protocol: its answers appear as they come.

import { messageOf, parts } from "./answer.js";
import { h } from "./dom.js";
import { span } from "./numbers.js";
import { field, isSimple } from "./schema.js";
import { events } from "./server.js";

const NO_SETTINGS = new Set(["model", "messages", "stream", "n", "user", "store", "safety_identifier", "prompt_cache_key"]);

export class Chat {
  constructor(document, call, name) {
    this.name = name;
    this.model = call.schema.properties.model.enum[0];
    this.messages = [];
    this.talk = h("div", { class: "talk", role: "log", tabindex: 0, "aria-label": "Conversation" }, h("p", { class: "empty" }, "The conversation appears here."));
    this.text = h("textarea", { id: "asked-message", rows: 2, placeholder: "Message. Enter sends it, Shift+Enter begins a new line.", onkeydown: (event) => this.#key(event) });
    const { properties, required = [] } = call.schema;
    const system = { ...field(document, { type: "string", description: "Sent in front of the conversation" }, "System message", { place: "chat-" }), name: "system" };
    this.settings = Object.entries(properties)
      .filter(([name, schema]) => !NO_SETTINGS.has(name) && (required.includes(name) || isSimple(document, schema)))
      .map(([name, schema]) => ({ name, ...field(document, schema, name, { isRequired: required.includes(name), place: "chat-" }) }));
    this.system = system;
    const [needed, others] = [true, false].map((wanted) => this.settings.filter((one) => required.includes(one.name) === wanted).map((one) => one.element));
    this.elements = [
      this.talk, ...needed,
      h("div", { class: "field" }, h("label", { class: "hidden", for: "asked-message" }, "Message"), this.text),
      h("details", {}, h("summary", {}, "Settings"), h("div", { class: "fields" }, system.element, ...others)),
    ];
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.text.form.requestSubmit();
  }

  /** The request for the next answer; without a message the one before again, if that may be. */
  sample(mayRepeat = false) {
    const typed = this.text.value.trim();
    const text = typed || (mayRepeat && this.asked);
    if (!text) throw new Error("Write a message first.");
    const before = typed ? this.messages : this.before;
    const system = this.system.read();
    const settings = Object.fromEntries(this.settings.map((one) => [one.name, one.read()]).filter(([, value]) => value !== undefined));
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...before, { role: "user", content: text }];
    return { model: this.model, messages, stream: true, ...settings };
  }

  /** Moves the message into the conversation, where its answer is awaited. */
  begin() {
    this.asked = this.text.value.trim();
    this.before = [...this.messages];
    this.text.value = "";
    this.said = h("p");
    if (!this.messages.length) this.talk.replaceChildren();
    this.talk.querySelector(".wrong")?.remove();
    this.turn = [h("div", { "data-role": "user" }, h("b", {}, "You"), h("p", {}, this.asked)), h("div", { "data-role": "assistant" }, h("b", {}, this.name), this.said)];
    this.#append(...this.turn);
  }

  /** Shows an answer as it comes, and keeps what came of it if it is stopped. */
  async take(answer, onProgress) {
    const began = performance.now();
    let number = 0;
    let first = 0;
    try {
      if (!answer.ok) {
        const text = await answer.text();
        throw new Error(messageOf(text) ?? (text.slice(0, 300) || `status ${answer.status}`));
      }
      for await (const [, data] of events(answer)) {
        if (data === "[DONE]") break;
        const value = JSON.parse(data);
        if (value.error) throw new Error(messageOf(data));
        const delta = value.choices?.[0]?.delta ?? {};
        const text = (delta.content ?? "") + (delta.tool_calls ? `${JSON.stringify(delta.tool_calls)}\n` : "");
        if (!text) continue;
        number += 1;
        first ||= performance.now() - began;
        this.said.append(text);
        this.talk.scrollTop = this.talk.scrollHeight;
        onProgress(`${parts(number)}, the first after ${span(first / 1000)}`);
      }
      onProgress(number ? `${parts(number)}, the first after ${span(first / 1000)}` : "an empty answer");
    } finally {
      if (this.said.textContent) this.messages.push({ role: "user", content: this.asked }, { role: "assistant", content: this.said.textContent });
    }
  }

  /** Says why there is no answer, or not all of it; a message without any answer goes back to be sent again. */
  fail(message) {
    if (!this.said.textContent) {
      for (const one of this.turn) one.remove();
      this.text.value ||= this.asked;
    }
    if (message) this.#append(h("p", { class: "wrong", role: "alert" }, message));
  }

  #append(...items) {
    this.talk.append(...items);
    this.talk.scrollTop = this.talk.scrollHeight;
  }
}
