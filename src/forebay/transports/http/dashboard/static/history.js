// SPDX-License-Identifier: Apache-2.0
// What was told since the page was opened: a beat a second for each endpoint that did something, fifteen minutes of it.

export const KEPT_S = 900;
export const ALL = "";

const COUNTED = ["ok", "failed", "batches", "rows", "busyS", "parts"];
const BUCKETS = ["request", "queue", "sizes"];

function emptyBeat(at, dt) {
  return { at, dt, ok: 0, failed: 0, batches: 0, rows: 0, busyS: 0, parts: 0, request: [], queue: [], sizes: [] };
}

function merge(into, from) {
  for (const [bucket, number] of from) into[bucket] = (into[bucket] ?? 0) + number;
}

class Line {
  constructor() {
    this.beats = [];
    this.state = { inFlight: 0, waiting: 0, alive: 0, idle: 0, slots: 0, restarts: 0, problem: "" };
    this.totals = {};
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
    this.times = []; // when the server was heard: [from, to], one for each connection
    this.now = 0; // its clock
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
    this.names = new Set(models.map((one) => one.name));
    for (const model of models) {
      this.#stand(model.name, model);
      for (const [node, facts] of Object.entries(model.nodes ?? {})) this.#stand(`${model.name}/${node}`, facts);
    }
  }

  #stand(name, facts) {
    const workers = facts.workers ?? {};
    Object.assign(this.line(name).state, {
      inFlight: facts.in_flight ?? 0,
      waiting: facts.waiting ?? 0,
      alive: workers.alive ?? 0,
      idle: workers.idle ?? 0,
      slots: workers.slots ?? 0,
      restarts: workers.restarts ?? 0,
    });
  }

  began(bounds) {
    this.bounds = bounds;
    this.times.push(null);
  }

  /** Takes one event. */
  take(event) {
    const last = this.times.at(-1);
    const dt = last ? event.monotonic - last[1] : 1;
    if (last) last[1] = event.monotonic;
    else this.times[this.times.length - 1] = [event.monotonic, event.monotonic];
    this.now = event.monotonic;
    while (this.times.length > 1 && this.times[0][1] < this.now - KEPT_S) this.times.shift();
    const owners = new Map();
    for (const [graph, nodes] of this.graphs) for (const node of nodes) owners.set(`${graph}/${node}`, graph);
    const merged = new Map(); // what models did, with what was done inside of them
    const of = (name) => {
      if (!merged.has(name)) merged.set(name, emptyBeat(this.now, dt));
      return merged.get(name);
    };
    const own = new Map();
    for (const told of event.beats) {
      const line = this.line(told.endpoint);
      const owner = owners.get(told.endpoint);
      const beat = this.#beat(told, dt);
      // Two versions of a model have one line.
      const first = own.get(told.endpoint);
      const state = { inFlight: told.in_flight, waiting: told.waiting, alive: told.alive, idle: told.idle, slots: told.slots, restarts: told.restarts };
      if (first) for (const name of Object.keys(state)) line.state[name] += state[name];
      else Object.assign(line.state, state);
      line.state.problem = told.problem ?? "";
      line.totals = first ? addUp(line.totals, told.totals) : told.totals;
      own.set(told.endpoint, beat);
      const target = of(owner ?? told.endpoint);
      if (owner) {
        line.push(Object.assign(beat, gauges(line)));
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
      for (const field of COUNTED) all[field] += beat[field];
      for (const field of BUCKETS) merge(all[field], entries(beat[field]));
    }
    const line = this.lines.get(ALL);
    const sum = { inFlight: 0, waiting: 0, alive: 0, idle: 0, slots: 0, restarts: 0 };
    for (const [name, other] of this.lines) {
      if (name === ALL) continue;
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

  /** Sums of the last seconds of a line. */
  recent(name, seconds) {
    const from = Math.max(this.now - seconds, this.#heardSince());
    const sum = emptyBeat(this.now, Math.max(this.now - from, 1e-9));
    const { beats } = this.line(name);
    for (let at = beats.length - 1; at >= 0 && beats[at].at > from; at -= 1) addTo(sum, beats[at]);
    return sum;
  }

  #heardSince() {
    return this.times.at(-1)?.[0] ?? this.now;
  }

  /** The last seconds of a line in columns; null where the server was not heard. */
  columns(name, seconds, wanted) {
    const width = Math.max(Math.round(seconds / wanted), 1);
    const end = Math.ceil(this.now / width) * width;
    const columns = Array.from({ length: Math.ceil(seconds / width) }, () => null);
    const begin = end - columns.length * width;
    const place = (at) => Math.ceil((at - begin) / width) - 1;
    const { beats, state } = this.line(name);
    for (const period of this.times) {
      if (!period) continue;
      for (let at = Math.max(place(period[0] + 1e-6), 0); at <= place(period[1]); at += 1) {
        const to = Math.min(begin + (at + 1) * width, period[1]);
        const from = Math.max(begin + at * width, period[0]);
        if (to > from) columns[at] = emptyBeat(to, to - from);
      }
    }
    let gauge = null;
    let next = 0;
    for (const [at, column] of columns.entries()) {
      const until = begin + (at + 1) * width;
      let highest = null;
      for (; next < beats.length && beats[next].at <= until; next += 1) {
        gauge = beats[next];
        if (beats[next].at <= begin + at * width || !column) continue;
        addTo(column, beats[next]);
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

function addUp(one, other) {
  const sum = { ...one };
  for (const [code, number] of Object.entries(other)) sum[code] = (sum[code] ?? 0) + number;
  return sum;
}

function addTo(sum, beat) {
  for (const field of COUNTED) sum[field] += beat[field];
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
