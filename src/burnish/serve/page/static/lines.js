// @ts-check
// Drawing helpers of charts: theme colors, lines of a curve, and a table of the same values.
import { numbers, smoothed, tokenRates } from "./curves.js";
import { $, el, figure, setFigure, tableOf } from "./dom.js";
import { bytes, duration, short } from "./format.js";
import { fullNameOf, hasOtherMetrics } from "./metrics.js";
import { language, loadRunWords, t } from "./words.js";

export const COLORS = 8;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4], [12, 4], [6, 2, 2, 2], [3, 6]];
/** Return the value of a color variable in the current theme. @param {string} name */
export function themeColor(name) {
  const probe = el("span", { class: `color-${name}` }); // light-dark() is resolved by a color, not by a variable
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
/** @param {string} color @param {number} alpha */
const faint = (color, alpha) =>
  color.replace(
    /^rgba?\(([^)]*)\)$/,
    (_, parts) =>
      `rgba(${parts
        .split(/[ ,/]+/)
        .slice(0, 3)
        .join(", ")}, ${alpha})`,
  );
/** Return the value at an index, or the last one before it. @param {any[]} values @param {number} place */
export function valueNear(values, place) {
  for (let at = place; at >= Math.max(0, place - 50); at -= 1)
    if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}
/** Return the lines of a curve: raw and, with smoothing, smoothed. @param {import("./chart.js").Curve} curve @param {number} color @returns {any[]} */
export function linesOfCurve(curve, color) {
  const stroke = themeColor(`c${color % COLORS}`),
    dash = DASHES[(curve.color ?? 0) % DASHES.length],
    none = { show: false };
  const raw = { ...curve, color, given: curve.y, y: numbers(curve.y), stroke, width: 1.75, dash, dots: none };
  if (curve.points) return [{ ...raw, width: 0, dots: { show: true, size: 8, fill: stroke } }];
  if (curve.smoothing && curve.y.length > 2)
    return [
      { ...raw, label: "", stroke: faint(stroke, 0.28), width: 1 },
      { ...raw, y: smoothed(curve.y, curve.smoothing), isSmoothed: true },
    ];
  return [{ ...raw, dots: { show: curve.y.length < 3, size: 6 } }];
}
/** Table of the chart's values for screen readers, limited to a few hundred rows. @param {any} columns */
export function table(columns) {
  const names = Object.keys(columns),
    step = Math.max(1, Math.ceil(columns.step.length / 300));
  const body = columns.step
    .map((/** @type {any} */ _, /** @type {number} */ place) => place)
    .filter((/** @type {number} */ place) => place % step === 0 || place === columns.step.length - 1);
  const cell = (/** @type {string} */ name, /** @type {any} */ value) =>
    name === "memory_bytes" && value
      ? bytes(value)
      : name === "time" && value
        ? duration(value - columns.time.find(Boolean))
        : figure(value);
  return tableOf(
    names.map((name) => el("th", { scope: "col", class: "number" }, fullNameOf(name, t))),
    body.map((/** @type {number} */ place) =>
      names.map((name) => el("td", { class: "number" }, cell(name, columns[name][place]))),
    ),
  );
}
/** Redraw when the theme or the width changes, and for a print. @param {() => void} draw */
export const onRedraw = (draw) => {
  const root = document.documentElement;
  let theme = "";
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme ?? "";
    root.dataset.theme = "light";
    draw();
  });
  addEventListener("afterprint", () => {
    root.dataset.theme = theme;
    draw();
  });
  document.addEventListener("theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      draw();
    }
  });
};
/** Describe the losses of a run. @param {import("./curves.js").Columns} columns */
export function summarize(columns) {
  const points = columns.step
    .map((step, place) => [step, columns.loss?.[place]])
    .filter(([, value]) => typeof value === "number");
  if (points.length < 2) return void $("#waiting")?.remove();
  const low = points.reduce((best, pair) => (pair[1] < best[1] ? pair : best)),
    last = points[points.length - 1];
  $("#summary").textContent = t("chart_summary", {
    first: short(points[0][1]),
    last: short(last[1]),
    steps: last[0],
    low: short(low[1]),
    at: low[0],
  });
  $("[data-caption=loss]").textContent = t("lowest_at", { low: short(low[1]), at: low[0] });
}
/**
 * Show the last reward instead of the loss in the first tile if the run has rewards.
 * @param {import("./curves.js").Columns} columns @param {any} loss the last loss of the run
 */
export function showReward(columns, loss) {
  const reward = numbers(columns.reward ?? []).findLast((value) => value !== null);
  if (reward === undefined) return;
  $("#tiles dt").textContent = t("reward");
  setFigure("[data-is=loss]", reward);
  $("[data-caption=loss]").textContent = `${t("loss")} ${short(loss, language)}`;
}
/** Show the memory and the tokens per second in their tiles. @param {import("./curves.js").Columns} columns */
export function showMachine(columns) {
  const memory = numbers(columns.memory_bytes ?? []).filter((value) => value !== null),
    rate = numbers(tokenRates(columns)).filter((value) => value !== null);
  if (memory.length) {
    $("[data-is=memory]").textContent = bytes(memory[memory.length - 1]);
    $("[data-caption=memory]").textContent = t("at_most", { value: bytes(Math.max(...memory)) });
  }
  if (rate.length) {
    setFigure("[data-is=tokens_per_s]", rate[rate.length - 1]);
    $("[data-caption=tokens_per_s]").textContent = t("on_average", {
      value: short(rate.reduce((sum, one) => sum + one, 0) / rate.length, language),
    });
  }
}
/** Load the names of metrics that not every run has, and other texts of runs. @param {Record<string, any>} columns @param {any} [more] */
export const wordsFor = async (columns, more) => {
  if (more || hasOtherMetrics(columns)) await loadRunWords();
};
