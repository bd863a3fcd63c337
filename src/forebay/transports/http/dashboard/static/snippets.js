// SPDX-License-Identifier: Apache-2.0
// Writes a request as a program that sends it: with curl, in Python and in JavaScript. Knows neither page nor server.

/**
 * A request is {method, url, body, answers, needsKey}. `body` is null, {json: text}, {form: [[name, text or file]]} or
 * {raw: text or file}; of a file only its `name` is used. A key never gets into a program: it reads FOREBAY_KEY.
 */
export const LANGUAGES = [["curl", "curl"], ["python", "Python"], ["javascript", "JavaScript"]];

export function snippet(language, request) {
  return { curl, python, javascript }[language](request);
}

const isFile = (value) => typeof value === "object";
const type = (body) => (body?.json !== undefined ? "application/json" : body?.raw !== undefined ? "application/octet-stream" : null);
const text = (value) => JSON.stringify(value); // a string of JSON is one of Python and of JavaScript, too

function curl({ method, url, body, answers, needsKey }) {
  const quoted = (value) => `'${value.replaceAll("'", "'\\''")}'`;
  const path = (file) => `@"${file.name.replace(/["\\]/g, "\\$&")}"`; // as -F reads it
  const lines = [`curl -N ${quoted(url)}`];
  if (method === "POST" && body === null) lines[0] += " -X POST";
  if (needsKey) lines.push('-H "X-API-Key: $FOREBAY_KEY"');
  if (type(body)) lines.push(`-H 'Content-Type: ${type(body)}'`);
  if (body?.json !== undefined) lines.push(`--data-raw ${quoted(body.json)}`);
  if (body?.raw !== undefined) lines.push(isFile(body.raw) ? `--data-binary ${quoted(`@${body.raw.name}`)}` : `--data-raw ${quoted(body.raw)}`);
  for (const [name, value] of body?.form ?? []) {
    lines.push(isFile(value) ? `-F ${quoted(`${name}=${path(value)}`)}` : `--form-string ${quoted(`${name}=${value}`)}`);
  }
  if (answers === "bytes") lines.push("-o answer.bin");
  return lines.join(" \\\n  ");
}

function python({ method, url, body, answers, needsKey }) {
  const streams = answers === "stream" || answers === "chat";
  const imports = [answers === "chat" && "import json", needsKey && "import os"].filter(Boolean);
  const given = [`    ${text(method)},`, `    ${text(url)},`];
  const headers = [];
  if (needsKey) headers.push('"X-API-Key": os.environ["FOREBAY_KEY"]');
  if (body?.raw !== undefined) headers.push(`"Content-Type": ${text(type(body))}`);
  if (headers.length) given.push(`    headers={${headers.join(", ")}},`);
  if (body?.json !== undefined) given.push(`    json=${literal(JSON.parse(body.json, exact))},`);
  if (body?.raw !== undefined) given.push(`    content=${isFile(body.raw) ? `open(${text(body.raw.name)}, "rb").read()` : text(body.raw)},`);
  const [files, fields] = [true, false].map((wanted) => (body?.form ?? []).filter(([, value]) => isFile(value) === wanted));
  if (fields.length) given.push(`    data={${fields.map(([name, value]) => `${text(name)}: ${text(value)}`).join(", ")}},`);
  if (files.length) given.push(`    files=[${files.map(([name, file]) => `(${text(name)}, open(${text(file.name)}, "rb"))`).join(", ")}],`);
  const lines = ["# pip install httpx", ...imports, ...(imports.length ? [""] : []), "import httpx", ""];
  if (streams) {
    lines.push("with httpx.stream(", ...given, "    timeout=60,", ") as answer:", "    if answer.is_error:", "        raise SystemExit(answer.read().decode())", "    for line in answer.iter_lines():");
    if (answers === "chat") {
      lines.push('        if line.startswith("data: {"):', '            for choice in json.loads(line[6:])["choices"]:', '                print(choice["delta"].get("content") or "", end="", flush=True)');
    } else lines.push('        if line.startswith("data: "):', "            print(line[6:], flush=True)");
  } else {
    lines.push("answer = httpx.request(", ...given, "    timeout=60,", ")", "if answer.is_error:", "    raise SystemExit(answer.text)");
    if (answers === "json") lines.push("print(answer.json())");
    else lines.push('open("answer.bin", "wb").write(answer.content)');
  }
  return `${lines.join("\n")}\n`;
}

/** A literal of Python. */
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value instanceof Digits) return value.text;
  if (value !== null && typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${text(name)}: ${literal(one)}`).join(", ")}}`;
  return value === null ? "None" : value === true ? "True" : value === false ? "False" : text(value);
}

/** A number as it was written. */
class Digits {
  constructor(digits) {
    this.text = digits;
  }
}

const exact = (_name, value, context) => (typeof value === "number" && context?.source ? new Digits(context.source) : value);

function javascript({ method, url, body, answers, needsKey }) {
  const load = (file) => `new Blob([await readFile(${text(file.name)})])`;
  const files = [...(body?.form ?? []).map(([, value]) => value), body?.raw].filter((value) => value !== undefined && isFile(value));
  const lines = ["// Node.js 18 or newer; save it as ask.mjs"];
  if (files.length) lines.push('import { readFile } from "node:fs/promises";');
  lines.push("");
  if (body?.form) {
    lines.push("const form = new FormData();");
    for (const [name, value] of body.form) {
      const more = isFile(value) ? `${load(value)}, ${text(value.name)}` : text(value);
      lines.push(`form.append(${text(name)}, ${more});`);
    }
    lines.push("");
  }
  const headers = [];
  if (type(body)) headers.push(`"Content-Type": ${text(type(body))}`);
  if (needsKey) headers.push('"X-API-Key": process.env.FOREBAY_KEY');
  lines.push(`const answer = await fetch(${text(url)}, {`, `  method: ${text(method)},`);
  if (headers.length) lines.push(`  headers: { ${headers.join(", ")} },`);
  if (body?.json !== undefined) lines.push(`  body: ${survives(body.json) ? `JSON.stringify(${body.json})` : text(body.json)},`);
  if (body?.raw !== undefined) lines.push(`  body: ${isFile(body.raw) ? load(body.raw) : text(body.raw)},`);
  if (body?.form) lines.push("  body: form,");
  lines.push("});", "if (!answer.ok) throw new Error(await answer.text());");
  if (answers === "stream" || answers === "chat") lines.push("for await (const text of answer.body.pipeThrough(new TextDecoderStream())) console.log(text);");
  else lines.push(answers === "json" ? "console.log(await answer.json());" : "console.log(new Uint8Array(await answer.arrayBuffer()));");
  return `${lines.join("\n")}\n`;
}

/** Whether JSON means the same as an expression of JavaScript: long numbers lose digits there, and one name is special. */
const survives = (json) => JSON.stringify(JSON.parse(json)) === json && !json.includes("__proto__");
