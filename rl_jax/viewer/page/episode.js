// One episode turn by turn with its tokens as a heat map, and two of them side by side.
"use strict";
const HEATS = [["logprob", "log-prob"], ["advantage", "advantage"], ["mask", "mask"], ["version", "version"], ["none", "plain"]];
const PROBS = [0.9, 0.7, 0.4, 0.2, 0.1, 0.03]; // class q0 above the first, q6 below the last
let heat = "logprob";

// Class of token k under the colours chosen.
function heatClass(kind, tokens, k, shown) {
  if (kind === "logprob") {
    const logprob = tokens.logprobs[k];
    if (logprob === null) return "unknown";
    const p = Math.exp(logprob), at_ = PROBS.findIndex((edge) => p >= edge);
    return `q${at_ < 0 ? 6 : at_}`;
  }
  if (kind === "advantage") {
    const a = tokens.advantages ? tokens.advantages[k] : null;
    if (a === null) return "unknown";
    const part = Math.round((3 * Math.abs(a)) / (shown.max_advantage || 1));
    return a === 0 || part === 0 ? "z" : `${a > 0 ? "p" : "n"}${Math.max(1, Math.min(3, part))}`;
  }
  if (kind === "mask") return tokens.mask[k] ? "trained" : "untrained";
  if (kind === "version") {
    const version = tokens.versions[k];
    if (version === null) return "unknown";
    const lag = shown.consumed_by === null ? 0 : Math.max(0, Math.min(4, shown.consumed_by - version));
    return `v${lag}${tokens.mixed[k] ? " mixed" : ""}`;
  }
  return "";
}
function legendOf(kind, shown) {
  const swatch = (css, text) => h("span", null, h(`i.token.${css}`, null, "\u00a0\u00a0"), text);
  const parts = {
    logprob: [swatch("q0", "p \u2265 .9"), swatch("q1", ".7"), swatch("q2", ".4"), swatch("q3", ".2"), swatch("q4", ".1"), swatch("q5", ".03"), swatch("q6", "less")],
    advantage: shown.has_advantages
      ? [swatch("n3", `\u2212${figure(shown.max_advantage)}`), swatch("n1", "below 0"), swatch("z", "0"), swatch("p1", "above 0"), swatch("p3", `+${figure(shown.max_advantage)}`), swatch("unknown", "not trained")]
      : [h("span", null, "this step has no record of its tokens' advantages")],
    mask: [swatch("trained", "trained"), swatch("untrained", "sampled, not trained")],
    version: shown.consumed_by === null
      ? [swatch("v0", `version ${shown.start_version}`)]
      : [0, 1, 2, 3, 4].map((lag) => swatch(`v${lag}`, lag === 4 ? "4 or more old" : lag ? `${lag} old` : `version ${shown.consumed_by}`)).concat(swatch("v0.mixed", "KV of another version behind it")),
    none: [],
  };
  return h("div.legend", null, parts[kind]);
}

function tokenRun(tokens, shown, kind) {
  const box = h("span.tokens"), fragment = document.createDocumentFragment();
  tokens.pieces.forEach((piece, k) => {
    const span = document.createElement("span");
    span.className = `token ${heatClass(kind, tokens, k, shown)}`;
    span.textContent = inert(piece).replace(/\n/g, "\u21b5\n") || "\u00b7";
    span.dataset.k = k;
    fragment.append(span);
  });
  box.append(fragment);
  const told = (event) => {
    const k = event.target.dataset ? event.target.dataset.k : undefined;
    if (k === undefined) { tip(null); return; }
    const lines = [["token", JSON.stringify(tokens.pieces[k])], ["id", tokens.ids[k]], ["position", tokens.start + Number(k)]];
    if (tokens.logprobs[k] !== null) lines.push(["log-prob", tokens.logprobs[k].toFixed(4)], ["p", Math.exp(tokens.logprobs[k]).toFixed(4)]);
    if (tokens.advantages) lines.push(["advantage", tokens.advantages[k] === null ? "not trained" : tokens.advantages[k]]);
    lines.push(["trained", tokens.mask[k] ? "yes" : "no"]);
    if (tokens.versions[k] !== null) lines.push(["version", `${tokens.versions[k]}${tokens.mixed[k] ? ", KV behind it mixed" : ""}`]);
    tip(event.target, lines.map(([name, value]) => `${name.padEnd(10)}${inert(value)}`).join("\n"));
  };
  box.addEventListener("pointerover", told);
  box.addEventListener("pointerleave", () => tip(null));
  box.addEventListener("click", told);
  return box;
}

const textOf = (cut, css) => h(`div.text.${css}`, null, cut.text, cut.left_out ? h("p.note", null, `${whole(cut.left_out)} more characters are left out; raw bytes has them`) : null);

function turnBox(shown, turn, kind, who) {
  const times = Object.entries(turn.times_s).filter(([, s]) => s).map(([name, s]) => `${name} ${s < 1 ? `${(1000 * s).toFixed(0)} ms` : `${s.toFixed(1)} s`}`);
  const meta = [`${whole(turn.num_prompt)} seen`, `${whole(turn.num_tokens)} sampled`, `ended by ${turn.finish}`, turn.reward === null ? null : `reward ${figure(turn.reward)}`,
    turn.role && `role ${turn.role}`, turn.cached_prompt ? `${whole(turn.cached_prompt)} cached` : null, turn.server && `on ${turn.server}`, ...times].filter(Boolean);
  const said = h("div.text.said", null, turn.tokens.ids.length ? tokenRun(turn.tokens, shown, kind) : turn.said.text);
  const add = (left, next) => {
    if (!left) return;
    const button = h("button.more", { type: "button", onclick: async () => {
      try {
        const more = await ask("tokens", { ...who, turn: turn.number, start: next });
        button.replaceWith(tokenRun(more, shown, heat));
        add(more.left_out, next + more.ids.length);
      } catch (error) { button.replaceWith(note(error.message, "bad")); }
    } }, `${whole(left)} more tokens`);
    said.append(button);
  };
  add(turn.tokens.left_out, turn.tokens.start + turn.tokens.ids.length);
  return h("section.turn", { id: `turn${turn.number}`, "data-turn": turn.number },
    h("div.meta", null, h("b", null, `turn ${turn.number + 1}`), meta.map((m) => h("span", null, m))),
    turn.seen.text || turn.num_prompt ? textOf(turn.seen, "seen") : null, said,
    turn.calls.map((call) => call.error
      ? h("div.call.bad", null, h("b", null, "call that could not be read "), textOf(call.error, "plain"))
      : h("div.call", null, h("b", null, call.name), " ", h("code", null, Object.entries(call.arguments).map(([k, v]) => `${k}=${v.text}${v.left_out ? "..." : ""}`).join(", ")))));
}

function headOf(shown) {
  const parts = Object.entries(shown.reward.parts);
  return h("section.card.head", null,
    h("div.bar1", null, h("span.big", null, figure(shown.reward.value)), h("span", null, shown.reward.status === "scored" ? "reward" : `not scored: ${shown.reward.status}`),
      h(`span.end.${shown.outcome}`, null, shown.outcome, shown.truncated_by ? ` by ${shown.truncated_by}` : ""), h("span.tag", null, shown.tag)),
    h("p.muted.task", null, shown.task, " \u00b7 ", shown.uid, shown.attempt ? ` \u00b7 attempt ${shown.attempt}` : ""),
    h("p.muted", null, `${whole(shown.num_tokens)} tokens, ${whole(shown.num_trained)} trained, begun with version ${shown.start_version}`,
      shown.contexts > 1 ? `, ${shown.contexts} contexts` : "", parts.length ? ` \u00b7 parts: ${parts.map(([k, v]) => `${k} ${figure(v)}`).join(", ")}` : ""),
    shown.reward.detail.text ? textOf(shown.reward.detail, "plain") : null,
    shown.failure ? h("p.note.bad", null, Object.entries(shown.failure).map(([k, v]) => `${k}: ${v}`).join(" \u00b7 ")) : null);
}

async function episodeView(view, parts, query) {
  const [, step, split, i] = parts, who = { step, split, i };
  if (HEATS.some(([key]) => key === query.get("color"))) heat = query.get("color");
  view.append(h("p.crumbs", null, h("a", { href: link(["episodes"], { split, by: "step" }) }, "Steps"), " / ", h("a", { href: link(["step", step, split]) }, `step ${step}`), ` / episode ${i}`));
  let shown;
  try {
    shown = await ask("episode", who);
  } catch (error) {
    view.append(note(error.message, "bad"), embedded ? "" : rawOf(who));
    return;
  }
  const near = shown.members.findIndex((m) => m.i === shown.i), to = (k) => link(["episode", step, split, shown.members[k].i]);
  const rewards = shown.members.map((m) => m.reward).filter((r) => r !== null);
  known.low = Math.min(0, ...rewards); known.high = Math.max(1, ...rewards);
  view.querySelector(".crumbs").append(` of ${whole(shown.num)} / group ${shown.group} `);
  const strip = h("div.cells", { "aria-label": "members of the group" }, shown.members.map((m, k) => h(`a.cell.${rewardClass(m.reward)}${k === near ? ".here" : ""}`,
    { href: to(k), title: `episode ${m.i}` }, figure(m.reward))), shown.num_members > shown.members.length ? `and ${shown.num_members - shown.members.length} more` : null);
  const other = shown.members[near + 1] || shown.members[near - 1];
  const turns = h("div.turns"), legend = h("div");
  const draw = () => {
    legend.replaceChildren(legendOf(heat, shown));
    turns.replaceChildren(...shown.turns.map((turn) => turnBox(shown, turn, heat, who)));
    if (shown.turns_left_out) turns.append(note(`${shown.turns_left_out} more turns are left out`));
    if (view.isConnected) turnTo(parts, { color: heat === "logprob" ? null : heat });
    for (const button of colours.children) button.setAttribute("aria-pressed", String(button.textContent === HEATS.find(([k]) => k === heat)[1]));
  };
  const colours = choice("colour of tokens", HEATS, heat, (v) => { heat = v; draw(); });
  view.append(headOf(shown), h("div.bar1.controls", null, strip, other ? h("a.button", { id: "compare", href: link(["diff", step, split, shown.i, step, split, other.i]) }, "compare") : null),
    h("div.bar1.controls", null, colours, legend), shown.token_fault ? note(shown.token_fault) : "", turns, embedded ? "" : rawOf(who));
  draw();
  if (!view.isConnected) return; // left meanwhile: the keys are another view's
  keys.left = near > 0 ? () => { location.hash = to(near - 1); } : null;
  keys.right = near < shown.members.length - 1 ? () => { location.hash = to(near + 1); } : null;
  keys.c = () => { heat = HEATS[(HEATS.findIndex(([k]) => k === heat) + 1) % HEATS.length][0]; draw(); };
  keys.d = other ? () => { location.hash = link(["diff", step, split, shown.i, step, split, other.i]); } : null;
  keys.u = () => go(["step", step, split]);
}

function rawOf(who) {
  const box = h("div"), size = 4000;
  const read = async (start) => {
    try {
      const raw = await ask("raw", { ...who, start, num: size });
      box.replaceChildren(h("pre.raw", null, raw.bytes), h("div.pager", null,
        h("button", { type: "button", disabled: start <= 0, onclick: () => read(Math.max(0, start - size)) }, "\u2190"),
        h("span", null, `bytes ${whole(raw.start)}\u2013${whole(raw.start + raw.bytes.length)} of ${whole(raw.size)}`),
        h("button", { type: "button", disabled: raw.start + raw.bytes.length >= raw.size, onclick: () => read(start + size) }, "\u2192")));
    } catch (error) { box.replaceChildren(note(error.message, "bad")); }
  };
  return h("details.rawbox", { ontoggle: (event) => { if (event.target.open && !box.firstChild) read(0); } }, h("summary", null, "raw bytes"), box);
}

// --- two side by side ----------------------------------------------------------------------------------------------
const MAX_DIFF = 2000; // tokens of a turn; the table of the longest common sequence has their product

// For each of a and b, which of its entries are not in the longest common sequence; null where they are too long for it.
function differing(a, b) {
  if (a.length > MAX_DIFF || b.length > MAX_DIFF) return null;
  const width = b.length + 1, table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--)
    table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
  const left = new Set(), right = new Set();
  let i = 0, j = 0;
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) { i++; j++; } else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) left.add(i++); else right.add(j++);
  }
  while (i < a.length) left.add(i++);
  while (j < b.length) right.add(j++);
  return [left, right];
}

async function diffView(view, parts) {
  const whos = [parts.slice(1, 4), parts.slice(4, 7)].map(([step, split, i]) => ({ step, split, i }));
  view.append(h("p.crumbs", null, "Compare ", whos.map((w, k) => [k ? " and " : "", h("a", { href: link(["episode", w.step, w.split, w.i]) }, `step ${w.step} ${w.split} #${w.i}`)])));
  const both = await Promise.all(whos.map((who) => ask("episode", who)));
  const members = both[1].members, change = (side, m) => {
    const w = whos.map((one, k) => (k === side ? { ...one, i: m } : one));
    return link(["diff", w[0].step, w[0].split, w[0].i, w[1].step, w[1].split, w[1].i]);
  };
  const rewards = members.map((m) => m.reward).filter((r) => r !== null);
  known.low = Math.min(0, ...rewards); known.high = Math.max(1, ...rewards);
  view.append(h("div.bar1.controls", null, h("span.muted", null, "right side: "), h("div.cells", null, members.map((m) => h(`a.cell.${rewardClass(m.reward)}${m.i === both[1].i ? ".here" : ""}`, { href: change(1, m.i), title: `episode ${m.i}` }, figure(m.reward))))));
  view.append(h("div.sides", null, both.map((shown) => headOf(shown))));
  const num = Math.max(both[0].turns.length, both[1].turns.length);
  for (let k = 0; k < num; k++) {
    const turns = both.map((shown) => shown.turns[k]);
    const found = turns[0] && turns[1] ? differing(turns[0].tokens.ids, turns[1].tokens.ids) : null;
    view.append(h("div.sides", null, turns.map((turn, side) => {
      if (!turn) return h("section.turn.absent", null, note(`no turn ${k + 1}`));
      const box = turnBox(both[side], turn, "none", whos[side]);
      if (found) box.querySelectorAll(".token").forEach((span, n) => { if (found[side].has(n)) span.classList.add(side ? "added" : "removed"); });
      const same = turns[1 - side] && turns[1 - side].seen.text === turn.seen.text;
      if (turns[1 - side] && !same && box.querySelector(".seen")) box.querySelector(".seen").classList.add("differs");
      return box;
    })));
    if (turns[0] && turns[1] && !found) view.append(note(`turn ${k + 1} is longer than ${MAX_DIFF} tokens: its differences are not marked`));
  }
  if (view.isConnected) keys.u = () => go(["step", whos[0].step, whos[0].split]);
}
