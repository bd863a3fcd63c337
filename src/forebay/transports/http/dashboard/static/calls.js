// SPDX-License-Identifier: Apache-2.0
// Lists the ways to call a model, and puts what a form holds into a request.

import { follow } from "./schema.js";

const CHAT = "/v1/chat/completions";
const MAX_EXAMPLE = 1000;
const UNTYPED = "INVALID"; // of a graph that does not say what it takes

const isFile = (value) => value instanceof File;

/** The calls of a model, the one to offer first in front: {path, method, query, schema, isRaw, takesForm, isChat, answers}. */
export function callsOf(document, name) {
  const paths = document.paths ?? {};
  const openai = Object.entries(paths).filter(([path, { post }]) => path.startsWith("/v1/") && post).map(([path, { post }]) => {
    const call = callOf(document, path, "POST", post);
    const schema = (call.schema.anyOf ?? [call.schema]).find((one) => one.properties?.model?.enum?.includes(name));
    if (!schema) return null;
    const properties = { ...schema.properties, model: { ...schema.properties.model, enum: [name] } };
    return { ...call, schema: { ...schema, properties }, isChat: path === CHAT, answers: path === CHAT ? "chat" : "json" };
  });
  const own = Object.entries(paths).filter(([path]) => `${decodeURIComponent(path)}/`.startsWith(`/models/${name}/`)).map(([path, { post, get }]) => {
    if (post) return callOf(document, path, "POST", post);
    return get?.parameters?.some(isSample) ? callOf(document, path, "GET", get) : null;
  });
  return [...openai, ...own].filter(Boolean);
}

const isSample = (one) => one.in === "query" && one.name === "sample" && one.explode === true;

function callOf(document, path, method, operation) {
  const content = operation.requestBody?.content ?? {};
  const parameters = operation.parameters ?? [];
  const sample = method === "GET" ? parameters.find(isSample).schema : content["application/json"]?.schema;
  const query = parameters.filter((one) => one.in === "query" && !isSample(one)).map((one) => ({ name: one.name, schema: follow(document, one.schema) }));
  const answers = operation.responses?.["200"]?.content ?? {};
  return {
    path, method, query, isRaw: !sample, schema: follow(document, sample),
    takesForm: "multipart/form-data" in content,
    answers: answers["application/json"] ? (answers["*/*"] ? "bytes" : "json") : answers["text/event-stream"] ? "stream" : "bytes",
  };
}

/** The call of a model that only the Open Inference Protocol describes, from what /v2/models/NAME says of it. */
export function inferCall({ name, inputs }) {
  const properties = Object.fromEntries(inputs.map((one) => [one.name, {
    type: "array",
    description: one.datatype === UNTYPED ? "of any type; numbers are sent as FP32, texts as BYTES" : `${one.datatype}, shape [${one.shape.join(", ")}]; -1 is any length`,
    ...zeros(one),
  }]));
  const wrap = (values) => ({ inputs: inputs.filter((one) => values[one.name] !== undefined).map((one) => tensor(one, values[one.name])) });
  return {
    path: `/v2/models/${encodeURIComponent(name)}/infer`, method: "POST", query: [], isRaw: false, takesForm: false, wrap, answers: "json",
    schema: { type: "object", properties, required: inputs.filter((one) => !one.optional).map((one) => one.name) },
  };
}

function tensor({ name, datatype }, value) {
  const shape = [];
  for (let level = value; Array.isArray(level); level = level[0]) shape.push(level.length);
  const data = [value].flat(Infinity);
  const meant = { string: "BYTES", boolean: "BOOL" }[typeof data[0]] ?? "FP32";
  return { name, datatype: datatype === UNTYPED ? meant : datatype, shape, data };
}

function zeros({ datatype, shape }) {
  const lengths = (datatype === UNTYPED && !shape.length ? [1] : shape).map((length) => (length < 0 ? 1 : length));
  if (lengths.reduce((product, length) => product * length, 1) > MAX_EXAMPLE) return {};
  const one = datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0;
  return { examples: [lengths.reduceRight((inner, length) => Array.from({ length }, () => inner), one)] };
}

/** The fields of a form or a query as [name, text or file]; lists that hold no files are JSON, which the server reads there. */
export function partsOf(values) {
  return Object.entries(values).flatMap(([name, value]) => {
    if (Array.isArray(value) && value.some(isFile)) return value.map((one) => [name, one]);
    return [[name, typeof value === "string" || isFile(value) ? value : JSON.stringify(value)]];
  });
}

/** The body of a sample: JSON, or a form if it holds files. */
export function bodyOf(value) {
  if (isFile(value)) return { form: [["file", value]] };
  const holdsFiles = value !== null && typeof value === "object" && Object.values(value).flat().some(isFile);
  return holdsFiles ? { form: partsOf(value) } : { json: JSON.stringify(value) };
}
