// SPDX-License-Identifier: Apache-2.0
// Numbers as people read them, with their units.

const THIN = "\u202f";
export const NONE = "–";

export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${short(value / 1e9)}${THIN}G`;
  if (size >= 1e6) return `${short(value / 1e6)}${THIN}M`;
  if (size >= 1e4) return `${short(value / 1e3)}${THIN}k`;
  return short(value);
}

/** A number with its noun, such as "1 version". */
export function several(value, noun, nouns = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : nouns}`;
}

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.01) return "<0.01";
  if (size < 1) return String(Number(value.toFixed(2)));
  if (size < 10) return String(Number(value.toFixed(1)));
  return Math.round(value).toLocaleString("en-US");
}

/** Seconds as [number, unit]. */
export function time(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return [NONE, ""];
  if (seconds < 0.001) return [precise(seconds * 1e6), "µs"];
  if (seconds < 1) return [precise(seconds * 1e3), "ms"];
  return [precise(seconds), "s"];
}

export const span = (seconds) => time(seconds).join(THIN).trim();

function precise(value) {
  return value < 10 ? String(Number(value.toFixed(1))) : String(Math.round(value));
}

export const percent = (share) => (share === null || Number.isNaN(share) ? NONE : `${Math.round(100 * share)}${THIN}%`);

export function bytes(size) {
  if (size < 1024) return `${size}${THIN}B`;
  if (size < 1024 * 1024) return `${short(size / 1024)}${THIN}KB`;
  return `${short(size / 1024 / 1024)}${THIN}MB`;
}

/** How long ago a moment was, in seconds. */
export function ago(seconds) {
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.round(seconds)}${THIN}s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)}${THIN}min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)}${THIN}h ago`;
  return `${Math.round(seconds / 86400)}${THIN}d ago`;
}

/** Round values of an axis from 0: the top, and what is labelled on the way. */
export function ticks(highest, wanted = 3) {
  if (!(highest > 0)) return { top: 1, at: [0, 1] };
  const raw = highest / wanted;
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * base).find((candidate) => candidate >= raw * 0.999);
  const top = Math.ceil(highest / step - 1e-9) * step;
  const at = [];
  for (let value = 0; value <= top + step / 2; value += step) at.push(value);
  return { top, at };
}
