// Two models side by side: one question, two answers, each as it comes.
import { $, $$, Failed, api, el, events, get, ready, say, send, short, t, visible } from "./base.js";
import { nodes } from "./md.js";

await ready;
const chosen = [null, null], engines = [null, null];
let turns = [], answering = [], chat = sessionStorage.getItem("chat") ?? `chat-${Date.now().toString(36)}`;
sessionStorage.setItem("chat", chat);
const { runs } = await get("api/runs"), { models, named } = await get("api/models");
const targets = new Map([["", null]]);
if (named) targets.set("named", { label: named, body: { named: true } });
for (const run of runs) {
  if (run.maker !== "burnish" && !run.checkpoint) continue;
  targets.set(run.id, { label: run.name, body: { run: run.id } });
  if (run.checkpoint) {
    const { checkpoints } = await get(`api/runs/${run.id}`);
    for (const step of checkpoints.toReversed().slice(0, 8)) targets.set(`${run.id}/${step}`, { label: `${run.name} / checkpoint-${step}`, body: { run: run.id, checkpoint: step } });
  }
}
for (const model of models) if (model.kind === "model") targets.set(`path:${model.path}`, { label: model.path, body: { path: model.path } });
for (const select of $$("select[data-side]")) {
  select.append(...[...targets].map(([value, target]) => el("option", { value }, target ? target.label : t("nobody"))));
  select.addEventListener("change", () => load(Number(select.dataset.side), select.value));
}

async function load(side, value) {
  chosen[side] = value || null;
  $(`.side[data-side="${side}"]`).hidden = side === 1 && !value;
  $("#sides").classList.toggle("alone", !chosen[1]);
  engines[side] = null;
  if (!value) return;
  try {
    engines[side] = await send("POST", "api/engines", targets.get(value).body);
    await until(side, engines[side]);
  } catch (failed) { $("#engine-states").textContent = failed.message; }
}
async function until(side, engine) {
  while (engines[side] === engine) {
    const state = (await get("api/engines")).engines.find((one) => one.id === engine.id);
    if (!state || state.state === "ended") { $("#engine-states").textContent = t("engine_ended", { name: engine.name, said: visible(state?.said ?? "") }); engines[side] = null; return; }
    if (state.state === "ready") { engine.state = "ready"; $("#engine-states").textContent = `${engine.name} ✓`; return; }
    $("#engine-states").textContent = t("loading_engine", { name: engine.name, said: state.said });
    await new Promise((resolve) => { setTimeout(resolve, 500); });
  }
}
$("#unload").addEventListener("click", async () => {
  for (const side of [0, 1]) if (engines[side]) await send("DELETE", `api/engines/${engines[side].id}`, undefined);
  for (const select of $$("select[data-side]")) { select.value = ""; void load(Number(select.dataset.side), ""); }
});

// --- the conversation -------------------------------------------------------------------------------------------------

const name = (side) => (side === "given" ? t("given_answer") : targets.get(chosen[side])?.label ?? "");
function turnNode(role, side) {
  const text = el("div", { class: "text" }), thought = el("details", { hidden: true }, el("summary", {}, t("thought")), el("div", { class: "thought" })), figures = el("div", { class: "figures" });
  $(`.side[data-side="${side}"]`).append(el("div", { class: `turn ${role}` }, el("h2", {}, role === "user" ? t("you") : name(side)), thought, text, figures));
  return { text, thought, figures };
}
function show() {
  for (const side of [0, 1, "given"]) $(`.side[data-side="${side}"]`).replaceChildren();
  for (const turn of turns) {
    asked(turn);
    for (const side of [0, 1]) for (const one of chain(turn.answers[side])) fill(turnNode("assistant", side), one, () => goOn(side, turn));
  }
}
/** The question on each side, and the answer of its record, where it is one. */
function asked(turn) {
  for (const side of [0, 1]) {
    for (const { role, content, tool_calls: calls } of turn.before ?? []) turnNode(role, side).text.replaceChildren(...nodes(content || calls.map((call) => `${call.function.name}(${call.function.arguments})`).join("\n")));
    turnNode("user", side).text.replaceChildren(...nodes(turn.user));
  }
  $(".side[data-side=given]").hidden = !turns.some((one) => one.given);
  if (turn.given) { const node = turnNode("assistant", "given"); node.text.replaceChildren(...nodes(turn.given)); node.figures.textContent = visible(turn.place); }
}
/** An answer, and those that followed the results of its calls. */
const chain = (one) => (one ? [one, ...chain(one.next)] : []);
const waits = (one) => chain(one).some((part) => part.figures && part.calls?.some((call) => call.result === undefined));
/** A call, with what it came back with, or a field for that. */
function callNode(call, one, told) {
  const shown = el("pre", { class: "call" }, visible(`${call.name}(${call.arguments})`));
  if (call.result !== undefined) return [shown, el("pre", { class: "result" }, visible(call.result))];
  if (!one.figures || !told) return [shown]; // it is still being written
  const field = el("textarea", { rows: 2, "aria-label": t("result_of", { name: call.name }), placeholder: t("result_of", { name: call.name }) });
  const give = (event) => { event.preventDefault(); call.result = field.value; told(); };
  return [shown, el("form", { class: "row result-form", onsubmit: give }, field, el("button", {}, t("give_result")))];
}
function fill(node, one, told) {
  node.text.replaceChildren(...nodes(one.text));
  for (const call of one.calls ?? []) node.text.append(...callNode(call, one, told));
  node.thought.hidden = !one.thought;
  $(".thought", node.thought).textContent = visible(one.thought ?? "");
  node.figures.replaceChildren(...(one.figures ? [one.figures] : []), ...(one.pieces?.length ? [" ", el("details", {}, el("summary", {}, t("pieces")), one.pieces.map(([piece, logprob]) => el("span", { class: "piece", title: `${(100 * Math.exp(logprob)).toFixed(1)} %` }, visible(piece))))] : []));
}
const messagesOf = (side) => [
  ...($("#system").value ? [{ role: "system", content: $("#system").value }] : []),
  ...turns.flatMap((turn) => [...(turn.before ?? []), { role: "user", content: turn.user }, ...chain(turn.answers[side]).filter((one) => one.text || one.calls?.length).flatMap(said)]),
];
const said = ({ text, calls = [] }) => [
  { role: "assistant", content: text, ...(calls.length ? { tool_calls: calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) } : {}) },
  ...calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result ?? "" })),
];
/** The tools as they were typed: their declarations, or a list of functions alone. */
function tools() {
  const text = $("#tools").value.trim();
  const listed = text ? JSON.parse(text) : [];
  if (!Array.isArray(listed)) throw new SyntaxError();
  return listed.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}

async function answer(side, turn, seed) {
  const messages = messagesOf(side), last = chain(turn.answers[side]).at(-1), offered = tools();
  const one = { text: "", thought: "", calls: [], pieces: [] }, node = turnNode("assistant", side), stop = new AbortController();
  if (last) last.next = one; else turn.answers[side] = one;
  answering.push(stop);
  const began = performance.now();
  let firstMs = null, tokens = 0;
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  try {
    const response = await api("POST", `api/chat/${engines[side].id}`, { messages, stream: true, stream_options: { include_usage: true }, logprobs: true, temperature: number("#temperature"), top_p: number("#top_p"), max_tokens: number("#max_tokens"), seed, ...(offered.length ? { tools: offered } : {}) }, stop.signal);
    for await (const event of events(response)) {
      if (event.data === "[DONE]") break;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Failed(500, chunk.error);
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      const part = chunk.choices[0];
      if (!part) continue;
      if (firstMs === null && (part.delta.content || part.delta.reasoning_content)) firstMs = performance.now() - began;
      one.text += part.delta.content ?? "";
      one.thought += part.delta.reasoning_content ?? "";
      for (const call of part.delta.tool_calls ?? []) {
        if (call.function.name) one.calls.push({ id: call.id, name: call.function.name, arguments: "" });
        one.calls.at(-1).arguments += call.function.arguments ?? "";
      }
      for (const token of part.logprobs?.content ?? []) one.pieces.push([token.token, token.logprob]);
      fill(node, one);
    }
    const seconds = (performance.now() - began) / 1000;
    one.figures = t("answer_figures", { tokens, rate: short(tokens / seconds), first: short((firstMs ?? 0) / 1000) });
  } catch (failed) {
    one.figures = stop.signal.aborted ? t("was_stopped") : failed.message;
  }
  fill(node, one, () => goOn(side, turn));
}
/** A result was given: shown, and answered once no call of this side waits any more. */
async function goOn(side, turn) {
  show();
  keep();
  if (waits(turn.answers[side])) return;
  if (engines[side]?.state !== "ready") { say(t("no_engine")); return; }
  await during([side], turn, 0);
}
async function ask(turn, again = 0) {
  const sides = [0, 1].filter((side) => engines[side]?.state === "ready");
  if (!sides.length) { say(t("no_engine")); return; }
  await during(sides, turn, again);
}
async function during(sides, turn, again) {
  answering = [];
  busy(true);
  const seed = $("#seed").value === "" ? undefined : Number($("#seed").value) + again;
  try { await Promise.all(sides.map((side) => answer(side, turn, seed))); } catch (failed) {
    if (!(failed instanceof SyntaxError)) throw failed;
    say(t("tools_wrong"));
  }
  busy(false);
  keep();
}
function keep() { void send("PUT", `api/chats/${chat}`, { system: $("#system").value, tools: $("#tools").value, turns, targets: chosen }).catch(() => {}); }
function busy(is) { $("#halt").hidden = !is; for (const id of ["#send", "#retry", "#held-out"]) $(id).disabled = is; }

$("#say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("#message").value;
  if (!text.trim() || $("#send").disabled) return;
  if (turns.some((turn) => turn.answers.some(waits))) { say(t("call_waits")); $(".result-form textarea")?.focus(); return; }
  const turn = { user: text, answers: [null, null], again: 0 };
  turns.push(turn);
  asked(turn);
  $("#message").value = "";
  void ask(turn);
});
$("#message").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("#say").requestSubmit(); });
$("#halt").addEventListener("click", () => { for (const stop of answering) stop.abort(); });
$("#retry").addEventListener("click", () => {
  const turn = turns.at(-1);
  if (!turn) return;
  turn.answers = [null, null];
  turn.again += 1;
  show();
  void ask(turn, turn.again);
});
function fresh() {
  turns = [];
  chat = `chat-${Date.now().toString(36)}`;
  sessionStorage.setItem("chat", chat);
  $(".side[data-side=given]").hidden = true;
  show();
}
$("#fresh").addEventListener("click", fresh);
$("#held-out").addEventListener("click", async () => {
  const run = chosen.map((value) => value?.split("/")[0]).find((value) => /^[0-9a-f]{12}$/.test(value ?? ""));
  if (!run) { say(t("held_out_of_run")); return; }
  busy(true);
  try {
    const record = await get(`api/runs/${run}/held-out`);
    fresh();
    $("#system").value = record.system;
    $("#tools").value = record.tools.length ? JSON.stringify(record.tools, null, 1) : "";
    const turn = { before: record.before, user: record.user, given: record.answer, place: t("held_out_is", record), answers: [null, null], again: 0 };
    turns.push(turn);
    asked(turn);
    busy(false);
    await ask(turn);
  } catch (failed) { busy(false); if (!(failed instanceof Failed)) throw failed; say(failed.message); }
});
$("#record").addEventListener("click", () => {
  const record = JSON.stringify({ messages: messagesOf(0), ...($("#tools").value.trim() ? { tools: tools() } : {}) });
  const link = el("a", { href: URL.createObjectURL(new Blob([`${record}\n`], { type: "application/jsonl" })), download: "records.jsonl" });
  link.click();
});

const kept = await get(`api/chats/${chat}`).catch(() => null);
if (kept) { turns = kept.turns; $("#system").value = kept.system ?? ""; $("#tools").value = kept.tools ?? ""; }
const wanted = $("#engines").dataset.target;
const begin = [wanted || kept?.targets?.[0] || (named ? "named" : ""), wanted ? "" : kept?.targets?.[1] || ""];
for (const side of [0, 1]) {
  if (begin[side] && targets.has(begin[side])) { $(`select[data-side="${side}"]`).value = begin[side]; void load(side, begin[side]); }
}
$("#send").disabled = false;
$("#sides").classList.toggle("alone", !begin[1]);
show();
