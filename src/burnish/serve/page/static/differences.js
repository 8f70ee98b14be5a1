// @ts-check
// Tables of compared runs: their metrics and options.
import { numbers } from "./curves.js";
import { el, figure, tableOf } from "./dom.js";
import { optionsOf, short, shortOption } from "./format.js";
import { language, t } from "./words.js";

/**
 * Create a table of the last metrics, with their differences to those of the first run.
 * @param {any[]} heads of the runs @param {any[]} runs
 */
export function metricsTable(heads, runs) {
  const names = ["state", "step", "loss", "eval_loss", "tokens_per_s"];
  const cell = (/** @type {any} */ run, /** @type {string} */ name) => {
    if (name === "state") return el("td", {}, el("span", { class: `state ${run.state}` }, t(`state_${run.state}`)));
    const best = ["loss", "eval_loss"].includes(name)
      ? Math.min(...numbers(runs.map((one) => one[name])).map((value) => value ?? Infinity))
      : null;
    const base = runs[0][name],
      isCompared = run !== runs[0] && name !== "step" && [run[name], base].every((value) => typeof value === "number"),
      change = isCompared ? run[name] - base : null;
    return el(
      "td",
      { class: "number" },
      figure(run[name], best !== null && run[name] === best && runs.length > 1 ? "b" : "span"),
      change ? el("small", {}, ` ${change >= 0 ? "+" : "−"}${short(Math.abs(change), language)}`) : null,
    );
  };
  const columns = names.map((name) => el("th", { scope: "col", class: name === "state" ? null : "number" }, t(name)));
  return tableOf(
    [el("th", { scope: "col" }, t("name")), ...columns],
    runs.map((run, place) => [el("th", { scope: "row" }, heads[place]), ...names.map((name) => cell(run, name))]),
    {},
    el("caption", { class: "hidden" }, t("final_metrics")),
  );
}

/**
 * Create a table of all options that any of the runs sets: differing ones first and bold, equal ones and defaults dimmed.
 * @param {any[]} heads of the runs @param {string[]} yaml of the runs @param {boolean} onlyDifferent
 */
export function optionsTable(heads, yaml, onlyDifferent) {
  const all = yaml.map(optionsOf);
  const names = [...new Set(all.flatMap((one) => Object.keys(one)))].map((name) => ({
    name,
    differs: new Set(all.map((one) => one[name])).size > 1,
  }));
  const shown = names
    .filter((one) => one.differs || !onlyDifferent)
    .sort((a, b) => Number(b.differs) - Number(a.differs) || a.name.localeCompare(b.name));
  if (!shown.length) return el("p", { class: "hint" }, t("no_differences"));
  const cell = (/** @type {any} */ one, /** @type {any} */ { name, differs }) =>
    el(
      "td",
      { class: name in one && differs ? null : "default", title: one[name] },
      name in one && differs ? el("b", {}, shortOption(one[name])) : shortOption(one[name] ?? t("default")),
    );
  return tableOf(
    [t("tab_options"), ...heads].map((head) => el("th", { scope: "col" }, head)),
    shown.map((one) => [el("th", { scope: "row", class: "mono" }, one.name), ...all.map((run) => cell(run, one))]),
  );
}
