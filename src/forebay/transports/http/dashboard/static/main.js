// SPDX-License-Identifier: Apache-2.0
// Puts the page together: /models says who is there, a stream how they stand and what happens.

import { Cluster } from "./cluster.js";
import { Detail } from "./detail.js";
import { $, choice, kept, mark, say } from "./dom.js";
import { Faults } from "./faults.js";
import { ALL, History } from "./history.js";
import { Models } from "./models.js";
import { Repositories } from "./repositories.js";
import { hasKey, listen, read, setKey, whenKeyIsNeeded } from "./server.js";
import { Tenants } from "./tenants.js";
import { Tiles } from "./tiles.js";
import { Trace } from "./trace.js";
import { TryIt } from "./tryit.js";

const MODELS_EVERY_MS = 10_000;

const history = new History();
let models = [];
let chosen = ALL;
let seconds = Number(kept.get("localStorage", "seconds")) || 300;
let changes = null;
let asked = 0;
let hasCluster = false;
let hasTenants = false;
let mayDiffer = false; // what the models take and how graphs are wired, since they were last read

const tiles = new Tiles($("tiles"));
const table = new Models($("models"), (name) => choose(name === chosen && models.length > 1 ? ALL : name));
const tenants = new Tenants($("tenants"));
const repositories = new Repositories($("repositories"));
const cluster = new Cluster($("cluster"));
const detail = new Detail($("detail"), history, () => choose(ALL));
const faults = new Faults($("errors"), (endpoint) => choose(models.find((one) => endpoint === one.name || endpoint.startsWith(`${one.name}/`))?.name ?? ALL));
const tryIt = new TryIt($("try"));
new Trace($("trace"));

function choose(name) {
  chosen = name;
  table.choose(name);
  detail.choose(name, models);
  if (name !== ALL && document.body.dataset.beside === undefined) tryIt.choose(name);
  show();
}

function show() {
  // As long as less was heard than is to be shown, the charts show what there is: a minute, then two.
  const shown = Math.min(seconds, Math.max(Math.ceil(history.heard() / 60), 1) * 60);
  tiles.show(history, shown);
  table.show(history, shown);
  detail.show(shown);
  faults.show();
}

async function learn() {
  asked = Date.now();
  const isAnother = mayDiffer;
  try {
    const told = await (await read("models")).json();
    models = told.models;
    repositories.learn(told);
    if (hasTenants) tenants.learn(await (await read("ui/tenants")).json());
    if (hasCluster) cluster.learn(await (await read("ui/nodes")).json());
    say($("notices"), told.problem ? `The project could not be read anew; what was there before serves on.\n${told.problem}` : "");
  } catch (problem) {
    say($("notices"), `the models cannot be listed: ${problem.message}`);
    return;
  }
  mayDiffer = false;
  history.learn(models);
  table.learn(models);
  if (chosen !== ALL && !models.some((one) => one.name === chosen)) chosen = ALL;
  if (models.length === 1) chosen = models[0].name;
  table.choose(chosen);
  detail.choose(chosen, models, isAnother);
  show();
  if (document.body.dataset.beside === undefined) await tryIt.learn(models, isAnother);
}

function take(kind, data) {
  if (kind === "hello") {
    history.began(data.bounds, data.standing);
    hasCluster = data.has_cluster;
    hasTenants = data.has_tenants;
    mark(document.body, "data-beside", data.is_beside ? "" : null); // a project has all other paths for itself
    mayDiffer = true;
    faults.hear(data.now);
    for (const fault of data.faults) faults.take(fault, null);
    say($("footer"), `forebay ${data.forebay} · percentiles and sizes are of what was answered since this page was opened · nothing is counted for it while nobody looks`);
    learn();
    return;
  }
  if (changes !== null && changes !== data.changes) {
    asked = 0;
    mayDiffer = true;
  }
  changes = data.changes;
  history.take(data);
  faults.hear(data.at);
  for (const beat of data.beats) for (const fault of beat.faults ?? []) faults.take(fault, beat.codes[fault.code]);
  show();
  if (Date.now() - asked > MODELS_EVERY_MS) learn();
}

function tellState(state, why = "", refused = "") {
  const words = { live: "live", lost: "reconnecting", paused: "paused", connecting: "connecting" };
  mark($("link"), "data-state", state);
  say($("link").lastElementChild, words[state]);
  mark($("link"), "title", why || null);
  mark(document.body, "data-link", state);
  if (refused) say($("notices"), refused); // until the models are listed
}

function askForKey(wrong) {
  const dialog = $("login");
  if (!dialog.open) {
    say($("login-wrong"), wrong ? "This key is not known here." : "");
    $("login-key").value = "";
    dialog.showModal();
  }
  return new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
}

$("login").addEventListener("cancel", (event) => event.preventDefault());
$("login").querySelector("form").addEventListener("submit", () => {
  setKey($("login-key").value.trim());
  $("key").hidden = false;
});
whenKeyIsNeeded((used) => askForKey(used !== ""));
$("key").hidden = !hasKey();
say($("key"), "Forget key");
$("key").addEventListener("click", () => {
  setKey("");
  location.reload();
});

choice($("windows"), [[60, "1 min"], [300, "5 min"], [900, "15 min"]], seconds, (wanted) => {
  seconds = wanted;
  kept.set("localStorage", "seconds", String(wanted));
  show();
});
const theme = kept.get("localStorage", "theme") ?? "auto";
mark(document.documentElement, "data-theme", theme);
choice($("themes"), [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]], theme, (wanted) => {
  mark(document.documentElement, "data-theme", wanted);
  kept.set("localStorage", "theme", wanted);
});
say($("where"), location.host);
document.title = `forebay · ${location.host}`;
listen(take, tellState);
