// SPDX-License-Identifier: Apache-2.0
// The last 15 minutes: coarse samples from before the page was opened, then a beat a second for each active endpoint.

export const KEPT_S = 900;
export const ALL = "";
const VERSION = "\n"; // stands in no name

const COUNTED = ["ok", "failed", "batches", "rows", "busyS", "parts"];
const BUCKETS = ["request", "queue", "sizes"];
const NOTHING = { inFlight: 0, waiting: 0, alive: 0, idle: 0, slots: 0, restarts: 0 };

function emptyBeat(at, dt) {
  return { at, dt, ok: 0, failed: 0, batches: 0, rows: 0, busyS: 0, parts: 0, request: [], queue: [], sizes: [] };
}

/** Adds the counts of buckets; those of empty buckets are missing. */
function merge(into, from, share = 1) {
  from.forEach((number, bucket) => {
    into[bucket] = (into[bucket] ?? 0) + number * share;
  });
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
    this.heardUntil = -Infinity; // when the page stopped to listen the last time
    this.unnamed = 0; // endpoints that coarse samples count in the totals only
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
  began(bounds, standing, monotonic, last = { names: {}, samples: [] }) {
    this.bounds = bounds;
    this.last = last; // the sample that this page ends, as it listens from now on
    this.isNew = true;
    this.#goOn();
    this.told = monotonic;
    this.heardUntil = this.ticks.at(-1)?.at ?? -Infinity;
    for (const told of standing) this.#stand(told);
  }

  /** Lets the browser's clock go on between connections: that of a server that was started elsewhere says nothing. */
  #goOn() {
    const heardAt = Date.now() / 1000;
    this.now += Math.max(heardAt - this.heardAt, 0);
    this.heardAt = heardAt;
  }

  /** Fills the time in which this page did not listen with the samples that the server took until it began to. */
  recall({ names, samples }) {
    const offset = this.now - this.told;
    const begin = Math.max(this.heardUntil, this.now - KEPT_S);
    const [last] = this.last.samples;
    const isBefore = ([at]) => !last || at < last[0] - last[1] + 0.1;
    for (const [toldAt, took, rows] of [...samples.filter(isBefore), ...this.last.samples]) {
      const at = toldAt + offset;
      const dt = at - Math.max(at - took, begin);
      if (dt <= 0) continue;
      this.ticks.push({ at, dt });
      const nameOf = (place) => names[place] ?? this.last.names[place];
      for (const row of rows) if (!nameOf(row[0])) this.unnamed = Math.max(this.unnamed, row[10]);
      this.#add(at, dt, rows.map((row) => this.#past(nameOf(row[0]), row, at, dt, dt / took)), true);
    }
    this.heardUntil = Infinity;
    this.ticks.sort((one, other) => one.at - other.at);
    for (const line of this.lines.values()) line.beats.sort((one, other) => one.at - other.at);
  }

  /** One row of a sample; `share` of it is in the gap. */
  #past([endpoint, version] = [null, null], [, ok, failed, request, waiting, inFlight, batches, rows, busyMs, parts], at, dt, share) {
    const beat = emptyBeat(at, dt);
    const counted = { ok, failed, batches, rows, parts };
    for (const [field, number] of Object.entries(counted)) beat[field] = Math.round(number * share);
    beat.busyS = (busyMs / 1000) * share;
    for (let place = 0; place < request.length; place += 2) beat.request[request[place]] = request[place + 1] * share;
    return { endpoint, version, beat: Object.assign(beat, { waiting, inFlight }) };
  }

  #stand(told) {
    const line = this.line(told.endpoint);
    const state = { inFlight: told.in_flight, waiting: told.waiting, alive: told.alive, idle: told.idle, slots: told.slots, restarts: told.restarts, devices: told.devices ?? [] };
    line.stand(told.version, state, told.totals);
    line.state.problem = told.problem ?? "";
  }

  /** Takes one event. */
  take(event) {
    const dt = this.isNew ? 0 : event.monotonic - this.told;
    if (this.isNew) this.#goOn();
    else this.now += dt;
    this.isNew = false;
    this.told = event.monotonic;
    this.heardAt = Date.now() / 1000;
    this.ticks.push({ at: this.now, dt });
    while (this.ticks[0].at < this.now - KEPT_S) this.ticks.shift();
    for (const told of event.beats) this.#stand(told);
    this.#add(this.now, dt, event.beats.map((told) => ({ endpoint: told.endpoint, version: told.version, beat: this.#beat(told, dt) })), false);
  }

  /** Adds what endpoints did in the seconds before a moment to the lines of versions, nodes, models and all. */
  #add(at, dt, told, isPast) {
    const owners = new Map();
    for (const [graph, nodes] of this.graphs) for (const node of nodes) owners.set(`${graph}/${node}`, graph);
    const all = emptyBeat(at, dt);
    const merged = new Map(); // what models did, with what was done inside of them
    const of = (name) => {
      if (!merged.has(name)) merged.set(name, Object.assign(emptyBeat(at, dt), { waiting: 0, inFlight: 0 }));
      return merged.get(name);
    };
    for (const { endpoint, version, beat } of told) {
      if (endpoint === null) {
        Object.assign(all, { waiting: beat.waiting, inFlight: beat.inFlight }); // of endpoints that have no lines
        addTo(all, beat);
        continue;
      }
      this.line(`${endpoint}${VERSION}${version}`).push(beat);
      const owner = owners.get(endpoint);
      const target = of(owner ?? endpoint);
      if (owner) {
        addTo(of(endpoint), beat); // two versions of a node have one line
        this.#addWork(target, beat);
      } else {
        target.ok += beat.ok;
        target.failed += beat.failed;
        target.parts += beat.parts;
        merge(target.request, beat.request);
        merge(target.queue, beat.queue);
        if (!this.graphs.has(endpoint)) this.#addWork(target, beat);
      }
      if (!isPast) continue;
      of(endpoint).waiting += beat.waiting;
      of(endpoint).inFlight += beat.inFlight;
      if (owner) target.waiting += beat.waiting;
    }
    for (const [name, beat] of merged) {
      const line = this.line(name);
      if (isPast) {
        beat.slots = line.state.slots;
      } else {
        Object.assign(beat, gauges(line));
        for (const node of this.graphs.get(name) ?? []) beat.waiting += this.line(`${name}/${node}`).state.waiting;
      }
      line.push(beat);
      if (owners.has(name)) continue;
      addTo(all, beat);
      if (isPast) for (const field of ["waiting", "inFlight"]) all[field] = (all[field] ?? 0) + beat[field];
    }
    const line = this.lines.get(ALL);
    if (!isPast) this.#sumUp(line, owners);
    line.push(isPast ? { ...gauges(line), waiting: 0, inFlight: 0, ...all } : Object.assign(all, gauges(line)));
  }

  /** Adds up how all endpoints stand. */
  #sumUp(line, owners) {
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
    for (const field of BUCKETS) for (const [bucket, number] of told[field] ?? []) beat[field][bucket] = number;
    return beat;
  }

  #addWork(target, beat) {
    for (const field of ["batches", "rows", "busyS"]) target[field] += beat[field];
    merge(target.sizes, beat.sizes);
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
    const first = this.ticks[0];
    return first ? this.now - first.at + first.dt : 0;
  }

  /** The last seconds of a line in columns; null where the server was not heard. */
  columns(name, seconds, wanted, isWhole = true) {
    const width = Math.max(Math.round(seconds / wanted), 2);
    const end = Math.floor(this.now / width) * width; // what has not ended yet would look like a fall
    const columns = Array.from({ length: Math.ceil(seconds / width) }, () => null);
    const begin = end - columns.length * width;
    const place = (at) => Math.ceil((at - begin) / width) - 1;
    // A coarse sample is spread over all columns that it lies in.
    const spread = ({ at, dt }, give) => {
      if (dt <= width) give(place(at), 1);
      else for (let one = Math.max(place(at - dt), 0); one <= Math.min(place(at), columns.length - 1); one += 1) {
        const share = Math.min(at, begin + (one + 1) * width) - Math.max(at - dt, begin + one * width);
        if (share > 0) give(one, share / dt);
      }
    };
    const { beats, state } = this.line(name);
    for (const tick of this.ticks) spread(tick, (at, share) => {
      if (at < 0 || at >= columns.length || !tick.dt) return;
      columns[at] ??= emptyBeat(tick.at, 0);
      columns[at].dt += tick.dt * share;
    });
    const highest = [];
    for (const beat of beats) spread(beat, (at, share) => {
      if (!columns[at]) return;
      addTo(columns[at], beat, isWhole, share);
      if (!highest[at] || beat.waiting > highest[at].waiting) highest[at] = beat;
    });
    let gauge = null;
    let next = 0;
    for (const [at, column] of columns.entries()) {
      for (; next < beats.length && beats[next].at <= begin + (at + 1) * width; next += 1) gauge = beats[next];
      if (!column) continue;
      const shown = highest[at] ?? gauge ?? gauges({ state });
      Object.assign(column, { inFlight: shown.inFlight, waiting: shown.waiting, idle: shown.idle, slots: shown.slots });
    }
    return { columns, width, end };
  }
}

function gauges({ state }) {
  return { inFlight: state.inFlight, waiting: state.waiting, idle: state.idle, slots: state.slots, alive: state.alive };
}

function stateOf(facts) {
  const { alive = 0, idle = 0, slots = 0, restarts = 0, devices = [] } = facts.workers;
  return { inFlight: facts.in_flight ?? 0, waiting: facts.waiting ?? 0, alive, idle, slots, restarts, devices };
}

function addTo(sum, beat, isWhole = true, share = 1) {
  for (const field of COUNTED) sum[field] += beat[field] * share;
  if (!isWhole) return;
  for (const field of BUCKETS) merge(sum[field], beat[field], share);
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
