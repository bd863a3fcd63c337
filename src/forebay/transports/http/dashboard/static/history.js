// SPDX-License-Identifier: Apache-2.0
// What was told since the page was opened: a beat a second for each endpoint that did something, fifteen minutes of it.

export const KEPT_S = 900;
export const ALL = "";
const VERSION = "\n"; // stands in no name

const COUNTED = ["ok", "failed", "batches", "rows", "busyS", "parts"];
const BUCKETS = ["request", "queue", "sizes"];
const NOTHING = { inFlight: 0, waiting: 0, alive: 0, idle: 0, slots: 0, restarts: 0 };

function emptyBeat(at, dt) {
  return { at, dt, ok: 0, failed: 0, batches: 0, rows: 0, busyS: 0, parts: 0, request: [], queue: [], sizes: [] };
}

function merge(into, from) {
  for (const [bucket, number] of from) into[bucket] = (into[bucket] ?? 0) + number;
}

class Line {
  constructor() {
    this.beats = [];
    this.state = { ...NOTHING, devices: [], problem: "" };
    this.totals = {};
    this.versions = new Map(); // how each version stands; the line is their sum
  }

  /** Notes how a version stands and what it has counted. */
  stand(version, state, totals) {
    const known = this.versions.get(version);
    this.versions.set(version, { state, totals: totals ?? known?.totals ?? {} });
    this.#sum();
  }

  keep(versions) {
    for (const version of [...this.versions.keys()]) if (!versions.has(version)) this.versions.delete(version);
    this.#sum();
  }

  #sum() {
    Object.assign(this.state, NOTHING, { devices: [] });
    this.totals = {};
    for (const { state, totals } of this.versions.values()) {
      for (const field of Object.keys(NOTHING)) this.state[field] += state[field];
      this.state.devices.push(...state.devices);
      for (const [code, number] of Object.entries(totals)) this.totals[code] = (this.totals[code] ?? 0) + number;
    }
  }

  push(beat) {
    this.beats.push(beat);
    while (this.beats[0].at < beat.at - KEPT_S) this.beats.shift();
  }
}

export class History {
  constructor() {
    this.bounds = { seconds: [], rows: [] };
    this.lines = new Map([[ALL, new Line()]]);
    this.ticks = []; // when it was heard, and after how long; after nothing where a connection began
    this.isNew = true;
    this.now = 0; // its clock, which never goes back
    this.told = 0; // the clock of the server
    this.heardAt = Date.now() / 1000;
    this.graphs = new Map(); // nodes of each model that is a graph
  }

  line(name) {
    let line = this.lines.get(name);
    if (!line) this.lines.set(name, (line = new Line()));
    return line;
  }

  /** Notes who is there and how they stand, as /models tells it. */
  learn(models) {
    this.graphs = new Map(models.filter((one) => one.nodes).map((one) => [one.name, Object.keys(one.nodes)]));
    const known = new Set([ALL]);
    for (const model of models) {
      const versions = new Set((model.versions ?? [model]).map((one) => one.version));
      const places = [[model.name, model], ...Object.entries(model.nodes ?? {}).map(([node, facts]) => [`${model.name}/${node}`, facts])];
      for (const [name, facts] of places) {
        known.add(name);
        this.line(name).keep(versions);
        if (facts.workers) this.line(name).stand(model.version, stateOf(facts));
      }
    }
    for (const name of [...this.lines.keys()]) if (!known.has(name.split(VERSION)[0])) this.lines.delete(name);
  }

  /** Takes how every endpoint stands, and what was counted before anybody looked. */
  began(bounds, standing) {
    this.bounds = bounds;
    this.isNew = true;
    for (const told of standing) this.#stand(told);
  }

  #stand(told) {
    const line = this.line(told.endpoint);
    const state = { inFlight: told.in_flight, waiting: told.waiting, alive: told.alive, idle: told.idle, slots: told.slots, restarts: told.restarts, devices: told.devices ?? [] };
    line.stand(told.version, state, told.totals);
    line.state.problem = told.problem ?? "";
  }

  /** Takes one event. */
  take(event) {
    const heardAt = Date.now() / 1000;
    const dt = this.isNew ? 0 : event.monotonic - this.told;
    // The clock of a server that was started elsewhere says nothing about ours: between connections the browser's goes on.
    this.now += this.isNew ? Math.max(heardAt - this.heardAt, 0) : dt;
    this.isNew = false;
    this.told = event.monotonic;
    this.heardAt = heardAt;
    this.ticks.push({ at: this.now, dt });
    while (this.ticks[0].at < this.now - KEPT_S) this.ticks.shift();
    const owners = new Map();
    for (const [graph, nodes] of this.graphs) for (const node of nodes) owners.set(`${graph}/${node}`, graph);
    const merged = new Map(); // what models did, with what was done inside of them
    const of = (name) => {
      if (!merged.has(name)) merged.set(name, emptyBeat(this.now, dt));
      return merged.get(name);
    };
    for (const told of event.beats) {
      const owner = owners.get(told.endpoint);
      const beat = this.#beat(told, dt);
      this.#stand(told);
      this.line(`${told.endpoint}${VERSION}${told.version}`).push(beat);
      const target = of(owner ?? told.endpoint);
      if (owner) {
        addTo(of(told.endpoint), beat); // two versions of a node have one line
        this.#addWork(target, beat);
      } else {
        target.ok += beat.ok;
        target.failed += beat.failed;
        target.parts += beat.parts;
        merge(target.request, entries(beat.request));
        merge(target.queue, entries(beat.queue));
        if (!this.graphs.has(told.endpoint)) this.#addWork(target, beat);
      }
    }
    const all = emptyBeat(this.now, dt);
    for (const [name, beat] of merged) {
      const line = this.line(name);
      line.push(Object.assign(beat, gauges(line)));
      for (const node of this.graphs.get(name) ?? []) beat.waiting += this.line(`${name}/${node}`).state.waiting;
      if (owners.has(name)) continue;
      for (const field of COUNTED) all[field] += beat[field];
      for (const field of BUCKETS) merge(all[field], entries(beat[field]));
    }
    const line = this.lines.get(ALL);
    const sum = { inFlight: 0, waiting: 0, alive: 0, idle: 0, slots: 0, restarts: 0 };
    for (const [name, other] of this.lines) {
      if (name === ALL || name.includes(VERSION)) continue;
      const isNode = owners.has(name);
      if (!isNode) sum.inFlight += other.state.inFlight;
      sum.waiting += other.state.waiting;
      if (this.graphs.has(name)) continue;
      for (const field of ["alive", "idle", "slots", "restarts"]) sum[field] += other.state[field];
    }
    Object.assign(line.state, sum);
    line.push(Object.assign(all, gauges(line)));
  }

  #beat(told, dt) {
    const beat = emptyBeat(this.now, dt);
    for (const [code, number] of Object.entries(told.codes ?? {})) {
      if (code === "ok") beat.ok += number;
      else beat.failed += number;
    }
    beat.batches = told.batches ?? 0;
    beat.rows = told.rows ?? 0;
    beat.busyS = told.model_s ?? 0;
    beat.parts = told.parts ?? 0;
    for (const field of BUCKETS) merge(beat[field], told[field] ?? []);
    return beat;
  }

  #addWork(target, beat) {
    for (const field of ["batches", "rows", "busyS"]) target[field] += beat[field];
    merge(target.sizes, entries(beat.sizes));
  }

  /** Sums of the last seconds of one version. */
  recentOf(name, version, seconds) {
    return this.recent(`${name}${VERSION}${version}`, seconds);
  }

  /** Sums of the last seconds of a line; without what went into which bucket if that is not wanted. */
  recent(name, seconds, isWhole = true) {
    const from = this.now - seconds;
    let dt = 0;
    for (let at = this.ticks.length - 1; at >= 0 && this.ticks[at].at > from; at -= 1) dt += this.ticks[at].dt;
    const sum = emptyBeat(this.now, Math.max(dt, 1e-9));
    const beats = this.lines.get(name)?.beats ?? [];
    for (let at = beats.length - 1; at >= 0 && beats[at].at > from; at -= 1) addTo(sum, beats[at], isWhole);
    return sum;
  }

  /** For how long something is known. */
  heard() {
    return this.now - (this.ticks[0]?.at ?? this.now);
  }

  /** The last seconds of a line in columns; null where the server was not heard. */
  columns(name, seconds, wanted, isWhole = true) {
    const width = Math.max(Math.round(seconds / wanted), 2);
    const end = Math.floor(this.now / width) * width; // what has not ended yet would look like a fall
    const columns = Array.from({ length: Math.ceil(seconds / width) }, () => null);
    const begin = end - columns.length * width;
    const place = (at) => Math.ceil((at - begin) / width) - 1;
    const { beats, state } = this.line(name);
    for (const tick of this.ticks) {
      const at = place(tick.at);
      if (at < 0 || at >= columns.length || !tick.dt) continue;
      columns[at] ??= emptyBeat(tick.at, 0);
      columns[at].dt += tick.dt;
    }
    let gauge = null;
    let next = 0;
    for (const [at, column] of columns.entries()) {
      const until = begin + (at + 1) * width;
      let highest = null;
      for (; next < beats.length && beats[next].at <= until; next += 1) {
        gauge = beats[next];
        if (beats[next].at <= begin + at * width || !column) continue;
        addTo(column, beats[next], isWhole);
        if (!highest || gauge.waiting > highest.waiting) highest = gauge;
      }
      if (!column) continue;
      const shown = highest ?? gauge ?? gauges({ state });
      Object.assign(column, { inFlight: shown.inFlight, waiting: shown.waiting, idle: shown.idle, slots: shown.slots });
    }
    return { columns, width, end };
  }
}

const entries = (sparse) => Object.entries(sparse);

function gauges({ state }) {
  return { inFlight: state.inFlight, waiting: state.waiting, idle: state.idle, slots: state.slots, alive: state.alive };
}

function stateOf(facts) {
  const { alive = 0, idle = 0, slots = 0, restarts = 0, devices = [] } = facts.workers;
  return { inFlight: facts.in_flight ?? 0, waiting: facts.waiting ?? 0, alive, idle, slots, restarts, devices };
}

function addTo(sum, beat, isWhole = true) {
  for (const field of COUNTED) sum[field] += beat[field];
  if (!isWhole) return;
  for (const field of BUCKETS) merge(sum[field], entries(beat[field]));
}

/** The value below which a share of the counted ones lies, as if those of a bucket were spread evenly; null if none. */
export function quantile(counts, bounds, share) {
  let total = 0;
  for (const number of counts) total += number ?? 0;
  if (!total) return null;
  let left = share * total;
  for (let bucket = 0; bucket < counts.length; bucket += 1) {
    const number = counts[bucket] ?? 0;
    if (!number) continue;
    if (left <= number) {
      if (bucket >= bounds.length) return bounds.at(-1);
      const low = bucket ? bounds[bucket - 1] : 0;
      return low + (bounds[bucket] - low) * (left / number);
    }
    left -= number;
  }
  return bounds.at(-1);
}
