// SPDX-License-Identifier: Apache-2.0
// Makes a form of what /openapi.json says a request looks like, and an example to begin with.

import { h } from "./dom.js";

const DEPTH = 6;

/** What a model takes: {schema, isRaw, isArray, query, isStream}; null if nothing is known of it. */
export function inputOf(document, name) {
  const wanted = Object.entries(document.paths ?? {}).find(([path]) => path.startsWith("/models/") && decodeURIComponent(path.slice(8)) === name);
  const operation = wanted?.[1]?.post;
  if (!operation) return null;
  const content = operation.requestBody?.content ?? {};
  const json = content["application/json"]?.schema;
  const query = (operation.parameters ?? []).filter((one) => one.in === "query").map((one) => ({ name: one.name, schema: follow(document, one.schema) }));
  if (!json) return { isRaw: true, type: Object.keys(content)[0] ?? "application/octet-stream", query };
  return { isRaw: false, schema: follow(document, json), query, document };
}

export function follow(document, schema, depth = 0) {
  if (!schema?.$ref || depth > DEPTH) return schema ?? {};
  let found = document;
  for (const step of schema.$ref.replace(/^#\//, "").split("/")) found = found?.[step.replace(/~1/g, "/").replace(/~0/g, "~")];
  return follow(document, { ...found, ...(schema.description ? { description: schema.description } : {}) }, depth + 1);
}

/** A value that fits. */
export function example(document, given, depth = 0) {
  const schema = follow(document, given);
  if (depth > DEPTH) return null;
  if (schema.examples?.length) return schema.examples[0];
  for (const word of ["example", "default", "const"]) if (schema[word] !== undefined) return schema[word];
  if (schema.enum) return schema.enum[0];
  const one = (schema.anyOf ?? schema.oneOf)?.find((choice) => choice.type !== "null");
  if (one) return example(document, one, depth + 1);
  if (schema.allOf) return example(document, Object.assign({}, ...schema.allOf.map((part) => follow(document, part))), depth + 1);
  switch (Array.isArray(schema.type) ? schema.type.find((type) => type !== "null") : schema.type) {
    case "object": {
      const value = {};
      for (const [name, part] of Object.entries(schema.properties ?? {})) {
        if ((schema.required ?? []).includes(name)) value[name] = example(document, part, depth + 1);
      }
      return value;
    }
    case "array": {
      if (schema.prefixItems) return schema.prefixItems.map((part) => example(document, part, depth + 1));
      return Array.from({ length: Math.max(schema.minItems ?? 1, 1) }, () => example(document, schema.items ?? {}, depth + 1));
    }
    case "integer":
    case "number":
      return schema.minimum ?? (schema.exclusiveMinimum === undefined ? 1 : schema.exclusiveMinimum + 1);
    case "boolean":
      return true;
    case "null":
      return null;
    case "string":
      return schema.contentEncoding === "base64" ? "aGVsbG8=" : "text";
    default:
      return "text";
  }
}

function plain(document, schema) {
  const choices = (schema.anyOf ?? schema.oneOf)?.map((one) => follow(document, one));
  if (!choices) return { ...schema, type: Array.isArray(schema.type) ? schema.type.find((type) => type !== "null") : schema.type };
  const rest = choices.filter((one) => one.type !== "null");
  return rest.length === 1 ? { ...rest[0], description: schema.description ?? rest[0].description, default: schema.default } : { type: "any" };
}

/** A form for one value. `read` returns it, or undefined if nothing was filled in. `place` tells apart what may have equal names. */
export function field(document, given, name, isRequired, value, place = "") {
  const schema = plain(document, follow(document, given));
  const id = `try-${place}${name}`; // in an object no two names are equal, in whatever script
  const initial = value ?? schema.default ?? (isRequired ? example(document, schema) : undefined);
  const shown = initial === undefined || initial === null ? "" : initial;
  let input;
  let read;
  if (schema.enum) {
    input = h("select", { id }, isRequired ? null : h("option", { value: "" }, "–"), schema.enum.map((one) => h("option", { value: JSON.stringify(one) }, String(one))));
    input.value = shown === "" ? input.options[0].value : JSON.stringify(shown);
    read = () => (input.value === "" ? undefined : JSON.parse(input.value));
  } else if (schema.type === "boolean") {
    input = h("input", { id, type: "checkbox" });
    input.checked = shown === true;
    read = () => input.checked;
  } else if (schema.type === "integer" || schema.type === "number") {
    input = h("input", { id, type: "number", step: schema.type === "integer" ? 1 : "any", min: schema.minimum, max: schema.maximum, value: shown === "" ? "" : JSON.stringify(shown), inputmode: "decimal" });
    read = () => (input.value === "" ? undefined : exact(Number(input.value), input.value));
  } else if (schema.type === "string") {
    input = h("input", { id, type: "text", value: typeof shown === "string" ? shown : JSON.stringify(shown), spellcheck: "false", maxlength: schema.maxLength });
    read = () => (input.value === "" && !isRequired ? undefined : input.value);
  } else {
    input = h("textarea", { id, rows: 2, spellcheck: "false", class: "code", value: shown === "" ? "" : pretty(shown) });
    read = () => {
      if (input.value.trim() === "" && !isRequired) return undefined;
      try {
        return parse(input.value);
      } catch (error) {
        throw new Error(`${name}: ${error.message}`);
      }
    };
  }
  const told = schema.description ? h("small", {}, schema.description) : null;
  const element = h("div", { class: "field" },
    h("label", { for: id }, name, isRequired ? null : h("span", { class: "quiet-text" }, " optional"), h("span", { class: "type" }, typeOf(document, schema))),
    input, told);
  return { element, read, input };
}

function typeOf(document, schema) {
  if (schema.enum) return "";
  if (schema.type === "array") return `[${typeOf(document, plain(document, follow(document, schema.items ?? {}))) || "…"}]`;
  return { integer: "whole number", string: schema.contentEncoding === "base64" ? "base64" : "text", any: "JSON", object: "JSON object", boolean: "" }[schema.type] ?? schema.type ?? "JSON";
}

/** Reads JSON; it can be written again with all digits of its whole numbers, of which JavaScript knows about sixteen. */
export const parse = (text) => JSON.parse(text, (_name, value, context) => exact(value, context?.source));

function exact(value, source) {
  const isLong = Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?[1-9][0-9]*$/.test(source);
  return isLong && JSON.rawJSON ? JSON.rawJSON(source) : value; // older browsers have no word for it
}

/** JSON for people: short lists stay on their line. */
export function pretty(value) {
  return JSON.stringify(value, null, 2).replace(/\[\s+([^[\]{}]{0,80}?)\s+\]/g, (_, inner) => `[${inner.replace(/\s*\n\s*/g, " ")}]`);
}
