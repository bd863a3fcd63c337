// SPDX-License-Identifier: Apache-2.0
// Puts the page together: /models says who is there, a stream how they stand and what happens.

import { Cluster } from "./cluster.js";
import { Detail } from "./detail.js";
import { $, choice, kept, mark, say } from "./dom.js";
import { Faults } from "./faults.js";
import { ALL, History } from "./history.js";
import { addressOf, modelIn, Models } from "./models.js";
import { several } from "./numbers.js";
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
let version = "";
let broken = ""; // why the project could not be reloaded
let leftAt = 0; // where the list of models was scrolled to
let hasCluster = false;
let hasTenants = false;
let mayDiffer = false; // what the models take and how graphs are wired, since they were last read
let lacksPast = false; // what was counted before the stream began

const tiles = new Tiles($("tiles"));
const table = new Models($("models"), history);
const tenants = new Tenants($("tenants"));
const repositories = new Repositories($("repositories"));
const cluster = new Cluster($("cluster"));
const detail = new Detail($("detail"), history);
const faults = new Faults($("errors"), (endpoint) => { location.hash = addressOf(models.find((one) => endpoint === one.name || endpoint.startsWith(`${one.name}/`))?.name ?? ALL); });
const tryIt = new TryIt($("try"));
new Trace($("trace"));

/** Chooses the model that the address names; where there is one only it is chosen without that. */
function chooseByAddress() {
  const name = modelIn(location.hash);
  chosen = models.some((one) => one.name === name) ? name : ALL;
  mark(document.body, "data-view", chosen !== ALL && models.length > 1 ? "model" : "all");
  if (models.length === 1) chosen = models[0].name;
  document.title = `${chosen === ALL ? "" : `${chosen} · `}forebay · ${location.host}`;
  return name === null || name === chosen ? "" : `This server has no model '${name}'.`;
}

function choose() {
  const left = chosen;
  if (left === ALL) leftAt = scrollY;
  const missing = chooseByAddress();
  say($("notices"), broken || missing);
  if (chosen === left) return;
  const name = chosen;
  detail.choose(name, models);
  placeTryIt();
  scrollTo(0, name === ALL ? leftAt : 0);
  if (name !== ALL) detail.title.focus({ preventScroll: true });
  if (name !== ALL && document.body.dataset.beside === undefined) tryIt.choose(name);
  show();
}

/** Puts the panel that calls models at the top of the page of a model, or beside the trace if none is chosen. */
function placeTryIt() {
  const panel = $("try");
  const isOnTop = panel.parentElement === detail.host;
  mark(panel, "data-one", chosen === ALL ? null : "");
  if (chosen !== ALL && !isOnTop) detail.versions.after(panel);
  if (chosen === ALL && isOnTop) $("trace").before(panel);
}

function show() {
  // As long as less was heard than is to be shown, the charts show what there is: a minute, then two.
  const shown = Math.min(seconds, Math.max(Math.ceil(history.heard() / 60), 1) * 60);
  tiles.show(history, shown);
  table.show(shown);
  detail.show(shown);
  faults.show(chosen);
}

async function learn() {
  asked = Date.now();
  const isAnother = mayDiffer;
  let told;
  try {
    told = await (await read("models")).json();
    if (hasTenants) tenants.learn(await (await read("ui/tenants")).json());
    if (hasCluster) cluster.learn(await (await read("ui/nodes")).json());
    models = told.models;
    const missing = chooseByAddress();
    broken = told.problem ? `The project could not be reloaded; the models that were loaded before go on.\n${told.problem}` : "";
    say($("notices"), broken || missing);
  } catch (problem) {
    say($("notices"), `The models cannot be listed: ${problem.message}`);
    return;
  }
  mayDiffer = false;
  history.learn(models);
  repositories.learn(told);
  mark(document.body, "data-empty", models.length === 0);
  table.learn(told);
  detail.choose(chosen, models, isAnother);
  placeTryIt();
  show();
  if (lacksPast) recall();
  if (document.body.dataset.beside === undefined) await tryIt.learn(models, isAnother, chosen);
}

/** Reads what happened before the stream began; that needs to know the graphs. */
async function recall() {
  lacksPast = false;
  try {
    history.recall(await (await read("ui/history")).json());
  } catch (problem) {
    say($("notices"), `The last 15 minutes cannot be read: ${problem.message}`);
    return;
  }
  tellFooter();
  table.arrange();
  show();
}

function take(kind, data) {
  if (kind === "hello") {
    history.began(data.bounds, data.standing, data.monotonic, data.last);
    lacksPast = true;
    hasCluster = data.has_cluster;
    hasTenants = data.has_tenants;
    mark(document.body, "data-beside", data.is_beside ? "" : null); // a project has all other paths for itself
    mayDiffer = true;
    faults.hear(data.now);
    for (const fault of data.faults) faults.take(fault, null);
    version = data.forebay;
    tellFooter();
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

function tellFooter() {
  const without = history.unnamed ? ` For that time, the totals include ${several(history.unnamed, "less busy endpoint")} without charts.` : "";
  say($("footer"), `forebay ${version} · Charts go back 15 minutes. Before you opened this page, their steps are 10 seconds long.${without}`);
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
    say($("login-wrong"), wrong ? "The server rejected this key." : "");
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
addEventListener("hashchange", choose);
say($("where"), location.host);
document.title = `forebay · ${location.host}`;
listen(take, tellState);
