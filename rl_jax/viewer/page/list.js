// Episodes: a histogram of rewards as a filter, the list, the list by step, and one step with its groups.
"use strict";
const PAGE_SIZE = 50, BINS = 40;

async function episodesView(view, parts, query) {
  const split = query.get("split") || "train", by = query.get("by") || "episode";
  const asked = Object.fromEntries(query);
  const change = (more) => go(["episodes"], { ...asked, page: null, ...more });
  const held = episodesOf(split);
  const number = (name) => (query.get(name) === null || query.get(name) === "" ? null : Number(query.get(name)));
  const wanted = { first: number("first"), last: number("last"), lo: number("lo"), hi: number("hi"), tag: query.get("tag"), outcome: query.get("outcome") };
  const bars = h("div.histogram"), count = h("p.count", { role: "status" }), table = h("div.table"), tags = h("span"), ends = h("span");
  view.append(
    h("section.card", null,
      h("div.filters", null,
        choice("split", [["train", "trained"], ["eval", "evaluated"]], split, (v) => go(["episodes"], { split: v })),
        choice("list by", [["episode", "episodes"], ["step", "steps"]], by, (v) => change({ by: v === "episode" ? null : v, sort: null })),
        tags, ends,
        field("from step", wanted.first ?? "", (v) => change({ first: v }), { type: "number", min: 0 }),
        field("to step", wanted.last ?? "", (v) => change({ last: v }), { type: "number", min: 0 }),
        h("button", { type: "button", onclick: () => go(["episodes"], { split, by: by === "step" ? by : null }) }, "clear")),
      bars, count),
    table);
  const draw = () => {
    if (held.error) { count.replaceChildren(note(held.error, "bad")); }
    tags.replaceChildren(held.tags.length > 1 ? select("tag", [["", "all"], ...held.tags.map((t) => [t, inert(t).slice(0, 40)])], wanted.tag || "", (v) => change({ tag: v })) : "");
    ends.replaceChildren(held.outcomes.length > 1 ? select("outcome", [["", "all"], ...held.outcomes.map((t) => [t, t])], wanted.outcome || "", (v) => change({ outcome: v })) : "");
    const found = pick(held, wanted);
    known.low = Math.min(0, found.low); known.high = Math.max(1, found.high);
    histogram(bars, held, found, wanted, change);
    const left = held.done ? "" : ` \u00b7 reading, so far ${whole(held.num)}`;
    if (!held.error) count.textContent = `${whole(found.rows.length)} of ${whole(held.num)} episodes, mean reward ${figure(found.mean)}${left}`;
    const focused = table.contains(document.activeElement) ? document.activeElement.dataset.go : undefined;
    if (by === "step") stepTable(table, held, found.rows, split, query);
    else episodeTable(table, held, found.rows, split, query);
    // Whoever moves through the list by keys stays where they are while more of it comes.
    const same = focused && [...table.querySelectorAll("tr.row")].find((row) => row.dataset.go === focused);
    if (same) same.focus({ preventScroll: true });
  };
  held.listeners.add(draw);
  leaving.push(() => held.listeners.delete(draw));
  draw();
}

// Rows (indexes into the columns) that the filters leave, what they earned, and those that all filters but the reward's leave.
function pick(held, wanted) {
  const tag = wanted.tag ? held.tags.indexOf(wanted.tag) : -1, outcome = wanted.outcome ? held.outcomes.indexOf(wanted.outcome) : -1;
  const rows = [], around = [];
  let sum = 0, known_ = 0, low = Infinity, high = -Infinity;
  for (let k = 0; k < held.num; k++) {
    if (wanted.first !== null && held.step[k] < wanted.first) continue;
    if (wanted.last !== null && held.step[k] > wanted.last) continue;
    if (tag >= 0 && held.tag[k] !== tag) continue;
    if (outcome >= 0 && held.outcome[k] !== outcome) continue;
    const reward = held.reward[k];
    around.push(k);
    if (reward < low) low = reward;
    if (reward > high) high = reward;
    if (wanted.lo !== null && !(reward >= wanted.lo)) continue;
    if (wanted.hi !== null && !(reward <= wanted.hi)) continue;
    rows.push(k);
    if (!Number.isNaN(reward)) { sum += reward; known_ += 1; }
  }
  return { rows, around, mean: known_ ? sum / known_ : null, low: low === Infinity ? 0 : low, high: high === -Infinity ? 1 : high };
}

function histogram(box, held, found, wanted, change) {
  let { low, high } = found;
  if (low === high) { low -= 0.5; high += 0.5; }
  const bins = new Array(BINS).fill(0);
  let unscored = 0;
  for (const k of found.around) {
    const reward = held.reward[k];
    if (Number.isNaN(reward)) unscored += 1;
    else bins[Math.min(BINS - 1, Math.floor((BINS * (reward - low)) / (high - low)))] += 1;
  }
  const width = Math.max(box.clientWidth, 200), height = 110, bottom = 16, most = Math.max(...bins, 1);
  const edge = (k) => low + (k * (high - low)) / BINS;
  const is = (k) => (wanted.lo === null || edge(k + 1) > wanted.lo - 1e-9) && (wanted.hi === null || edge(k) <= wanted.hi + 1e-9);
  // The square root keeps a bin of ten in sight beside one of ten thousand.
  const tall = (n) => (n ? Math.max(2, (height - bottom - 12) * Math.sqrt(n / most)) : 0);
  let start = null;
  const at_ = (event) => Math.max(0, Math.min(BINS - 1, Math.floor((BINS * (event.clientX - picture.getBoundingClientRect().left)) / width)));
  const bars = bins.map((n, k) => svg(`rect.bin${is(k) ? ".in" : ""}`, { x: (k * width) / BINS + 0.5, width: width / BINS - 1, y: height - bottom - tall(n), height: tall(n) }));
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
    "aria-label": "histogram of rewards; click a bar or drag over several to filter" },
    svg("line.axis", { x1: 0, x2: width, y1: height - bottom, y2: height - bottom }), bars,
    svg("text.first", { x: 0, y: height - 3 }, figure(low)), svg("text.last", { x: width, y: height - 3, "text-anchor": "end" }, figure(high)),
    svg("text.mid", { x: width / 2, y: height - 3, "text-anchor": "middle" }, `reward${unscored ? `, ${whole(unscored)} unscored` : ""}`));
  picture.addEventListener("pointerdown", (event) => { start = at_(event); event.preventDefault(); });
  picture.addEventListener("pointermove", (event) => {
    const k = at_(event);
    tip(picture, `${figure(edge(k))} to ${figure(edge(k + 1))}\n${whole(bins[k])} episodes`);
    if (start !== null) bars.forEach((bar, j) => bar.classList.toggle("in", j >= Math.min(start, k) && j <= Math.max(start, k)));
  });
  picture.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const a = Math.min(start, at_(event)), b = Math.max(start, at_(event));
    start = null;
    change({ lo: Number(edge(a).toPrecision(6)), hi: Number(edge(b + 1).toPrecision(6)) });
  });
  picture.addEventListener("pointerleave", () => tip(null));
  box.replaceChildren(picture);
}

const SORTS = { step: "step", reward: "reward", length: "tokens" };
function sorted(held, rows, by) {
  if (!by) return rows;
  const column = held[by.replace("-", "")], sign = by.startsWith("-") ? -1 : 1;
  return [...rows].sort((a, b) => {
    const x = column[a], y = column[b];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    return sign * (x - y) || a - b;
  });
}

function pager(page, num, query, view) {
  const last = Math.max(Math.ceil(num / PAGE_SIZE) - 1, 0);
  const to = (p) => go(view, { ...Object.fromEntries(query), page: p || null });
  return h("div.pager", null,
    h("button", { type: "button", id: "earlier", disabled: page <= 0, onclick: () => to(page - 1) }, "\u2190"),
    h("span", null, `${whole(Math.min(page * PAGE_SIZE + 1, num))}\u2013${whole(Math.min((page + 1) * PAGE_SIZE, num))} of ${whole(num)}`),
    h("button", { type: "button", id: "later", disabled: page >= last, onclick: () => to(page + 1) }, "\u2192"));
}

function episodeTable(box, held, rows, split, query) {
  const by = query.get("sort") || "", page = Math.max(0, Number(query.get("page")) || 0);
  const all = sorted(held, rows, by), shown = all.slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE);
  const head = (key, ...more) => h(`th${more.join("")}`, { "aria-sort": by === key ? "ascending" : by === `-${key}` ? "descending" : "none" },
    h("button", { type: "button", onclick: () => go(["episodes"], { ...Object.fromEntries(query), page: null, sort: by === `-${key}` ? key : `-${key}` }) },
      SORTS[key], by === key ? " \u2191" : by === `-${key}` ? " \u2193" : ""));
  const tasks = shown.map(() => h("td.left.wide.task"));
  const lines = shown.map((k, n) => h("tr.row", { tabindex: 0, "data-go": link(["episode", held.step[k], split, held.i[k]]) },
    h("td", null, h("a", { href: link(["step", held.step[k], split]) }, held.step[k])),
    h("td.wide", null, held.group[k]),
    h("td", null, h("a", { href: link(["episode", held.step[k], split, held.i[k]]) }, `#${held.i[k]}`)),
    h("td.left", null, rewardBar(Number.isNaN(held.reward[k]) ? null : held.reward[k])),
    h("td", null, whole(held.length[k])),
    h("td.left.tag", null, held.tags[held.tag[k]].slice(0, 60)),
    h("td.left.wide", null, h(`span.end.${held.outcomes[held.outcome[k]]}`, null, held.outcomes[held.outcome[k]])),
    tasks[n]));
  box.replaceChildren(h("table.list", null, h("thead", null, h("tr", null, head("step"), h("th.wide", null, "group"), h("th", null, "episode"), head("reward", ".left"), head("length"),
    h("th.left", null, "tag"), h("th.left.wide", null, "outcome"), h("th.left.wide", null, "task"))), h("tbody", null, lines)),
    rows.length ? pager(page, rows.length, query, ["episodes"]) : note(held.done ? "No episode is left by these filters." : "reading"));
  if (shown.length) ask("names", { split, who: shown.map((k) => `${held.step[k]}.${held.i[k]}`).join(",") })
    .then((names) => names.forEach((one, n) => { tasks[n].textContent = inert(one.task || "").slice(0, 80); }))
    .catch((error) => { tasks[0].textContent = inert(error.message); });
}

function stepTable(box, held, rows, split, query) {
  const steps = new Map();
  for (const k of rows) {
    let one = steps.get(held.step[k]);
    if (!one) steps.set(held.step[k], (one = { num: 0, known: 0, sum: 0, square: 0, tokens: 0, cut: 0, groups: new Map() }));
    const reward = held.reward[k], range = one.groups.get(held.group[k]);
    one.num += 1; one.tokens += held.length[k]; one.cut += held.outcomes[held.outcome[k]] !== "ok";
    if (!Number.isNaN(reward)) { one.known += 1; one.sum += reward; one.square += reward * reward; }
    if (!range) one.groups.set(held.group[k], [reward, reward]);
    else { range[0] = Math.min(range[0], reward); range[1] = Math.max(range[1], reward); }
  }
  const page = Math.max(0, Number(query.get("page")) || 0), all = [...steps].sort((a, b) => b[0] - a[0]);
  const lines = all.slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE).map(([step, one]) => {
    const mean = one.known ? one.sum / one.known : null;
    const flat = [...one.groups.values()].filter(([a, b]) => a === b).length;
    return h("tr.row", { tabindex: 0, "data-go": link(["step", step, split]) },
      h("td", null, h("a", { href: link(["step", step, split]) }, step)), h("td.left", null, rewardBar(mean)),
      h("td.wide", null, figure(one.known ? Math.sqrt(Math.max(one.square / one.known - mean * mean, 0)) : null)),
      h("td", null, whole(one.num)), h("td", null, whole(one.groups.size)), h("td.wide", null, whole(flat)), h("td.wide", null, whole(one.cut)), h("td", null, figure(one.tokens / one.num)));
  });
  box.replaceChildren(h("table.list", null, h("thead", null, h("tr", null, h("th", null, "step"), h("th.left", null, "mean reward"), h("th.wide", null, "std"), h("th", null, "episodes"), h("th", null, "groups"),
    h("th.wide", null, "all equal"), h("th.wide", null, "not ok"), h("th", null, "tokens"))), h("tbody", null, lines)),
    all.length ? pager(page, all.length, query, ["episodes"]) : note(held.done ? "No step is left by these filters." : "reading"));
}

// One step: its groups, each with its members by reward.
async function stepView(view, parts) {
  const step = Number(parts[1]), split = parts[2] === "eval" ? "eval" : "train";
  const steps = known.run.steps, here = steps.indexOf(step);
  const near = (k, text) => (steps[k] === undefined ? h("span.muted", null, text) : h("a", { href: link(["step", steps[k], split]), id: k < here ? "prev" : "next" }, text));
  const said = h("p.count");
  view.append(h("p.crumbs", null, h("a", { href: link(["episodes"], { split, by: "step" }) }, "Steps"), ` / step ${step} `, near(here - 1, "\u2190"), " ", near(here + 1, "\u2192")),
    h("div.bar1.controls", null, choice("split", [["train", "trained"], ["eval", "evaluated"]], split, (v) => go(["step", step, v])), said));
  const piece = await ask("columns", { split, first: step, last: step });
  const held = { num: 0, tags: [], outcomes: [], step: [], i: [], reward: [], length: [], group: [], tag: [], outcome: [] };
  merge(held, piece, false);
  const own = [...held.i.keys()].filter((k) => held.step[k] === step); // an export answers with all steps
  if (!own.length) { view.append(note(`Step ${step} has no complete traces of ${split}${split === "train" ? " (metrics.rollouts_every)" : ""}.`)); return; }
  const groups = new Map();
  for (const k of own) groups.set(held.group[k], [...(groups.get(held.group[k]) || []), k]);
  const rewards = own.map((k) => held.reward[k]).filter((r) => !Number.isNaN(r));
  known.low = Math.min(0, ...rewards); known.high = Math.max(1, ...rewards);
  const mean = (list) => (list.length ? list.reduce((a, b) => a + b, 0) / list.length : null);
  const tools = h("div");
  said.textContent = `${whole(own.length)} episodes in ${whole(groups.size)} groups, mean reward ${figure(mean(rewards))}`;
  view.append(h("div.bar1", null, h("span.scale", null, "reward ", figure(known.low), [0, 1, 2, 3, 4, 5, 6].map((k) => h(`i.cell.r${k}`)), figure(known.high)),
      h("button", { type: "button", id: "tools", onclick: () => toolsOf(tools, step, split) }, "tool calls and ends")), tools);
  const cards = [...groups].map(([group, members]) => {
    const known_ = members.map((k) => held.reward[k]).filter((r) => !Number.isNaN(r)), m = mean(known_);
    const std = known_.length ? Math.sqrt(mean(known_.map((r) => (r - m) ** 2))) : null;
    const task = h("span.task");
    const cells = members.slice(0, 128).map((k) => h(`a.cell.${rewardClass(held.reward[k])}`, { href: link(["episode", step, split, held.i[k]]),
      title: `episode ${held.i[k]}, reward ${figure(held.reward[k])}, ${held.length[k]} tokens, ${held.outcomes[held.outcome[k]]}` }, figure(held.reward[k])));
    const card = h("article.group", { "data-group": group }, h("div.bar1", null, h("b", null, `group ${group}`), h("span.muted", null, held.tags[held.tag[members[0]]].slice(0, 60)), task),
      h("div.cells", null, cells, members.length > 128 ? `and ${members.length - 128} more` : null),
      h("div.muted", null, `mean ${figure(m)}, std ${figure(std)}${std === 0 ? ": no gradient from this group" : ""}`,
        members.length > 1 ? [" \u00b7 ", h("a", { href: link(["diff", step, split, held.i[members[0]], step, split, held.i[members[1]]]) }, "compare the first two")] : null));
    return { card, task, first: members[0] };
  });
  const list = h("div.groups", null, cards.slice(0, 200).map((c) => c.card));
  view.append(list, cards.length > 200 ? note(`and ${cards.length - 200} more groups: filter them in the list of episodes`) : "");
  const asked = cards.slice(0, 200);
  const names = await ask("names", { split, who: asked.map((c) => `${step}.${held.i[c.first]}`).join(",") });
  names.forEach((one, n) => { asked[n].task.textContent = inert(one.task || "").slice(0, 120); });
}
