// @ts-check
// Formatting of numbers and text. Does not access the DOM, so that tests can run it without a browser.

/** @param {number} value @param {string} language @param {number} digits */
const compact = (value, language, digits) =>
  Intl.NumberFormat(language, { notation: "compact", maximumSignificantDigits: digits }).format(value);
/** 1e18, 2.5e-5. @param {number} value */
const power = (value) =>
  value
    .toExponential(2)
    .replace(/\.?0+e/, "e")
    .replace("e+", "e");
/** Integers in full, other numbers with up to four significant digits. @param {any} value @param {string} [language] */
export const short = (value, language = "en") => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e15) return power(value);
  if (size >= (Number.isInteger(value) ? 1e7 : 1e5)) return compact(value, language, 4);
  if (Number.isInteger(value)) return Intl.NumberFormat(language).format(value);
  if (size >= 1000) return Intl.NumberFormat(language, { maximumSignificantDigits: 4 }).format(value);
  if (size > 0 && size < 1e-3) return power(value);
  return String(Number(value.toPrecision(4)));
};
/** The value of an option as a person writes it: "30.0" -> "30", "5.0e-05" -> "5e-5", '["a", "b"]' -> "a, b". @param {string} text */
export const shortOption = (text) => {
  if (/^\["[^"\\]*"(, ?"[^"\\]*")*\]$/.test(text)) return JSON.parse(text).join(", ");
  if (!/^-?\d+(\.\d+)?(e[+-]?\d+)?$/i.test(text)) return text;
  const value = Number(text);
  return Number.isInteger(value) && Number.isSafeInteger(value) ? String(value) : short(value);
};
/** @param {number} tick @param {boolean} isSmall @param {string} language */
const axisLabel = (tick, isSmall, language) => {
  if (tick && isSmall) return power(tick);
  return Math.abs(tick) < 1000 || Math.abs(tick) >= 1e15 ? short(tick, language) : compact(tick, language, 3);
};
/** Format tick labels of an axis in a common notation. @param {(number | null)[]} ticks @param {string} [language] */
export const axisLabels = (ticks, language = "en") => {
  const isSmall = Math.max(...ticks.map((tick) => Math.abs(tick ?? 0))) < 0.01;
  return ticks.map((tick) => (tick === null ? "" : axisLabel(tick, isSmall, language)));
};
/** @param {number} value */
export const bytes = (value) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < 4; unit += 1) value /= 1000;
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
};
/** @param {number | null | undefined} seconds */
export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds)),
    pad = (/** @type {number} */ n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  return hours
    ? `${hours}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`
    : `${Math.floor(whole / 60)}:${pad(whole % 60)}`;
};
/** @param {number} seconds @param {string} [language] */
export const clock = (seconds, language) => {
  const time = new Date(seconds * 1000);
  return time.toDateString() === new Date().toDateString()
    ? time.toLocaleTimeString(language)
    : time.toLocaleString(language);
};
/** The help of an option, with its unit unless the help names it. @param {Record<string, any>} option */
export const helpOf = ({ help, unit }) =>
  !unit || help.match(/[\w'-]+/g)?.includes(unit) ? help : `${help} (${unit})`;
/** "3 hours ago". @param {number} seconds since 1970 @param {string} [language] @param {number} [now] */
export function ago(seconds, language = "en", now = Date.now() / 1000) {
  const passed = Math.max(0, now - seconds),
    format = new Intl.RelativeTimeFormat(language, { numeric: "auto" });
  if (passed < 60) return format.format(0, "second");
  if (passed < 3600) return format.format(-Math.floor(passed / 60), "minute");
  if (passed < 86400) return format.format(-Math.floor(passed / 3600), "hour");
  return format.format(-Math.floor(passed / 86400), "day");
}
/** Make invisible and bidirectional control characters visible. @param {string} text */
export function visible(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (letter) => `⟨U+${(letter.codePointAt(0) ?? 0).toString(16).padStart(4, "0").toUpperCase()}⟩`,
  );
}
/** The text of a line after its last carriage return, except one at its end. @param {string} line */
const overwritten = (line) => {
  const shown = line.endsWith("\r") ? line.slice(0, -1) : line;
  return shown.slice(shown.lastIndexOf("\r") + 1);
};
/** Remove terminal color codes, and text overwritten after a carriage return. @param {string} text */
export const plain = (text) =>
  visible(
    text
      .replace(/\u001b\[[0-9;?]*[A-Za-z]/g, "")
      .split("\n")
      .map(overwritten)
      .join("\n"),
  );
/** How far a run is. @param {any} run @param {(key: string, values: any) => string} t */
export const progressOf = ({ kind, step, total, epoch }, t) =>
  t(kind === "train" ? "step_of" : "done_of", { step, total }) +
  (typeof epoch === "number" ? ` · ${t("epoch_is", { epoch: epoch.toFixed(2) })}` : "");
/** Join the sentences of an error, with a full stop where one has none. @param {any[]} sentences */
export const joined = (...sentences) =>
  sentences
    .filter(Boolean)
    .map((text, place, all) => (place < all.length - 1 && !/[.!?:。！？：]$/.test(text) ? `${text}.` : text))
    .join(" ");
/** Parse the top-level lines of a run's YAML to name -> value. @param {string} text @returns {Record<string, string>} */
export const optionsOf = (text) =>
  Object.fromEntries(
    text
      .split("\n")
      .map((line) => /^(\w+): (.*?)(?: {2}# .*)?$/.exec(line))
      .filter((match) => match !== null)
      .map((match) => [match[1], match[2].replace(/^"(.*)"$/, "$1")]),
  );
/** "per_device_train_batch_size" -> "Per device train batch size". @param {string} key */
export const humanized = (key) => {
  const text = key.replaceAll("_", " ").trim();
  return text.charAt(0).toUpperCase() + text.slice(1);
};
/** Whether a run has a model to load. @param {any} run */
export const hasWeights = ({ kind, checkpoint, maker, state }) =>
  kind === "train" && (checkpoint !== null || (maker === "burnish" && state === "done"));
/** Whether the options of a run say that it trains a reward model, which generates no text. @param {string} yaml */
export const isRewardModel = (yaml) => /^stage: "?rm\b/m.test(yaml);
