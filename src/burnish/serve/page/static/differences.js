// @ts-check
// The options of compared runs.
import { el } from "./dom.js";
import { optionsOf, shortOption } from "./format.js";
import { t } from "./words.js";

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
  return el(
    "table",
    {},
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col" }, t("tab_options")),
        heads.map((head) => el("th", { scope: "col" }, head)),
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
  );
}
