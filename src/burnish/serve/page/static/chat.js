// @ts-check
// A conversation with one model, or with two side by side; responses are streamed.
import { $, $$, copy, download, notify } from "./dom.js";
import { busy, isBusy, onSubmit } from "./composer.js";
import { Engines } from "./engines.js";
import { isRewardModel } from "./format.js";
import { history, save } from "./history.js";
import { Attached, withImages, withoutPixels } from "./images.js";
import { answers, chain, conversation } from "./messages.js";
import { Failed, get } from "./net.js";
import { choices, findTargets } from "./targets.js";
import { sampling, statistics, tools } from "./sampling.js";
import { fill, following, oncePerFrame, promptNode, referenceNode, small, toEnd, turnNode, waits } from "./turns.js";
import { loadWordsOf, ready, t } from "./words.js";
await Promise.all([ready, loadWordsOf("chat")]);
const wanted = $("#engines").dataset.target,
  targets = await findTargets(wanted, (run) => !isRewardModel(run.yaml));
const engines = new Engines(targets, settle);
let turns = /** @type {any[]} */ ([]);
let answering = /** @type {AbortController[]} */ ([]);
let chat = sessionStorage.getItem("chat") ?? "";
let opened = 0; // how often a conversation was opened
/** Sides whose tool results were entered while a response was written. @type {Set<number>} */
const continued = new Set();
const attached = new Attached(() => engines.running[[0, 1].find((side) => engines.isReady(side)) ?? 0]?.id);
const name = (/** @type {number} */ side) => targets.get(engines.chosen[side] ?? "")?.label ?? "";

function settle() {
  const isTwo = Boolean(engines.chosen[1]);
  $('.side[data-side="1"]').hidden = !isTwo;
  $("#unload").hidden = !engines.chosen.some(Boolean);
  const isAny = turns.length > 0;
  $("#sides").hidden = !isAny;
  $("#welcome").hidden = isAny;
  $("#welcome-text").textContent = t(targets.size ? (engines.chosen[0] ? "chat_ready" : "chat_choose") : "no_models");
  $("#retry").disabled = $("#record").disabled = !isAny;
}
function show() {
  for (const side of [0, 1, "reference"]) $(`.side[data-side="${side}"]`).replaceChildren();
  for (const turn of turns) showTurn(turn);
  settle();
  toEnd();
}
/** @param {any} turn */
function showTurn(turn) {
  for (const side of [0, 1]) {
    promptNode(turn, side, (text) => {
      stopAnswers();
      turns = turns.slice(0, turns.indexOf(turn));
      begin({ before: turn.before, user: text, images: turn.images, answers: [null, null], again: 0 });
    });
    for (const one of chain(turn.answers[side]))
      finish(turnNode("assistant", side, one.by ?? name(side)), one, side, turn);
  }
  $('.side[data-side="reference"]').hidden = !turns.some((one) => one.reference);
  if (turn.reference) referenceNode(turn);
}
/** Show a complete response with its actions. @param {any} node @param {any} one @param {number} side @param {any} turn */
function finish(node, one, side, turn) {
  fill(node, one, () => goOn(side, turn));
  node.tools.replaceChildren(
    small("copy", t("copy"), () => copy(one.text)),
    ...(turn === turns.at(-1) ? [small("again", t("retry"), retry)] : []),
  );
}
const messagesOf = (/** @type {number} */ side) => conversation($("#system").value, turns, side);
/** @param {number} side @param {any} turn @param {any[]} offered tools */
async function answer(side, turn, offered) {
  const messages = messagesOf(side),
    last = chain(turn.answers[side]).at(-1),
    stop = new AbortController();
  const one = /** @type {any} */ ({ by: name(side), text: "", reasoning: "", calls: [], pieces: [] });
  const node = turnNode("assistant", side, one.by);
  if (last) last.next = one;
  else turn.answers[side] = one;
  answering.push(stop);
  fill(node, one);
  toEnd();
  const began = performance.now(),
    drawing = oncePerFrame(() => fill(node, one));
  let [firstMs, count] = [0, 0];
  try {
    const body = { messages, ...sampling(turn.again), ...(offered.length ? { tools: offered } : {}) };
    for await (const tokens of answers(engines.running[side].id, body, one, stop.signal)) {
      if (!firstMs && (one.text || one.reasoning)) firstMs = performance.now() - began;
      count = tokens;
      drawing.request();
    }
    one.figures = statistics(count, performance.now() - began, firstMs);
  } catch (failed) {
    one.figures = stop.signal.aborted ? t("was_stopped") : failed instanceof Error ? failed.message : String(failed);
    if (failed instanceof Failed && failed.code === "no_engine") void engines.load(side, engines.chosen[side] ?? "");
  }
  drawing.cancel();
  following(() => finish(node, one, side, turn));
}
/** Show an entered tool result, and request the next response once no call of this side is waiting. @param {number} side @param {any} turn */
async function goOn(side, turn) {
  if (isBusy()) {
    continued.add(side);
    return;
  }
  show();
  keep();
  if (!waits(turn.answers[side])) await request([side], turn);
}
/** @param {any} turn */
async function begin(turn) {
  turns.push(turn);
  show();
  await request([0, 1], turn);
}
/** Request the responses of the sides whose model is loaded. @param {number[]} wanted @param {any} turn */
async function request(wanted, turn) {
  const sides = wanted.filter((side) => engines.isReady(side)),
    offered = tools();
  if (!sides.length) notify(t("no_engine"));
  if (!sides.length || !offered) return;
  const own = /** @type {AbortController[]} */ (answering = []);
  busy(true);
  await Promise.all(sides.map((side) => answer(side, turn, offered)));
  if (answering !== own) return; // stopped by an edit or by another conversation
  busy(false);
  settle();
  keep();
  for (const side of continued) {
    continued.delete(side);
    await goOn(side, turn);
  }
}
/** Stop the responses that are being written, before the conversation changes. */
function stopAnswers() {
  for (const stop of answering) stop.abort();
  answering = [];
  continued.clear();
  busy(false);
}
function keep() {
  const [system, tools] = [$("#system").value, $("#tools").value];
  const saved = { system, tools, turns: withoutPixels(turns), targets: engines.chosen };
  sessionStorage.setItem("chat", chat);
  save(chat, saved);
}
function retry() {
  stopAnswers();
  const turn = turns.pop();
  if (turn) void begin({ ...turn, answers: [null, null], again: turn.again + 1 });
}
/** Open a saved conversation, or start a new one. Throws Failed, and leaves the current one, if it cannot be read. */
async function open(id = "") {
  const own = (opened += 1),
    saved = id ? await get(`api/chats/${id}`) : null;
  if (own !== opened) return null; // another one was selected meanwhile
  if (isBusy() && turns.length) keep();
  stopAnswers();
  chat = id || `chat-${Date.now().toString(36)}`;
  sessionStorage.setItem("chat", id);
  turns = saved?.turns ?? [];
  if (saved) for (const name of ["system", "tools"]) $(`#${name}`).value = saved[name] ?? "";
  show();
  return saved;
}
/** Open the conversation of this tab. If it cannot be read, it stays the one that a reload opens. */
async function reopen() {
  const id = chat;
  try {
    return await open(id);
  } catch (failed) {
    await open();
    if (!(failed instanceof Failed) || failed.status === 404) return null;
    sessionStorage.setItem("chat", id);
    throw failed;
  }
}
onSubmit((text) => {
  if (turns.some((turn) => turn.answers.some(waits))) {
    notify(t("call_waiting"));
    $(".result-form textarea")?.focus();
    return false;
  }
  if (!text.trim() && !attached.images.length) return false;
  void begin({ user: text, images: attached.take(), answers: [null, null], again: 0 });
  return true;
});
$("#stop-response").addEventListener("click", () => {
  answering.forEach((stop) => stop.abort());
  $("#message").focus();
});
$("#retry").addEventListener("click", retry);
$("#new-chat").addEventListener("click", () => open());
history(() => chat, open);
$("#unload").addEventListener("click", async () => {
  await engines.unload();
  for (const select of $$("select[data-side]")) {
    select.value = "";
    void engines.load(Number(select.dataset.side), "");
  }
});
$("#held-out").addEventListener("click", async () => {
  const run = engines.chosen.map((value) => value?.split("/")[0]).find((value) => /^[0-9a-f]{12}$/.test(value ?? ""));
  if (!run) {
    notify(t("validation_needs_run"));
    return;
  }
  busy(true);
  try {
    const record = await withImages(await get(`api/runs/${run}/held-out`));
    await open();
    $("#system").value = record.system;
    $("#tools").value = record.tools.length ? JSON.stringify(record.tools, null, 1) : "";
    busy(false);
    await begin({
      before: record.before,
      user: record.user,
      images: record.images,
      reference: record.answer,
      place: t("validation_example", record),
      answers: [null, null],
      again: 0,
    });
  } catch (failed) {
    busy(false);
    throw failed;
  }
});
$("#record").addEventListener("click", () => {
  const offered = tools();
  if (!offered) return;
  const record = { messages: messagesOf(0), ...(offered.length ? { tools: offered } : {}) };
  download(new Blob([`${JSON.stringify(record)}\n`]), "records.jsonl");
});
const saved = await reopen().catch((failed) => notify(failed.message));
const named = targets.has("named") ? "named" : "";
const first = wanted ? [wanted, ""] : [saved?.targets?.[0] || named, saved?.targets?.[1] || ""];
for (const select of $$("select[data-side]")) {
  const side = Number(select.dataset.side),
    value = targets.has(first[side]) ? first[side] : "";
  select.replaceChildren(...choices(targets, value, t(side ? "no_second_model" : "choose_a_model")));
  select.addEventListener("change", () => engines.load(side, select.value));
  if (value) void engines.load(side, value);
}
$("#send").disabled = false;
settle();
