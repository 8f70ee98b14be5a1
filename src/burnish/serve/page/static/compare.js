// @ts-check
// Comparison of several runs: charts with a legend, metrics, and differing options.
import { Chart } from "./chart.js";
import { xValues, concatenated, definedPoints, tokenRates } from "./curves.js";
import { $, $$, el, figure } from "./dom.js";
import { optionsOf, short, shortOption } from "./format.js";
import { onRedraw, wordsFor } from "./lines.js";
import { fullNameOf, groups } from "./metrics.js";
import { follow, get } from "./net.js";
import { language, ready, t } from "./words.js";

await ready;
const box = $("#chosen"),
  most = Number(box.dataset.most);
/** @type {string[]} */
let chosen = box.dataset.runs.split(",").filter(Boolean);
const runs = (await get("api/runs")).runs.filter((/** @type {any} */ run) => run.kind === "train");
chosen = chosen.filter((id) => runs.some((/** @type {any} */ run) => run.id === id)).slice(0, most); // a link may be old
/** @type {Map<string, any>} */
const series = new Map(),
  facts = new Map();
/** @type {Map<string, Chart>} */
const charts = new Map();
const swatch = (/** @type {number} */ place) => el("span", { class: `swatch color-c${place}` });
const chip = (/** @type {any} */ run) =>
  el(
    "label",
    { class: "chip", "data-words": `${run.title} ${run.folder}`.toLowerCase() },
    el("input", { type: "checkbox", value: run.id, checked: chosen.includes(run.id) }),
    el("span", {}),
    run.title,
  );
box.append(...runs.slice(0, 200).map(chip));
$("#search").addEventListener("input", (/** @type {any} */ event) => {
  for (const one of $$(".chip", box)) one.hidden = !one.dataset.words.includes(event.target.value.toLowerCase());
});

async function load() {
  await Promise.all(
    chosen.map(async (id) => {
      if (!series.has(id)) series.set(id, (await get(`api/runs/${id}/series?points=2000`)).columns);
      if (!facts.has(id)) facts.set(id, await get(`api/runs/${id}`));
    }),
  );
  await Promise.all([...series.values()].map((one) => wordsFor(one)));
  if (chosen.some((id) => !series.has(id) || !facts.has(id))) return; // one was chosen meanwhile: its call draws all
  history.replaceState(null, "", chosen.length ? `?runs=${chosen.join(",")}` : location.pathname);
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
const label = (/** @type {number} */ place) => facts.get(chosen[place]).title;
function draw() {
  $("#nothing").hidden = chosen.length > 0;
  $("#whole").hidden = !chosen.length;
  const kind = $("#x-axis").value,
    smoothing = Number($("#smoothing").value);
  /** @type {Map<string, any>} */
  const all = new Map(chosen.map((id) => [id, { ...series.get(id), rate: tokenRates(series.get(id)) }]));
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
function figures() {
  const names = ["state", "step", "loss", "eval_loss", "tokens_per_s"],
    base = facts.get(chosen[0]);
  const cell = (/** @type {any} */ run, /** @type {string} */ name) => {
    if (name === "state") return el("td", {}, el("span", { class: `state ${run.state}` }, t(`state_${run.state}`)));
    const best = ["loss", "eval_loss"].includes(name)
      ? Math.min(...chosen.map((id) => facts.get(id)[name] ?? Infinity))
      : null;
    const change =
      run !== base && name !== "step" && typeof run[name] === "number" && typeof base[name] === "number"
        ? run[name] - base[name]
        : null;
    return el(
      "td",
      { class: "number" },
      figure(run[name], best !== null && run[name] === best && chosen.length > 1 ? "b" : "span"),
      change ? el("small", {}, ` ${change >= 0 ? "+" : "−"}${short(Math.abs(change), language)}`) : null,
    );
  };
  const heads = names.map((name) => el("th", { scope: "col", class: name === "state" ? null : "number" }, t(name)));
  $("#figures").replaceChildren(
    el(
      "table",
      {},
      el("caption", { class: "hidden" }, t("final_metrics")),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("name")), heads)),
      el(
        "tbody",
        {},
        chosen.map((id, place) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, swatch(place), label(place)),
            names.map((name) => cell(facts.get(id), name)),
          ),
        ),
      ),
    ),
  );
}
/** Table of all options that any of the runs sets: differing ones first and bold, equal ones and defaults dimmed. */
function options() {
  const all = chosen.map((id) => optionsOf(facts.get(id).yaml ?? "")),
    onlyDifferent = $("#only-different").checked;
  const names = [...new Set(all.flatMap((one) => Object.keys(one)))].map((name) => ({
    name,
    differs: new Set(all.map((one) => one[name])).size > 1,
  }));
  const shown = names
    .filter((one) => one.differs || !onlyDifferent)
    .sort((a, b) => Number(b.differs) - Number(a.differs) || a.name.localeCompare(b.name));
  if (!shown.length) {
    $("#options").replaceChildren(el("p", { class: "hint" }, t("no_differences")));
    return;
  }
  const cell = (/** @type {any} */ one, /** @type {any} */ { name, differs }) =>
    el(
      "td",
      { class: name in one && differs ? null : "default", title: one[name] },
      name in one && differs ? el("b", {}, shortOption(one[name])) : shortOption(one[name] ?? t("default")),
    );
  $("#options").replaceChildren(
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, t("tab_options")),
          chosen.map((_, place) => el("th", { scope: "col" }, swatch(place), label(place))),
        ),
      ),
      el(
        "tbody",
        {},
        shown.map((one) =>
          el(
            "tr",
            {},
            el("th", { scope: "row", class: "mono" }, one.name),
            all.map((run) => cell(run, one)),
          ),
        ),
      ),
    ),
  );
}
box.addEventListener("change", () => {
  const ticked = $$("input:checked", box).map((one) => one.value);
  chosen = [...chosen.filter((id) => ticked.includes(id)), ...ticked.filter((id) => !chosen.includes(id))].slice(
    0,
    most,
  );
  void load().then(() => following.again());
});
for (const control of ["#smoothing", "#x-axis", "#log-scale", "#clip"]) $(control).addEventListener("input", draw);
$("#only-different").addEventListener("input", options);
onRedraw(draw);
await load();
const following = follow(
  () => `runs=${chosen.join(",") || "none"}`,
  [...facts.values()].map((one) => one.cursor).join(","),
  (name, data) => {
    if (name === "rows" && series.has(data.run)) {
      series.set(data.run, concatenated(series.get(data.run), data.columns));
      void wordsFor(data.columns).then(draw);
    } else if (name === "run" && facts.has(data.id)) {
      facts.set(data.id, { ...facts.get(data.id), ...data });
      figures();
    }
  },
);
