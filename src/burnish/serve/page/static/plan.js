// @ts-check
// The plan of a run: facts, a memory bar, notes, and examples with highlighted trained tokens.
import { $, $$, el, svg } from "./dom.js";
import { bytes, joined, short, visible } from "./format.js";
import { smallImage } from "./small_image.js";
import { language, optionalText, t } from "./words.js";

/** @param {any} term */
const termName = ({ name }) => optionalText(`term_${name.replaceAll(" ", "_")}`) ?? name;
/** Whether the memory is enough, as a key; "" if the available memory is unknown. @param {any} memory */
const verdictOf = ({ total, available }) => (available ? (total > available ? "too_much" : "fits") : "");
/** @param {any} memory */
function memoryBar(memory) {
  const verdict = verdictOf(memory);
  const parts = memory.terms.filter((/** @type {any} */ term) => term.bytes > 0);
  const whole = Math.max(memory.total, memory.available || memory.total);
  let at = 0;
  const bar = svg("svg", {
    class: "memory-bar",
    viewBox: "0 0 1000 10",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  for (const [place, term] of parts.entries()) {
    const width = (1000 * term.bytes) / whole;
    bar.append(svg("rect", { x: at, y: 0, width, height: 10, class: `fill-c${place % 8}` }));
    at += width;
  }
  return el(
    "div",
    { class: "memory" },
    el(
      "div",
      { class: "row" },
      el("span", { class: "muted grow" }, t("plan_memory")),
      el(
        "span",
        {},
        t("of_free", { needed: bytes(memory.total), free: memory.available ? bytes(memory.available) : "–" }),
        " ",
        el("b", { class: verdict === "too_much" ? "problem" : verdict }, verdict && t(verdict)),
      ),
    ),
    bar,
    el(
      "ul",
      { class: "terms" },
      parts.map((/** @type {any} */ term, /** @type {number} */ place) =>
        el("li", {}, el("span", { class: `swatch color-c${place % 8}` }), `${termName(term)} ${bytes(term.bytes)}`),
      ),
    ),
  );
}
/** @param {any} answer */
export function planNodes(answer) {
  const { steps, memory, disk } = answer,
    tiles = el("dl", { class: "tiles" });
  const add = (/** @type {string} */ name, /** @type {string} */ value, /** @type {any} */ under = "") =>
    tiles.append(
      el("div", { class: "tile" }, el("dt", {}, t(name)), el("dd", {}, value), el("dd", { class: "caption" }, under)),
    );
  add("plan_steps", short(steps.total, language), t("steps_text", { total: steps.total, per_epoch: steps.per_epoch }));
  if (steps.rows) add("plan_rows", short(steps.rows, language));
  if (disk) add("plan_disk", bytes(disk.needed), t("disk_free", { free: bytes(disk.free) }));
  if (steps.curve?.length > 1) {
    const high = Math.max(...steps.curve) || 1;
    const points = steps.curve
      .map(
        (/** @type {number} */ value, /** @type {number} */ place) =>
          `${(place * 120) / (steps.curve.length - 1)},${26 - (24 * value) / high}`,
      )
      .join(" ");
    add(
      "plan_rate",
      short(high),
      svg(
        "svg",
        { viewBox: "0 0 120 28", class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("polyline", { points }),
      ),
    );
  }
  return [tiles, ...(memory ? [memoryBar(memory)] : [])];
}
/** One-line summary of the plan, for narrow windows. @param {any} answer */
export function planLine({ steps, memory, problems = [] }) {
  if (problems.length) return t("problems_count", { count: problems.length });
  if (!steps) return t("plan");
  const parts = [`${t("plan_steps")} ${short(steps.total, language)}`];
  if (memory) parts.push(`${t("plan_memory")} ${bytes(memory.total)}`);
  if (memory) parts.push(t(verdictOf(memory)));
  return parts.filter(Boolean).join(" · ");
}
/** @param {any} answer */
export function noteNodes(answer) {
  const notes = [...(answer.dropped ?? []), ...(answer.notes ?? [])],
    lang = language === "en" ? null : "en";
  return notes.length
    ? el(
        "ul",
        { class: "notes", lang },
        notes.map((note) => el("li", {}, note)),
      )
    : el("p", { class: "hint" }, t("no_notes"));
}
/** @param {any} answer */
export function detailNodes(answer) {
  const lang = language === "en" ? null : "en";
  return (answer.sections ?? []).flatMap((/** @type {any} */ section) => [
    el("h3", { lang }, section.title),
    el(
      "dl",
      { class: "facts", lang },
      section.lines.flatMap((/** @type {any[]} */ [name, text, where]) => [
        el("dt", {}, name),
        el("dd", {}, visible(text), where ? el("small", {}, ` ${where}`) : null),
      ]),
    ),
  ]);
}
/**
 * Show the problems that no visible field shows. Values that no field can change can be removed.
 * @param {any[]} problems @param {Map<string, any>} values @param {(name: string) => void} remove
 */
export function showOthers(problems, values, remove) {
  const fieldOf = (/** @type {any} */ one) => $(`[data-option="${CSS.escape(one.option ?? "")}"]`);
  const others = problems.filter((one) => {
    const shown = fieldOf(one)?.querySelector(".problem");
    return !shown?.textContent || !shown.checkVisibility();
  });
  const button = (/** @type {any} */ { option }) =>
    el("button", { type: "button", onclick: () => remove(option) }, `${t("remove")}: ${option}`);
  $("#problems").hidden = !others.length;
  $("#problems").replaceChildren(
    ...others.flatMap((one) => [
      el("p", { lang: "en" }, one.where ? `${one.where}: ` : "", joined(one.sentence, one.remedy)),
      ...(values.has(one.option) && !fieldOf(one)?.querySelector("input:enabled, select:enabled") ? [button(one)] : []),
    ]),
  );
}
/** Shows one example at a time. */
export class Examples {
  constructor() {
    this.place = 0;
    /** @type {any[]} */
    this.rows = [];
    for (const [id, move] of /** @type {[string, number][]} */ ([
      ["#row-before", -1],
      ["#row-after", 1],
    ]))
      $(id).addEventListener("click", () => {
        this.place += move;
        this.show();
      });
    for (const box of ["#row-ids", "#row-brackets"]) $(box).addEventListener("input", () => this.show());
  }
  /** @param {any[]} [rows] @param {boolean} [isRefused] nothing is loading */
  show(rows = this.rows, isRefused = false) {
    this.rows = rows;
    if (isRefused) for (const node of $$("#plan > .skeleton, #sample > .skeleton")) node.remove();
    if (!rows.length) return;
    this.place = (this.place + rows.length) % rows.length;
    const row = rows[this.place],
      ids = $("#row-ids").checked,
      brackets = $("#row-brackets").checked;
    const title = row.title.replace(/^\d+(, )?/, ""); // the number of a row is in the text
    $("#row-title").textContent = t("example_of", { ...row, title }).replace(/^(: |：)/, "");
    const images = new Map(row.images);
    $("#sample").replaceChildren(
      ...row.pieces.map((/** @type {any[]} */ [text, trained, tokens], /** @type {number} */ place) => {
        if (images.has(place) && !ids) return smallImage(images.get(place), text);
        const shown = ids ? ` ${tokens.join(" ")} ` : visible(text);
        return trained ? el("mark", {}, brackets ? `⟦${shown}⟧` : shown) : document.createTextNode(shown);
      }),
    );
  }
}
