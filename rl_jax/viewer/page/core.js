// What all views share: making elements, asking for data, what is known of the run, formats, the hash.
// Everything that comes from a run reaches the document as text nodes only (h() and inert()); nothing is parsed as HTML.
"use strict";
const at = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const embedded = at("export") ? JSON.parse(at("export").textContent) : null; // of a one-file export

// h("div.card", {title: "x", onclick: f}, "text", child, [children])
function h(what, attributes, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElement(tag), classes, attributes, children);
}
function svg(what, attributes, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElementNS(NS, tag), classes, attributes, children);
}
function fill(element, classes, attributes, children) {
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : inert(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : inert(child));
  }
  return element;
}

// Text in which nothing acts on its surroundings: control characters, marks of direction, what has no width and halves
// of surrogate pairs are shown by name.
const ACTS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
function inert(value) {
  return String(value).replace(ACTS, (c) => `\u27e8${c.charCodeAt(0).toString(16).padStart(2, "0")}\u27e9`);
}

// --- asking --------------------------------------------------------------------------------------------------------
async function ask(name, asked) {
  if (embedded) return fromExport(name, asked || {});
  const answer = await fetch(`/api/${name}?${new URLSearchParams(asked || {})}`);
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said;
}
function fromExport(name, asked) {
  const found = {
    curves: () => Object.fromEntries(asked.names.split(",").map((n) => [n, embedded.curves[n]]).filter(([, c]) => c)),
    columns: () => embedded.columns[asked.split],
    names: () => asked.who.split(",").map((who) => embedded.names[`${asked.split}.${who}`] || {}),
    episode: () => embedded.episodes[`${asked.step}/${asked.split}/${asked.i}`],
    tools: () => embedded.tools[`${asked.step}/${asked.split}`],
    examples: () => embedded.examples[`${asked.state}\n${asked.reason}`],
  };
  const value = found[name] ? found[name]() : embedded[name];
  if (value === undefined) throw new Error(`not in this exported file; it holds ${embedded.holds}`);
  return value;
}

// --- what is known -------------------------------------------------------------------------------------------------
const known = { run: null, metrics: null, splits: {} };

// The episodes of a split as columns, newest step first; they come in pieces, and `changed` is called for each.
function episodesOf(split) {
  if (!known.splits[split]) {
    known.splits[split] = {
      num: 0, tags: [], outcomes: [], done: false, newest: -1, error: null, listeners: new Set(),
      step: new Int32Array(0), i: new Int32Array(0), reward: new Float32Array(0), length: new Int32Array(0),
      group: new Int32Array(0), tag: new Int16Array(0), outcome: new Int8Array(0),
    };
    load(known.splits[split], split, 0, null);
  }
  return known.splits[split];
}
async function load(held, split, first, last) {
  try {
    let next = last, front = first > 0;
    held.done = false;
    do {
      const asked = { split, first };
      if (next !== null) asked.last = next;
      const piece = await ask("columns", asked);
      merge(held, piece, front);
      next = piece.next;
      if (front && next !== null) front = false; // more new steps than one piece holds: order is by sorting then
      for (const changed of held.listeners) changed();
    } while (next !== null);
  } catch (error) {
    held.error = String(error.message || error);
  }
  held.done = true;
  for (const changed of held.listeners) changed();
}
function merge(held, piece, front) {
  const codes = (own, all) => own.map((name) => { const k = all.indexOf(name); return k < 0 ? all.push(name) - 1 : k; });
  const tags = codes(piece.tags, held.tags), outcomes = codes(piece.outcomes, held.outcomes);
  const kinds = { step: Int32Array, i: Int32Array, reward: Float32Array, length: Int32Array, group: Int32Array,
    tag: Int16Array, outcome: Int8Array };
  for (const [name, Kind] of Object.entries(kinds)) {
    const raw = atob(piece.columns[name]), bytes = new Uint8Array(raw.length);
    for (let k = 0; k < raw.length; k++) bytes[k] = raw.charCodeAt(k);
    let column = new Kind(bytes.buffer);
    if (name === "tag") column = column.map((code) => tags[code]);
    if (name === "outcome") column = column.map((code) => outcomes[code]);
    const joined = new Kind(held.num + column.length);
    joined.set(front ? column : held[name], 0);
    joined.set(front ? held[name] : column, front ? column.length : held.num);
    held[name] = joined;
  }
  held.num += piece.num;
  for (let k = 0; k < held.num; k++) if (held.step[k] > held.newest) held.newest = held.step[k];
}

async function lookAtRun() {
  const before = known.run;
  known.run = await ask("run");
  const newest = known.run.steps.at(-1) ?? -1;
  for (const [split, held] of Object.entries(known.splits)) {
    if (held.done && newest > held.newest && before && before.steps.at(-1) !== newest) load(held, split, held.newest + 1, null);
  }
  showHead();
  return before === null || before.num_rows !== known.run.num_rows;
}
const isLive = (run) => run.state === "running" || run.state === "paused";
function showHead() {
  const run = known.run;
  document.title = `${inert(run.name)} \u00b7 rl_jax`;
  at("name").textContent = inert(run.name);
  at("name").title = inert(run.path);
  const planned = run.steps_planned ? ` of ${run.steps_planned}` : "";
  const step = run.step === null ? "" : `step ${run.step}${planned}`;
  const silent = isLive(run) && run.silent_s !== null && !embedded ? `last sign ${ago(run.silent_s)} ago` : "";
  at("state").textContent = [run.state, step, silent, embedded ? "exported" : ""].filter(Boolean).map(inert).join(" \u00b7 ");
  at("state").className = isLive(run) ? "live" : run.state === "failed" ? "bad" : "";
}

// --- formats -------------------------------------------------------------------------------------------------------
function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en-US");
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 100) return value.toFixed(0);
  if (size >= 0.01) return Number(value.toPrecision(3)).toString();
  return value.toExponential(1);
}
const whole = (value) => Number(value).toLocaleString("en-US");
const share = (value) => `${(100 * value).toFixed(1)} %`;
function ago(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}
const clock = (seconds) => new Date(1000 * seconds).toLocaleString("sv-SE");

// --- the hash: #/view/part/part?name=value --------------------------------------------------------------------------
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query || "") };
}
function decode(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}
function link(parts, query) {
  const asked = new URLSearchParams(Object.entries(query || {}).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  const text = String(asked);
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}
const go = (parts, query) => { location.hash = link(parts, query); };
const turnTo = (parts, query) => { history.replaceState(null, "", link(parts, query)); };

// --- small parts ---------------------------------------------------------------------------------------------------
function note(text, kind) { return h(`p.note${kind ? `.${kind}` : ""}`, null, text); }
function choice(label, options, value, changed) {
  return h("div.choice", { role: "group", "aria-label": label },
    options.map(([key, text]) => h("button", { type: "button", "aria-pressed": String(key === value), onclick: () => changed(key) }, text ?? key)));
}
function select(label, options, value, changed) {
  const box = h("select", { "aria-label": label, onchange: (event) => changed(event.target.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return h("label.field", null, h("span", null, label), box);
}
function field(label, value, changed, attributes) {
  const box = h("input", { "aria-label": label, value, ...attributes, onchange: (event) => changed(event.target.value) });
  return h("label.field", null, h("span", null, label), box);
}
function rewardBar(value) {
  const low = known.low ?? 0, high = known.high ?? 1;
  const part = value === null ? 0 : Math.max(0, Math.min(1, (value - low) / (high - low || 1)));
  const bar = svg("svg.bar", { viewBox: "0 0 60 8", "aria-hidden": "true", preserveAspectRatio: "none" },
    svg("rect.back", { width: 60, height: 8, rx: 2 }), svg("rect.fore", { width: 60 * part, height: 8, rx: 2 }));
  return h("span.reward", null, bar, h("span.num", null, figure(value)));
}
// 0..6 by where the reward lies between the run's lowest and highest.
function rewardClass(value) {
  if (value === null || Number.isNaN(value)) return "none";
  const low = known.low ?? 0, high = known.high ?? 1;
  return `r${Math.max(0, Math.min(6, Math.round((6 * (value - low)) / (high - low || 1))))}`;
}
function tip(element, text) {
  const box = at("tip");
  if (!element) { box.hidden = true; return; }
  box.textContent = text;
  box.hidden = false;
  const r = element.getBoundingClientRect(), width = box.offsetWidth, height = box.offsetHeight;
  box.style.left = `${Math.max(4, Math.min(r.left, document.documentElement.clientWidth - width - 4))}px`;
  box.style.top = `${r.top > height + 8 ? r.top - height - 6 : r.bottom + 6}px`;
}
