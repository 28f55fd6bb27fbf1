// The run's view: advice, key figures, every metric as a small chart; and one metric large.
"use strict";
const KEY = ["reward/mean", "eval/success", "policy/entropy", "mismatch/k3", "is/ess", "optim/grad_norm", "length/response",
  "time/step_s", "perf/decode_tokens_per_s", "sft/loss"];
const AREAS = { reward: "Reward", eval: "Evaluation", policy: "Policy", optim: "Optimizer", mismatch: "Trainer against sampler",
  is: "Importance weights", staleness: "Staleness", length: "Lengths", finish: "Ends of turns", batch: "Batch", time: "Time",
  perf: "Speed", goodput: "Goodput", serve: "Serving", sync: "Weight sync", episodes: "Episodes", redundant: "Redundancy",
  critic: "Critic", envs: "Environments", rewards: "Scorers", filter: "Selection", curriculum: "Curriculum", alarm: "Alarms",
  sft: "Warm start and rows", preference: "Preference", data: "Data" };
const MAX_SERIES = 6;

async function runView(view, parts, query) {
  const run = known.run;
  view.append(adviceOf(run));
  if (run.faults.length) view.append(h("section.card.faults", null, h("h2", null, "Not readable"), h("ul", null, run.faults.map((f) => h("li", null, f)))));
  known.metrics = await ask("metrics");
  if (!known.metrics.length) view.append(note("No metrics yet: metrics.jsonl has no row."));
  const tiles = h("section.tiles", { "aria-label": "key figures" });
  const rest = h("div.areas");
  const find = h("input.find", { type: "search", placeholder: "filter metrics  ( / )", "aria-label": "filter metrics", value: query.get("q") || "" });
  view.append(tiles, h("div.bar1", null, h("h2", null, "All metrics"), find), rest, factsOf(run));
  const byName = new Map(known.metrics.map((f) => [f.family, f]));
  const key = KEY.filter((name) => byName.has(name)).slice(0, 8).map((name) => byName.get(name));
  const curves = await ask("curves", { names: key.map((f) => f.series[0].name).join(","), points: 120 });
  tiles.append(...key.map((f) => tile(f, curves[f.series[0].name])));
  const draw = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = known.metrics.filter((f) => words.every((w) => `${f.family} ${f.meaning}`.toLowerCase().includes(w)));
    rest.replaceChildren(...areasOf(shown));
    if (!shown.length && known.metrics.length) rest.append(note("No metric has these words in its name or meaning."));
    turnTo(["run"], { q: find.value });
  };
  let timer = 0;
  find.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(draw, 120); });
  draw();
}

function adviceOf(run) {
  if (!run.advice.length) {
    const why = run.step === null ? "No step has ended yet." : "No rule speaks at the last step.";
    return h("section.card.calm", { "aria-label": "advice" }, h("p", null, h("b", null, "Advice "), why));
  }
  return h("section.card.advice", { "aria-label": "advice" }, h("h2", null, "Advice"), run.advice.map((one) =>
    h(`article.line.${one.kind}`, null,
      h("span.kind", null, one.kind),
      h("div", null, h("a.what", { href: link(["metric", familyOf(one.metric)]) }, one.what),
        h("p", null, one.meaning, ". "), h("p.remedy", null, one.remedy)))),
    run.num_suppressed ? note(`${run.num_suppressed} lines of tuning advice are held back until that is mended.`) : null);
}
const familyOf = (name) => name.split(".")[0].replace(/(_lag|_at)\d+/, "$1{n}");

function tile(family, curve) {
  const values = curve ? curve.values : [];
  return h("a.tile", { href: link(["metric", family.family]), title: family.meaning },
    h("span.label", null, family.family), h("span.value", null, figure(values.at(-1))), spark(values));
}
function spark(values) {
  const width = 120, height = 26;
  if (values.length < 2) return svg("svg.spark", { viewBox: `0 0 ${width} ${height}` });
  const low = Math.min(...values), high = Math.max(...values);
  const d = values.map((v, k) => `${(k * width) / (values.length - 1)},${height - 2 - ((height - 4) * (v - low)) / (high - low || 1)}`);
  return svg("svg.spark", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("polyline.s0", { points: d.join(" "), "vector-effect": "non-scaling-stroke" }));
}

function areasOf(families) {
  const areas = new Map();
  for (const f of families) areas.set(f.area, [...(areas.get(f.area) || []), f]);
  const order = Object.keys(AREAS);
  const rank = (area) => (order.indexOf(area) + 1 || order.length + 1);
  return [...areas.keys()].sort((a, b) => rank(a) - rank(b)).map((area) => {
    const grid = h("div.grid", null, areas.get(area).map((f) => {
      const slot = h("a.chart", { href: link(["metric", f.family]), "data-family": f.family },
        h("span.label", null, f.family.slice(area.length + 1)), h("span.value", null, figure(f.series[0].last)), h("div.plot"));
      slot.title = inert(f.meaning);
      slot.family = f;
      return slot;
    }));
    lazily(grid);
    return h("section", { "aria-label": area }, h("h3", null, AREAS[area] || area), grid);
  });
}
// Curves of an area are asked for when it comes into sight.
function lazily(grid) {
  const seen = new IntersectionObserver(async (entries) => {
    if (!entries.some((e) => e.isIntersecting)) return;
    seen.disconnect();
    const slots = [...grid.children];
    const names = slots.flatMap((s) => s.family.series.slice(0, MAX_SERIES).map((one) => one.name));
    try {
      const curves = {};
      for (let k = 0; k < names.length; k += 100) Object.assign(curves, await ask("curves", { names: names.slice(k, k + 100).join(","), points: 160 }));
      for (const slot of slots) plot(slot.querySelector(".plot"), slot.family, curves, { height: 84, small: true });
    } catch (error) { grid.append(note(error.message, "bad")); }
  }, { rootMargin: "300px" });
  seen.observe(grid);
}

// One chart into a box: lines, the range of both axes, alarms as bands, values under the pointer.
function plot(box, family, curves, { height, small, log }) {
  const series = family.series.slice(0, MAX_SERIES).map((one) => ({ ...one, ...curves[one.name] })).filter((s) => s.steps);
  if (!series.length) { box.replaceChildren(note("no values")); return; }
  const width = Math.max(box.clientWidth, 120), top = 6, bottom = 15, left = small ? 40 : 52, right = 4;
  const map = log ? (v) => (v > 0 ? Math.log10(v) : NaN) : (v) => v;
  const values = series.flatMap((s) => s.values).map(map).filter((v) => !Number.isNaN(v));
  const steps = series.flatMap((s) => [s.steps[0], s.steps.at(-1)]);
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const first = Math.min(...steps), last = Math.max(...steps);
  const x = (step) => left + ((width - left - right) * (step - first)) / (last - first || 1);
  const y = (value) => top + ((height - top - bottom) * (high - map(value))) / (high - low);
  const back = log ? (v) => 10 ** v : (v) => v;
  const bands = series.flatMap((s) => s.alarms).map(([a, b, rule, kind]) =>
    svg(`rect.band.${kind}`, { x: x(a) - 1.5, y: top, width: Math.max(x(b) - x(a), 0) + 3, height: height - top - bottom }, svg("title", null, rule)));
  const lines = series.map((s, k) => {
    const points = s.steps.map((step, j) => [x(step), y(s.values[j])]).filter(([, b]) => !Number.isNaN(b));
    if (points.length === 1) return svg(`circle.dot.s${k}`, { cx: points[0][0], cy: points[0][1], r: 2.5 });
    return svg(`polyline.s${k}`, { points: points.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ") });
  });
  const mark = svg("line.mark", { y1: top, y2: height - bottom, x1: left, x2: left, visibility: "hidden" });
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": family.family },
    svg("line.axis", { x1: left, x2: width, y1: height - bottom, y2: height - bottom }),
    bands, lines, mark,
    svg("text.high", { x: left - 5, y: top + 8, "text-anchor": "end" }, figure(back(high))), svg("text.low", { x: left - 5, y: height - bottom, "text-anchor": "end" }, figure(back(low))),
    svg("text.first", { x: left, y: height - 3 }, whole(first)), svg("text.last", { x: width, y: height - 3, "text-anchor": "end" }, whole(last)));
  const stepAt = (event) => first + ((event.clientX - picture.getBoundingClientRect().left - left) * (last - first)) / (width - left - right || 1);
  picture.addEventListener("pointermove", (event) => {
    const wanted = stepAt(event);
    const found = series.map((s) => [s, nearest(s.steps, wanted)]);
    const step = found[0][0].steps[found[0][1]];
    for (const end of ["x1", "x2"]) mark.setAttribute(end, x(step));
    mark.setAttribute("visibility", "visible");
    tip(picture, [`step ${step}`, ...found.map(([s, j]) => `${s.label.padEnd(10)} ${figure(s.values[j])}`)].map(inert).join("\n"));
  });
  picture.addEventListener("pointerleave", () => { tip(null); mark.setAttribute("visibility", "hidden"); });
  if (!small && family.area !== "sft") picture.addEventListener("click", (event) => {
    const steps = known.run.steps;
    if (steps.length) go(["step", steps[nearest(steps, stepAt(event))], family.area === "eval" ? "eval" : "train"]);
  });
  box.replaceChildren(picture);
  if (series.length > 1 || !small) box.append(h("div.legend", null, series.map((s, k) => h("span", null, h(`i.s${k}`), s.label)),
    family.series.length > MAX_SERIES ? h("span", null, `and ${family.series.length - MAX_SERIES} more`) : null));
}
function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (low < high) { const mid = (low + high) >> 1; if (sorted[mid] < wanted) low = mid + 1; else high = mid; }
  return low > 0 && wanted - sorted[low - 1] < sorted[low] - wanted ? low - 1 : low;
}

async function metricView(view, parts, query) {
  if (!known.metrics) known.metrics = await ask("metrics");
  const name = parts.slice(1).join("/"), family = known.metrics.find((f) => f.family === name);
  view.append(h("p.crumbs", null, h("a", { href: "#/run" }, "Run"), " / ", name));
  if (!family) { view.append(note(`This run has no metric ${name}.`, "bad")); return; }
  const log = query.get("log") === "1", box = h("div.plot");
  view.append(h("section.card", null,
    h("div.bar1", null, h("h2", null, name), choice("scale", [["0", "linear"], ["1", "log"]], log ? "1" : "0", (v) => go(parts, { log: v === "1" ? 1 : null }))),
    h("p.muted", null, family.meaning, ". ", family.area === "sft" ? "" : "A click on the chart opens that step's episodes."), box));
  const names = family.series.map((s) => s.name).slice(0, 100);
  const curves = await ask("curves", { names: names.join(","), points: 1000 });
  plot(box, family, curves, { height: 300, log });
  const rows = family.series.filter((s) => curves[s.name]).map((s) => {
    const c = curves[s.name];
    return h("tr", null, h("td.left", null, s.label), h("td", null, figure(c.values.at(-1))), h("td", null, figure(Math.min(...c.values))),
      h("td", null, figure(Math.max(...c.values))), h("td.wide", null, whole(c.num)));
  });
  view.append(h("section.card", null, h("table", null,
    h("thead", null, h("tr", null, ["series", "last", "lowest", "highest"].map((t, k) => h(k ? "th" : "th.left", null, t)), h("th.wide", null, "points"))), h("tbody", null, rows))));
  const alarms = Object.entries(curves).flatMap(([n, c]) => c.alarms.map((a) => [n, ...a]));
  if (alarms.length) view.append(h("section.card", null, h("h2", null, "Where rules spoke"), h("ul.plain", null, alarms.slice(-50).reverse().map(([n, a, b, rule, kind]) =>
    h("li", null, h(`span.kind.${kind}`, null, kind), ` ${rule}: `, h("a", { href: link(["step", a, "train"]) }, a === b ? `step ${a}` : `steps ${a} to ${b}`), ` (${n})`)))));
}

function factsOf(run) {
  const pairs = [["directory", run.path], ["attempts", run.attempts], ["host", run.env.host], ["commit", run.env.git && run.env.git.slice(0, 12)],
    ["jax", run.env.versions && run.env.versions.jax], ...run.facts];
  return h("section.card", { "aria-label": "config" }, h("h2", null, "This run"),
    h("dl.facts", null, pairs.filter(([, v]) => v !== null && v !== undefined).map(([k, v]) => h("div", null, h("dt", null, k), h("dd", null, typeof v === "object" ? JSON.stringify(v) : v)))),
    Object.keys(run.summary).length ? h("details", null, h("summary", null, "summary.json"), h("pre", null, JSON.stringify(run.summary, null, 1).slice(0, 20000))) : null);
}
