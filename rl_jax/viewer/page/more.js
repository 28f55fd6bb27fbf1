// What became of episodes, tool calls by kind, events, and the keys.
"use strict";

async function failuresView(view) {
  const waiting = note("reading the ledger");
  view.append(waiting);
  const table = await ask("failures");
  waiting.remove();
  const most = Math.max(...Object.values(table.states), 1);
  view.append(h("section.card", null, h("h2", null, "Attempts at episodes, by the states that they reached"),
    table.fault ? note(table.fault, "bad") : null,
    h("div.states", null, Object.entries(table.states).map(([state, num]) => h("div.state", null, h("span", null, state.toLowerCase()),
      svg("svg.bar", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect.back", { width: 100, height: 8 }), svg(`rect.fore.${state}`, { width: (100 * num) / most, height: 8 })),
      h("span.num", null, whole(num))))),
    table.resumes ? note(`${table.resumes} resumes: what was not saved before each is void`) : null));
  const issued = table.states.ISSUED || 0;
  view.append(h("section.card", null, h("h2", null, "What was lost, and why"), table.kinds.length ? h("table.list", null,
    h("thead", null, h("tr", null, h("th.left", null, "state"), h("th.left", null, "reason"), h("th", null, "episodes"), h("th", null, "share"), h("th.left.wide", null, "tags"))),
    h("tbody", null, table.kinds.map((kind) => [kindRow(kind, issued)]))) : note("Nothing failed, was dropped or was cancelled."),
    table.others ? note(`${whole(table.others)} records of further kinds are not listed`) : null));
  const steps = known.run.steps, box = h("div");
  view.append(h("section.card", null, h("div.bar1", null, h("h2", null, "Tool calls and ends of turns"),
    steps.length ? field("of step", steps.at(-1), (v) => toolsOf(box, Number(v), "train"), { type: "number", id: "toolstep" }) : null), box));
  if (steps.length) await toolsOf(box, steps.at(-1), "train");
}

function kindRow(kind, issued) {
  const more = h("td", { colspan: 5 }), row = h("tr.examples", { hidden: true }, more);
  const open = async () => {
    row.hidden = !row.hidden;
    if (row.hidden || more.firstChild) return;
    try {
      const found = await ask("examples", { state: kind.state, reason: kind.reason });
      more.append(h("ul.plain", null, found.map((one) => h("li", null, h("code", null, one.uid), ` attempt ${one.attempt}, ${one.tag.slice(0, 60)}, ${whole(one.num_tokens)} tokens sampled, begun with version ${one.start_version}`))),
        note("The newest; logs/latest/driver.log has what a failure said."));
    } catch (error) { more.append(note(error.message, "bad")); }
  };
  return [h("tr.row.kindrow", { tabindex: 0, onclick: open, onkeydown: (event) => { if (event.key === "Enter") { event.stopPropagation(); open(); } } },
    h("td.left", null, h(`span.end.${kind.state}`, null, kind.state.toLowerCase())), h("td.left", null, kind.reason), h("td", null, whole(kind.num)), h("td", null, issued ? share(kind.num / issued) : "\u2013"),
    h("td.left.wide", null, Object.entries(kind.tags).map(([tag, n]) => `${tag.slice(0, 40)} ${whole(n)}`).join(", "))), row];
}

async function toolsOf(box, step, split) {
  box.replaceChildren(note("reading"));
  try {
    const found = await ask("tools", { step, split });
    const ends = Object.entries(found.finishes).map(([name, n]) => `${name} ${whole(n)}`).join(", ");
    box.replaceChildren(
      h("p.muted", null, `step ${step}: ${whole(found.scanned)} of ${whole(found.episodes)} episodes, ${whole(found.turns)} turns; ended by ${ends || "nothing"}`, found.unreadable ? `; ${found.unreadable} cannot be read` : ""),
      found.fault ? note(found.fault) : "",
      found.kinds.length ? h("table.list", null, h("thead", null, h("tr", null, h("th.left", null, "tool"), h("th", null, "calls"), h("th", null, "unreadable"), h("th", null, "mean reward"))),
        h("tbody", null, found.kinds.map((kind) => [h("tr", null, h("td.left", null, h("b", null, kind.name)), h("td", null, whole(kind.num)), h("td", null, whole(kind.errors)), h("td", null, figure(kind.reward))),
          h("tr.examples", null, h("td", { colspan: 4 }, h("details", null, h("summary", null, "examples"), kind.examples.map((one) => h("div.call", null,
            h("a", { href: link(["episode", step, split, one.i]) }, `#${one.i}`), ` turn ${one.turn + 1} `, h("code", null, one.said.text), one.answer.text ? h("div.text.seen", null, one.answer.text) : null)))))]))) : note("No tool call was made."));
  } catch (error) { box.replaceChildren(note(error.message, "bad")); }
}

async function eventsView(view, parts, query) {
  const kind = query.get("kind") || "", found = await ask("events", { kind });
  const events = embedded && kind ? found.events.filter((one) => one.kind === kind) : found.events; // an export holds the newest
  const kinds = Object.entries(found.kinds).sort((a, b) => b[1] - a[1]).map(([k, n]) => [k, `${inert(k)} (${whole(n)})`]);
  const hidden = kind ? "" : found.routine.map((k) => `${whole(found.kinds[k])} of ${k} are under their own kind`).join(", ");
  const shown = kind ? found.kinds[kind] || 0 : found.num - found.routine.reduce((sum, k) => sum + found.kinds[k], 0);
  view.append(h("section.card", null,
    h("div.bar1", null, h("h2", null, `${whole(found.num)} events`), kinds.length > 1 ? select("kind", [["", "all"], ...kinds], kind, (v) => go(["events"], { kind: v })) : null),
    hidden ? note(hidden) : null, shown > events.length ? note(`the newest ${whole(events.length)} of ${whole(shown)} are shown`) : null,
    events.length ? h("ul.events", null, events.map(eventLine)) : note(found.num ? "None of this kind." : "Nothing is in events.jsonl.")));
}
function eventLine(one) {
  const { time, kind, step, text, name, attempt, t_mono_s, ...more } = one;
  const rest = Object.entries(more).map(([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : v}`).join(", ").slice(0, 2000);
  const where = step === undefined || step === null ? "" : typeof step === "number" ? h("a", { href: link(["step", step, "train"]) }, `step ${step}`) : String(step).slice(0, 60);
  return h("li", null, h("time", null, typeof time === "number" ? clock(time) : ""), h(`span.kind.${kind === "alarm" ? "correctness" : "tuning"}`, null, String(kind).slice(0, 60)),
    h("span", null, where, " ", name ? `${String(name).slice(0, 100)} ` : "", text ? String(text).slice(0, 4000) : "", rest ? ` ${rest}` : ""));
}

const KEYS = [["1 2 3 4", "run, episodes, failures, events"], ["j k", "next, previous line of a list"], ["Enter", "open the line"], ["n p", "next, previous page or step"],
  ["\u2190 \u2192", "previous, next member of the group"], ["c", "next colour of tokens"], ["d", "compare with the next member"], ["u", "up: episode to step, step to list"], ["/", "filter"], ["?", "this list"]];
function helpView(view) {
  view.append(h("section.card", null, h("h2", null, "Keys"), h("dl.facts", null, KEYS.map(([key, what]) => h("div", null, h("dt", null, key), h("dd", null, what)))),
    h("p.muted", null, "The address names what is shown: it can be kept, and sent to whoever sees the same run.")));
}
