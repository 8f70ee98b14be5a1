// One run: curves, state, log, checkpoints; all from its files, live.
import { $, $$, api, bytes, clock, duration, el, follow, get, plain, ready, say, send, short, t, up, visible } from "./base.js";
import { Chart, across, csv, redrawn, table } from "./chart.js";

await ready;
const id = $("#run").dataset.run;
const CHARTS = ["loss", "lr", "grad_norm", "tokens_per_s", "memory_bytes"];
const charts = {};
let columns = { step: [] }, facts = {}, logText = "", timer = null;
const ALIVE = ["starting", "running", "saving", "evaluating", "stopping"];

function draw() {
  timer = null;
  const smoothing = Number($("#smoothing").value), x = across(columns, $("#across").value), log = $("#log-scale").checked;
  const drawn = CHARTS.filter((name) => columns[name]?.some((value) => value !== null));
  // All places first: how wide one is depends on how many there are.
  for (const name of drawn) charts[name] ??= Object.assign(new Chart($("#charts"), t(name), "run"), { isBytes: name === "memory_bytes" });
  for (const name of drawn) {
    const rows = columns[name].map((value, place) => [x[place], value]).filter(([, value]) => value !== null);
    const curve = { label: t(name), x: rows.map((row) => row[0]), y: rows.map((row) => row[1]), smoothing: ["loss", "grad_norm"].includes(name) ? smoothing : 0 };
    const curves = [curve];
    if (name === "loss" && columns.eval_loss) {
      const found = columns.eval_loss.map((value, place) => [x[place], value]).filter(([, value]) => value !== null);
      curves.push({ label: t("eval_loss"), x: found.map((row) => row[0]), y: found.map((row) => row[1]), points: true, color: 1 });
    }
    charts[name].draw(curves, { log: log && name !== "lr" });
  }
  const pairs = columns.step.map((step, place) => [step, columns.loss?.[place]]).filter(([, value]) => typeof value === "number");
  if (pairs.length) {
    const low = pairs.reduce((best, pair) => (pair[1] < best[1] ? pair : best));
    $("#summary").textContent = t("chart_summary", { first: short(pairs[0][1]), last: short(pairs.at(-1)[1]), steps: pairs.at(-1)[0], low: short(low[1]), at: low[0] });
  }
  if (!$("#table").hidden) $("#table").replaceChildren(table(columns));
}
const later = () => { timer ??= setTimeout(draw, 200); };

function add(more) {
  const before = columns.step.length, added = more.step.length;
  for (const name of new Set([...Object.keys(columns), ...Object.keys(more)])) {
    columns[name] = [...(columns[name] ?? new Array(before).fill(null)), ...(more[name] ?? new Array(added).fill(null))];
  }
  later();
}

async function fetchSeries() {
  const found = await get(`api/runs/${id}/series?points=4000`);
  columns = found.columns;
  showRemarks(found.remarks);
  draw();
  return found.cursor;
}

function showRemarks(remarks) {
  $("#remarks").hidden = !remarks.length;
  $("#remarks").replaceChildren(...remarks.map(({ key, values }) => el("li", {}, t(key, values))));
}
/** What is said of the whole run is computed where its files are; asked again when something came that may change it. */
let asked = null;
const remarkLater = () => { asked ??= setTimeout(async () => { asked = null; showRemarks((await get(`api/runs/${id}/series?points=16`)).remarks); }, 1000); };

function show(run) {
  facts = { ...facts, ...run };
  const alive = ALIVE.includes(facts.state);
  const state = $("#state");
  if (state.textContent !== t(`state_${facts.state}`)) { state.textContent = t(`state_${facts.state}`); say(`${facts.name}: ${state.textContent}`); }
  state.className = `state ${facts.state}`;
  $("#where").textContent = t("step_of", { step: facts.step, total: facts.total }) + (facts.epoch === null ? "" : ` · ${t("epoch_is", { epoch: Number(facts.epoch).toFixed(2) })}`);
  $("#left").textContent = alive && facts.left_s ? t("left_is", { time: duration(facts.left_s) }) : "";
  Object.assign($("#progress"), { max: facts.total || 1, value: facts.step });
  for (const name of ["loss", "eval_loss", "tokens_per_s"]) $(`.facts [data-is=${name}]`).textContent = short(facts[name]);
  $(".facts [data-is=checkpoint]").textContent = facts.checkpoint ?? "–";
  $(".facts [data-is=best]").textContent = facts.best ?? "";
  const sentence = remark();
  $("#sentence").hidden = !sentence;
  $("#sentence").textContent = visible(sentence);
  $("#stop").hidden = $("#stop-now").hidden = !alive || facts.maker !== "burnish";
  $("#stop").disabled = facts.state === "stopping";
  $("#again").hidden = alive || facts.maker !== "burnish" || facts.state === "done" || facts.state === "elsewhere";
}
const remark = () => [facts.sentence, facts.remedy].filter(Boolean).join(" ");

// --- tabs -------------------------------------------------------------------------------------------------------------

const panel = (name) => $(`#panel-${name}`);
const eventLine = (event) => el("li", {}, `${clock(event.time)} · ${t("step")} ${event.step} · ${visible(event.text)}`);
function fill(run) {
  panel("events").replaceChildren(el("ul", {}, run.events.map(eventLine)));
  panel("options").replaceChildren(el("pre", {}, visible(run.given) || "–"), el("p", {}, `${(run.launch.argv ?? []).join(" ")}`), el("p", {}, [run.launch.host, run.launch.user, run.launch.burnish].filter(Boolean).join(" · ")));
  panel("files").replaceChildren(el("ul", {}, run.files.map((file) => el("li", {}, el("a", { href: `${up}api/runs/${id}/download/${encodeURIComponent(file.name)}`, download: file.name }, file.name), ` ${bytes(file.bytes)}`))));
  panel("checkpoints").replaceChildren(el("ul", {}, run.checkpoints.map((step) => el("li", {}, `checkpoint-${step} `, el("a", { href: `${up}talk?target=${id}/${step}` }, t("nav_talk")), " · ", el("a", { href: `${up}export?target=${id}/${step}` }, t("nav_export"))))));
  if (run.outcome.traceback) panel("events").append(el("details", {}, el("summary", {}, "Traceback"), el("pre", {}, visible(run.outcome.traceback))));
}
async function fillLog() {
  logText = (await get(`api/runs/${id}/log`)).text;
  panel("log").replaceChildren(el("pre", { id: "log-text" }, plain(logText)));
  panel("log").scrollTop = panel("log").scrollHeight;
}
function choose(tab) {
  for (const one of $$("[role=tab]")) {
    const isIt = one === tab;
    one.setAttribute("aria-selected", String(isIt));
    one.tabIndex = isIt ? 0 : -1;
    $(`#${one.getAttribute("aria-controls")}`).hidden = !isIt;
  }
  if (tab.id === "tab-log") void fillLog();
  if (["tab-files", "tab-checkpoints", "tab-options"].includes(tab.id)) void get(`api/runs/${id}`).then(fill);
  following?.again();
}
for (const tab of $$("[role=tab]")) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const all = $$("[role=tab]"), next = all[(all.indexOf(tab) + move + all.length) % all.length];
    choose(next);
    next.focus();
  });
}

// --- what a person does -----------------------------------------------------------------------------------------------

const told = async (path, body, text) => { try { await api("POST", `api/runs/${id}/${path}`, body); if (text) say(text); } catch (failed) { say(failed.message); } };
$("#stop").addEventListener("click", () => told("stop", { how: "save" }, t("stop_told")));
$("#stop-now").addEventListener("click", () => { if (confirm(t("stop_now_sure", { checkpoint: facts.checkpoint ?? "–", step: facts.step }))) void told("stop", { how: "now" }); });
$("#again").addEventListener("click", () => told("continue", {}));
for (const control of ["#smoothing", "#across", "#log-scale"]) $(control).addEventListener("input", draw);
$("#as-table").addEventListener("input", (event) => { $("#table").hidden = !event.target.checked; draw(); });
$("#csv").addEventListener("click", () => { $("#csv").href = URL.createObjectURL(new Blob([csv(columns)], { type: "text/csv" })); });
redrawn(draw);

let following = null;
const first = await get(`api/runs/${id}`);
fill(first);
show(first);
following = follow(() => `runs=${id}&log=${panel("log").hidden ? 0 : 1}`, await fetchSeries(), (name, data) => {
  if (name === "rows") { add(data.columns); if (data.columns.eval_loss) remarkLater(); }
  else if (name === "run") show(data);
  else if (name === "event") { if (["skipped", "checkpoint"].includes(data.kind)) remarkLater(); $("ul", panel("events"))?.append(eventLine(data)); }
  else if (name === "resync") void fetchSeries();
  else if (name === "gone") location.href = `${up}runs`;
  else if (name === "log" && $("#log-text")) {
    logText += data.text;
    $("#log-text").textContent = plain(logText.slice(-262144));
    panel("log").scrollTop = panel("log").scrollHeight;
  }
});
