// @ts-check
// One run: tiles, charts, state, log and checkpoints, updated live from its files.
import { Chart } from "./chart.js";
import { xValues, csv, concatenated, definedPoints, tokenRates } from "./curves.js";
import { $, $$, askToConfirm, download, el, notify, setFigure, tabs } from "./dom.js";
import { duration, hasWeights, isRewardModel, joined, progressOf, short } from "./format.js";
import { onRedraw, showMachine, showReward, summarize, table, wordsFor } from "./lines.js";
import { groups, nameOf, titleOf } from "./metrics.js";
import { api, follow, get, up } from "./net.js";
import {
  LiveLog,
  addEvent,
  eventText,
  fillPanels,
  fillPredictions,
  panel,
  showWarnings,
  usualSentence,
} from "./panels.js";
import { language, loadRunWords, optionalText, ready, t } from "./words.js";

await ready;
const id = $("#run").dataset.run,
  isTraining = Boolean($("#charts"));
const ALIVE = ["starting", "running", "saving", "evaluating", "stopping"];
/** @type {Map<string, Chart>} */
const charts = new Map();
/** @type {import("./curves.js").Columns} */
let columns = { step: [] };
/** @type {any} */
let facts = {};
/** @type {any} */
let timer = null;
/** @type {any} */
let warningsTimer = null;
/** @type {any} */
let following = null;
/** @type {Promise<string> | null} */
let reloading = null;
let stage = "";
const POINTS = 4000;
const ignore = () => {}; // follow() reports it
const log = new LiveLog(panel("log"), id);

// --- curves -----------------------------------------------------------------------------------------------------------

function draw() {
  timer = null;
  if ($(".plot:active")) return void later(); // a selection of a range would be lost
  if (!isTraining || !columns.step.length) return;
  const kind = $("#x-axis").value,
    smoothing = Number($("#smoothing").value),
    shown = /** @type {import("./curves.js").Columns} */ ({ ...columns, rate: tokenRates(columns) });
  const x = xValues(shown, kind),
    wanted = groups(shown);
  $$(".skeleton-card", $("#charts")).forEach((node) => node.remove());
  for (const [name, chart] of charts)
    if (!wanted.some((group) => group.name === name)) {
      chart.remove();
      charts.delete(name);
    }
  for (const [place, group] of wanted.entries()) {
    const title = titleOf(group.name, t);
    if (!charts.has(group.name))
      charts.set(
        group.name,
        new Chart($("#charts"), title, {
          sync: "run",
          large: place === 0,
          height: place === 0 ? 356 : 136,
          unit: group.unit,
          columns: () =>
            Object.fromEntries(["step", ...group.columns, ...group.points].map((name) => [name, shown[name] ?? []])),
        }),
      );
  }
  for (const group of wanted) {
    /** @type {import("./chart.js").Curve[]} */
    const curves = group.columns.map((name, place) => ({
      label: nameOf(name, t),
      ...definedPoints(x, shown[name]),
      smoothing: group.smooth ? smoothing : 0,
      color: place,
    }));
    for (const name of group.points) {
      const place = group.columns.indexOf(name.slice("eval_".length));
      const color = group.columns.length > 1 && place >= 0 ? place : group.columns.length;
      curves.push({ label: nameOf(name, t), ...definedPoints(x, shown[name]), points: true, color });
    }
    charts.get(group.name)?.draw(curves, {
      log: $("#log-scale").checked && group.name === "loss",
      zero: group.zero,
      clip: $("#clip").checked,
      time: kind === "time",
    });
  }
  for (const one of $$("#x-axis option")) one.disabled = !columns[one.value]; // other programs log no time
  summarize(columns);
  showReward(columns, facts.loss);
  showMachine(columns);
  $("#table").hidden = !$("#as-table").checked; // it may have been selected before this script was loaded
  if (!$("#table").hidden) $("#table").replaceChildren(table(columns));
}
const later = () => {
  timer ??= setTimeout(() => wordsFor(columns).then(draw), 200);
};
/** Load all rows, of a long run a part. They replace those that arrived one by one. Returns their cursor. */
async function fetchSeries() {
  const found = await get(`api/runs/${id}/series?points=${POINTS}`);
  columns = found.columns;
  following?.again(found.cursor);
  await wordsFor(columns);
  await showWarnings(found.warnings);
  draw();
  return found.cursor;
}
const reload = () =>
  (reloading ??= fetchSeries().finally(() => {
    reloading = null;
  }));
/** Reload the warnings, which the server computes over the whole run, after new data. */
const updateWarnings = () => {
  warningsTimer ??= setTimeout(() => {
    warningsTimer = null;
    get(`api/runs/${id}/series?points=16`).then((found) => showWarnings(found.warnings), ignore);
  }, 1000);
};

// --- state ------------------------------------------------------------------------------------------------------------

/** @param {any} run */
function show(run) {
  facts = { ...facts, ...run };
  const alive = ALIVE.includes(facts.state),
    state = $("#state"),
    text = t(`state_${facts.state}`);
  if (state.textContent !== text) {
    state.textContent = text;
    notify(`${facts.title}: ${text}`);
    if (!isTraining && !alive) location.reload(); // its results
  }
  state.className = `state ${facts.state}`;
  $("#progress-line").hidden = !facts.total;
  $("#progress-text").textContent = progressOf(facts, t);
  $("#time-left").textContent = alive && facts.left_s ? t("left_is", { time: duration(facts.left_s) }) : "";
  Object.assign($("#progress"), { max: facts.total || 1, value: facts.step });
  $("#stage").hidden = !alive || facts.total > 0;
  $("#stage").textContent = optionalText(`stage_${stage}`) ?? t("stage_starting");
  if (isTraining) {
    for (const name of ["loss", "eval_loss"]) setFigure(`[data-is=${name}]`, facts[name]);
    $("[data-is=checkpoint]").textContent = facts.checkpoint ?? "–";
    $("[data-caption=eval_loss]").textContent = eventText({ kind: "best", text: facts.best ?? "" });
    showReward(columns, facts.loss);
  }
  if (!alive && !columns.step.length) for (const node of $$(".skeleton-card, #waiting")) node.remove();
  const sentence = joined(usualSentence(facts.sentence), usualSentence(facts.remedy));
  $("#sentence").hidden = !sentence;
  $("#sentence").className = `notice${["failed", "died"].includes(facts.state) ? " bad" : ""}`;
  $("#sentence").textContent = sentence;
  const isUsed = [$("#stop"), $("#resume")].includes(document.activeElement);
  $("#stop").hidden = $("#stop-now").hidden = !alive;
  $("#resume").hidden = alive || facts.maker !== "burnish" || ["done", "unreadable", "elsewhere"].includes(facts.state);
  if (isUsed) $(alive ? "#stop" : "#resume").focus(); // one takes the place of the other
}

tabs($$("[role=tab]"), (tab) => {
  if (tab.id === "tab-log") void log.fill();
  else if (tab.id === "tab-completions")
    void Promise.all([import("./completions.js"), loadRunWords()]).then(([module]) =>
      module.showCompletions(panel("completions"), id),
    );
  else void Promise.all([get(`api/runs/${id}`), loadRunWords()]).then(([run]) => fill(run));
  following?.again();
});

// --- actions ----------------------------------------------------------------------------------------------------------

/** @param {string} path @param {any} body @param {string} [text] */
const post = async (path, body, text) => {
  await api("POST", `api/runs/${id}/${path}`, body);
  if (text) notify(text);
};
$("#stop").addEventListener("click", () => post("stop", { how: "save" }, t("stopping")));
$("#stop-now").addEventListener("click", async () => {
  await loadRunWords();
  if (await askToConfirm(t("stop_now_sure", { checkpoint: facts.checkpoint ?? "–", step: facts.step }), t("stop_now")))
    void post("stop", { how: "now" });
});
$("#resume").addEventListener("click", async () => {
  await loadRunWords();
  const sure = t("resume_silent_sure", { host: facts.launch?.host });
  if (facts.state !== "silent" || (await askToConfirm(sure, t("continue")))) void post("continue", {});
});
$("#csv")?.addEventListener("click", async () => {
  const all = (await get(`api/runs/${id}/series?points=1000000`)).columns; // the charts have a part of a long run
  download(new Blob([csv(all)], { type: "text/csv" }), `${facts.title}.csv`);
});
if (isTraining) {
  for (const control of ["#smoothing", "#x-axis", "#log-scale", "#clip", "#as-table"])
    $(control).addEventListener("input", draw);
  onRedraw(draw);
}

/** @param {any} run */
function fill(run) {
  stage = run.events.findLast((/** @type {any} */ event) => event.kind === "stage")?.text ?? "";
  $("#to-chat").hidden = isRewardModel(run.yaml) || !hasWeights(run);
  fillPanels(run);
}
const drawn = isTraining ? await fetchSeries() : ""; // before the state, of which no change is missed then
const first = await get(`api/runs/${id}`);
await wordsFor({}, first.sentence || first.best);
fill(first);
show(first);
void fillPredictions(id);
void log.fill();
following = follow(
  () => `runs=${id}&log=${panel("log").hidden ? 0 : 1}`,
  drawn || first.cursor,
  (name, data) => {
    if (name === "rows") {
      columns = concatenated(columns, data.columns);
      if (columns.step.length > 3 * POINTS) void reload().catch(ignore);
      later();
      if (data.columns.eval_loss) updateWarnings();
      if (data.columns["completions/mean_length"] && $("#tab-completions").hidden)
        void get(`api/runs/${id}`).then(fillPanels, ignore);
    } else if (name === "run") void wordsFor({}, data.sentence || data.best).then(() => show(data));
    else if (name === "event") {
      if (data.kind === "stage") stage = data.text;
      show({});
      if (["skipped", "checkpoint"].includes(data.kind)) updateWarnings();
      void loadRunWords().then(() => addEvent(data));
    } else if (name === "resync") void Promise.all([reload(), log.fill()]).catch(ignore);
    else if (name === "gone")
      void loadRunWords().then(() => {
        sessionStorage.setItem("notice", t("run_gone", { name: facts.title }));
        location.href = `${up}runs`;
      });
    else if (name === "log") log.add(data).catch(ignore);
  },
);
