// SPDX-License-Identifier: Apache-2.0
// Shows what a model answers: JSON, pictures, sound, bytes, streams as they come, and errors in words.

import { h } from "./dom.js";
import { bytes, span } from "./numbers.js";
import { parse, pretty } from "./schema.js";
import { events } from "./server.js";

const SHOWN_CHARS = 100_000;
const SHOWN_PARTS = 500;

/** Shows an answer; `onProgress` gets what is known of its size as it grows. `name` is that of a saved file. */
export async function showAnswer(output, answer, onProgress, name) {
  const began = performance.now();
  const type = (answer.headers.get("content-type") ?? "").split(";")[0];
  if (type === "text/event-stream") return showStream(output, answer, onProgress, began);
  const blob = await answer.blob();
  onProgress(bytes(blob.size));
  if (/^image\/(png|jpeg|gif|webp|avif|bmp)$/.test(type)) {
    output.replaceChildren(h("img", { src: URL.createObjectURL(blob), alt: "the answer" }));
  } else if (/^(audio|video)\//.test(type)) {
    output.replaceChildren(h(type.slice(0, 5), { src: URL.createObjectURL(blob), controls: true }));
  } else if (type === "application/json" || type.startsWith("text/")) {
    const text = await blob.text();
    const message = answer.ok ? null : messageOf(text);
    output.replaceChildren(...(message ? [h("p", { class: "wrong" }, message)] : []), h("pre", {}, shownJson(text, type)));
  } else {
    const head = await blob.slice(0, 4096).arrayBuffer();
    const text = new TextDecoder().decode(head);
    output.replaceChildren(
      h("pre", {}, /[\u0000-\u0008\u000e-\u001f\ufffd]/.test(text) ? hex(new Uint8Array(head).subarray(0, 512)) : text),
      h("a", { class: "quiet", href: URL.createObjectURL(blob), download: `${name}.bin` }, "Save"));
  }
}

/** The sentence in an error; null if there is none. */
export function messageOf(text) {
  try {
    const { error } = JSON.parse(text);
    return String(error.message ?? error);
  } catch {
    return null;
  }
}

/** How many parts of a stream came. */
export const parts = (number) => `${number} ${number === 1 ? "part" : "parts"}`;

async function showStream(output, answer, onProgress, began) {
  const list = h("ol", { class: "parts" });
  const joined = h("p", { class: "joined" });
  output.replaceChildren(joined, list);
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
      list.append(h("li", { "data-kind": kind }, h("time", {}, at), h("span", {}, kind === "error" ? (messageOf(data) ?? data) : typeof value === "string" ? JSON.stringify(value) : data)));
      output.scrollTop = output.scrollHeight;
    }
    onProgress(`${parts(number)} so far`);
  }
  onProgress(parts(number));
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
