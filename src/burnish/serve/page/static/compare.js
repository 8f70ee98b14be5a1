// @ts-check
// Comparison of several runs: charts with a legend, metrics, and differing options.
import { Chart } from "./chart.js";
import { xValues, concatenated, definedPoints, tokenRates } from "./curves.js";
import { $, $$, el, notify } from "./dom.js";
import { metricsTable, optionsTable } from "./differences.js";
import { onRedraw, wordsFor } from "./lines.js";
import { fullNameOf, groups } from "./metrics.js";
import { follow, get } from "./net.js";
import { ready, t } from "./words.js";

await ready;
const box = $("#chosen"),
  most = Number(box.dataset.most);
/** @type {string[]} */
let chosen = box.dataset.runs.split(",").filter(Boolean);
const allRuns = (await get("api/runs")).runs.filter((/** @type {any} */ run) => run.kind === "train");
chosen = chosen.filter((id) => allRuns.some((/** @type {any} */ run) => run.id === id)).slice(0, most); // a link may be old
const runs = allRuns.filter(
  (/** @type {any} */ run, /** @type {number} */ age) => age < 200 || chosen.includes(run.id),
);
/** @type {Map<string, any>} */
const series = new Map(),
  facts = new Map();
/** @type {Map<string, Chart>} */
const charts = new Map();
const POINTS = 2000;
/** @type {any} */
let following = null;
/** Of the runs that were loaded before they are followed. @type {string[]} */
const cursors = [];
/** @type {any} */
let timer = null;
function redraw() {
  timer = $(".plot:active") ? setTimeout(redraw, 200) : null; // a selection of a range would be lost
  if (!timer) draw();
}
/** Runs that are loaded again. @type {Set<string>} */
const reloading = new Set();
/** Load a run again. @param {string} id */
function reload(id) {
  if (reloading.has(id)) return;
  reloading.add(id);
  void loadRun(id)
    .then(redraw)
    .finally(() => reloading.delete(id));
}
// --- the view, which is in the URL ------------------------------------------------------------------------------------

/** @type {Record<string, any>} */
const view = {
  x: $("#x-axis"),
  smoothing: $("#smoothing"),
  log: $("#log-scale"),
  clip: $("#clip"),
  different: $("#only-different"),
};
const DEFAULTS = { x: "step", smoothing: "0.6", log: "false", clip: "false", different: "true" };
const address = new URLSearchParams(location.search);
for (const [name, defaultValue] of Object.entries(DEFAULTS)) {
  const value = address.get(name) ?? defaultValue;
  if (view[name].type === "checkbox") view[name].checked = value === "true";
  else view[name].value = value;
}
if (!view.x.value) view.x.value = DEFAULTS.x;
/** Keep what is shown in the URL, for a link to it. */
function keepView() {
  const valueOf = (/** @type {any} */ { type, checked, value }) => (type === "checkbox" ? String(checked) : value);
  const changed = Object.entries(DEFAULTS).filter(([name, defaultValue]) => valueOf(view[name]) !== defaultValue);
  const parts = [`runs=${chosen.join(",")}`, ...changed.map(([name]) => `${name}=${valueOf(view[name])}`)];
  history.replaceState(null, "", chosen.length ? `?${parts.join("&")}` : location.pathname);
}

// --- the runs ---------------------------------------------------------------------------------------------------------

const swatch = (/** @type {number} */ place) => el("span", { class: `swatch color-c${place}` });
const chip = (/** @type {any} */ run) =>
  el(
    "label",
    { class: "chip", "data-words": `${run.title} ${run.folder}`.toLowerCase() },
    el("input", { type: "checkbox", value: run.id, checked: chosen.includes(run.id) }),
    el("span", {}),
    run.title,
  );
box.append(...runs.map(chip));
$("#search").addEventListener("input", (/** @type {any} */ event) => {
  for (const one of $$(".chip", box)) one.hidden = !one.dataset.words.includes(event.target.value.toLowerCase());
});

/** Load a run, and follow the rows after those that were loaded. @param {string} id */
async function loadRun(id) {
  const found = await get(`api/runs/${id}/series?points=${POINTS}`),
    run = await get(`api/runs/${id}`);
  await wordsFor(found.columns);
  if (!chosen.includes(id)) return;
  series.set(id, found.columns);
  facts.set(id, run);
  if (following) following.again(found.cursor);
  else cursors.push(found.cursor);
}
/** Load the runs that were chosen, and forget the others. */
async function load() {
  for (const id of series.keys())
    if (!chosen.includes(id)) {
      series.delete(id);
      facts.delete(id);
    }
  const missing = chosen.filter((id) => !series.has(id)),
    loaded = await Promise.allSettled(missing.map(loadRun));
  chosen = chosen.filter(
    (id) => series.has(id) || !missing.some((one, place) => one === id && isRejected(loaded[place])),
  );
  if (chosen.some((id) => !series.has(id))) return; // one was chosen meanwhile: its call draws all
  keepView();
  for (const one of $$(".chip", box)) {
    const input = $("input", one),
      place = chosen.indexOf(input.value);
    $("span", one).className = place < 0 ? "" : `swatch color-c${place}`;
    input.checked = place >= 0;
    input.disabled = place < 0 && chosen.length >= most;
  }
  $("#most").hidden = chosen.length < most;
  draw();
}
/** Whether a run could not be loaded, which a notification says. @param {PromiseSettledResult<void>} result */
function isRejected(result) {
  if (result.status === "rejected") notify(result.reason.message);
  return result.status === "rejected";
}
const isLoaded = () => chosen.every((id) => facts.has(id));
const label = (/** @type {number} */ place) => facts.get(chosen[place]).title;
function draw() {
  if (!isLoaded()) return;
  $("#nothing").hidden = chosen.length > 0;
  $("#whole").hidden = !chosen.length;
  const kind = $("#x-axis").value,
    smoothing = Number($("#smoothing").value);
  /** @type {Map<string, any>} */
  const all = new Map(chosen.map((id) => [id, { ...series.get(id), rate: tokenRates(series.get(id)) }]));
  for (const one of $$("#x-axis option")) one.disabled = ![...all.values()].some((columns) => columns[one.value]);
  const merged = Object.assign({ step: [] }, ...[...all.values()]);
  const wanted = groups(merged).flatMap((group) =>
    [...group.columns, ...group.points].map((column) => ({
      ...group,
      name: column,
      smooth: group.smooth && !group.points.includes(column),
    })),
  );
  for (const [name, chart] of charts)
    if (!wanted.some((one) => one.name === name)) {
      chart.remove();
      charts.delete(name);
    }
  for (const [place, one] of wanted.entries()) {
    const title = fullNameOf(one.name, t);
    if (!charts.has(one.name))
      charts.set(
        one.name,
        new Chart($("#charts"), title, {
          sync: "compare",
          large: place === 0,
          height: place === 0 ? 356 : 136,
          unit: one.unit,
        }),
      );
  }
  for (const one of wanted) {
    const curves = chosen
      .map((id, place) => ({
        label: label(place),
        ...definedPoints(xValues(all.get(id), kind), all.get(id)[one.name] ?? []),
        smoothing: one.smooth ? smoothing : 0,
        color: place,
      }))
      .filter((curve) => curve.y.length);
    charts.get(one.name)?.draw(curves, {
      log: $("#log-scale").checked && /^(eval_)?loss$/.test(one.name),
      zero: one.zero,
      clip: $("#clip").checked,
      time: kind === "time",
    });
  }
  figures();
  options();
}
const heads = () => chosen.map((_, place) => [swatch(place), label(place)]);
function figures() {
  if (isLoaded())
    $("#figures").replaceChildren(
      metricsTable(
        heads(),
        chosen.map((id) => facts.get(id)),
      ),
    );
}
function options() {
  if (!isLoaded()) return;
  const yaml = chosen.map((id) => facts.get(id).yaml ?? "");
  $("#options").replaceChildren(optionsTable(heads(), yaml, $("#only-different").checked));
}
box.addEventListener("change", () => {
  const ticked = $$("input:checked", box).map((one) => one.value);
  chosen = [...chosen.filter((id) => ticked.includes(id)), ...ticked.filter((id) => !chosen.includes(id))].slice(
    0,
    most,
  );
  void load().then(() => following?.again());
});
for (const [name, control] of Object.entries(view))
  control.addEventListener("input", () => {
    keepView();
    if (name === "different") options();
    else draw();
  });
onRedraw(draw);
await load();
following = follow(
  () => `runs=${[...series.keys()].join(",") || "none"}`,
  cursors.join(","),
  (name, data) => {
    if (name === "rows" && series.has(data.run)) {
      series.set(data.run, concatenated(series.get(data.run), data.columns));
      if (series.get(data.run).step.length > 3 * POINTS) reload(data.run);
      timer ??= setTimeout(() => wordsFor(data.columns).then(redraw), 200);
    } else if (name === "run" && facts.has(data.id)) {
      facts.set(data.id, { ...facts.get(data.id), ...data });
      figures();
    } else if (name === "resync") reload(data.run);
    else if (name === "gone" && chosen.includes(data.run)) {
      chosen = chosen.filter((id) => id !== data.run);
      $(`input[value="${data.run}"]`, box)?.closest(".chip").remove();
      void load().then(() => following?.again());
    }
  },
);
