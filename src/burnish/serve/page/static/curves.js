// @ts-check
// Calculations for charts: smoothing, axis ranges, rates. Does not access the DOM.

/** @typedef {Record<string, any[]>} Columns */

/** @param {any[]} values @returns {(number | null)[]} */
export const numbers = (values) => values.map((value) => (typeof value === "number" ? value : null));
/** Allowed distances between tick labels of steps or tokens: 1, 2, 5, 10, 20, ... */
export const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
/** Number of NaN or infinite values, which JSON transmits as strings. @param {any[]} values */
export const countNonFinite = (values) => values.filter((value) => typeof value === "string").length;
/** Places on the x axis of NaN and infinite values. @param {any[]} x @param {any[]} values */
export const nonFinitePlaces = (x, values) => x.filter((_, place) => typeof values[place] === "string");

/**
 * Exponential moving average with bias correction (Kingma & Ba 2015, section 3).
 * @param {any[]} values @param {number} weight
 */
export function smoothed(values, weight) {
  let mean = 0,
    mass = 0;
  return values.map((value) => {
    if (typeof value !== "number") return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}
/**
 * Values of the x axis: steps, tokens, or seconds since the first row. null in rows without such a value.
 * @param {Columns} columns @param {string} kind
 */
export function xValues(columns, kind) {
  if (kind === "step") return columns.step;
  const values = numbers(columns[kind] ?? columns.step.map(() => null));
  if (kind === "tokens") return values;
  const first = values.find((value) => value !== null) ?? 0;
  return values.map((value) => (value === null ? null : value - first));
}
/**
 * Range of a y axis. It spans at least a quarter of the magnitude of the values, so that noise on a flat curve stays
 * small. With `zero` it starts at 0.
 * @param {(number | null)[]} values @param {{zero?: boolean, clip?: boolean, log?: boolean}} options @returns {number[]}
 */
export function rangeOf(values, { zero = false, clip = false, log = false } = {}) {
  if (log)
    return rangeOf(
      values.map((one) => (one && one > 0 ? Math.log10(one) : null)),
      { clip },
    ).map((power) => 10 ** power);
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  const at = (/** @type {number} */ share) => sorted[Math.round(share * (sorted.length - 1))];
  let low = clip ? at(0.02) : sorted[0],
    high = clip ? at(0.98) : /** @type {number} */ (sorted.at(-1));
  if (zero && low >= 0) low = 0;
  const middle = (low + high) / 2,
    least = 0.25 * Math.max(Math.abs(low), Math.abs(high)) || 1;
  if (zero && low === 0 && high === 0) high = 1;
  if (high - low < least) [low, high] = [middle - least / 2, middle + least / 2];
  const room = 0.06 * (high - low);
  return [zero && low === 0 ? 0 : low - room, high + room];
}
/**
 * Tokens per second between two logs, excluding evaluations: as the run logged it, or from the times of the rows.
 * `tokens_per_s` is the mean since the start. @param {Columns} columns
 */
export function tokenRates(columns) {
  const { tokens, time, rate = [], tokens_per_s: mean = [] } = columns;
  if (!tokens || !time) return mean;
  let before = -1,
    begun = 0; // the time of the row before, which may be one of an evaluation
  return columns.step.map((_, place) => {
    if (typeof time[place] !== "number") return null;
    const last = before,
      from = begun;
    begun = time[place];
    if (typeof tokens[place] !== "number" || columns.loss?.[place] === null) return null;
    before = place;
    const seconds = last < 0 ? 0 : time[place] - from,
      count = last < 0 ? 0 : tokens[place] - tokens[last];
    return rate[place] ?? (seconds > 0 && count > 0 ? count / seconds : (mean[place] ?? null));
  });
}
/** Concatenate two parts of a log. @param {Columns} columns @param {Columns} more @returns {Columns} */
export function concatenated(columns, more) {
  const before = columns.step.length,
    added = more.step.length,
    names = new Set([...Object.keys(columns), ...Object.keys(more)]);
  return Object.fromEntries(
    [...names].map((name) => [
      name,
      [...(columns[name] ?? new Array(before).fill(null)), ...(more[name] ?? new Array(added).fill(null))],
    ]),
  );
}
/** Drop the rows without a value or a place on the x axis. @param {any[]} x @param {any[]} values */
export function definedPoints(x, values) {
  const isDefined = (/** @type {any} */ value) => value !== null && value !== undefined;
  const indices = values.map((_, place) => place).filter((place) => isDefined(values[place]) && isDefined(x[place]));
  return { x: indices.map((place) => x[place]), y: indices.map((place) => values[place]) };
}
/** A cell of a CSV file (RFC 4180). @param {any} value */
const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
/** @param {Columns} columns */
export const csv = (columns) => {
  const names = Object.keys(columns);
  return [
    names.map(cell).join(","),
    ...columns.step.map((_, place) => names.map((name) => cell(columns[name][place] ?? "")).join(",")),
  ].join("\n");
};
