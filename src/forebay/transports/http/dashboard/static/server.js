// SPDX-License-Identifier: Apache-2.0
// Asks the server. Addresses are relative to where the page lies, so that a prefix of a proxy stays in front of them.

import { kept } from "./dom.js";

const SILENCE_MS = 6000;
const PATIENCE_MS = [500, 1000, 2000, 4000, 8000];
const HIDDEN_MS = 60_000;

export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = kept.get("sessionStorage", "key") ?? "";
let onKeyNeeded = () => Promise.resolve();

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value;
  kept.set("sessionStorage", "key", value || null);
}

export function whenKeyIsNeeded(ask) {
  onKeyNeeded = ask;
}

/** The text whose characters are the bytes of another one: browsers put no others into a header. */
const utf8 = (text) => String.fromCharCode(...new TextEncoder().encode(text));

/** Headers of every request: other sites' pages cannot add them without being asked. */
export function headers(more = {}) {
  return { "X-Forebay-Page": "ui", ...(key ? { "X-API-Key": utf8(key) } : {}), ...more };
}

/** Asks; a missing key is asked for, and then once more. */
export async function ask(path, options = {}) {
  const used = key;
  const answer = await fetch(path, { cache: "no-store", ...options, headers: headers(options.headers) });
  if (answer.status === 401) {
    if (used === key) await onKeyNeeded(used); // else somebody has asked meanwhile
    return ask(path, options);
  }
  return answer;
}

export async function read(path) {
  const answer = await ask(path);
  if (!answer.ok) throw new Problem(answer.status, await reason(answer));
  return answer;
}

export async function reason(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `status ${answer.status}`;
  }
}

/** Yields the events of a stream as [kind, data]; tells of every piece of them that comes. */
export async function* events(answer, onPiece = () => {}) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    onPiece();
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      let kind = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) kind = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (data.length) yield [kind, data.join("\n")];
    }
  }
}

/** Listens to what the server does, and again whenever the connection is lost; not while nobody looks at the page. */
export function listen(onEvent, onState) {
  let attempt = 0;
  let stop = null;
  let hidden = null;

  async function once() {
    const control = new AbortController();
    stop = () => control.abort();
    let watchdog;
    const hear = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => control.abort(), SILENCE_MS);
    };
    hear();
    try {
      const answer = await ask("ui/events", { signal: control.signal });
      hear(); // a key may have been asked for
      if (!answer.ok) throw new Problem(answer.status, await reason(answer));
      for await (const [kind, data] of events(answer, hear)) {
        attempt = 0;
        onState("live");
        onEvent(kind, JSON.parse(data));
      }
      return "the server ended the stream";
    } finally {
      clearTimeout(watchdog);
      stop = null;
    }
  }

  async function forever() {
    while (true) {
      if (hidden === "paused") {
        onState("paused");
        await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
        continue;
      }
      let why = "";
      let refused = "";
      try {
        why = await once();
      } catch (problem) {
        refused = problem instanceof Problem ? problem.message : "";
        why = refused || "no connection";
      }
      if (hidden === "paused") continue;
      const wait = PATIENCE_MS[Math.min(attempt, PATIENCE_MS.length - 1)];
      attempt += 1;
      onState("lost", `${why}; retrying`, refused);
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  function look() {
    clearTimeout(hidden);
    hidden = null;
    if (document.hidden) {
      hidden = setTimeout(() => {
        hidden = "paused";
        stop?.();
      }, HIDDEN_MS);
    }
  }

  document.addEventListener("visibilitychange", look);
  look(); // a tab that is opened in the background is hidden from the start
  forever();
}
