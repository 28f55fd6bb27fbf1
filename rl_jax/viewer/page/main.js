// Which view is shown, the keys, and looking again at a run that goes on.
"use strict";
const TABS = [["run", "Run"], ["episodes", "Episodes"], ["failures", "Failures"], ["events", "Events"], ["keys", "?"]];
const VIEWS = { run: runView, metric: metricView, episodes: episodesView, step: stepView, episode: episodeView, diff: diffView,
  failures: failuresView, events: eventsView, keys: helpView };
const UNDER = { metric: "run", step: "episodes", episode: "episodes", diff: "episodes" };
const AGAIN_MS = 3000;
const keys = {}; // of the view that is shown
let leaving = []; // what to do when it is left
let drawn = 0;

async function draw() {
  const { parts, query } = place(), name = parts[0] in VIEWS ? parts[0] : "run", mine = ++drawn;
  for (const leave of leaving) leave();
  leaving = [];
  for (const key of Object.keys(keys)) delete keys[key];
  tip(null);
  at("tabs").replaceChildren(...TABS.map(([key, text]) => h("a", { href: link([key]), "aria-current": key === (UNDER[name] || name) ? "page" : null, "aria-label": key === "keys" ? "keys" : null }, text)));
  const view = h("div.view", { "data-view": name });
  at("view").replaceChildren(view);
  try {
    await VIEWS[name](view, parts.length ? parts : ["run"], query);
  } catch (error) {
    if (mine === drawn) view.append(note(String(error.message || error), "bad"));
  }
  if (mine === drawn) view.dataset.ready = "yes";
}

function move(by) {
  const rows = [...document.querySelectorAll("tr.row, article.group a.cell")];
  if (!rows.length) return;
  const here = rows.indexOf(document.activeElement);
  rows[Math.max(0, Math.min(rows.length - 1, here < 0 ? 0 : here + by))].focus();
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const click = (...ids) => { for (const id of ids) { const found = at(id); if (found && !found.disabled) { found.click(); return; } } };
  const own = { ArrowLeft: keys.left, ArrowRight: keys.right, c: keys.c, d: keys.d, u: keys.u || (() => go(["episodes"])) }[event.key];
  if (own) own();
  else if (event.key >= "1" && event.key <= "4") go([TABS[event.key - 1][0]]);
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "n") click("later", "next");
  else if (event.key === "p") click("earlier", "prev");
  else if (event.key === "?") go(["keys"]);
  else if (event.key === "/") { const box = document.querySelector("input"); if (box) box.focus(); else go(["run"]); }
  else if (event.key === "Enter" && event.target.dataset.go) location.hash = event.target.dataset.go;
  else return;
  event.preventDefault();
});
document.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-go]");
  if (row && !event.target.closest("a, button")) location.hash = row.dataset.go;
});
let resizing = 0, width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return; // a telephone's bar that comes and goes
  width = window.innerWidth;
  clearTimeout(resizing);
  resizing = setTimeout(draw, 200);
});
window.addEventListener("hashchange", () => { draw(); window.scrollTo(0, 0); });
window.addEventListener("scroll", () => tip(null), { passive: true });

async function again() {
  try {
    const grew = await lookAtRun();
    if (grew && place().parts[0] === "run" && !at("view").contains(document.activeElement) && window.scrollY < 40) await draw();
  } catch (error) {
    at("state").textContent = `the viewer does not answer: ${inert(error.message || error)}`;
    at("state").className = "bad";
  }
  setTimeout(again, AGAIN_MS);
}
(async () => {
  try {
    await lookAtRun();
  } catch (error) {
    at("view").replaceChildren(note(String(error.message || error), "bad"));
    return;
  }
  await draw();
  if (!embedded && isLive(known.run)) setTimeout(again, AGAIN_MS);
})();
