// The chat page: streams /v1/chat/completions and shows each token with its log-prob and version.
"use strict";
const at = (id) => document.getElementById(id);
const talk = at("talk"), tip = at("tip");
let messages = [], running = null;

const headers = () => {
  const out = { "content-type": "application/json" };
  if (at("key").value) out.authorization = `Bearer ${at("key").value}`;
  return out;
};

async function look() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    const said = await answer.json();
    if (!answer.ok) throw new Error(said.error.message);
    at("model").textContent = said.data[0].id;
    at("state").textContent = `version ${said.data[0].weight_version}, context ${said.data[0].max_model_len}`;
  } catch (error) {
    at("state").textContent = String(error.message || error);
  }
}

function add(kind, text) {
  const box = document.createElement("div");
  box.className = `said ${kind}`;
  box.textContent = text;
  talk.append(box);
  talk.scrollTop = talk.scrollHeight;
  return box;
}

// One span a token; the text of a chunk goes to its last token where they do not part evenly.
function addTokens(box, chunk) {
  const choice = chunk.choices[0], tokens = choice.logprobs ? choice.logprobs.content : [];
  let left = choice.delta.content || "";
  tokens.forEach((token, i) => {
    const span = document.createElement("span");
    const fits = i < tokens.length - 1 && left.startsWith(token.token);
    const text = fits ? token.token : i < tokens.length - 1 ? "" : left;
    left = left.slice(text.length);
    const p = Math.exp(token.logprob);
    span.className = `token ${p < 0.1 ? "p0" : p < 0.4 ? "p1" : p < 0.8 ? "p2" : ""}`;
    span.textContent = text;
    span.tabIndex = -1;
    span.dataset.tip = `token    ${JSON.stringify(token.token)}\nlog-prob ${token.logprob.toFixed(4)}` +
      `\np        ${p.toFixed(4)}\nversion  ${chunk.weight_version}`;
    if (text) box.append(span);
  });
  if (!tokens.length && left) box.append(left);
  return choice.delta.content || "";
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function ask(words) {
  messages.push({ role: "user", content: words });
  add("user", words);
  const box = add("assistant", "");
  let text = "";
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  try {
    const body = {
      messages, stream: true, logprobs: true, temperature: Number(at("temperature").value),
      max_tokens: Math.max(1, Number(at("tokens").value)),
    };
    if (at("seed").value !== "") body.seed = Number(at("seed").value);
    const answer = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const chunk of events(answer)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.choices.length) text += addTokens(box, chunk);
      talk.scrollTop = talk.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") add("error", String(error.message || error));
  }
  if (text) messages.push({ role: "assistant", content: text });
  else { messages.pop(); box.remove(); }
  running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  look();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = at("words").value.trim();
  if (!words || running) return;
  at("words").value = "";
  ask(words);
});
at("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); at("ask").requestSubmit(); }
});
at("stop").addEventListener("click", () => running && running.abort());
at("clear").addEventListener("click", () => { if (!running) { messages = []; talk.replaceChildren(); } });
at("key").addEventListener("change", look);
talk.addEventListener("mouseover", (event) => {
  const told = event.target.dataset && event.target.dataset.tip;
  tip.hidden = !told;
  if (!told) return;
  tip.textContent = told;
  const box = event.target.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${box.top > tip.offsetHeight + 8 ? box.top - tip.offsetHeight - 4 : box.bottom + 4}px`;
});
talk.addEventListener("mouseout", () => { tip.hidden = true; });
look();
