// SPDX-License-Identifier: Apache-2.0
// Makes a form of what /openapi.json says a request looks like, and an example to begin with.

import { h } from "./dom.js";

const DEPTH = 6;

/** Whether a schema is that of a file: it comes with a form as it is, and in JSON as base64. */
export const isBinary = (schema) => schema.type === "string" && (schema.contentEncoding === "base64" || schema.format === "binary");

export function follow(document, schema, depth = 0) {
  if (!schema?.$ref || depth > DEPTH) return schema ?? {};
  let found = document;
  for (const step of schema.$ref.replace(/^#\//, "").split("/")) found = found?.[step.replace(/~1/g, "/").replace(/~0/g, "~")];
  return follow(document, { ...found, ...(schema.description ? { description: schema.description } : {}) }, depth + 1);
}

/** Whether a schema allows anything: of the items of an array of NumPy, which are mostly numbers. */
const isOpen = (schema) => Object.keys(schema ?? {}).length === 0;

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
      return Array.from({ length: Math.max(schema.minItems ?? 1, 1) }, () => (isOpen(schema.items) ? 0 : example(document, schema.items, depth + 1)));
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

/** Whether one value of a form holds it: no list and no object. */
export function isSimple(document, given) {
  const { type, enum: choices } = plain(document, follow(document, given));
  return choices !== undefined || ["integer", "number", "string", "boolean"].includes(type);
}

/**
 * A form for one value. `read` returns it, or undefined if nothing was filled in. `place` tells apart what may have equal
 * names; `takesFiles` whether files may be chosen.
 */
export function field(document, given, name, { isRequired = false, value, place = "", takesFiles = false } = {}) {
  const schema = plain(document, follow(document, given));
  const id = `try-${place}${name}`; // in an object no two names are equal, in whatever script
  const items = schema.type === "array" ? plain(document, follow(document, schema.items ?? {})) : {};
  if (takesFiles && (isBinary(schema) || isBinary(items))) return fileField(schema, name, id, isRequired, isBinary(items));
  const initial = value ?? schema.default ?? (isRequired ? example(document, schema) : undefined);
  const shown = initial === undefined || initial === null ? "" : initial;
  let input;
  let read;
  const choices = choicesOf(schema, isRequired);
  if (choices) {
    input = h("select", { id }, isRequired ? null : h("option", { value: "" }, "–"), choices.map((one) => h("option", { value: JSON.stringify(one) }, String(one))));
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
  return { element: labelled(schema, name, id, isRequired, typeOf(document, schema), input), read, input };
}

/** The values to choose from, if they are few; a boolean that may be left out has two. */
function choicesOf(schema, isRequired) {
  if (schema.enum) return schema.enum;
  if (schema.const !== undefined) return [schema.const];
  return schema.type === "boolean" && !isRequired && typeof schema.default !== "boolean" ? [true, false] : null;
}

function labelled(schema, name, id, isRequired, type, input) {
  return h("div", { class: "field" },
    h("label", { for: id }, name, isRequired ? null : h("span", { class: "quiet-text" }, " optional"), h("span", { class: "type" }, type)),
    input, schema.description ? h("small", {}, schema.description) : null);
}

function fileField(schema, name, id, isRequired, isList) {
  const input = h("input", { id, type: "file", multiple: isList });
  const read = () => {
    const files = [...input.files];
    if (files.length) return isList ? files : files[0];
    if (isRequired) throw new Error(`${name}: choose a file`);
    return undefined;
  };
  return { element: labelled(schema, name, id, isRequired, isList ? "files" : "file", input), read, input };
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
