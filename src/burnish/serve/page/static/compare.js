// Several runs over each other: curves, figures, and the options in which they differ.
import { $, $$, el, follow, get, ready, short, t } from "./base.js";
import { Chart, across, redrawn } from "./chart.js";

await ready;
const MOST = 8;
const box = $("#chosen");
let chosen = box.dataset.runs.split(",").filter(Boolean).slice(0, MOST);
const runs = (await get("api/runs")).runs, series = new Map(), facts = new Map();
const charts = {};
box.append(el("div", { class: "row" }, runs.slice(0, 200).map((run) => el("label", {}, el("input", { type: "checkbox", value: run.id, checked: chosen.includes(run.id) }), ` ${run.name}`))));

async function load() {
  await Promise.all(chosen.map(async (id) => {
    if (!series.has(id)) series.set(id, (await get(`api/runs/${id}/series?points=2000`)).columns);
    if (!facts.has(id)) facts.set(id, await get(`api/runs/${id}`));
  }));
  history.replaceState(null, "", chosen.length ? `?runs=${chosen.join(",")}` : location.pathname);
  draw();
}
const label = (place) => `${place + 1} ${facts.get(chosen[place]).name}`;
function draw() {
  const drawn = [];
  for (const name of ["loss", "eval_loss", "lr", "grad_norm", "tokens_per_s"]) {
    const curves = chosen.map((id, place) => {
      const columns = series.get(id), x = across(columns, $("#across").value);
      const rows = (columns[name] ?? []).map((value, row) => [x[row], value]).filter(([, value]) => value !== null);
      return { label: label(place), x: rows.map((row) => row[0]), y: rows.map((row) => row[1]), smoothing: name === "loss" ? Number($("#smoothing").value) : 0, color: place };
    }).filter((curve) => curve.y.length);
    if (!curves.length) { charts[name]?.node.remove(); delete charts[name]; continue; }
    charts[name] ??= new Chart($("#charts"), t(name), "compare");
    drawn.push([name, curves]); // all places first: how wide one is depends on how many there are
  }
  for (const [name, curves] of drawn) {
    charts[name].draw(curves);
    charts[name].text.textContent = curves.map((curve) => `${curve.label}: ${short(curve.y.at(-1))}`).join("  ");
  }
  figures();
  options();
}
function figures() {
  if (!chosen.length) { $("#figures").replaceChildren(); return; }
  const names = ["state", "step", "loss", "eval_loss", "tokens_per_s"], base = facts.get(chosen[0]);
  const cell = (run, name) => (name === "state" ? t(`state_${run.state}`) : `${short(run[name])}${run !== base && typeof run[name] === "number" && typeof base[name] === "number" && name !== "step" ? ` (${run[name] - base[name] >= 0 ? "+" : ""}${short(run[name] - base[name])})` : ""}`);
  $("#figures").replaceChildren(el("table", {}, el("caption", { class: "hidden" }, t("final_figures")), el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("name")), names.map((name) => el("th", { scope: "col", class: "number" }, t(name))))),
    el("tbody", {}, chosen.map((id, place) => el("tr", {}, el("th", { scope: "row" }, label(place)), names.map((name) => el("td", { class: "number" }, cell(facts.get(id), name))))))));
}
function given(text) {
  return Object.fromEntries(text.split("\n").map((line) => /^(\w+): (.*?)(?: {2}# .*)?$/.exec(line)).filter(Boolean).map((match) => [match[1], match[2]]));
}
function options() {
  const all = chosen.map((id) => given(facts.get(id).given));
  const names = [...new Set(all.flatMap((one) => Object.keys(one)))].filter((name) => new Set(all.map((one) => one[name])).size > 1);
  if (!names.length) { $("#options").replaceChildren(el("p", {}, t("no_differences"))); return; }
  $("#options").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("tab_options")), chosen.map((_, place) => el("th", { scope: "col" }, label(place))))),
    el("tbody", {}, names.sort().map((name) => el("tr", {}, el("th", { scope: "row" }, name), all.map((one) => el("td", {}, one[name] ?? t("default"))))))));
}
box.addEventListener("change", () => { chosen = $$("input:checked", box).map((one) => one.value).slice(0, MOST); void load(); following.again(); });
for (const control of ["#smoothing", "#across"]) $(control).addEventListener("input", draw);
redrawn(draw);
await load();
const following = follow(() => `runs=${chosen.join(",") || "none"}`, [...facts.values()].map((one) => one.cursor).join(","), (name, data) => {
  if (name === "rows" && series.has(data.run)) {
    const columns = series.get(data.run), before = columns.step.length;
    for (const column of new Set([...Object.keys(columns), ...Object.keys(data.columns)])) columns[column] = [...(columns[column] ?? new Array(before).fill(null)), ...(data.columns[column] ?? new Array(data.columns.step.length).fill(null))];
    draw();
  } else if (name === "run" && facts.has(data.id)) { facts.set(data.id, { ...facts.get(data.id), ...data }); figures(); }
});
