// @ts-check
// Texts of the page in the selected language.

const root = document.documentElement;
export const language = root.lang;
/** @type {Record<string, string>} */
const words = {};
/** @param {string} [prefix] of the file's name */
const load = async (prefix = "") => {
  const response = await fetch((root.dataset.words ?? "").replace(/[^/]+$/, `${prefix}$&`));
  if (!response.ok) throw new Error(response.url);
  Object.assign(words, await response.json());
};
export const ready = load();
/** Load the texts of a page. @param {"new" | "chat"} page */
export const loadWordsOf = (page) => load(`${page}.`);
/** @type {Promise<void> | undefined} */
let ofRuns;
/** Load the texts of runs when they are needed: names of metrics and events, warnings. Without them, keys are shown. */
export const loadRunWords = () =>
  (ofRuns ??= load("run.").catch(() => {
    ofRuns = undefined; // the next call loads them again
  }));

/** Return a text of the page with its {placeholders} filled in. @param {string} key @param {Record<string, any>} values */
export const t = (key, values = {}) =>
  (words[key] ?? key).replace(/\{(\w+)\}/g, (all, name) => (name in values ? String(values[name]) : all));
/** Return a text of the page, or undefined if the key does not exist. @param {string} key */
export const optionalText = (key) => words[key];
